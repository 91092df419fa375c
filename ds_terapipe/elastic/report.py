"""The first rank's reports of a transition: a log line, a one-time warning, monitor events."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.elastic.shapes.shape_text import shape_text
from ds_terapipe.pipeline.recording.report import emit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Transition:
    """A change of the frozen layers, or of the shape, before a step.

    Attributes:
        step: 0-based ``global_steps``; None: the change loads a checkpoint.
        frozen, layers: numbers of frozen entries and of all entries of the layer list.
        before, after: the shapes.
        seconds: duration of the change.
        freed_bytes, sent_bytes: summed over all ranks.
        fullest_before, fullest_after: bytes of weights, gradients and optimiser state on the fullest rank.
    """

    step: int | None
    frozen: int
    layers: int
    before: Shape
    after: Shape
    seconds: float
    freed_bytes: float
    sent_bytes: float
    fullest_before: float
    fullest_after: float

    @property
    def line(self) -> str:
        """Line for the log."""
        shapes = [shape_text(self.before)] * (self.before != self.after) + [shape_text(self.after)]
        when = "as in the checkpoint" if self.step is None else f"step {self.step}"
        return (
            f"{when}: {self.frozen} of {self.layers} layers frozen, {' -> '.join(shapes)}, {self.seconds:.2f} s, "
            f"{self.freed_bytes / 1e6:,.1f} MB freed, {self.sent_bytes / 1e6:,.1f} MB moved"
        )

    @property
    def events(self) -> dict[str, float]:
        """Values for the monitor."""
        return {
            "Elastic/frozen_layers": self.frozen,
            "Elastic/stages": self.after.stages,
            "Elastic/replicas": self.after.replicas,
            "Elastic/transition_seconds": self.seconds,
            "Elastic/freed_bytes": self.freed_bytes,
        }


class TransitionReport:
    """Reports transitions; permanent facts are reported once."""

    def __init__(self) -> None:
        self._said_eval = self._warned = False

    def tell(self, transition: Transition, monitor: Any, samples: int) -> None:
        """Report a transition on the first rank. ``samples``: trained so far, the monitor's x axis."""
        line = transition.line
        if transition.frozen and not self._said_eval:
            self._said_eval, line = True, f"{line}; frozen layers run in eval mode, without dropout"
        emit(line)
        if transition.fullest_after > transition.fullest_before and not self._warned:
            self._warned = True
            after, before = transition.fullest_after / 1e6, transition.fullest_before / 1e6
            logger.warning(
                "elastic_pipeline.resize: a rank has up to %.1f MB of weights, gradients and optimizer state now, and had up "
                "to %.1f MB before",
                after,
                before,
            )
        if monitor.enabled and transition.step is not None:
            monitor.write_events([(name, value, samples) for name, value in transition.events.items()])

"""The first rank's reports of a change: a log line, a one-time warning, monitor events."""

from __future__ import annotations

import logging
from typing import Any

from ds_terapipe.elastic.changing import Changed
from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.elastic.shapes.history import shape_text
from ds_terapipe.pipeline.recording.report import emit

logger = logging.getLogger(__name__)


class ChangeReport:
    """Reports changes of the frozen layers or of the shape; permanent facts are reported once."""

    def __init__(self) -> None:
        self._said_eval = self._warned = False

    def tell(
        self, engine: Any, step: int | None, before: Shape, changed: Changed, layers: int, fullest: tuple[float, float]
    ) -> None:
        """Report a change on the first rank.

        Args:
            engine: after the change.
            step: 0-based ``global_steps``, before which it was; None: it loads a checkpoint.
            before: the shape before.
            changed: seconds, and bytes summed over all ranks.
            layers: number of entries of the layer list.
            fullest: bytes of weights, gradients and optimiser state on the fullest rank, before and after.
        """
        frozen, after = engine.frozen_layers, engine.shape
        when = "as in the checkpoint" if step is None else f"step {step}"
        several = engine.token_pipeline.stages_per_place > 1
        shapes = " -> ".join(shape_text(each, several) for each in dict.fromkeys((before, after)))
        line = (
            f"{when}: {frozen} of {layers} layers frozen, {shapes}, {changed.seconds:.2f} s, "
            f"{changed.freed / 1e6:,.1f} MB freed, {changed.sent / 1e6:,.1f} MB moved"
        )
        if frozen and not self._said_eval:
            self._said_eval, line = True, f"{line}; frozen layers run in eval mode, without dropout"
        emit(line)
        if fullest[1] > fullest[0] and not self._warned:
            self._warned = True
            logger.warning(
                "elastic_pipeline.resize: a rank has up to %.1f MB of weights, gradients and optimizer state now, and had up "
                "to %.1f MB before",
                fullest[1] / 1e6,
                fullest[0] / 1e6,
            )
        if engine.monitor.enabled and step is not None:
            events = {
                "frozen_layers": frozen,
                "stages": after.stages,
                "replicas": after.replicas,
                "transition_seconds": changed.seconds,
                "freed_bytes": changed.freed,
            }
            engine.monitor.write_events(
                [(f"Elastic/{name}", value, engine.global_samples) for name, value in events.items()]
            )

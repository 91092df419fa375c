"""Large-batch rules for the learning rate, pure, and the base of the schedules that DeepSpeed steps.

The rules are those of You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
(arXiv 1904.00962): the LR grows with the square root of the batch, the warm-up takes the same number of steps at every
batch (so its share of the training doubles with the batch: linear-epoch warm-up), then the LR decays polynomially.
Imports the standard library only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_terapipe.overrides import override

logger = logging.getLogger(__name__)


def whole_steps(ratio: float, steps: int) -> int:
    """Steps of warm-up that a share of ``steps`` is, rounded to the nearest (halves up)."""
    return math.floor(ratio * steps + 0.5)


@dataclass(frozen=True)
class Ramp:
    """Linear warm-up to a peak, then polynomial decay, by the number k of optimiser steps taken before.

    With T steps, W of them warm-up, peak P, end E and power p, the LR that step k (0, 1, ...) uses is

    - P (k + 1) / W for k < W: the first step moves by 1/W of the peak and step W - 1 uses the peak;
    - E + (P - E) (1 - (k - W) / (T - W)) ** p for W <= k < T, or with ``decay_from="start"`` E + (P - E) (1 - k / T) ** p;
    - E from step T on.

    ``decay_from="start"`` is the form of the original BERT code and of NVIDIA's recipe: the LR falls at the end of the
    warm-up by what it would have decayed meanwhile. ``"peak"`` has no such edge.
    """

    peak: float
    steps: int
    warmup_steps: int
    end_lr: float = 0.0
    power: float = 1.0
    decay_from: str = "peak"

    def lr(self, step: int) -> float:
        """The LR that the step after ``step`` others uses."""
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        if step >= self.steps:
            return self.end_lr
        start = self.warmup_steps if self.decay_from == "peak" else 0
        left = 1.0 - (step - start) / (self.steps - start)
        return float(self.end_lr + (self.peak - self.end_lr) * left**self.power)


class Schedule:
    """An LR schedule as DeepSpeed drives one: ``step()`` after every optimiser step that was not skipped.

    The LR of the first step is set at construction. A parameter group whose own ``lr`` differs from the optimizer's keeps
    that proportion: a group given a tenth of it gets a tenth of the schedule's LR. The own ``lr`` stays in the group as
    ``initial_lr``, as with PyTorch's schedulers, for a schedule that follows this one or a state that is loaded before.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps_taken = 0
        groups = optimizer.param_groups
        self._common = float(
            getattr(optimizer, "defaults", {}).get("lr", 0.0) or (_own_lr(groups[0]) if groups else 0.0)
        )
        self._scales: list[float] = []  # read with the first LR
        self._told = False

    @property
    def total_steps(self) -> int:
        """Steps until the schedule has come to its end."""
        raise NotImplementedError

    def lr_at(self, step: int) -> float:
        """The LR of the step after ``step`` others, before the groups' proportions."""
        raise NotImplementedError

    def attach(self, engine: Any) -> None:
        """Called once, after ``deepspeed.initialize``, with the engine that steps this schedule."""
        override(engine, "load_checkpoint", self._loading)
        self._told = engine.global_rank != 0

    def _loading(self, engine: Any, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint; its optimizer's LR, which ZeRO loads last, gives way to the schedule's."""
        found = load(*args, **kwargs)
        self.take_effect()
        return found

    def step(self) -> None:
        """One optimiser step was taken: set the LR of the next one."""
        self.steps_taken += 1
        if self.steps_taken >= self.total_steps and not self._told:
            self._told = True
            logger.info("%s: all %d steps are done, the LR stays at its end", type(self).__name__, self.total_steps)
        self.take_effect()

    def get_lr(self) -> list[float]:
        """The LR of each parameter group for the next step."""
        lr = self.lr_at(self.steps_taken)
        return [lr * scale for scale in self._proportions()]

    def get_last_lr(self) -> list[float]:
        """Return :meth:`get_lr`, under the name of PyTorch's schedulers."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The position and the proportions of the groups; plain Python values."""
        return {
            "schedule": type(self).__name__,
            "steps_taken": self.steps_taken,
            "lr_scales": list(self._proportions()),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go to the position in ``state``; the form of the schedule comes from the configuration.

        Raises:
            ValueError: ``state`` is another scheduler's, or has other parameter groups.
        """
        found = None if state is None else state.get("schedule", "another one")
        if state is None or found != type(self).__name__:
            raise ValueError(
                f"the checkpoint's LR scheduler is {found}, not {type(self).__name__}: "
                "use load_checkpoint(..., load_lr_scheduler_states=False) to restart the schedule"
            )
        if len(state["lr_scales"]) != len(self._proportions()):
            raise ValueError(
                f"the checkpoint's LR scheduler has {len(state['lr_scales'])} parameter groups, the optimizer has "
                f"{len(self._scales)}: use load_checkpoint(..., load_lr_scheduler_states=False)"
            )
        self.steps_taken = int(state["steps_taken"])
        self._scales = [float(scale) for scale in state["lr_scales"]]
        self.take_effect()

    def take_effect(self) -> None:
        """Give the optimizer's groups the LR of the next step, as after another has changed them."""
        # The groups are looked up each time: Optimizer.load_state_dict puts new ones in their place.
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)  # a captured graph reads this very tensor
            else:
                group["lr"] = lr

    def _proportions(self) -> list[float]:
        """Return the groups' proportions; groups that were added since the last call bring theirs."""
        for group in self.optimizer.param_groups[len(self._scales) :]:
            if self._common > 0:
                group.setdefault("initial_lr", float(group["lr"]))
            self._scales.append(_own_lr(group) / self._common if self._common > 0 else 1.0)
        return self._scales


def _own_lr(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))

"""Large-batch rules for the learning rate, pure, and the schedules that DeepSpeed steps: ``LambWarmup``, ``MixedBatch``.

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

from ds_terapipe.errors import bad_value
from ds_terapipe.optim.schedule_values import PATH, count, decay_settings, known_keys, number, one_warmup

logger = logging.getLogger(__name__)

NAMES = ("LambWarmup", "MixedBatch")


# ------------------------------------------------------------------------------------------------------------- pure rules


def square_root_lr(reference_lr: float, reference_batch: int, batch: int) -> float:
    """Peak LR at ``batch`` samples a step when ``reference_lr`` is right at ``reference_batch``: sqrt(batch / reference)."""
    return reference_lr * math.sqrt(batch / reference_batch)


def linear_epoch_ratio(reference_ratio: float, reference_batch: int, batch: int) -> float:
    """Share of the training that is warm-up at ``batch``: it grows like the batch, so the number of steps stays."""
    return reference_ratio * batch / reference_batch


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


# ----------------------------------------------------------------------------------------------------------- the schedules


class Schedule:
    """An LR schedule as DeepSpeed drives one: ``step()`` after every optimiser step that was not skipped.

    The LR of the first step is set at construction. A parameter group whose own ``lr`` differs from the optimizer's keeps
    that proportion: a group given a tenth of it gets a tenth of the schedule's LR.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps_taken = 0
        self._scales = _proportions(optimizer)
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

    def step(self) -> None:
        """One optimiser step was taken: set the LR of the next one."""
        self.steps_taken += 1
        if self.steps_taken >= self.total_steps and not self._told:
            self._told = True
            logger.info("%s: all %d steps are done, the LR stays at its end", type(self).__name__, self.total_steps)
        self._set_lr()

    def get_lr(self) -> list[float]:
        """The LR of each parameter group for the next step."""
        lr = self.lr_at(self.steps_taken)
        return [lr * scale for scale in self._scales]

    def get_last_lr(self) -> list[float]:
        """As :meth:`get_lr`; the name that PyTorch's schedulers have for it."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The position and the proportions of the groups; plain Python values."""
        return {"schedule": type(self).__name__, "steps_taken": self.steps_taken, "lr_scales": list(self._scales)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go to the position in ``state``; what the schedule looks like comes from the configuration, not from there.

        Raises:
            ValueError: ``state`` is another scheduler's, or has other parameter groups.
        """
        found = None if state is None else state.get("schedule", "another one")
        if state is None or found != type(self).__name__:
            raise ValueError(
                f"the checkpoint's LR scheduler is {found}, not {type(self).__name__}: "
                "use load_checkpoint(..., load_lr_scheduler_states=False) to start the schedule anew"
            )
        if len(state["lr_scales"]) != len(self._scales):
            raise ValueError(
                f"the checkpoint's LR scheduler has {len(state['lr_scales'])} parameter groups, the optimizer has "
                f"{len(self._scales)}: use load_checkpoint(..., load_lr_scheduler_states=False)"
            )
        self.steps_taken = int(state["steps_taken"])
        self._scales = [float(scale) for scale in state["lr_scales"]]
        self._set_lr()

    def _set_lr(self) -> None:
        # The groups are looked up each time: Optimizer.load_state_dict puts new ones in their place.
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)  # a captured graph reads this very tensor
            else:
                group["lr"] = lr


def _proportions(optimizer: Any) -> list[float]:
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    common = float(getattr(optimizer, "defaults", {}).get("lr", 0.0) or (lrs[0] if lrs else 0.0))
    return [lr / common if common > 0 else 1.0 for lr in lrs]


class LambWarmup(Schedule):
    """Square-root scaling, linear-epoch warm-up, polynomial decay, from what is right at a reference batch.

    Peak LR = ``reference_lr`` sqrt(B / ``reference_batch_size``). B is the engine's ``train_batch_size``, which is known
    from the configuration or from :meth:`attach`. The LR of the optimizer's own block only sets proportions of groups.

    Args:
        optimizer: its ``param_groups`` get the LR.
        reference_lr: peak LR at the reference batch.
        reference_batch_size: samples in a step there.
        total_steps: optimiser steps of this training, at its own batch.
        warmup_ratio: share of the training that is warm-up at the reference batch; at B it is B / reference of it.
        warmup_steps: instead, the steps of warm-up, the same at every batch.
        end_lr, power, decay_from: see :class:`Ramp`; ``end_lr`` is not scaled.
        batch_size: B; None for one that is known only when the engine exists.

    Raises:
        ConfigError: a wrong value, or a batch so large that the warm-up is longer than the training.
    """

    KEYS = (
        "reference_lr", "reference_batch_size", "total_steps", "warmup_ratio", "warmup_steps", "end_lr", "power",
        "decay_from",
    )  # fmt: skip
    REQUIRED = KEYS[:3]

    def __init__(self, optimizer: Any, *, batch_size: int | None = None, **params: Any) -> None:
        super().__init__(optimizer)
        self._params = self.checked(params)
        self.ramp = None if batch_size is None else self.ramp_at(self._params, batch_size)
        if self.ramp is not None:
            self._set_lr()

    @classmethod
    def checked(cls, params: object) -> dict[str, Any]:
        """``scheduler.params`` with every value checked.

        Raises:
            ConfigError: naming the first key that is wrong.
        """
        block = known_keys(PATH, params, cls.KEYS, cls.REQUIRED)
        given = one_warmup(PATH, block)
        steps = count(f"{PATH}.total_steps", block["total_steps"])
        values: dict[str, Any] = {
            "reference_lr": number(f"{PATH}.reference_lr", block["reference_lr"], above=0.0),
            "reference_batch_size": count(f"{PATH}.reference_batch_size", block["reference_batch_size"]),
            "total_steps": steps,
        }
        if given == "warmup_ratio":
            values[given] = number(f"{PATH}.{given}", block[given], most=1.0)
        else:
            values[given] = count(f"{PATH}.{given}", block[given], least=0)
        # The peak depends on the batch: that the end is not above it is looked at with the batch.
        return {**values, **decay_settings(PATH, block, math.inf)}

    @staticmethod
    def ramp_at(params: Mapping[str, Any], batch: int) -> Ramp:
        """The schedule at ``batch`` samples a step, from checked parameters.

        Raises:
            ConfigError: the warm-up is longer than the training, or the end is above the peak.
        """
        steps, reference = params["total_steps"], params["reference_batch_size"]
        peak = square_root_lr(params["reference_lr"], reference, batch)
        if "warmup_steps" in params:
            warmup, key = params["warmup_steps"], "warmup_steps"
        else:
            ratio, key = linear_epoch_ratio(params["warmup_ratio"], reference, batch), "warmup_ratio"
            warmup = whole_steps(ratio, steps)
        if warmup > steps:
            raise bad_value(
                f"{PATH}.{key}", params[key],
                f"such that the {warmup} steps of warm-up at batch {batch} fit into total_steps ({steps})",
                "a smaller warm-up, a smaller batch or more steps",
            )  # fmt: skip
        decay = {key: params[key] for key in ("end_lr", "power", "decay_from")}
        number(f"{PATH}.end_lr", decay["end_lr"], most=peak)
        return Ramp(peak, steps, warmup, **decay)

    @property
    def total_steps(self) -> int:
        """Steps until the LR has come to its end."""
        return int(self._params["total_steps"])

    def lr_at(self, step: int) -> float:
        """The LR of the step after ``step`` others; RuntimeError as long as the batch size is not known."""
        if self.ramp is None:
            raise RuntimeError(
                "LambWarmup: the batch size is not known, call attach(engine) after deepspeed.initialize"
            )
        return self.ramp.lr(step)

    def attach(self, engine: Any) -> None:
        """Take the batch size from the engine."""
        self.ramp = self.ramp_at(self._params, engine.train_batch_size())
        self._set_lr()


# ------------------------------------------------------------------------------------------------- from ``ds_config.json``


def validate(name: str, params: object, config: Mapping[str, Any]) -> None:
    """Check ``scheduler.params`` and what stands beside it; the same on every rank, before an engine exists.

    Args:
        name: ``scheduler.type``, one of :data:`NAMES`.
        params: ``scheduler.params``.
        config: the whole DeepSpeed configuration.

    Raises:
        ConfigError: ``scheduler.params.<key>: got ..., must be ..., use ...``.
    """
    if name == "MixedBatch":
        from ds_terapipe.optim.phases import check_config, parse_phases

        check_config(parse_phases(params), config)
    elif name == "LambWarmup":
        checked, batch = LambWarmup.checked(params), _given_batch(config)
        if batch is not None:
            LambWarmup.ramp_at(checked, batch)
    else:
        raise bad_value("scheduler.type", name, f"one of {', '.join(NAMES)}", NAMES[0])


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the batch sizes that ``MixedBatch`` implies, for DeepSpeed to read; else a copy as it is.

    Raises:
        ConfigError: as :func:`validate`.
    """
    block = config.get("scheduler")
    if not isinstance(block, Mapping) or block.get("type") != "MixedBatch":
        return dict(config)
    from ds_terapipe.optim.phases import check_config, parse_phases, with_first_batch

    phases = parse_phases(block.get("params"))
    check_config(phases, config)
    return with_first_batch(phases, config)


def build_scheduler(name: str, params: Mapping[str, Any], config: Mapping[str, Any]) -> Callable[[Any], Schedule]:
    """The function that ``deepspeed.initialize(lr_scheduler=...)`` calls with the optimizer.

    What it returns becomes ``engine.lr_scheduler``; call its ``attach(engine)`` after ``deepspeed.initialize``.

    Raises:
        ConfigError: as :func:`validate`.
    """
    validate(name, params, config)
    if name == "LambWarmup":
        return lambda optimizer: LambWarmup(optimizer, batch_size=_given_batch(config), **params)
    from ds_terapipe.optim.mixed_batch import MixedBatch

    return lambda optimizer: MixedBatch(optimizer, **params)


def _given_batch(config: Mapping[str, Any]) -> int | None:
    """``train_batch_size`` where it is a size; what is wrong with another value is DeepSpeed's to say."""
    batch = config.get("train_batch_size")
    return batch if isinstance(batch, int) and not isinstance(batch, bool) and batch > 0 else None

"""The keys of ``scheduler.params``, of each LR schedule."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from ds_terapipe.blocks import Block, Count, Must, NotNegative, Number, Whole
from ds_terapipe.errors import ConfigError, bad_value, is_finite
from ds_terapipe.optim.schedules.lr_rules import Ramp, whole_steps

PATH = "scheduler.params"
PHASES = f"{PATH}.phases"

AnyRamp = TypeVar("AnyRamp", bound="RampKeys")


def _integral(value: Any) -> Any:
    """Return 1e5 as the integer that it is."""
    return int(value) if is_finite(value) and float(value).is_integer() else value


Steps = Annotated[Count, BeforeValidator(_integral), Must("a positive whole number", "e.g. 100")]
PeakLr = Annotated[Number, Must("a number above 0", "e.g. 1e-3")]
Share = Annotated[NotNegative, Field(le=1)]


class RampKeys(Block):
    """Keys that a warm-up and a decay have."""

    PATH: ClassVar[str] = PATH

    warmup_ratio: Annotated[Share | None, Must("a share of the steps, 0 or more", "e.g. 0.1")] = None
    warmup_steps: Annotated[
        Annotated[Whole, BeforeValidator(_integral)] | None, Must("a whole number, 0 or more", "e.g. 100")
    ] = None
    end_lr: Annotated[NotNegative, Must("a number, 0 or more", "e.g. 1e-5")] = 0.0
    power: Annotated[Number, Must("a number above 0", "e.g. 1.0")] = 1.0
    decay_from: Literal["peak", "start"] = "peak"

    @model_validator(mode="after")
    def _check_warmup(self: AnyRamp) -> AnyRamp:
        given = [name for name in ("warmup_ratio", "warmup_steps") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "neither"
            rule = "must have one of warmup_ratio and warmup_steps, use e.g. warmup_ratio 0.1 or warmup_steps 0"
            raise ConfigError(f"{self.PATH}: got {got}, {rule}")
        return self

    def ramp_to(self, peak: float, steps: int, batch: int, growth: float = 1.0) -> Ramp:
        """Return the LR of a training.

        Args:
            peak: the LR after the warm-up.
            steps: of the training.
            batch: samples in a step, for errors.
            growth: factor of ``warmup_ratio``.

        Raises:
            ConfigError: the warm-up is longer than the training, or the end is above the peak.
        """
        name = "warmup_steps" if self.warmup_ratio is None else "warmup_ratio"
        warmup = self.warmup_steps if self.warmup_ratio is None else whole_steps(self.warmup_ratio * growth, steps)
        assert warmup is not None  # one of both is there
        if warmup > steps:
            rule = f"such that the {warmup} steps of warm-up at batch {batch} fit into the {steps} steps"
            use = "a smaller warm-up, a smaller batch or more steps"
            raise bad_value(f"{self.PATH}.{name}", getattr(self, name), rule, use)
        if self.end_lr > peak:
            raise bad_value(f"{self.PATH}.end_lr", self.end_lr, f"at most the peak LR, {peak:g}", "0")
        return Ramp(peak, steps, warmup, self.end_lr, self.power, self.decay_from)


class WarmupKeys(RampKeys):
    """Keys of ``LambWarmup``.

    Attributes:
        reference_lr: The peak LR at the reference batch.
        reference_batch_size: Samples in a step of the reference.
        total_steps: Optimizer steps of this training, at its own batch.
        warmup_ratio: The warm-up's share of the reference training. The number of its steps is the same at every batch. One of
            this and ``warmup_steps`` is required.
        warmup_steps: Steps of the warm-up.
        end_lr: The LR after the decay, 0 by default; it is not scaled.
        power: The power of the polynomial decay, 1 by default.
        decay_from: ``"peak"``: the decay starts after the warm-up, the default. ``"start"``: it is counted from the first step.
    """

    reference_lr: PeakLr
    reference_batch_size: Steps
    total_steps: Steps

    def ramp_at(self, batch: int) -> Ramp:
        """Return the schedule at ``batch`` samples a step; see `ramp_to`."""
        growth = batch / self.reference_batch_size
        # the share of the warm-up grows with the batch, so that the number of its steps stays
        return self.ramp_to(self.reference_lr * math.sqrt(growth), self.total_steps, batch, growth)


class Phase(RampKeys):
    """Optimizer steps of ``MixedBatch`` with one batch size and sequence length, and a warm-up and decay of their own.

    Attributes:
        steps: Optimizer steps of the phase.
        batch_size: Samples in a step, over all replicas.
        seq_length: Tokens in a sample.
        lr: The peak LR of the phase.
        warmup_ratio: The warm-up's share of the phase. One of this and ``warmup_steps`` is required.
        warmup_steps: Steps of the warm-up.
        end_lr: The LR at the end of the phase, 0 by default.
        power: The power of the polynomial decay, 1 by default.
        decay_from: ``"peak"``: the decay starts after the warm-up, the default. ``"start"``: it is counted from the first step.
        micro_batch_size: Samples in a micro-batch of one replica. Without it the size stays; in the first phase it is
            ``train_micro_batch_size_per_gpu``.
    """

    PATH: ClassVar[str] = PHASES

    steps: Steps
    batch_size: Steps
    seq_length: Steps
    lr: PeakLr
    micro_batch_size: Steps | None = None

    @model_validator(mode="after")
    def _check_ramp(self) -> Phase:
        _ = self.ramp
        return self

    @property
    def ramp(self) -> Ramp:
        """The LR by the steps taken in this phase."""
        return self.ramp_to(self.lr, self.steps, self.batch_size)


def _phases(given: Any) -> Any:
    return [_phase(index, each) for index, each in enumerate(given)] if isinstance(given, (list, tuple)) else given


def _phase(index: int, given: object) -> Phase:
    try:
        return Phase.read(given)
    except ConfigError as error:
        raise ConfigError(str(error).replace(PHASES, phase_path(index), 1)) from None


def phase_path(index: int) -> str:
    """Return the key of a phase in the configuration."""
    return f"{PHASES}[{index}]"


class MixedBatchKeys(Block):
    """Keys of ``MixedBatch``.

    Attributes:
        phases: The phases, one after the other.
    """

    PATH: ClassVar[str] = PATH

    phases: Annotated[
        list[Phase],
        Field(min_length=1),
        BeforeValidator(_phases),
        Must(
            "a list of one or more phases",
            'e.g. [{"steps": 7038, "batch_size": 65536, "seq_length": 128, "lr": 6e-3, "warmup_ratio": 0.2843}, ...]',
        ),
    ]

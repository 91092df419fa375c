"""The schedules that DeepSpeed steps, by the names of ``ds_config.json``: ``LambWarmup``, ``MixedBatch``.

The rules behind them are in lr_rules.py. Imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ds_terapipe.errors import bad_value
from ds_terapipe.names import TYPES
from ds_terapipe.optim.schedules.lr_rules import Ramp, Schedule, whole_steps
from ds_terapipe.optim.schedules.phases import check_config, parse_phases
from ds_terapipe.optim.schedules.values import PATH, count, decay_settings, known_keys, number, warmup_setting

NAMES = TYPES["scheduler"]


class LambWarmup(Schedule):
    """Square-root scaling, linear-epoch warm-up and polynomial decay, from the hyperparameters of a reference batch.

    Peak LR = ``reference_lr`` sqrt(B / ``reference_batch_size``). B is the engine's ``train_batch_size``, which is known
    from the configuration or from :meth:`attach`. The LR of the optimizer's own block only sets proportions of groups.

    Args:
        optimizer: Its ``param_groups`` get the LR.
        reference_lr: The peak LR at the reference batch.
        reference_batch_size: Samples in a step of the reference.
        total_steps: Optimizer steps of this training, at its own batch.
        warmup_ratio: The warm-up's share of the reference training. The number of its steps is the same at every batch. One of
            this and ``warmup_steps`` is required.
        warmup_steps: Steps of the warm-up.
        end_lr: The LR after the decay, 0 by default; it is not scaled.
        power: The power of the polynomial decay, 1 by default.
        decay_from: ``"peak"``: the decay starts after the warm-up, the default. ``"start"``: it is counted from the first step.
        batch_size: Samples in a step of this training; None until the engine exists.

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
            self.take_effect()

    @classmethod
    def checked(cls, params: object) -> dict[str, Any]:
        """``scheduler.params`` with every value checked.

        Raises:
            ConfigError: naming the first key that is wrong.
        """
        block = known_keys(PATH, params, cls.KEYS, cls.REQUIRED)
        steps = count(f"{PATH}.total_steps", block["total_steps"])
        lr = number(f"{PATH}.reference_lr", block["reference_lr"], above=0.0)
        batch = count(f"{PATH}.reference_batch_size", block["reference_batch_size"])
        warmup = warmup_setting(PATH, block)
        # The peak depends on the batch: that the end is not above it is looked at with the batch.
        decay = decay_settings(PATH, block, math.inf)
        return {"reference_lr": lr, "reference_batch_size": batch, "total_steps": steps, **warmup, **decay}

    @staticmethod
    def ramp_at(params: Mapping[str, Any], batch: int) -> Ramp:
        """The schedule at ``batch`` samples a step, from checked parameters.

        Raises:
            ConfigError: the warm-up is longer than the training, or the end is above the peak.
        """
        steps, reference = params["total_steps"], params["reference_batch_size"]
        peak = params["reference_lr"] * math.sqrt(batch / reference)
        if "warmup_steps" in params:
            warmup, key = params["warmup_steps"], "warmup_steps"
        else:
            # the share grows with the batch, so that the number of steps stays
            warmup, key = whole_steps(params["warmup_ratio"] * batch / reference, steps), "warmup_ratio"
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
        super().attach(engine)
        self.ramp = self.ramp_at(self._params, engine.train_batch_size())
        self.take_effect()


# ------------------------------------------------------------------------------------------------- from ``ds_config.json``


def validate(name: str, params: object, config: Mapping[str, Any]) -> None:
    """Check ``scheduler.params`` and related keys; the same on every rank, before an engine exists.

    Args:
        name: ``scheduler.type``, one of :data:`NAMES`.
        params: ``scheduler.params``.
        config: the whole DeepSpeed configuration.

    Raises:
        ConfigError: ``scheduler.params.<key>: got ..., must be ..., use ...``.
    """
    if name == "MixedBatch":
        check_config(parse_phases(params), config)
    elif name == "LambWarmup":
        checked, batch = LambWarmup.checked(params), _given_batch(config)
        if batch is not None:
            LambWarmup.ramp_at(checked, batch)
    else:
        raise bad_value("scheduler.type", name, f"one of {', '.join(NAMES)}", NAMES[0])


def complete_config(config: Mapping[str, Any], replicas: int | None = None) -> dict[str, Any]:
    """Return the configuration with the batch sizes that ``MixedBatch`` implies, for DeepSpeed; else a plain copy.

    Args:
        config: the whole DeepSpeed configuration.
        replicas: data-parallel ones, where they are known.

    Raises:
        ConfigError: as :func:`validate`.
    """
    block = config.get("scheduler")
    if not isinstance(block, Mapping) or block.get("type") != "MixedBatch":
        return dict(config)
    phases = parse_phases(block.get("params"))
    check_config(phases, config, replicas)
    batch, micro = phases[0].batch_size, phases[0].micro_batch_size
    return {**config, "train_batch_size": batch, **({"train_micro_batch_size_per_gpu": micro} if micro else {})}


def build_scheduler(name: str, params: Mapping[str, Any], config: Mapping[str, Any]) -> Callable[[Any], Schedule]:
    """The function that ``deepspeed.initialize(lr_scheduler=...)`` calls with the optimizer.

    The result becomes ``engine.lr_scheduler``; call its ``attach(engine)`` after ``deepspeed.initialize``.

    Raises:
        ConfigError: as :func:`validate`.
    """
    validate(name, params, config)
    if name == "LambWarmup":
        return lambda optimizer: LambWarmup(optimizer, batch_size=_given_batch(config), **params)
    from ds_terapipe.optim.schedules.mixed_batch import MixedBatch

    return lambda optimizer: MixedBatch(optimizer, **params)


def _given_batch(config: Mapping[str, Any]) -> int | None:
    """Return ``train_batch_size`` if it is a valid size; DeepSpeed reports other values."""
    batch = config.get("train_batch_size")
    return batch if isinstance(batch, int) and not isinstance(batch, bool) and batch > 0 else None

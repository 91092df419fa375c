"""The LR schedules of ``ds_config.json``, by their names there: ``LambWarmup``, ``MixedBatch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_terapipe.optim.schedules.keys import MixedBatchKeys, WarmupKeys
from ds_terapipe.optim.schedules.lr_rules import Schedule
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
from ds_terapipe.optim.schedules.phases import check_config
from ds_terapipe.rules import above


class LambWarmup(Schedule):
    """Square-root scaling, linear-epoch warm-up and polynomial decay, from the hyperparameters of a reference batch.

    Peak LR = ``reference_lr`` sqrt(B / ``reference_batch_size``). B is the engine's ``train_batch_size``, which is known
    from the configuration or from :meth:`attach`. The LR of the optimizer's own block only sets proportions of groups.

    Args:
        optimizer: Its ``param_groups`` get the LR.
        batch_size: Samples in a step of this training; None until the engine exists.
        params: Keys of :class:`~ds_terapipe.optim.schedules.keys.WarmupKeys`.

    Raises:
        ConfigError: a wrong value, or a batch so large that the warm-up is longer than the training.
    """

    def __init__(self, optimizer: Any, *, batch_size: int | None = None, **params: Any) -> None:
        super().__init__(optimizer)
        self._keys = WarmupKeys(**params)
        self.ramp = None if batch_size is None else self._keys.ramp_at(batch_size)
        if self.ramp is not None:
            self.take_effect()

    @property
    def total_steps(self) -> int:
        """Steps until the LR has come to its end."""
        return self._keys.total_steps

    def lr_at(self, step: int) -> float:
        """The LR of the step after ``step`` others; RuntimeError as long as the batch size is not known."""
        if self.ramp is None:
            raise RuntimeError("LambWarmup: got no batch size, must be attached first, use attach(engine)")
        return self.ramp.lr(step)

    def attach(self, engine: Any) -> None:
        """Take the batch size from the engine."""
        super().attach(engine)
        self.ramp = self._keys.ramp_at(engine.train_batch_size())
        self.take_effect()


def read(config: Mapping[str, Any], replicas: int | None = None) -> tuple[dict[str, Any], Callable[[Any], Schedule]]:
    """Read the block ``scheduler`` with a type of ours; the same on every rank, before an engine exists.

    Args:
        config: the whole DeepSpeed configuration.
        replicas: data-parallel ones, where they are known.

    Returns:
        The configuration with the batch sizes that ``MixedBatch`` implies, for DeepSpeed. The function that
        ``deepspeed.initialize(lr_scheduler=...)`` calls with the optimizer; ``attach`` of its result needs the engine.

    Raises:
        ConfigError: ``scheduler.params.<key>: got ..., must be ..., use ...``.
    """
    made, params = dict(config), config["scheduler"].get("params") or {}
    if config["scheduler"]["type"] == "LambWarmup":
        keys, batch = WarmupKeys.read(params), config.get("train_batch_size")
        known = batch if isinstance(batch, int) and above(0)(batch) else None  # DeepSpeed reports other values
        if known is not None:
            keys.ramp_at(known)
        return made, lambda optimizer: LambWarmup(optimizer, batch_size=known, **params)
    phases = MixedBatchKeys.read(params).phases
    check_config(phases, config, replicas)
    made["train_batch_size"], micro = phases[0].batch_size, phases[0].micro_batch_size
    if micro is not None:
        made["train_micro_batch_size_per_gpu"] = micro
    return made, lambda optimizer: MixedBatch(optimizer, **params)

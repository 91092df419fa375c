"""The block ``elastic_pipeline`` of ``ds_config.json``, checked value by value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ds_terapipe.config import LARGEST_64, Block, count, gigabytes, is_count, name_of, one_of, switch, unknown_key
from ds_terapipe.elastic.policies.freeze import READABLE, policy_class, policy_names
from ds_terapipe.elastic.policies.freezer import REASONS
from ds_terapipe.errors import ConfigError, bad_value, is_finite, nearest, shown
from ds_terapipe.refusals.configuration import Rule, above, at, autocasts_to_fp16, is_true, offloads

ELASTIC_PIPELINE = "elastic_pipeline"
EPOCH: Literal["epoch"] = "epoch"
Steps = tuple[tuple[int, int], ...]
"""Pairs (step, number): the number holds from the step with this 0-based ``global_steps`` on."""

AnyBlock = TypeVar("AnyBlock", bound=Block)

_BESIDE = "beside elastic_pipeline.freeze.policy, resize.policy or partition"
_RULES = (
    Rule("zero_optimization.stage", above(1), f"0 or 1 {_BESIDE}", "1"),
    Rule(
        "zero_optimization.offload_optimizer",
        offloads,
        f'absent {_BESIDE} (what is offloaded does not move), or have device "none"',
        'device "none"',
    ),
    Rule("torch_autocast", autocasts_to_fp16, f"bfloat16 or off {_BESIDE}", "dtype bfloat16"),
)


class FreezeSettings(Block):
    """The block ``elastic_pipeline.freeze``."""

    PATH: ClassVar[str] = f"{ELASTIC_PIPELINE}.freeze"
    _EXAMPLE: ClassVar[str] = "e.g. [[10, 2], [20, 4]]"
    _PAIRS: ClassVar[str] = "a list of [step, entries], steps increasing, entries 1 or more and not decreasing"

    policy: str = "static"
    """A policy of `ds_terapipe.elastic.policies.freeze`, or one that the user has registered there."""

    alpha: float = 0.33
    """Share of the layers that still train by which each interval may freeze more; for policies that read it."""

    interval: int | Literal["epoch"] = EPOCH
    """Steps between two decisions, or an epoch of ``training_data``; for policies that decide at intervals."""

    tolerance: float = 0.1
    """Relative change of a gradient's norm from interval to interval below which it is a plateau; for policies that read it."""

    patience: int = 3
    """Intervals that a plateau lasts before it counts; for policies that read it."""

    unfreeze: tuple[str, ...] = ()
    """Events that make all layers train again: of `ds_terapipe.elastic.policies.freezer.REASONS`."""

    frozen_layers: Steps | None = None
    """Pairs (step, number): from that step on, the first so many entries are frozen; for policies that read it."""

    @field_validator("policy", mode="before")
    @classmethod
    def _check_policy(cls, value: object) -> str:
        policy_class(value)  # type: ignore[arg-type]
        return str(value)

    @field_validator("alpha", mode="before")
    @classmethod
    def _check_alpha(cls, value: object) -> float:
        if not is_finite(value) or not 0 < value < 1:  # type: ignore[operator]
            raise bad_value(f"{cls.PATH}.alpha", value, "above 0 and below 1", "e.g. 0.33")
        return float(value)  # type: ignore[arg-type]

    @field_validator("tolerance", mode="before")
    @classmethod
    def _check_tolerance(cls, value: object) -> float:
        if not is_finite(value) or not 0 < value < 1:  # type: ignore[operator]
            raise bad_value(f"{cls.PATH}.tolerance", value, "above 0 and below 1", "e.g. 0.1")
        return float(value)  # type: ignore[arg-type]

    @field_validator("patience", mode="before")
    @classmethod
    def _check_patience(cls, value: object) -> int:
        return count(f"{cls.PATH}.patience", value, "a positive number of intervals", "e.g. 3")

    @field_validator("unfreeze", mode="before")
    @classmethod
    def _check_unfreeze(cls, value: object) -> tuple[str, ...]:
        listed = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
        if not listed or any(each not in REASONS for each in value):  # type: ignore[attr-defined]
            words = [value] if isinstance(value, str) else value if listed else []
            near = [nearest(each, REASONS) or REASONS[0] for each in words]  # type: ignore[attr-defined]
            rule = f"a list of {' or '.join(map(shown, REASONS))}"
            raise bad_value(f"{cls.PATH}.unfreeze", value, rule, shown(near or [REASONS[0]]))
        return tuple(dict.fromkeys(value))  # type: ignore[call-overload]

    @field_validator("interval", mode="before")
    @classmethod
    def _check_interval(cls, value: object) -> int | str:
        if value == EPOCH:
            return EPOCH
        use = shown(EPOCH) if isinstance(value, str) else "e.g. 1000"
        return count(f"{cls.PATH}.interval", value, '"epoch" or a positive number of steps', use)

    @field_validator("frozen_layers", mode="before")
    @classmethod
    def _check_frozen_layers(cls, value: object) -> Steps | None:
        if value is None:
            return None
        steps = _steps(value)
        if steps is None:
            raise bad_value(f"{cls.PATH}.frozen_layers", value, cls._PAIRS, cls._EXAMPLE)
        return steps

    @model_validator(mode="after")
    def _check_order(self) -> FreezeSettings:
        """Refuse a decreasing ``frozen_layers`` unless an event may unfreeze layers."""
        decreases = any(a > b for (_, a), (_, b) in pairwise(self.frozen_layers or ()))
        if decreases and not self.unfreeze:
            raise bad_value(f"{self.PATH}.frozen_layers", self.frozen_layers, self._PAIRS, self._EXAMPLE)
        return self

    @model_validator(mode="after")
    def _check_what_the_policy_reads(self) -> FreezeSettings:
        """Refuse settings that the policy does not read, and missing ones that it needs."""
        reads = policy_class(self.policy).reads
        if self.unfreeze and self.policy == "static":
            rule = 'absent beside "policy": "static", which freezes nothing'
            raise bad_value(f"{self.PATH}.unfreeze", self.unfreeze, rule, 'e.g. "policy": "alpha", or leave it out')
        for name in READABLE:
            value = getattr(self, name)
            if name in reads and value is None:
                rule = f'a list of [step, entries] beside "policy": {shown(self.policy)}'
                raise bad_value(f"{self.PATH}.{name}", value, rule, self._EXAMPLE)
            if name not in reads and name in self.model_fields_set and value is not None:
                readers = [shown(policy) for policy in policy_names() if name in policy_class(policy).reads]
                rule = f'absent beside "policy": {shown(self.policy)}, which does not read it'
                raise bad_value(
                    f"{self.PATH}.{name}", value, rule, f'"policy": {" or ".join(readers)}, or leave it out'
                )
        return self


class ResizeSettings(Block):
    """The block ``elastic_pipeline.resize``."""

    PATH: ClassVar[str] = f"{ELASTIC_PIPELINE}.resize"

    policy: Literal["off", "halve", "measured"] | Steps = "measured"
    """Never; by PipeTransformer's compression test; by measured times; or a number of stages from a step on.

    The default ``measured`` becomes ``off`` beside settings that do not allow it.
    """

    memory_gb: float | None = None
    """Memory limit of a rank, in 1e9 bytes, for measured shapes; None: a rank's use at the start."""

    @field_validator("policy", mode="before")
    @classmethod
    def _check_policy(cls, value: object) -> str | Steps:
        key, rule = f"{cls.PATH}.policy", '"off", "halve", "measured" or a list of [step, stages]'
        names = ("off", "halve", "measured")
        if value in names:
            return str(value)
        if isinstance(value, str):
            raise bad_value(key, value, rule, shown(nearest(value, names) or "off"))
        steps = _steps(value)
        if steps is None:
            rule += ", steps increasing, stages 1 or more"
            raise bad_value(
                key, value, rule, "e.g. [[10, 2], [20, 1]]" if isinstance(value, (list, tuple)) else '"off"'
            )
        return steps

    @field_validator("memory_gb", mode="before")
    @classmethod
    def _check_memory(cls, value: object) -> float | None:
        return gigabytes(f"{cls.PATH}.memory_gb", value, "e.g. 40")

    @model_validator(mode="after")
    def _check_memory_is_read(self) -> ResizeSettings:
        if self.memory_gb is not None and self.policy != "measured":
            rule = f'absent beside "policy": {shown(self.policy)}, which does not read it'
            raise bad_value(f"{self.PATH}.memory_gb", self.memory_gb, rule, '"policy": "measured", or leave it out')
        return self


class CacheSettings(Block):
    """The block ``elastic_pipeline.cache``: outputs of the frozen layers, by sample."""

    PATH: ClassVar[str] = f"{ELASTIC_PIPELINE}.cache"

    enabled: bool = False
    """Whether outputs are cached."""

    dtype: Literal["exact", "bf16"] = "exact"
    """Unchanged, or floating-point numbers cast to bf16."""

    memory_gb: float | None = None
    """Limit for entries in a machine's memory (/dev/shm), in 1e9 bytes; by default half of its free space."""

    disk_path: str | None = None
    """Folder for entries that do not fit into memory."""

    disk_gb: float | None = None
    """Limit for entries on disk, in 1e9 bytes; by default 0.8 of the free space."""

    @field_validator("enabled", mode="before")
    @classmethod
    def _check_enabled(cls, value: object) -> bool:
        return switch(f"{cls.PATH}.enabled", value, False)

    @field_validator("memory_gb", "disk_gb", mode="before")
    @classmethod
    def _check_room(cls, value: object, info: ValidationInfo) -> float | None:
        return gigabytes(f"{cls.PATH}.{info.field_name}", value, "e.g. 8")

    @field_validator("dtype", mode="before")
    @classmethod
    def _check_dtype(cls, value: object) -> str:
        return one_of(f"{cls.PATH}.dtype", value, ("exact", "bf16"), "exact")

    @model_validator(mode="after")
    def _check_it_is_switched(self) -> CacheSettings:
        """Refuse settings of the cache without ``enabled``."""
        if self.model_fields_set and "enabled" not in self.model_fields_set:
            given = ", ".join(sorted(self.model_fields_set))
            raise ConfigError(f"{self.PATH}.enabled: missing, must be there beside {given}, use true")
        return self

    @model_validator(mode="after")
    def _check_disk_is_read(self) -> CacheSettings:
        if self.disk_gb is not None and self.disk_path is None:
            raise bad_value(
                f"{self.PATH}.disk_gb", self.disk_gb, "absent without disk_path", 'e.g. "disk_path": "cache/"'
            )
        return self

    @field_validator("disk_path", mode="before")
    @classmethod
    def _check_path(cls, value: object) -> str | None:
        return name_of(f"{cls.PATH}.disk_path", value, "the name of a folder", "cache/")


class DataSettings(Block):
    """The block ``elastic_pipeline.data``: the order of ``training_data``."""

    PATH: ClassVar[str] = f"{ELASTIC_PIPELINE}.data"

    shuffle: bool = False
    """Whether every epoch has its own order, drawn from the seed and the epoch."""

    seed: int = 1234
    """Seed of these orders."""

    @field_validator("shuffle", mode="before")
    @classmethod
    def _check_shuffle(cls, value: object) -> bool:
        return switch(f"{cls.PATH}.shuffle", value, False)

    @field_validator("seed", mode="before")
    @classmethod
    def _check_seed(cls, value: object) -> int:
        return count(f"{cls.PATH}.seed", value, "an integer of 0 or more", "e.g. 1234", 0, LARGEST_64)


class ElasticPipelineConfig(Block):
    """The block ``elastic_pipeline``."""

    PATH: ClassVar[str] = ELASTIC_PIPELINE

    enabled: bool = True
    """Whether the block is active; ``false`` is the same as leaving it out."""

    freeze: FreezeSettings = Field(default_factory=FreezeSettings)
    resize: ResizeSettings = Field(default_factory=ResizeSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    data: DataSettings = Field(default_factory=DataSettings)

    partition: Literal["as_launched", "measured"] = "as_launched"
    """Whether the layers of a running pipeline are repartitioned by measured costs even if nothing is frozen."""

    history_path: str | None = None
    """File to which the run adds a line of JSON for its start, each change and its end."""

    @property
    def moves(self) -> bool:
        """Whether layers may move to other ranks."""
        return self.resize.policy != "off" or self.partition == "measured"

    @property
    def has_to_move(self) -> bool:
        """Whether the configuration demands moving; else layers that cannot move stay."""
        return self.moves and (self.partition == "measured" or "policy" in self.resize.model_fields_set)

    def staying(self, reason: str) -> ElasticPipelineConfig:
        """Return these settings with ``resize.policy`` ``"off"``, and print the reason; only if they need not move."""
        if int(os.environ.get("RANK", 0)) == 0:
            from ds_terapipe.pipeline.recording.report import emit  # imports DeepSpeed, which the commands do not need

            emit(f"elastic_pipeline.resize.policy: off, since {reason}")
        stays: ElasticPipelineConfig = self.model_copy(update={"resize": ResizeSettings(policy="off")})
        return stays

    @field_validator("partition", mode="before")
    @classmethod
    def _check_partition(cls, value: object) -> str:
        one_of(f"{cls.PATH}.partition", value, ("as_launched", "measured"), "as_launched")
        return str(value)

    @field_validator("enabled", mode="before")
    @classmethod
    def _check_enabled(cls, value: object) -> bool:
        return switch(f"{cls.PATH}.enabled", value, True)

    @field_validator("history_path", mode="before")
    @classmethod
    def _check_history_path(cls, value: object) -> str | None:
        return name_of(f"{cls.PATH}.history_path", value, "the name of a file", "history.jsonl")

    @field_validator("freeze", "resize", "cache", "data", mode="before")
    @classmethod
    def _check_block(cls, value: object, info: Any) -> Block:
        kind: type[Block] = cls.model_fields[info.field_name].annotation
        return value if isinstance(value, kind) else _read(kind, value)


def parse(config: Mapping[str, Any]) -> ElasticPipelineConfig | None:
    """Check the block ``elastic_pipeline`` of a DeepSpeed configuration.

    Args:
        config: the whole configuration, as DeepSpeed reads it from the file.

    Returns:
        The checked block, or None where it is absent or has ``"enabled": false``.

    Raises:
        ConfigError: the block is not one, has an unknown key, or a value that breaks its rule; only the first is reported.
    """
    if ELASTIC_PIPELINE not in config:
        return None
    block = config[ELASTIC_PIPELINE]
    if isinstance(block, Mapping) and block.get("enabled") is False:
        return None
    return _read(ElasticPipelineConfig, block)


def check_config(settings: ElasticPipelineConfig, config: Mapping[str, Any]) -> ElasticPipelineConfig:
    """Refuse settings that a change of frozen layers or shape does not support yet.

    Returns:
        The settings, or those of a pipeline that keeps its shape, where nothing asked for another one.

    Raises:
        ConfigError: naming the key, its value and the value to use.
    """
    freezes = settings.freeze.policy != "static"
    if not freezes and not settings.moves:
        return settings
    flat = above(0)(at(config, "zero_optimization.stage")) or any(
        is_true(at(config, f"{name}.enabled")) for name in ("bf16", "bfloat16", "fp16")
    )
    if flat and policy_class(settings.freeze.policy).needs_gradients:
        must = "a policy without norms of gradients beside bf16, fp16 or ZeRO (which keep gradients scaled or in flat parts)"
        raise bad_value(f"{settings.freeze.PATH}.policy", settings.freeze.policy, must, '"alpha"')
    if flat and settings.freeze.unfreeze:
        must = (
            "absent beside bf16, fp16 or ZeRO (whose flat parts have one step count, where returning layers begin at 0)"
        )
        raise bad_value(f"{settings.freeze.PATH}.unfreeze", settings.freeze.unfreeze, must, "[]")
    for rule in _RULES:
        value = at(config, rule.path)
        if rule.refused(value):
            error = bad_value(rule.path, value, rule.rule, rule.use)
            if freezes or settings.has_to_move:
                raise error
            return settings.staying(f"{rule.path} is {shown(value)}")
    return settings


def check_alike(blocks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse settings that differ between ranks, which would decide differently.

    Args:
        blocks: of every rank.

    Raises:
        ConfigError: naming the first rank whose settings differ from rank 0's.
    """
    for rank, block in enumerate(blocks):
        if block != blocks[0]:
            raise ConfigError(
                f"{ELASTIC_PIPELINE}: got other settings on rank {rank} than on rank 0, must be the same on all, use one file"
            )


def _read(kind: type[AnyBlock], block: object) -> AnyBlock:
    known = kind.model_fields
    if not isinstance(block, Mapping):
        raise bad_value(kind.PATH, block, "a block of keys", f"some of {', '.join(known)}")
    for name in block:
        if name not in known:
            raise unknown_key(kind.PATH, name, known)
    return kind(strict=True, **block)


def _steps(value: object) -> Steps | None:
    """Return a list of [step, number] with increasing steps and positive numbers as a tuple; None if it is not one."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    pairs = [tuple(pair) if isinstance(pair, (list, tuple)) else () for pair in value]
    if not all(len(pair) == 2 and is_count(pair[0], least=0) and is_count(pair[1]) for pair in pairs):
        return None
    if any(a[0] >= b[0] for a, b in pairwise(pairs)):
        return None
    return tuple((int(step), int(number)) for step, number in pairs)

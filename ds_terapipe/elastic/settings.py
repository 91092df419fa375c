"""The block ``elastic_pipeline`` of ``ds_config.json``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ds_terapipe import blocks
from ds_terapipe.blocks import Block, Count, FileName, Gigabytes, Must, Switch, Whole
from ds_terapipe.elastic.policies.freeze import READABLE, policy_class, policy_names
from ds_terapipe.elastic.policies.freezer import REASONS
from ds_terapipe.errors import ConfigError, bad_value, shown
from ds_terapipe.rules import Rule, above, at, broken, is_given, is_true, offloads

ELASTIC_PIPELINE = "elastic_pipeline"
EPOCH: Literal["epoch"] = "epoch"
_FREEZE, _RESIZE, _CACHE = (f"{ELASTIC_PIPELINE}.{name}" for name in ("freeze", "resize", "cache"))


def _in_order(pairs: Any) -> Any:
    if any(a[0] >= b[0] for a, b in pairwise(pairs)):
        raise ValueError
    return pairs


def _are_reasons(words: Any) -> Any:
    if not set(words) <= set(REASONS):
        raise ValueError
    return words


Share = Annotated[float, Field(strict=True, gt=0, lt=1)]
Steps = Annotated[tuple[tuple[Whole, Count], ...], Field(min_length=1), AfterValidator(_in_order)]
"""Pairs (step, number): the number holds from the step with this 0-based ``global_steps`` on."""
_PAIRS = Must(
    "a list of [step, entries], steps increasing, entries 1 or more and not decreasing", "e.g. [[10, 2], [20, 4]]"
)


class FreezeSettings(Block):
    """The block ``elastic_pipeline.freeze``: which first layers stop training, and when.

    Attributes:
        policy: The rule that freezes a prefix of the layers. ``"static"`` freezes nothing more than ``requires_grad`` does.
            ``"schedule"`` follows ``frozen_layers``, ``"alpha"`` the number of intervals, ``"grad_norm"`` and ``"plateau"`` the
            gradients. Code may register other names.
        alpha: The share of the layers in training that an interval may freeze, for ``"alpha"``, ``"grad_norm"`` and
            ``"plateau"``.
        interval: Steps between two decisions, or an epoch of ``training_data``, for policies that decide at intervals.
        tolerance: The relative change of a gradient's norm between intervals below which it is a plateau, for ``"plateau"``.
        patience: Intervals that a plateau lasts before it counts, for ``"plateau"``.
        unfreeze: Events after which all layers train again: the learning rate restarts, the loss rises, or the policy says so.
        frozen_layers: Pairs of a step and a number: from this step on, so many first entries of the layer list are frozen. The
            policy ``"schedule"`` needs it.
    """

    PATH: ClassVar[str] = _FREEZE

    policy: Annotated[
        str,
        BeforeValidator(lambda value: policy_class(value) and str(value)),
        Must(f"{', '.join(map(shown, policy_names()))}, or a registered name", 'e.g. "alpha"'),
    ] = "static"
    alpha: Annotated[Share, Must("above 0 and below 1", "e.g. 0.33")] = 0.33
    interval: Annotated[Count | Literal["epoch"], Must('"epoch" or a positive number of steps', "e.g. 1000")] = EPOCH
    tolerance: Annotated[Share, Must("above 0 and below 1", "e.g. 0.1")] = 0.1
    patience: Annotated[Count, Must("a positive number of intervals", "e.g. 3")] = 3
    unfreeze: Annotated[
        tuple[Annotated[str, Field(json_schema_extra={"enum": [*REASONS]})], ...],
        AfterValidator(_are_reasons),
        Must(f"a list of {' or '.join(map(shown, REASONS))}", f"e.g. {shown(REASONS[:1])}"),
    ] = ()
    frozen_layers: Annotated[Steps | None, _PAIRS] = None

    @model_validator(mode="after")
    def _check_what_the_policy_reads(self) -> FreezeSettings:
        """Refuse settings that the policy does not read, and missing ones that it needs."""
        reads, policy = policy_class(self.policy).reads, f'"policy": {shown(self.policy)}'
        for name in READABLE:
            value = getattr(self, name)
            if name in reads and value is None:
                raise bad_value(f"{self.PATH}.{name}", value, f"a list of [step, entries] beside {policy}", _PAIRS.use)
            if name not in reads and name in self.model_fields_set and value is not None:
                readers = " or ".join(shown(each) for each in policy_names() if name in policy_class(each).reads)
                rule = f"absent beside {policy}, which does not read it"
                raise bad_value(f"{self.PATH}.{name}", value, rule, f'"policy": {readers}, or leave it out')
        return self


class ResizeSettings(Block):
    """The block ``elastic_pipeline.resize``: when the pipeline gets other stages and replicas.

    Attributes:
        policy: ``"off"`` keeps the shape. ``"halve"`` is the compression test of PipeTransformer. ``"measured"`` compares the
            measured times of shapes. Pairs of a step and a number set the stages, or places, from this step on. The default
            becomes ``"off"`` beside settings that do not allow another shape.
        memory_gb: The memory limit of a rank, for ``"measured"``. Without it the limit is a rank's use at the start, and a CPU
            has none.
    """

    PATH: ClassVar[str] = _RESIZE

    policy: Annotated[
        Literal["off", "halve", "measured"] | Steps,
        Must(
            '"off", "halve", "measured" or a list of [step, stages], steps increasing, stages 1 or more',
            "e.g. [[10, 2], [20, 1]]",
        ),
    ] = "measured"
    memory_gb: Gigabytes = None


class CacheSettings(Block):
    """The block ``elastic_pipeline.cache``: outputs of the frozen layers, kept by sample.

    Attributes:
        enabled: Whether outputs are cached. The other keys of the block need it.
        dtype: ``"exact"`` keeps outputs as they are. ``"bf16"`` rounds floating-point numbers: half the size of fp32, and
            losses within 1e-2.
        memory_gb: The limit for entries in the memory of a machine, which is /dev/shm, for all processes together. By
            default half of its free space.
        disk_path: A folder for entries that do not fit into memory.
        disk_gb: The limit for entries in ``disk_path``. By default 0.8 of the free space.
    """

    PATH: ClassVar[str] = _CACHE

    enabled: Switch = False
    dtype: Literal["exact", "bf16"] = "exact"
    memory_gb: Gigabytes = None
    disk_path: Annotated[FileName | None, Must("the name of a folder", '"cache/"')] = None
    disk_gb: Gigabytes = None

    @model_validator(mode="after")
    def _check_it_is_switched(self) -> CacheSettings:
        """Refuse settings of the cache without ``enabled``."""
        if self.model_fields_set and "enabled" not in self.model_fields_set:
            given = ", ".join(sorted(self.model_fields_set))
            raise ConfigError(f"{self.PATH}.enabled: missing, must be there beside {given}, use true")
        return self


class DataSettings(Block):
    """The block ``elastic_pipeline.data``: the order of ``training_data``.

    Attributes:
        shuffle: Whether every epoch has its own order. Otherwise the order is the dataset's.
        seed: The seed of these orders.
    """

    PATH: ClassVar[str] = f"{ELASTIC_PIPELINE}.data"

    shuffle: Switch = False
    seed: Annotated[Whole, Must("an integer of 0 or more", "e.g. 1234")] = 1234


class ElasticPipelineConfig(Block):
    """The block ``elastic_pipeline``: frozen layers, and a pipeline that follows them.

    Attributes:
        enabled: The switch of the block. ``false`` is the same as no block.
        freeze: Which first layers stop training, and when.
        resize: When the pipeline gets other stages and replicas.
        cache: Outputs of the frozen layers, kept by sample.
        data: The order of ``training_data``.
        partition: ``"measured"`` divides the layers of a running pipeline by measured times, even if no layer is frozen.
        history_path: A file to which rank 0 adds a line for the start, each change and the end. ``ds_terapipe shapes`` draws it.
    """

    PATH: ClassVar[str] = ELASTIC_PIPELINE

    enabled: Switch = True
    freeze: FreezeSettings = Field(default_factory=FreezeSettings)
    resize: ResizeSettings = Field(default_factory=ResizeSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    partition: Literal["as_launched", "measured"] = "as_launched"
    history_path: Annotated[FileName | None, Must("the name of a file", '"history.jsonl"')] = None

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
        return self.model_copy(update={"resize": ResizeSettings(policy="off")})


def _keeps_flat_parts(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's optimizer has gradients scaled, or in flat parts: under bf16, fp16 and ZeRO."""
    names = ("bf16", "bfloat16", "fp16")
    return above(0)(at(config, "zero_optimization.stage")) or any(is_true(at(config, f"{n}.enabled")) for n in names)


RULES = (
    Rule(
        f"{_FREEZE}.frozen_layers",
        lambda pairs: pairs is not None and any(a[1] > b[1] for a, b in pairwise(pairs)),
        *_PAIRS,
        when=lambda config: not at(config, f"{_FREEZE}.unfreeze"),
    ),
    Rule(
        f"{_FREEZE}.unfreeze",
        bool,
        'absent beside "policy": "static", which freezes nothing',
        'e.g. "policy": "alpha", or leave it out',
        when=lambda config: at(config, f"{_FREEZE}.policy", "static") == "static",
    ),
    Rule(
        f"{_RESIZE}.memory_gb",
        is_given,
        'absent beside another "policy" than "measured", which alone reads it',
        '"policy": "measured", or leave it out',
        when=lambda config: at(config, f"{_RESIZE}.policy", "measured") != "measured",
    ),
    Rule(
        f"{_CACHE}.disk_gb",
        is_given,
        "absent without disk_path",
        'e.g. "disk_path": "cache/"',
        when=lambda config: at(config, f"{_CACHE}.disk_path") is None,
    ),
)

_BESIDE = "beside elastic_pipeline.freeze.policy, resize.policy or partition"
CHANGES = (
    Rule(
        f"{_FREEZE}.policy",
        lambda policy: policy_class(policy).needs_gradients,
        "a policy without norms of gradients beside bf16, fp16 or ZeRO (which keep gradients scaled or in flat parts)",
        '"alpha"',
        when=_keeps_flat_parts,
    ),
    Rule(
        f"{_FREEZE}.unfreeze",
        bool,
        "absent beside bf16, fp16 or ZeRO (whose flat parts have one step count, where returning layers begin at 0)",
        "[]",
        when=_keeps_flat_parts,
    ),
    Rule("zero_optimization.stage", above(1), f"0 or 1 {_BESIDE}", "1"),
    Rule(
        "zero_optimization.offload_optimizer",
        offloads,
        f'absent {_BESIDE} (what is offloaded does not move), or have device "none"',
        'device "none"',
    ),
)


def parse(config: Mapping[str, Any]) -> ElasticPipelineConfig | None:
    """The block ``elastic_pipeline`` of a DeepSpeed configuration; None where it is absent or has ``"enabled": false``.

    Raises:
        ConfigError: the block is not one, has an unknown key, or a value that breaks its rule; only the first is reported.
    """
    return blocks.parse(ElasticPipelineConfig, config, RULES)


def check_config(settings: ElasticPipelineConfig, config: Mapping[str, Any]) -> ElasticPipelineConfig:
    """Refuse settings that a change of frozen layers or shape does not support yet.

    Returns:
        The settings, or those of a pipeline that keeps its shape, where nothing asked for another one.

    Raises:
        ConfigError: naming the key, its value and the value to use.
    """
    freezes = settings.freeze.policy != "static"
    for rule, value in broken(CHANGES, config) if freezes or settings.moves else ():
        if freezes or settings.has_to_move:
            raise bad_value(rule.path, value, rule.must, rule.use)
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

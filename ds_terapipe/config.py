"""The block ``token_pipeline`` of ``ds_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from . import blocks
from .blocks import Block, Count, FileName, Gigabytes, Must, Number, Switch, one_of
from .rules import Rule, above, at, check, is_given
from .schedule import NAMES

TOKEN_PIPELINE = "token_pipeline"
AUTO, INTERLEAVED = "auto", "interleaved"
SCHEDULES = (*NAMES, INTERLEAVED)
YEAR_S = 31536000  # in some 300 years a process group counts over, and its operations end at once
_GONE = [
    Rule(
        f"{TOKEN_PIPELINE}.pack_weights",
        is_given,
        "absent (weights are no longer packed)",
        f"{TOKEN_PIPELINE} without it",
    )
]


def _distinct(dimensions: list[int]) -> list[int]:
    if len(set(dimensions)) < len(dimensions):
        raise ValueError
    return dimensions


def _increasing(steps: list[int]) -> list[int]:
    if steps != sorted(steps):
        raise ValueError
    return steps


Dimensions = Count | Annotated[list[Count], Field(min_length=1), AfterValidator(_distinct)] | None
_EACH = Must(
    "a list with one entry per tensor: a dimension (1 or more, 0 is the batch), a list of them, or null",
    "e.g. [1, [2, 3], null]",
)
Cut = Annotated[Annotated[list[Dimensions], Field(min_length=1)] | None, _EACH]


class CutConfig(Block):
    """The block ``token_pipeline.cut``."""

    PATH: ClassVar[str] = f"{TOKEN_PIPELINE}.cut"

    inputs: Cut = None
    labels: Cut = None


class TokenPipelineConfig(Block):
    """The block ``token_pipeline``.

    Attributes:
        enabled: whether the block counts at all; ``false`` is the same as leaving it out.
        slices: number of equal slices (a remainder is spread), the length in tokens of every slice, or chosen from
            measurements.
        schedule: order of the work: every slice forward and then backward in reverse; one forward, one backward, perhaps with
            weight gradients in waits (``zero_bubble``) or around several stages on a place (``interleaved``). ``auto`` is
            chosen with the slices where they are ``auto``, else ``1f1b``, or ``interleaved`` with several stages on a place.
        stages_per_place: stages of the model on each place of the pipeline.
        placement: stage s on place s mod K of K places, or, for two stages on a place, back from the last place to the first.
        granularity: unequal automatic slices are multiples of so many tokens, and no automatic slice is shorter.
        memory_gb: limit of activations and buffers on a device, in 1e9 bytes; default: the free memory, no limit on a CPU.
        plan_path: a plan to run by, as ``ds_terapipe plan`` or a run has written it.
        measurements_path: file of measurements, written, and read if made on the same system; none by default.
        layout: position of the sequence in tensors between layers: [b, s, h], [s, b, h], or found by comparing shapes.
        cut: per tensor of the ``inputs`` and the ``labels``, the dimension or dimensions to cut, or null to keep it whole.
            Both keys are there after validation; None means that the general rule holds.
        verify: whether the first batch is run whole and sliced, and compared module by module, before the first step.
        weight_gradients: weight gradients of linear layers and embeddings: made once per micro-batch (faster), or per slice
            (less memory). ``auto`` is ``slice`` with activation checkpointing or ``torch_autocast``, else ``micro_batch``.
        timeout_s: seconds that a stage waits for another before the run ends with a report.
        trace_path: file for a Chrome trace of some steps, all ranks in it; none by default.
        trace_steps: first and last step of the trace, counted from 1 as in the log; by default the third to the fifth of the
            run.
    """

    PATH: ClassVar[str] = TOKEN_PIPELINE
    CHANGED_BY: ClassVar[Mapping[str, str]] = dict.fromkeys(("slices", "schedule"), "engine.set_slices(...)")

    enabled: Switch = True
    slices: Annotated[
        Count | Annotated[list[Count], Field(min_length=1)] | Literal["auto"],
        Must('a positive number, a list of lengths or "auto"', "e.g. 8"),
    ] = "auto"
    schedule: Annotated[
        str, BeforeValidator(lambda value: one_of(f"{TOKEN_PIPELINE}.schedule", value, (AUTO, *SCHEDULES), AUTO))
    ] = "auto"
    stages_per_place: Annotated[Count, Must("a positive number of stages", "e.g. 2")] = 1
    placement: Literal["interleaved", "v"] = "interleaved"
    granularity: Annotated[Count, Must("a positive number of tokens", "e.g. 8")] = 8
    memory_gb: Gigabytes = None
    plan_path: Annotated[FileName | None, Must("the name of a file", '"plan.json"')] = None
    measurements_path: Annotated[FileName | None, Must("the name of a file", '"measurements.json"')] = None
    layout: Literal["auto", "bsh", "sbh"] = "auto"
    cut: Annotated[
        dict[str, list[Dimensions] | None] | None,
        BeforeValidator(lambda value: None if value is None else CutConfig.read(value).model_dump()),
    ] = None
    verify: Switch = True
    weight_gradients: Literal["auto", "micro_batch", "slice"] = "auto"
    timeout_s: Annotated[Number, Field(le=YEAR_S), Must("a positive number of seconds", "e.g. 600")] = 600.0
    trace_path: Annotated[FileName | None, Must("the name of a file", '"trace.json"')] = None
    trace_steps: Annotated[
        Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(_increasing)] | None,
        Must("the first and the last step, counted from 1", "e.g. [3, 5]"),
    ] = None


def _on_a_place(config: Mapping[str, Any]) -> Any:
    """Return the number of stages on a place."""
    return at(config, f"{TOKEN_PIPELINE}.stages_per_place", 1)


_SEVERAL = f"{TOKEN_PIPELINE}.stages_per_place"
_PLANNED = 'absent beside slices that are given, it belongs to "slices": "auto"'
SEVERAL_RULES = (
    Rule(
        f"{TOKEN_PIPELINE}.schedule",
        lambda value: value == INTERLEAVED,
        '"1f1b" with one stage on each place',
        '"1f1b", or "stages_per_place": 2',
        when=lambda config: _on_a_place(config) == 1,
    ),
    Rule(
        f"{TOKEN_PIPELINE}.placement",
        lambda value: value == "v",
        '"interleaved" unless each place has two stages',
        '"stages_per_place": 2',
        when=lambda config: _on_a_place(config) != 2,
    ),
    Rule(
        _SEVERAL,
        above(1),
        '1 where slices are "auto" (the plan of plan_path has its own)',
        '"slices": 8',
        when=lambda config: at(config, f"{TOKEN_PIPELINE}.slices", AUTO) == AUTO,
    ),
    Rule(
        _SEVERAL,
        above(1),
        "1 beside elastic_pipeline (layers move between places of one stage)",
        "1",
        when=lambda config: at(config, "elastic_pipeline.enabled", "elastic_pipeline" in config) is not False,
    ),
)
RULES = (
    *SEVERAL_RULES,
    Rule(
        f"{TOKEN_PIPELINE}.trace_steps",
        is_given,
        "absent without trace_path, the file for them",
        'e.g. "trace_path": "trace.json"',
        when=lambda config: at(config, f"{TOKEN_PIPELINE}.trace_path") is None,
    ),
    *(
        Rule(
            f"{TOKEN_PIPELINE}.{name}",
            is_given,
            _PLANNED,
            "one of the two",
            when=lambda config: at(config, f"{TOKEN_PIPELINE}.slices", AUTO) != AUTO,
        )
        for name in ("plan_path", "measurements_path", "memory_gb", "granularity")
    ),
)


def parse(config: Mapping[str, Any]) -> TokenPipelineConfig | None:
    """The block ``token_pipeline`` of a DeepSpeed configuration; None where it is absent or has ``"enabled": false``.

    Raises:
        ConfigError: the block is not one, has an unknown key, or a value that breaks its rule.
    """
    if at(config, f"{TOKEN_PIPELINE}.enabled") is not False:
        check(_GONE, config)
    return blocks.parse(TokenPipelineConfig, config, RULES)

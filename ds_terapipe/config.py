"""The block ``token_pipeline`` of ``ds_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from . import blocks
from .blocks import Block, Count, FileName, Gigabytes, Must, Number, Switch, one_of
from .errors import shown
from .rules import Rule, at, is_given
from .schedule import choices

TOKEN_PIPELINE = "token_pipeline"
AUTO, INTERLEAVED = "auto", "interleaved"
YEAR_S = 31536000  # in some 300 years a process group counts over, and its operations end at once


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
    """The block ``token_pipeline.cut``: the dimensions to cut, where the general rule is wrong.

    Attributes:
        inputs: Dimensions of each input tensor, as ``[1, null, [2, 3]]``. Null keeps a tensor whole; a list cuts the rows and
            columns of a mask.
        labels: The same for the labels.
    """

    PATH: ClassVar[str] = f"{TOKEN_PIPELINE}.cut"

    inputs: Cut = None
    labels: Cut = None


class TokenPipelineConfig(Block):
    """The block ``token_pipeline``: a training step in slices of tokens.

    Attributes:
        enabled: The switch of the block. ``false`` is the same as no block.
        slices: The cut of every sequence: a number of equal slices, whose remainder is spread, or the tokens of each slice.
            ``"auto"`` measures the first steps and chooses the cut.
        schedule: The order of the work. ``"1f1b"`` alternates one slice forward and one backward, and a stage holds at most
            stages + slices - 1 units. ``"terapipe"`` runs all slices forward, then all backward. ``"zero_bubble"`` is ``"1f1b"``
            with weight gradients in the waits; it needs them by micro-batch. ``"interleaved"`` is for several stages on a place.
            ``"auto"`` is chosen with automatic slices; beside given slices it is ``"1f1b"``, or ``"interleaved"`` with several
            stages on a place.
        stages_per_place: Stages of the model on each place of the pipeline. With several, filling and draining take steps of a
            smaller stage. The layers move to their places in ``initialize``. A reshape keeps the number; a place alone has
            one.
        placement: Stage s on place s mod K of K places. ``"v"``, for two stages on a place, goes back from the last place to
            the first. One place then has both ends of the model.
        granularity: Tokens that divide the length of unequal automatic slices. No automatic slice is shorter.
        memory_gb: The limit for activations and buffers on a device, for automatic slices. Without it the free memory counts,
            and a CPU has no limit.
        plan_path: A plan that ``ds_terapipe plan`` or a run has written. Other stages, micro-batches or more memory than
            ``memory_gb`` are an error. Sequences of another length are measured, and a log line says so.
        measurements_path: A file for the measurements of automatic slices. A later run reads it if model, types, layout, devices
            and versions match; otherwise a log line names the difference.
        layout: The position of the sequence in tensors between layers: [b, s, h] or [s, b, h]. ``"auto"`` compares the
            shapes at two lengths. Set it where both would fit, which is otherwise an error.
        cut: The dimensions to cut in each tensor of ``inputs`` and ``labels``, where the general rule is wrong.
        verify: Whether every module is compared, whole and sliced, on the first batch before the first step. Sequences longer
            than 2,048 tokens are compared up to there.
        weight_gradients: When linear layers and embeddings make weight gradients: once for each micro-batch, which is faster,
            or for each slice, which takes less memory. ``"auto"`` is ``"slice"`` beside activation checkpointing or
            ``torch_autocast``, otherwise ``"micro_batch"``.
        timeout_s: Seconds that a stage waits for another before the job ends. A report then names who waits for whom.
        trace_path: A file for a Chrome trace of some steps, with every action of every rank.
        trace_steps: The first and the last traced step, counted from 1 as in the log. By default the third to the fifth step
            of the run.
    """

    PATH: ClassVar[str] = TOKEN_PIPELINE
    CHANGED_BY: ClassVar[Mapping[str, str]] = dict.fromkeys(("slices", "schedule"), "engine.set_slices(...)")

    enabled: Switch = True
    slices: Annotated[
        Count | Annotated[list[Count], Field(min_length=1)] | Literal["auto"],
        Must('a positive number, a list of lengths or "auto"', "e.g. 8"),
    ] = "auto"
    schedule: Annotated[
        str,
        BeforeValidator(lambda value: one_of(f"{TOKEN_PIPELINE}.schedule", value, (AUTO, *choices()), AUTO)),
        Field(json_schema_extra={"enum": [AUTO, *choices()]}),
        Must(" or ".join(map(shown, (AUTO, *choices()))), shown(AUTO)),
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
        WithJsonSchema({"anyOf": [CutConfig.model_json_schema(), {"type": "null"}]}),
        Must(
            "a block of inputs and labels, each a list with one entry per tensor", 'e.g. {"inputs": [1], "labels": [1]}'
        ),
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
    return blocks.parse(TokenPipelineConfig, config, RULES)

"""The factors of a training, and the rows that cover all their pairs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ds_terapipe.schedule import NAMES
from tests.rows.covering import Rule, covering

UNEVEN = "uneven"
PERIOD = 2  # steps after which the samples come again
FREEZES, RESIZES = ((1, 1), (3, 3)), (3, 5)  # (step, entries), and steps
SHORT, LONG = 3, 7  # steps of a training
SEED = 13  # of forty, the one whose rows take the least work


class Layout(NamedTuple):
    """Ranks of a training when it starts."""

    stages: int
    replicas: int
    tensor: int

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * self.tensor

    @property
    def other(self) -> Layout:
        """The layout with half as many stages, or two, and as many ranks."""
        stages = self.stages // 2 if self.stages > 1 else 2
        return Layout(stages, self.ranks // stages // self.tensor, self.tensor)

    def __str__(self) -> str:
        named = (("PP", self.stages), ("DP", self.replicas), ("TP", self.tensor))
        return "x".join(f"{name}{number}" for name, number in named if number > 1)


class Row(NamedTuple):
    # "gpt", "tied" (its head has the embedding's table), "writing" (layers write into their inputs); with megatron-core's layers
    # "megatron" (biases, learned positions, tied) and "modern" (grouped queries, RMS norm, SwiGLU, rotary positions)
    model: str = "gpt"
    layout: Layout = Layout(2, 1, 1)  # when it starts
    slices: Any = UNEVEN
    schedule: str = "1f1b"
    weight_gradients: str = "auto"
    micro_batches: int = 4  # of a step, over all replicas; two sequences each
    precision: str = "fp32"
    optimizer: str = "adamw"
    # "own" of the model, "masked" (its denominator depends on the data), "per token" (the same in slices), "focused" (no sum
    # over tokens)
    loss: str = "masked"
    recompute: int = 0  # ``activation_checkpoint_interval``
    clip: float = 0.5
    freeze: str = "none"  # or "by hand" (the first two entries, by ``requires_grad``), "schedule" (`FREEZES`)
    resize: str = "off"  # or "once" (to `Layout.other`), "and back"
    cache: bool = False  # whether the outputs of frozen layers are kept
    packed: bool = False  # whether a sequence has several documents
    sequence_parallel: bool = False  # whether tensor-parallel ranks share the tokens between layers, as Megatron's do
    resume: str = "no"  # or from a checkpoint in the middle, "here" or "elsewhere" (in `Layout.other`)
    placement: str = "plain"  # or two stages on a place, "interleaved" or "v"
    queues: int = 8  # hardware queues of a device, ``CUDA_DEVICE_MAX_CONNECTIONS``; no factor, since a CPU has none

    @property
    def is_elastic(self) -> bool:
        return self.freeze == "schedule" or self.resize != "off" or self.cache or self.resume == "elsewhere"

    @property
    def steps(self) -> int:
        return LONG if self.is_elastic else SHORT

    @property
    def saved_after(self) -> int | None:
        """Steps before the checkpoint that the training goes on from."""
        return None if self.resume == "no" else 4 if self.is_elastic else 2

    @property
    def is_narrow(self) -> bool:
        return self.precision.startswith(("bf16", "fp16"))

    def frozen(self, step: int) -> int:
        """Entries that this step trains without."""
        if self.freeze == "by hand":
            return 2
        return max((n for begin, n in FREEZES if begin <= step), default=0) if self.freeze == "schedule" else 0

    def layout_at(self, step: int, start: Layout) -> Layout:
        """The layout of a step, in a run that started in one."""
        if self.resize == "off" or step < RESIZES[0]:
            return start
        moved = start.other if start == self.layout else start
        back = self.layout if start == self.layout else self.layout.other
        return back if self.resize == "and back" and step >= RESIZES[1] else moved

    def __str__(self) -> str:
        """The values, those of the default row left out; ``pytest -k`` takes it as it is."""
        plain = Row()
        said = [str(self.model), str(self.layout)]
        for name in self._fields[2:]:
            value = getattr(self, name)
            if value != getattr(plain, name):
                said.append(f"{name}:{value}".replace(" ", "-"))
        return "+".join(said)


FACTORS: dict[str, Sequence[Any]] = {
    "model": ("gpt", "tied", "writing", "megatron", "modern"),
    "layout": tuple(Layout(*each) for each in ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1))),
    "slices": (1, 2, UNEVEN, 4), "schedule": (*NAMES, "interleaved"),
    "weight_gradients": ("auto", "slice", "micro_batch"), "micro_batches": (2, 4),
    "precision": ("fp32", "fp64", "ZeRO-1", "bf16", "bf16 at once", "bf16 ZeRO-1", "fp16"),
    "optimizer": ("sgd", "adamw", "instance", "lamb"), "loss": ("own", "masked", "per token", "focused"),
    "recompute": (0, 1, 2), "clip": (0.0, 0.5), "freeze": ("none", "by hand", "schedule"),
    "resize": ("off", "once", "and back"), "cache": (False, True), "packed": (False, True),
    "sequence_parallel": (False, True), "resume": ("no", "here", "elsewhere"), "placement": ("plain", "interleaved", "v"),
}  # fmt: skip
OURS = ("gpt", "tied", "writing")

RULES = (
    Rule(lambda model, layout: layout.tensor == 1 or model in ("megatron", "modern")),
    Rule(lambda layout, sequence_parallel: layout.tensor > 1 or not sequence_parallel),
    Rule(lambda model, loss: (loss != "own") == (model in OURS)),
    # the gradient of key biases is rounding, and in LAMB's norms
    Rule(lambda model, optimizer: optimizer != "lamb" or model != "megatron"),
    # what is recomputed would be written into twice, in plain PyTorch too
    Rule(lambda model, recompute: recompute == 0 or model != "writing"),
    Rule(lambda precision, optimizer: precision != "fp64" or optimizer != "lamb"),
    # megatron-core's layers have no fp16 on a CPU
    Rule(lambda precision, model: precision != "fp16" or model in OURS),
    Rule(lambda precision, resize: precision != "fp64" or resize == "off"),
    Rule(lambda precision, freeze: precision != "fp64" or freeze != "schedule"),
    Rule(lambda precision, cache: precision != "fp64" or not cache),
    Rule(lambda precision, resume: resume != "elsewhere" or precision not in ("fp64", "fp16")),
    # what DeepSpeed does at the end of a step knows nothing of shapes: few rows are enough
    *(
        Rule(lambda precision, value, usual=usual: precision != "bf16 at once" or value == usual, "precision", name)
        for name, usual in (("layout", Layout(2, 1, 1)), ("freeze", "none"), ("resize", "off"), ("resume", "no"))
    ),
    # in which every replica has a micro-batch
    Rule(
        lambda layout, micro_batches, resize, resume: (
            micro_batches >= max(layout.replicas, layout.other.replicas if resize != "off" or resume == "elsewhere" else 1)
        )
    ),
    # all-reduces of four ranks on two cores take most of a row
    Rule(lambda layout, slices, micro_batches: layout.tensor == 1 or slices in (1, 2) or micro_batches == 2),
    Rule(lambda slices, weight_gradients: slices != 1 or weight_gradients == "auto"),
    Rule(lambda slices, schedule: slices != 1 or schedule in ("1f1b", "interleaved")),
    Rule(lambda placement, schedule: placement != "plain" or schedule != "interleaved"),
    Rule(lambda placement, layout: placement == "plain" or layout.stages > 1),
    # where two stages on a place freeze and move, few rows are enough
    *(
        Rule(lambda at, layout, value, no=no: at == "plain" or layout.ranks == 2 or value not in no, "placement", "layout", name)
        for name, no in (("freeze", {"schedule"}), ("resize", {"once", "and back"}), ("cache", {True}), ("resume", {"elsewhere"}))
    ),
    # as many layers as stages: megatron-core's models have four
    Rule(lambda placement, layout, model: placement == "plain" or layout.stages == 2 or model in OURS),
    Rule(lambda cache, freeze: not cache or freeze != "none"),
    # one entry of two that are tied cannot be frozen by hand
    Rule(lambda model, freeze: freeze != "by hand" or model not in ("tied", "megatron")),
)


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows that `make test` runs."""
    return tuple(Row(**values) for values in covering(FACTORS, RULES, SEED))


def few_rows() -> list[Row]:
    """Rows that `make test-device` runs: each value in one with many hardware queues, and in one with a single queue.

    Four stages, and replicas of stages, are in `tests/device_stand_in/test_engine.py`.
    """
    small = [row for row in rows() if row.layout.ranks == 2 or row.layout.tensor == 2]
    left = [row._replace(queues=queues) for row in small for queues in (8, 1)]
    missing = {value for row in left for value in _values(row)}
    chosen: list[Row] = []
    while missing:
        again = {row._replace(queues=9 - row.queues) for row in chosen}
        best = max(left, key=lambda row: len(missing & _values(row)) - 2 * (row in again))
        left.remove(best)
        chosen.append(best)
        missing -= _values(best)
    return chosen


def _values(row: Row) -> set[tuple[Any, ...]]:
    return {(row.queues, *each) for each in row._asdict().items()}

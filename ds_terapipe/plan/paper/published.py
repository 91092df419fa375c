"""The times that TeraPipe's paper prints (Li et al., arXiv 2102.07988): settings, slices, seconds per step. Data only.

`Figure.source` says how a time came here: ``read`` off the paper's text and tables or the constants of its reference
repository, or ``recalled`` and only consistent with a figure or a sum. The same for its slices in `Figure.slices_source`.
All steps have sequences of 2048 tokens but for those called ``long``, p3.16xlarge nodes and one sequence per micro-batch.
"""

from __future__ import annotations

import dataclasses
import re

from ds_terapipe.plan.costs.hardware import MODELS, Model


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the paper's table 1. ``batch`` counts all sequences of a step, over all replicas."""

    number: int
    model: Model
    batch: int
    data_parallel: int
    stages: int
    tensor_parallel: int


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published time of one step.

    Attributes:
        setting: its layout of devices.
        kind: ``without`` slices, ``with`` the paper's own slices, ``uniform`` slices, or ``long`` sequences with or without.
        batch: sequences in a step, over all replicas.
        seq_length: tokens in a sequence.
        slices: their lengths in tokens; they add up to ``seq_length``.
        published_s: seconds.
        source, slices_source: ``read`` or ``recalled``.
    """

    setting: Setting
    kind: str
    batch: int
    seq_length: int
    slices: tuple[int, ...]
    published_s: float
    source: str
    slices_source: str = "read"

    @property
    def uniform(self) -> bool:
        """Whether the slices, maybe one only, were not chosen by the paper's optimiser."""
        return self.kind in ("without", "uniform") or (self.kind == "long" and len(self.slices) == 1)

    @property
    def sequences(self) -> int:
        """Sequences, and so micro-batches, of one replica."""
        return self.batch // self.setting.data_parallel


_1B, _13B, _44B, _175B = (MODELS[name] for name in ("gpt3-1b", "gpt3-13b", "gpt3-44b", "gpt3-175b"))

SETTINGS = (
    Setting(1, _1B, 128, 8, 24, 1),
    Setting(2, _1B, 72, 2, 12, 8),
    Setting(3, _1B, 72, 1, 24, 8),
    Setting(4, _13B, 32, 2, 20, 8),
    Setting(5, _13B, 32, 1, 40, 8),
    Setting(6, _44B, 8, 4, 96, 1),
    Setting(7, _44B, 8, 2, 24, 8),
    Setting(8, _44B, 8, 1, 48, 8),
    Setting(9, _175B, 2, 1, 96, 4),
    Setting(10, _175B, 2, 1, 48, 8),
)

# Setting: seconds without, seconds with, slices with, source of the times, source of the slices.
_MAIN = (
    (1, 1.517, 1.254, "776 640 632", "read", "recalled"),
    (2, 1.018, 1.018, "2048", "recalled", "recalled"),
    (3, 0.913, 0.913, "2048", "read", "read"),
    (4, 2.637, 1.891, "1024x2", "recalled", "recalled"),
    (5, 1.863, 1.328, "704 688 656", "read", "read"),
    (6, 13.319, 7.103, "64x26 56x6 48", "read", "recalled"),
    (7, 4.311, 2.771, "368 384 384 368 256 288", "recalled", "recalled"),
    (8, 2.662, 1.111, "384x2 368 320 296x2", "read", "read"),
    (9, 9.990, 1.481, "120x4 112x6 104x8 64", "read", "read"),
    (10, 5.822, 1.160, "128x16", "read", "recalled"),
)

# Setting: seconds with that many equal slices.
_UNIFORM = {8: {4: 1.241, 8: 1.255, 16: 1.241}, 9: {4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252}}

# Sequence length, batch, seconds without, seconds with, slices with (recalled): in setting 5's layout.
_LONG = (
    (4096, 8, 2.526, 0.913, "552 536 528 512 504 496 488 480"),
    (6144, 4, 3.754, 0.756, "584 568 512x6 496 488 472 464"),
    (8192, 2, 4.978, 0.636, "512x6 480x2 416x10"),
)


def figures() -> list[Figure]:
    """Return all published times, by setting: without and with slices, then uniform slices, then longer sequences."""
    found = []
    for number, without, with_slices, slices, source, slices_source in _MAIN:
        setting = SETTINGS[number - 1]
        found.append(Figure(setting, "without", setting.batch, 2048, (2048,), without, source))
        found.append(Figure(setting, "with", setting.batch, 2048, lengths(slices), with_slices, source, slices_source))
    for number, times in _UNIFORM.items():
        setting = SETTINGS[number - 1]
        for count, seconds in times.items():
            equal = (2048 // count,) * count
            found.append(Figure(setting, "uniform", setting.batch, 2048, equal, seconds, "read"))
    for length, batch, without, with_slices, slices in _LONG:
        found.append(Figure(SETTINGS[4], "long", batch, length, (length,), without, "read"))
        found.append(Figure(SETTINGS[4], "long", batch, length, lengths(slices), with_slices, "read", "recalled"))
    return found


def lengths(text: str) -> tuple[int, ...]:
    """``"64x26 56x6 48"`` as 26 slices of 64 tokens, six of 56 and one of 48.

    Raises:
        ValueError: any other text.
    """
    parts = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", part) for part in text.split()]
    if not parts or None in parts:
        raise ValueError(f"slices: got {text!r}, must be lengths or <length>x<count>, e.g. '64x26 48'")
    return tuple(int(part[1]) for part in parts if part for _ in range(int(part[2] or 1)))

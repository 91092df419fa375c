"""The times that TeraPipe's paper prints (Li et al., arXiv 2102.07988): settings, slices, seconds per step; and rates that
are calibrated on seven of them. Data only.

`Figure.source` says how a time came here: ``read`` off the paper's text and tables or the constants of its reference
repository, or ``recalled`` and only consistent with a figure or a sum. The same for its slices in `Figure.slices_source`.
All steps have sequences of 2048 tokens but for those called ``long``, p3.16xlarge nodes and one sequence per micro-batch.
"""

from __future__ import annotations

import dataclasses

from ds_terapipe.plan.costs.hardware import MODELS, Model, Rates


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
        calibrates: it is one of the seven times of `CALIBRATED`.
    """

    setting: Setting
    kind: str
    batch: int
    seq_length: int
    slices: tuple[int, ...]
    published_s: float
    source: str
    slices_source: str = "read"
    calibrates: bool = False

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
_MAIN: tuple[tuple[int, float, float, tuple[int, ...], str, str], ...] = (
    (1, 1.517, 1.254, (776, 640, 632), "read", "recalled"),
    (2, 1.018, 1.018, (2048,), "recalled", "recalled"),
    (3, 0.913, 0.913, (2048,), "read", "read"),
    (4, 2.637, 1.891, (1024, 1024), "recalled", "recalled"),
    (5, 1.863, 1.328, (704, 688, 656), "read", "read"),
    (6, 13.319, 7.103, (*(64,) * 26, *(56,) * 6, 48), "read", "recalled"),
    (7, 4.311, 2.771, (368, 384, 384, 368, 256, 288), "recalled", "recalled"),
    (8, 2.662, 1.111, (384, 384, 368, 320, 296, 296), "read", "read"),
    (9, 9.990, 1.481, (120, 120, 120, 120, *(112,) * 6, *(104,) * 8, 64), "read", "read"),
    (10, 5.822, 1.160, (128,) * 16, "read", "recalled"),
)

# Setting: seconds with that many equal slices.
_UNIFORM = {8: {4: 1.241, 8: 1.255, 16: 1.241}, 9: {4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252}}

# Sequence length, batch, seconds without, seconds with, slices with (recalled): in setting 5's layout.
_LONG: tuple[tuple[int, int, float, float, tuple[int, ...]], ...] = (
    (4096, 8, 2.526, 0.913, (552, 536, 528, 512, 504, 496, 488, 480)),
    (6144, 4, 3.754, 0.756, (584, 568, *(512,) * 6, 496, 488, 472, 464)),
    (8192, 2, 4.978, 0.636, (*(512,) * 6, 480, 480, *(416,) * 10)),
)

# Which of the seven times there are is computed from the model and the datasheet's ranges alone, see `predicted`; so are the
# rates, from these times. tests/plan/test_paper.py computes both.
_CALIBRATING = (0, 8, 16, 20, 22, 28, 33)
CALIBRATED = Rates(
    launch_s=0.0016497558508738754,
    flops=104967785964893.23,
    attention_flops=46748190357088.71,
    weight_passes=6.5971972345992285,
    score_bytes=49.01776822606573,
    latency_s=0.00021796408923554817,
    message_bytes_per_s=3009054711.2743807,
    all_reduce_bytes_per_s=34655429669.09471,
    gradient_bytes_per_s=1884637268.0242114,
)


def figures() -> list[Figure]:
    """Return all published times, by setting: without and with slices, then uniform slices, then longer sequences."""
    found = []
    for number, without, with_slices, slices, source, slices_source in _MAIN:
        setting = SETTINGS[number - 1]
        found.append(Figure(setting, "without", setting.batch, 2048, (2048,), without, source))
        found.append(Figure(setting, "with", setting.batch, 2048, slices, with_slices, source, slices_source))
    for number, times in _UNIFORM.items():
        setting = SETTINGS[number - 1]
        for count, seconds in times.items():
            equal = (2048 // count,) * count
            found.append(Figure(setting, "uniform", setting.batch, 2048, equal, seconds, "read"))
    for length, batch, without, with_slices, slices in _LONG:
        found.append(Figure(SETTINGS[4], "long", batch, length, (length,), without, "read"))
        found.append(Figure(SETTINGS[4], "long", batch, length, slices, with_slices, "read", "recalled"))
    return [dataclasses.replace(figure, calibrates=n in _CALIBRATING) for n, figure in enumerate(found)]

"""What the parity tests assert about a step that ran is false for every other one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_terapipe.pipeline.slicing import Span
from tests.ran import Ran, lengths_of

CUT = ((3, 1, 4), (3, 1, 4))
WHOLE = ((8,), (8,))


def ran(
    slices: Any = CUT,
    units: tuple[int, int] = (6, 6),
    layers: tuple[int, ...] = (1, 2),
    often: int = 1,
    missing: Any = (),
) -> Ran:
    """Of two micro-batches, with the calls of attention that go with it; ``missing`` are (layer, micro-batch, start)."""
    assembly = SimpleNamespace(stages={1: None})
    watched = Ran(SimpleNamespace(slices_run=slices, units_run=units, _assembly=assembly))
    for layer in layers:
        for m, lengths in enumerate(CUT):
            for index, length in enumerate(lengths):
                start = sum(lengths[:index])
                where = SimpleNamespace(
                    layer=layer, micro_batch=m, span=Span(start, start + length, 8), _recomputing=False
                )
                for _ in range(0 if (layer, m, start) in missing else often):
                    watched.note(where)
    return watched


def test_what_ran_passes() -> None:
    ran().check(CUT, 2)
    ran(layers=(7,)).check(CUT, 1)
    ran(often=2).check(CUT)
    ran(units=(6, 0)).check(CUT, 2, training=False)
    ran(slices=WHOLE, units=(2, 2), layers=()).check(WHOLE, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slices": WHOLE, "units": (2, 2), "layers": ()},
        {"slices": ((3, 1, 4), (4, 4))},
        {"units": (6, 5)},
        {"layers": (1,)},
        {"layers": ()},
        {"often": 2},
        {"missing": [(2, 1, 3)]},
    ],
    ids=["uncut", "other lengths", "a backward missing", "a layer uncut", "none cut", "twice", "a slice missing"],
)
def test_anything_else_fails(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        ran(**wrong).check(CUT, 2)


def test_an_uncut_step_has_no_attention_cut() -> None:
    with pytest.raises(AssertionError, match=r"cut was the attention of layers \[1, 2\], not of 2"):
        ran(slices=WHOLE, units=(2, 2)).check(WHOLE, 2)


def test_a_layer_that_calls_attention_several_times_does_so_for_every_slice() -> None:
    with pytest.raises(AssertionError, match="layer 2"):
        ran(often=2, missing=[(2, 0, 0)]).check(CUT)


def test_lengths_of_equal_slices_are_spread() -> None:
    assert lengths_of(24, 5) == (5, 5, 5, 5, 4) and lengths_of(4, [3, 1]) == (3, 1) and lengths_of(7, 1) == (7,)

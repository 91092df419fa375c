"""The assertions of parity tests about a step that ran are false for every other one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_terapipe.pipeline.slicing import Span
from tests.ran import Ran, lengths_of

CUT, WHOLE = ((3, 1, 4), (3, 1, 4)), ((8,), (8,))
UNCUT = {"slices": WHOLE, "units": (2, 2)}


def ran(
    slices: Any = CUT, units: Any = (6, 6), layers: Any = (1, 2), often: int = 1, missing: Any = ()
) -> Ran:  # fmt: skip
    """Of two micro-batches, with the calls of attention that go with it; ``missing`` are (layer, micro-batch, start)."""
    watched = Ran(SimpleNamespace(slices_run=slices, units_run=units, _assembly=SimpleNamespace(stages={1: None})))
    for layer in layers:
        for m in (0, 1):
            for start, length in ((0, 3), (3, 1), (4, 4)):
                span = Span(start, start + length, 8)
                where = SimpleNamespace(layer=layer, micro_batch=m, span=span, _recomputing=False)
                for _ in range(0 if (layer, m, start) in missing else often):
                    watched.note(where)
    return watched


def test_what_ran_passes() -> None:
    ran().check(CUT, 2)
    ran(layers=(7,)).check(CUT, 1)
    ran(often=2).check(CUT)
    ran(units=(6, 0)).check(CUT, 2, training=False)
    ran(**UNCUT, layers=()).check(WHOLE, 2)


WRONG: dict[str, tuple[dict[str, Any], tuple[Any, ...], str]] = {
    "uncut": ({**UNCUT, "layers": ()}, (CUT, 2), "ran slices of"),
    "other lengths": ({"slices": ((3, 1, 4), (4, 4))}, (CUT, 2), "ran slices of"),
    "a backward missing": ({"units": (6, 5)}, (CUT, 2), r"ran \(6, 5\) units"),
    "a layer uncut": ({"layers": (1,)}, (CUT, 2), r"layers \[1\], not of 2"),
    "none cut": ({"layers": ()}, (CUT, 2), r"layers \[\], not of 2"),
    "twice": ({"often": 2}, (CUT, 2), "layer 1 called"),
    "a slice missing": ({"missing": [(2, 1, 3)]}, (CUT, 2), "layer 2 called"),
    "a slice missing of several calls": ({"often": 2, "missing": [(2, 0, 0)]}, (CUT,), "layer 2 called"),
    "cut in an uncut step": (UNCUT, (WHOLE, 2), r"layers \[1, 2\], not of 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_fails(name: str) -> None:
    step, wanted, text = WRONG[name]
    with pytest.raises(AssertionError, match=text):
        ran(**step).check(*wanted)


def test_lengths_of_equal_slices_are_spread() -> None:
    assert lengths_of(24, 5) == (5, 5, 5, 5, 4) and lengths_of(4, [3, 1]) == (3, 1) and lengths_of(7, 1) == (7,)

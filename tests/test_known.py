"""Tests notice what they are for: each known defect is found by its test, and parity tests see what a step ran."""

import itertools
import re
import shlex
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ds_terapipe.pipeline.slicing import Span
from tests.mutation.known import Known, known
from tests.mutation.runs import ROOT, run_tests
from tests.ran import Ran


def test_known_defects_are_of_this_package() -> None:
    """Each changes one place of a module, leaves it valid Python, and selects tests that are there."""
    names = [defect.name for defect in known()]
    assert len(set(names)) == len(names)
    for defect in known():
        path = ROOT.joinpath("ds_terapipe", *defect.module.split(".")).with_suffix(".py")
        source = path.read_text(encoding="utf-8")
        assert source.count(defect.was) == 1, f"{defect.name}: occurs {source.count(defect.was)} times"
        assert defect.becomes != defect.was
        compile(defect.applied(f"ds_terapipe.{defect.module}", source), path, "exec")
        file = next(word for word in shlex.split(defect.test) if word.startswith("tests/")).partition("::")[0]
        assert (ROOT / file).exists(), f"{defect.name}: no file {file}"
        text = "".join(path.read_text() for path in [ROOT / file, *(ROOT / file).rglob("*.py")] if path.is_file())
        parts = re.findall(r"\w+_\w+", defect.test.partition("-k")[2])  # of names of tests; other words are of their ids
        assert [part for part in parts if part not in text] == [], f"{defect.name}: selects no test of {file}"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("defect", known(), ids=lambda defect: defect.name)
def test_a_known_defect_is_found(defect: Known) -> None:
    code, text = run_tests(shlex.split(defect.test), {"MUTANT": f"known:{defect.name}"}, 600.0)
    assert code == 1, f"exit status {code} where a test must fail\n{text[-2000:]}"


CUT, WHOLE = ((3, 1, 4), (3, 1, 4)), ((8,), (8,))
UNCUT = {"slices": WHOLE, "units": (2, 2)}


def ran(slices: Any = CUT, units: Any = (6, 6), layers: Any = (1, 2), often: int = 1, missing: Any = ()) -> Ran:
    """Of two micro-batches, with the calls of attention that go with it; ``missing`` are (layer, micro-batch, start)."""
    runtime = SimpleNamespace(stages={1: SimpleNamespace(trains=True)})
    watched = Ran(SimpleNamespace(slices_run=slices, units_run=units, _runtime=runtime))
    for layer, m, (start, stop) in itertools.product(layers, (0, 1), ((0, 3), (3, 4), (4, 8))):
        where = {"layer": layer, "micro_batch": m, "span": Span(start, stop, 8), "_recomputing": False}
        for _ in range(0 if (layer, m, start) in missing else often):
            watched.note(SimpleNamespace(**where))
    return watched


@pytest.mark.parametrize(("step", "wanted", "text"), [
    ({}, (CUT, 2), ""), ({"often": 2}, (CUT,), ""), ({**UNCUT, "layers": ()}, (WHOLE, 2), ""),
    ({**UNCUT, "layers": ()}, (CUT, 2), "ran slices of"), ({"units": (6, 5)}, (CUT, 2), r"ran \(6, 5\) units"),
    ({"layers": (1,)}, (CUT, 2), r"layers \[1\], not of 2"), ({"often": 2}, (CUT, 2), "layer 1 called"),
    ({"often": 2, "missing": [(2, 0, 0)]}, (CUT,), "layer 2 called"), (UNCUT, (WHOLE, 2), r"layers \[1, 2\], not of 2"),
])  # fmt: skip
def test_a_step_passes_that_ran_as_it_must_and_no_other(step: dict[str, Any], wanted: tuple[Any, ...], text: str) -> None:
    with pytest.raises(AssertionError, match=text) if text else nullcontext():
        ran(**step).check(*wanted)

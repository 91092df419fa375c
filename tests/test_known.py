"""Each known defect is found by the test that it names."""

import re
import shlex

import pytest

from tests.mutation.known import Known, known
from tests.mutation.runs import ROOT, run_tests


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

"""Every known defect is found by the tests that are about it, and by their own measure.

``make test`` runs each mutant against the cheapest of its checks, ``make test-mutants`` against all of them, with a table.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import mutants
from tests.mutants import CAUGHT, Mutant, NeverRan, applied, harness, installed, neutral
from tests.spawn import run_ranks

MUTANTS, CHECKS = mutants.mutants(), mutants.checks()
CHEAPEST = {mutant.cheapest for mutant in MUTANTS.values()}


def cells() -> list[Any]:
    """All pairs of a mutant and a check that must catch it; marked as `mutants` unless it is the cheapest."""
    return [
        pytest.param(
            name,
            check.name,
            marks=[] if MUTANTS[name].cheapest == check.name else pytest.mark.mutants,
            id=f"{name}|{check.name}",
        )
        for check in CHECKS.values()
        for name in check.catches
    ]


def columns() -> list[Any]:
    return [pytest.param(name, marks=[] if name in CHEAPEST else pytest.mark.mutants) for name in CHECKS]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mutant", "check"), cells())
def test_a_mutant_is_caught(mutant: str, check: str, record_property: Any) -> None:
    factor = CHECKS[check].run(mutant)
    record_property("mutant", (mutant, check, factor))
    assert factor > CAUGHT, f"missed: {MUTANTS[mutant].breaks} {check} is off by {factor:.2g} times its tolerance"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", columns())
def test_the_patches_alone_change_nothing(check: str, record_property: Any) -> None:
    """Else a mutant could be caught for the patching."""
    factor = CHECKS[check].run(neutral(CHECKS[check].catches))
    record_property("mutant", ("(neutral)", check, factor))
    assert factor <= 1.0


def test_every_check_says_of_every_mutant_whether_it_is_about_it() -> None:
    for module in harness._modules():
        for check in module.CHECKS:
            said = {*check.catches, *check.blind}
            missing, unknown = {mutant.name for mutant in module.MUTANTS} - said, said - MUTANTS.keys()
            assert not missing and not unknown, f"{check.name}: says nothing of {missing}; no such mutants: {unknown}"
            assert not set(check.catches) & set(check.blind), check.name
    for mutant in MUTANTS.values():
        assert mutant.name in CHECKS[mutant.cheapest].catches, f"{mutant.name}: {mutant.cheapest} does not catch it"
        assert "; " not in mutant.name and not mutant.name.startswith("neutral")


# ------------------------------------------------------------------------------------------------------------ the harness


class Subject:
    """Something to patch."""

    FACTOR = 2

    def double(self, number: int) -> int:
        return self.FACTOR * number

    @staticmethod
    def half(number: int) -> float:
        return number / 2

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @property
    def three(self) -> int:
        return 3


class Heir(Subject):
    """Something that inherits what is patched."""


def _one_more(original: Any, hit: Any) -> Any:
    if not callable(original):
        hit()
        return original + 1

    def replacement(*args: Any) -> Any:
        result = original(*args)
        if isinstance(result, str):
            hit()
            return result + "s"
        if result == 0:
            return result
        hit()
        return result + 1

    return replacement


def _mutant(name: str, *places: str) -> Mutant:
    where = tuple(f"{__name__}:{place}" for place in places)
    return Mutant(name, "Results are one too large.", where, _one_more, "none")


TOYS = {
    mutant.name: mutant
    for mutant in (
        _mutant("method", "Subject.double"),
        _mutant("heir", "Heir.double"),
        _mutant("all kinds", "Subject.half", "Subject.name", "Subject.three", "Subject.FACTOR"),
        _mutant("elsewhere", "_never_called"),
    )
}


def _never_called() -> int:
    return 0


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "mutants", lambda: TOYS)


def test_a_patch_is_there_and_gone_again(toys: None) -> None:
    before = dict(vars(Subject))
    with applied("method") as hits:
        assert Subject().double(2) == 5 and Subject().double(0) == 0
        assert Heir().double(1) == 3
    assert hits == {"method": 2}, "only what it changes is a hit"
    with applied("heir"):
        assert Subject().double(2) == 4 and Heir().double(2) == 5
    assert "double" not in vars(Heir)
    with applied("all kinds"):
        assert (Subject.half(2), Heir.name(), Subject().three, Subject.FACTOR) == (2.0, "Heirs", 4, 3)
    assert dict(vars(Subject)) == before


def test_a_neutral_patch_passes_on_and_counts(toys: None) -> None:
    with applied(neutral(["method", "all kinds"])) as hits:
        one = Subject()
        assert (one.double(2), one.half(2), one.name(), one.three) == (4, 1.0, "Subject", 3)
    assert hits == {"method": 1, "all kinds": 4}


def test_a_mutant_that_changes_nothing_is_an_error(toys: None) -> None:
    with pytest.raises(NeverRan, match="method changed nothing on any rank"):
        with applied("method"):
            Subject().double(0)
    with pytest.raises(NeverRan, match="elsewhere changed nothing"):
        with applied(neutral(["method", "elsewhere"])):
            Subject().double(1)
    with installed("elsewhere") as hits:
        pass
    assert hits == {"elsewhere": 0}
    assert Subject().double(2) == 4


def where(rank: int, world: int) -> str:
    return os.path.basename(os.environ["MASTER_ADDR"]) if rank == 1 else "rank 0 looks at nothing"


def test_ranks_have_the_mutant_and_report_its_hits() -> None:
    name = "attention ignores earlier slices"
    with pytest.raises(NeverRan, match=f"{name} changed nothing on any rank"):
        run_ranks(where, 2, mutant=name)
    assert run_ranks(where, 2) == ["rank 0 looks at nothing", "127.0.0.1"]

"""The emulation: that it runs, sleeps as long as it says, and can tell a miss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.emulated import Case, Taken
from tests.benchmarks.emulation import COST, Row, check_losses, main, parse, table, verdicts
from tests.benchmarks.measure import WrongResult

WHOLE = Row(16, Case("1f1b", 2, (32,)), 10.0, (10.3, 10.1))


def cut(simulated: float, *steps: float) -> Row:
    return Row(16, Case("terapipe", 2, (16, 16)), simulated, steps)


def test_a_quick_run_sleeps_no_less_than_the_simulator_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["--quick", "--steps", "2", "--json", str(tmp_path / "rows.json")]
    )  # whether 5% are met depends on who else is at work here
    written = json.loads((tmp_path / "rows.json").read_text())
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("no real-time priority")]
    assert len(lines) == 1 + 3 + 1
    assert [(row["case"]["schedule"], row["slices"]) for row in written["rows"]] == [
        ("1f1b", 1),
        ("terapipe", 4),
        ("1f1b", 4),
    ]
    # two stages: the whole forward and backward of one sequence twice; in slices, each once and the slowest again
    whole, slices = 3 * (0.006 + 0.00675 * 32 + 1.5e-5 * 32 * 16.5), 3 * (0.024 + 0.00675 * 32 + 1.5e-5 * 32 * 16.5)
    slowest = 3 * (0.006 + 0.00675 * 8 + 1.5e-5 * 8 * 28.5)
    assert [row["simulated"] for row in written["rows"]] == pytest.approx([2 * whole, *[slices + slowest] * 2])
    # a step can't be faster than its sleeps; how much slower it is depends on who else is at work, and is no test
    assert min(row["error"] for row in written["rows"]) > -0.01


def test_forward_units_are_long_beside_the_lateness_of_sleeps() -> None:
    assert COST.forward(0, 8, 0) >= 0.04


def test_verdicts_on_error_and_speedup() -> None:
    assert [v.met for v in verdicts([WHOLE, cut(2.0, 2.2, 2.01)])] == [True, True]
    assert [v.met for v in verdicts([WHOLE, cut(1.9, 2.01)])] == [False, True]
    assert [v.met for v in verdicts([WHOLE, cut(2.1, 2.1)])] == [True, False]
    assert "5.05 (simulated 5.00)" in table([WHOLE, cut(2.0, 2.2, 2.0)])[-1]


def test_cases_that_trained_differently_are_refused() -> None:
    cases = [WHOLE.case, cut(1.0).case]
    check_losses(cases, [[Taken(1.0, []), Taken(1.0 + 1e-7, [])]] * 2)
    with pytest.raises(WrongResult, match=r"loss 1\.01"):
        check_losses(cases, [[Taken(1.0, []), Taken(1.01, [])]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "1"], "got 1, must be numbers from 2 up"),
        (["--slices", "4,x"], "got 4,x, must be numbers from 1 up"),
        (["--quick", "--slices", "5"], "--slices: got 5, must be at most 4"),
        (["--steps", "0"], "--steps: got 0, must be at least 1"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err

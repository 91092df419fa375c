"""Which rounds count, what is concluded from them, and what becomes of workers and of a file of finished runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.benchmarks import measure
from tests.benchmarks.measure import Lines, Probe, Settings, WrongResult, run_rounds

QUIET, NOISY, SLOW = Probe(1.0, 1.1), Probe(1.0, 1.3), Probe(1.2, 1.3)


@pytest.mark.parametrize(
    ("probes", "clean"),
    [((QUIET, QUIET), True), ((NOISY, QUIET), False), ((QUIET, NOISY), False), ((QUIET, SLOW), False)],
)
def test_a_round_is_dropped_where_two_take_over_1_15_times_what_one_takes(probes: tuple[Probe, Probe], clean: bool):
    (one,) = run_rounds({"a": lambda: 1.0}, Settings(1, 1, patience=0), iter(probes).__next__).rounds
    assert one.clean is clean


def test_minima_are_of_clean_rounds_and_fewer_than_three_are_inconclusive():
    probes, times = iter([QUIET, QUIET, QUIET, NOISY, QUIET, QUIET]), iter([5.0, 10.0, 1.0, 1.0, 4.0, 12.0])
    columns = {"slow": times.__next__, "peer": times.__next__}
    result = run_rounds(columns, Settings(2, 9, patience=0), probes.__next__)
    # every other round is in the reverse order
    assert [one.seconds for one in result.rounds] == [
        {"slow": 5.0, "peer": 10.0}, {"slow": 1.0, "peer": 1.0}, {"slow": 4.0, "peer": 12.0},
    ]  # fmt: skip
    assert result.seconds == {"slow": 4.0, "peer": 10.0}
    head, _, line, peer = result.table("title", "peer")
    assert head == "title: INCONCLUSIVE, fewer than 3 clean: 2 clean rounds of 3, two at once 1.10x slower than one"
    assert line.split() == ["slow", "4", "0.40", "2.50"] and peer.split() == ["peer", "10", "1.00", "1.00"]


def test_three_clean_rounds_are_enough_and_without_a_clean_one_the_attempts_end_it():
    result = run_rounds({"a": itertools.count(2.0).__next__}, Settings(3, 9), lambda: QUIET)
    assert result.state == "3 clean rounds of 3, two at once 1.10x slower than one"
    result = run_rounds({"a": itertools.count(2.0).__next__}, Settings(3, 4, patience=1), lambda: NOISY)
    assert len(result.rounds) == 4 and result.seconds == {"a": 2.0} and result.state.startswith("INCONCLUSIVE")


def test_a_round_begins_when_the_machine_is_quiet_or_patience_ends():
    probes = iter([NOISY, NOISY, QUIET, QUIET, NOISY, NOISY, NOISY, QUIET])
    rounds = run_rounds({"a": lambda: 1.0}, Settings(2, 2, patience=2), probes.__next__).rounds
    assert [(one.before, one.after) for one in rounds] == [(QUIET, QUIET), (NOISY, QUIET)]


def test_the_fastest_call_counts_and_the_first_does_not():
    clock, calls = iter([0.0, 5.0, 10.0, 12.0]), []
    assert measure.fastest(lambda: calls.append(1), 2, clock.__next__) == 2.0 and len(calls) == 3


def test_columns_that_train_differently_are_refused():
    trains = {"a": "all", "b": "all", "c": "some"}
    measure.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.00005], "c": [3.0, 1.0]}, trains)
    with pytest.raises(WrongResult, match=r"b has losses \[2.0, 1.1\] in its first steps, a has \[2.0, 1.0\]"):
        measure.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.1]}, trains)


def test_a_file_keeps_whole_lines_of_its_settings(tmp_path: Path):
    lines = Lines(tmp_path / "folder" / "runs.jsonl", {"lr": 1e-4, "alphas": (1, 2)})
    lines.add(run=1)
    with open(lines.path, "a") as file:
        file.write('{"run": 2, "sett')  # of a process that was killed
    assert lines.read() == [{"run": 1}]
    lines.add(run=3)
    Lines(lines.path, {"lr": 2e-4}).add(run=4)
    assert lines.read() == [{"run": 1}, {"run": 3}]
    assert Lines(lines.path).read() == [{"run": 1}, {"run": 3}, {"run": 4}]

"""The benchmarks' own reasoning: which rounds count, what is concluded, what the parts of an account add up to."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.benchmarks.account import Costs, account, bound
from tests.benchmarks.columns import Column, Workload, prepare_one_process
from tests.benchmarks.gpt import QUICK
from tests.benchmarks.measure import Result, Settings, WrongResult, measure
from tests.benchmarks.rounds import Minima, Probe, minima, run_rounds, verdict
from tests.benchmarks.token_pipeline import auto_line, table, target_lines
from tests.benchmarks.workers import Seat, WorkerError, Workers

QUIET = Probe((1.0, 1.02), (1.05, 1.1))
NOISY = Probe((1.0, 1.02), (1.05, 1.3))


def test_a_round_with_a_slow_probe_on_either_side_is_dropped():
    probes = iter([QUIET, QUIET, QUIET, NOISY, NOISY, QUIET, QUIET, QUIET])
    times = iter([5.0, 3.0, 1.0, 4.0])
    rounds = run_rounds({"a": lambda: next(times)}, lambda: next(probes), wanted=2, at_most=9, patience=0)
    assert [one.clean for one in rounds] == [True, False, False, True]
    result = minima(rounds)
    assert result.seconds == {"a": 4.0} and (result.clean, result.tried) == (2, 4)
    assert not result.conclusive
    assert (result.slowdown, result.contention) == (pytest.approx(1.1), pytest.approx(1.075 / 1.01))


def test_rounds_end_after_the_attempts_and_say_so_with_figures_of_dropped_rounds():
    rounds = run_rounds({"a": itertools.count(2.0).__next__}, lambda: NOISY, wanted=3, at_most=4)
    assert minima(rounds).seconds == {"a": 2.0}
    assert (minima(rounds).clean, minima(rounds).tried) == (0, 4)


def test_a_round_begins_when_the_machine_is_quiet_or_patience_ends():
    probes = iter([NOISY, NOISY, QUIET, QUIET, NOISY, NOISY, NOISY, QUIET])
    rounds = run_rounds({"a": lambda: 1.0}, lambda: next(probes), wanted=2, at_most=2, patience=2)
    assert [(one.before, one.after) for one in rounds] == [(QUIET, QUIET), (NOISY, QUIET)]
    assert [one.clean for one in rounds] == [True, False]


def test_columns_are_interleaved_and_change_places():
    seen: list[str] = []
    columns = {name: lambda name=name: seen.append(name) or 1.0 for name in "ab"}
    rounds = run_rounds(columns, lambda: QUIET, wanted=3, at_most=3)
    assert "".join(seen) == "abbaab"
    assert minima(rounds).conclusive


@pytest.mark.parametrize(
    ("ratio", "noise", "conclusive", "expected"),
    [
        (1.45, 0.0, True, "pass"),
        (1.44, 0.0, True, "miss"),
        (1.44, 0.02, True, "inconclusive"),
        (1.40, 0.02, True, "miss"),
        (2.0, 0.0, False, "inconclusive"),
    ],
)
def test_verdict(ratio, noise, conclusive, expected):
    assert verdict(ratio, 1.45, noise, conclusive) == expected


def test_the_parts_of_an_account_add_up_to_the_step():
    costs = Costs(cut={1: 2.0, 8: 2.2}, stages=[0.9, 1.1], one_way={8: 0.001})
    found = account(sequences=2, slices=8, step=3.0, one_process=4.0, contention=1.05, costs=costs)
    assert found.bound == pytest.approx(4.0 / 2 * (1 + 1 / 16)) == bound(4.0, 2, 2, 8)
    assert found.cutting == pytest.approx(2 * 0.1 * (1 + 1 / 16))
    assert found.imbalance == pytest.approx(2 * 0.1 * (1 + 1 / 16))
    assert found.messages == pytest.approx(2 * 2 * 8 * 0.001)
    parts = found.bound + found.cutting + found.two_at_once + found.imbalance + found.messages + found.rest
    assert parts == pytest.approx(3.0)


def prepare_wrong(rank: int, world: int, workload: Workload):
    """One process that trains one sequence fewer."""
    return prepare_one_process(rank, world, Workload(workload.shape, workload.sequences - 1))


def prepare_broken(rank: int, world: int, workload: Workload):
    """A column that cannot be built."""
    raise RuntimeError("no such engine")


RIGHT = Column("right", "right", 1, prepare_one_process)
FAST = Settings(rounds=1, attempts=1, probe_repeats=1, timeout=60, patience=0)


def test_a_column_with_another_loss_ends_the_benchmark():
    with pytest.raises(WrongResult, match="wrong has losses"):
        measure([RIGHT, Column("wrong", "wrong", 1, prepare_wrong)], Workload(QUICK, 2), FAST)


def test_a_column_that_fails_is_named_and_the_others_are_measured():
    result = measure([Column("broken", "broken", 2, prepare_broken), RIGHT], Workload(QUICK, 1), FAST)
    assert result.failures == {"broken": "RuntimeError: no such engine"}
    assert result.seconds("broken") is None and result.seconds("right") > 0
    assert result.memory["right"][0].highest_mb > result.memory["right"][0].imported_mb > 0


def die(seat: Seat) -> None:
    """Request: rank 1 is killed, rank 0 answers."""
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_reported_and_its_group_ended():
    with Workers(2, timeout=60) as pair:
        processes = list(pair._processes)
        with pytest.raises(WorkerError, match="rank 1 died without a word, exit code -9"):
            pair.call(die)
        assert not any(process.is_alive() for process in processes)


def test_workers_that_have_ended_leave_no_shared_memory():
    with Workers(1, timeout=60) as alone:
        buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_{alone._port}_0")
        buffer.touch()
    assert not buffer.exists()


def ran(clean: int = 3, **seconds: float) -> Result:
    return Result(Minima(seconds, clean, clean, 1.05, 1.05, []), {}, {}, {})


EQUAL = {"ours1": 2.5, "ours2": 1.5, "ours4": 1.2, "ours8": 1.3, "ours16": 1.4}


def test_the_planner_s_choice_is_compared_with_the_best_of_all_equal_slices():
    assert auto_line(1, ran(**EQUAL, auto=1.27)).endswith("(4), at most 1.06: pass")
    assert auto_line(1, ran(**EQUAL, auto=1.28)).endswith("(4), at most 1.06: miss")
    assert auto_line(1, ran(clean=2, **EQUAL, auto=1.0)).endswith("inconclusive")
    some = {name: seconds for name, seconds in EQUAL.items() if name not in ("ours4", "ours16")}
    assert auto_line(1, ran(**some, auto=1.0)).endswith("not compared with the best equal slices, 4, 16 not measured")
    assert auto_line(1, ran(**EQUAL)) is None


def test_targets_are_those_of_their_batch_and_the_noise_does_not_count():
    lines = target_lines({1: ran(**EQUAL, auto=1.3, deepspeed=1.9, deepspeed2=1.96)})
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["pass", "miss", "inconclusive", "miss"]
    assert lines[2] == "B=1  ours, auto: 1.462x DeepSpeed, target 1.50x: inconclusive"
    slow = target_lines({8: ran(deepspeed=10.0, deepspeed2=10.1, auto=10.3, ours1=10.0, ours2=10.1)})
    assert [line.rsplit(": ", 1)[1] for line in slow[:3]] == ["pass", "pass", "miss"]


def test_a_column_that_failed_says_why():
    result = Result(Minima({"ours1": 1.0}, 3, 3, 1.05, 1.05, []), {}, {}, {"ours2": "rank 0 did not answer"})
    lines = table({1: result}, ["ours1", "ours2"])
    assert "failed" in lines[1] and lines[-1].strip() == "ours 2 failed: rank 0 did not answer"

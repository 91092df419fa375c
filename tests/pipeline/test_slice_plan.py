"""Which steps are measured and planned, without processes: simulated steps in place of recorded ones."""

import dataclasses
from functools import cache
from typing import Any
from unittest.mock import Mock, call

import pytest

from ds_terapipe.config import parse
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.autotune.auto import PATIENCE, AutoSlices
from ds_terapipe.pipeline.autotune.planner import RIVALS, Planner
from ds_terapipe.pipeline.autotune.run_info import RunInfo
from ds_terapipe.pipeline.autotune.trials import ROUNDS, TRIALS, TURNS, planned_steps
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.measure import RecordedStep
from ds_terapipe.plan.costs.memory import MemoryModel, StageMemory, memory_use
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.result import Plan, compact
from ds_terapipe.schedule import Placement
from ds_terapipe.tracing.chrome import MEASURED, events_of
from tests.plan.costs import ExampleCost

STAGES = 2
MEASURING = 1 + ROUNDS * len(TRIALS)
COMPARING = 1 + TURNS * (1 + RIVALS)
TRUTH = ExampleCost([1.0] * STAGES, fixed=1e-3, linear=1e-4, attention=5e-9)
TIMES = StepTimes(TRUTH, STAGES, 1)
EQUAL = {slice_lengths(1024, n): TIMES.seconds("1f1b", slice_lengths(1024, n)) for n in TRIALS}
OTHER = {"1f1b": "terapipe", "terapipe": "1f1b"}


@cache
def simulated(micro_batches: int, schedule: str, slices: tuple[int, ...]) -> tuple[float, Any]:
    found = StepTimes(TRUTH, STAGES, micro_batches).simulate(schedule, slices)
    return found.makespan, [e._replace(run=MEASURED) for e in events_of(found.grid, found.intervals)]


def metered(limit: float | None = None, **stage: float) -> Any:
    """A meter of memory that counts its uses; a token takes one byte, or what ``stage`` says."""
    model = MemoryModel((StageMemory(**(stage or {"activations": 1.0})),) * STAGES)
    return Mock(**{"end.return_value": (model, limit), "peaks.return_value": None})


class Run:
    """Steps of given lengths, one after the other; ``keys`` of token_pipeline."""

    def __init__(
        self, meter: Any = None, micro_batches: int = 1, device: str = "this one", multiple: int = 1, **keys: Any
    ) -> None:
        self.lines: list[str] = []
        self.schedule = ""  # of the last step
        self.meter = meter or metered()
        config = parse({"token_pipeline": {key: str(v) if key.endswith("path") else v for key, v in keys.items()}})
        assert config is not None
        facts, self.multiple = {"device": device, "versions": {"torch": "2"}}, multiple
        about = RunInfo(Placement.plain(STAGES), 1, micro_batches, False, False, facts, multiple)
        self.auto = AutoSlices(Planner(config, about, lambda decide: decide(), self.meter, self.lines.append))

    def step(self, lengths: Any, slow: Any = lambda slices: 1.0, elsewhere: Any = ()) -> tuple[int, ...]:
        """Run a step, ``slow`` times as long as it should take, beside other replicas'; its longest micro-batch's slices."""
        self.batch = StepBatch(lengths=[*lengths], everywhere=tuple(sorted({*lengths, *elsewhere})), multiple=self.multiple)
        plan = self.auto.plan(lengths, self.batch.everywhere)
        self.schedule = plan.schedule
        self.batch.cut(plan.slices)
        slices = tuple(span.length for span in self.batch.spans[lengths.index(max(lengths))])
        makespan, events = simulated(len(lengths), plan.schedule, slices)
        self.auto.record_step(events if plan.recorded else [], slow(slices) * makespan)
        return slices

    def steps(self, count: int, lengths: Any, slow: Any = lambda slices: 1.0) -> list[tuple[int, ...]]:
        return [self.step(lengths, slow) for _ in range(count)]

    def measure(self, lengths: Any = (1024,) * 8) -> list[tuple[int, ...]]:
        """Run steps until there is one more plan; their slices."""
        begin, ran = len(self.planned), []
        while len(self.planned) == begin:
            ran.append(self.step(lengths))
        return ran

    @property
    def plans(self) -> Any:
        return (self.auto.state() or {"plans": []})["plans"]

    @property
    def planned(self) -> list[int]:
        return [plan["seq_length"] for plan in self.plans]

    @property
    def counted(self) -> int:
        return self.meter.watch.mock_calls.count(call(True))

    def said(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "costs.json"


def measured(path: Any, **keys: Any) -> Run:
    run = Run(measurements_path=path, **keys)
    run.measure()
    Plan.from_dict(run.plans[0]).save(path.parent / "plan.json")
    return run


def test_ranks_that_share_tokens_get_the_same_number_of_each_slice():
    run = Run(multiple=8)
    assert all(length % 8 == 0 for slices in run.steps(MEASURING + COMPARING, (1000,)) for length in slices)
    assert run.planned == [1000] and len(run.plans[0]["slices"]) > 2
    run.step([1000, 16])
    assert [span.length for span in run.batch.spans[1]] == [8, 8]  # the short one has no more shares


def test_trials_then_a_plan_that_is_the_best_of_them_or_better():
    run = Run()
    assert [len(slices) for slices in run.measure([1024])] == [TRIALS[0], *TRIALS * ROUNDS]
    assert TIMES.seconds("1f1b", run.step([1024])) <= min(EQUAL.values()) * (1 + 1e-9)
    run.step([1024] * 4)  # another number of micro-batches is planned from what is known
    assert len(run.plans) == 2 and run.counted == 1
    # without weight gradients zero_bubble is 1f1b by another name, and so no rival and no runner-up
    (alone, plan), (first, second, *_) = map(Plan.from_dict, run.plans), EQUAL
    assert all(option.slices != alone.slices or option.step_s > alone.step_s for option in alone.losing)
    for schedule, others in (("zero_bubble", [second]), ("terapipe", [first, second])):
        planned = dataclasses.replace(plan, schedule=schedule, slices=first)
        rivals = run.auto._planner.rivals(planned, [RecordedStep(cut, (), 1.0) for cut in (first, second)])
        assert [rival.slices for rival in rivals] == others


@pytest.mark.parametrize("lengths", [(1024, 512), (512, 1024)])
def test_lengths_that_alternate_are_both_planned_in_the_end(lengths):
    run = Run()
    for _ in range(2 * MEASURING + 1):
        for length in lengths:
            run.step([length])
    run.step([512])
    assert sorted(run.planned) == [512, 1024] and run.counted <= 2


def test_a_measurement_is_given_up_where_its_length_does_not_come_again():
    run = Run()
    run.steps(3, [1024])
    run.steps(PATIENCE, [512])
    assert run.counted == 1
    run.steps(MEASURING + 1, [512])
    assert run.planned == [512] and run.counted == 2


def test_micro_batches_of_different_lengths_are_run_unmeasured_and_by_the_plan_when_there_is_one():
    run = Run()
    assert len(run.step([1024, 512])) == 8 and run.counted == 0
    run.steps(MEASURING, [1024, 1024])
    assert len(run.step([1024, 6])) == len(run.step([1024, 1024])) > 6


@pytest.mark.parametrize(("limit", "runs"), [(5000.0, {16}), (7000.0, {16, 8, 4}), (50000.0, set(TRIALS))])
def test_what_trials_really_took_says_which_are_left_out(limit, runs):
    """A token takes one byte as the engine counts, in truth ten more while its slice is computed, and two of a cut sequence."""
    truth, tried = MemoryModel((StageMemory(activations=1.0, working=10.0, joined=2.0),) * STAGES), []

    def takes(slices: int) -> tuple[float, ...]:
        return tuple(use.total for use in memory_use(truth, "1f1b", slice_lengths(1024, slices), 1))

    run = Run(metered(limit))
    run.meter.peaks.side_effect = lambda: takes(tried[-1])
    plan = run.auto.plan
    run.auto.plan = lambda *given: (found := plan(*given), tried.append(found.slices))[0]
    run.measure([1024])
    assert set(tried) == runs and all(max(takes(n)) <= limit for n in runs)
    # one measurement makes careful
    assert all(max(takes(n)) > limit for n in TRIALS if n < min(runs)) or limit == 5000.0
    assert run.meter.watch.call_count == len(tried)


def test_replicas_with_other_lengths_measure_and_plan_together():
    """The lengths in all pipelines decide, never a replica's own."""
    here, there = Run(), Run()
    for _ in range(3 * MEASURING):
        for short, long in ((6, 1024), (1024, 1024)):
            here.step([short], elsewhere=[long])
            there.step([long], elsewhere=[short])
            assert (here.planned, here.counted, here.batch.is_cut) == (there.planned, there.counted, there.batch.is_cut)
    assert here.planned == [1024]


WINNERS = [
    # the first step of the plan, 1f1b, does not count, nor does one lucky step of the rival
    ([9.0, 1.0, 1.0, 1.0], [1.1, 0.5, 1.1], "1f1b"),
    ([9.0, 0.9, 1.1, 1.1], [1.0, 1.0, 1.0], "1f1b"),  # slower in most turns, but not at its best
    ([9.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 1.1], "terapipe"),
    ([9.0, 1.0, 1.0, 1.0], [0.995], "1f1b"),
    ([2.0, 1.0], [], "1f1b"),
]


@pytest.mark.parametrize(("plan_s", "rival_s", "winner"), WINNERS)
def test_a_rival_wins_by_the_median_turn_and_by_the_fastest_step(plan_s, rival_s, winner):
    """Steps take these seconds, the last for all further ones."""
    left = {"1f1b": list(plan_s), "terapipe": list(rival_s)}
    plan = Plan("1f1b", (8,), 8, Placement.plain(STAGES), 1, 1, False, step_s=1.0)
    rivals = [dataclasses.replace(plan, schedule="terapipe")] if rival_s else []
    steps = planned_steps(plan, Mock(agree=lambda decide: decide()), rivals)
    turn = next(steps)
    while turn.slices.timed:
        own = left[turn.slices.schedule]
        turn = steps.send(((), own.pop(0) if len(own) > 1 else own[0]))
    assert turn.plan is not None and turn.plan.schedule == turn.slices.schedule == winner
    assert turn.plan.step_s == (1.0 if winner == "1f1b" else min(rival_s))


@pytest.mark.parametrize("known_by", ["trials", "measurements", "plan", "checkpoint"])
def test_what_is_planned_is_what_runs(path, known_by):
    """Slices and schedule, from the first step on, and it takes what it predicts; no equal cut is like any of these plans."""
    run = measured(path)
    plan = Plan.from_dict(run.plans[0])
    if known_by == "measurements":
        run = Run(measurements_path=path)
    elif known_by != "trials":
        slices, seconds = (600, 424), StepTimes(TRUTH, STAGES, 8).seconds
        plan = dataclasses.replace(plan, slices=slices, schedule="terapipe", step_s=seconds("terapipe", slices))
    if known_by == "plan":
        plan.save(path.parent / "other.json")
        run = Run(plan_path=path.parent / "other.json", micro_batches=8)
    elif known_by == "checkpoint":
        run = Run()
        run.auto.load({"plans": [plan.to_dict()]})
    assert len(set(plan.slices)) > 1 and plan.slices != slice_lengths(1024, len(plan.slices))
    for _ in range(1 if known_by == "trials" else TURNS + 3):  # nothing to be compared with
        assert (run.step([1024] * 8), run.schedule) == (plan.slices, plan.schedule)
    if known_by != "trials":  # by how many per cent steps took longer than predicted
        (line,) = run.said("taken")
        assert float(line.split("(")[1].split("%")[0]) == pytest.approx(0.0, abs=5.0)


def test_a_plan_for_another_run_is_refused(path):
    other = OTHER[measured(path, meter=metered(1e9)).plans[0]["schedule"]]
    for keys, says in [
        ({"micro_batches": 4}, r"plan_path: .* is for 8 micro_batches, must be for this run's 4"),
        ({"multiple": 3}, "plan_path: .* is for slices of .* tokens, must be for multiples of 3"),
        ({"schedule": other}, r"token_pipeline\.plan_path: .* is for the schedule"),
        ({"memory_gb": 1e-8}, r"plan_path: .*plan\.json is for \S+e-06 GB, must be for memory_gb, 1e-08"),
    ]:
        with pytest.raises(ConfigError, match=says):
            Run(plan_path=path.parent / "plan.json", **{"micro_batches": 8, **keys})


def test_it_is_said_whether_a_plan_is_used(path):
    state = measured(path, meter=metered(1e9)).auto.state()
    (plan,) = state["plans"]
    file, schedule = path.parent / "plan.json", plan["schedule"]
    run = Run(plan_path=file, micro_batches=8)
    run.step([512] * 8)
    first = f"plan: {compact(tuple(plan['slices']))} tokens, {schedule}, from {file}"
    assert run.lines == [first, f"plan: {file} is for 8 micro-batches of 1024 tokens, not for these 8 of 512"]
    for keys, ending, used in [
        ({}, "from the checkpoint, for 8 micro-batches of 1024 tokens", [1024]),
        ({"schedule": OTHER[schedule]}, f'is for the schedule "{schedule}" and not for the given one: not used', []),
    ]:
        run = Run(**keys)
        run.auto.load(state)
        assert run.planned == used and run.lines[-1].endswith(ending)


def test_measurements_are_used_again_in_the_same_run_only(path):
    measured(path)
    again, other = Run(measurements_path=path), Run(measurements_path=path, device="another")
    again.step([1024] * 8)
    assert again.planned == [1024] and again.counted == 0
    said = f'plan: {path} was measured on another run: device "this one", here "another": measured again'
    assert other.lines == [said]
    other.step([1024] * 8)
    assert other.planned == [] and other.counted == 1


# what was free when it was measured is a limit for each run that uses the measurements, and memory_gb wins; a limit that was
# given belongs to its run
LIMITS = [(1700.0, {}, {}, 1700.0), (1700.0, {}, {"memory_gb": 1.0}, 1e9), (1e9, {"memory_gb": 1.0}, {}, None)]


@pytest.mark.parametrize(("limit", "first", "second", "told"), LIMITS)
def test_limits_of_measurements(path, limit, first, second, told):
    measured(path, meter=metered(limit), **first)
    again = Run(measurements_path=path, **second)
    again.step([1024] * 8)
    assert again.plans[0]["memory_limit_bytes"] == told


def test_too_little_memory_names_the_least_that_any_trial_takes():
    """One micro-batch is held whole however it is cut, and cut it keeps K and V besides."""
    run = Run(metered(1e9, activations=1e6, keys_values=1e6), memory_gb=1.0)
    with pytest.raises(ConfigError, match=r"token_pipeline\.memory_gb: got 1, must be at least 1\.024.*unsliced"):
        run.steps(MEASURING, [1024])

"""Which steps are measured and planned, without processes: simulated steps in place of recorded ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ds_terapipe.config import parse
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.autotune.auto import PATIENCE, AutoCutting
from ds_terapipe.pipeline.autotune.comparison import Comparison, comparison_steps
from ds_terapipe.pipeline.autotune.cutting import Cutting
from ds_terapipe.pipeline.autotune.phases import ROUNDS, TRIALS
from ds_terapipe.pipeline.autotune.planner import RIVALS
from ds_terapipe.pipeline.autotune.run_info import RunInfo, differences
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.memory import MemoryModel, StageMemory, memory_use
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.result import Plan, compact
from ds_terapipe.tracing.chrome import MEASURED, events_of

STAGES = 2
MEASURING = 1 + ROUNDS * len(TRIALS)


class Truth:
    """What a slice takes on both stages; no messages."""

    sequences, max_length = 1, 1 << 20

    def forward(self, stage: int, length: Any, context: Any) -> Any:
        return 1e-3 + 1e-4 * np.asarray(length, float) + 1e-8 * np.asarray(length, float) * context

    def backward(self, stage: int, length: Any, context: Any) -> Any:
        return 2 * self.forward(stage, length, context)

    def weights(self, stage: int, length: Any) -> Any:
        return 0.0 * length

    def message(self, boundary: int, length: Any) -> Any:
        return 0.0 * np.asarray(length, float)


MODEL = MemoryModel((StageMemory(activations=1.0),) * STAGES), "1f1b"


class Meter:
    """Counts how often memory is measured."""

    def __init__(self, limit: float | None = None) -> None:
        self.begun, self.watched, self._limit = 0, 0, limit

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> tuple[MemoryModel | None, float | None]:
        return MODEL[0], self._limit

    def note_peak(self) -> None:
        self.watched += 1

    def peaks(self) -> tuple[float, ...] | None:
        return None


class Run:
    """Steps of given lengths, one after the other."""

    def __init__(
        self, meter: Meter | None = None, micro_batches: int = 1, device: str = "this one", **keys: Any
    ) -> None:
        self.lines: list[str] = []
        self.schedule = ""  # of the last step
        self.meter = meter or Meter()
        config = parse({"token_pipeline": keys})
        assert config is not None
        measured_on = {"device": device, "versions": {"torch": "2"}}
        about = RunInfo(STAGES, 1, micro_batches, False, False, measured_on)
        self.auto = AutoCutting(config, about, lambda decide: decide(), self.meter, self.lines.append)

    def step(
        self,
        lengths: Sequence[int],
        slow: Callable[[tuple[int, ...]], float] = lambda slices: 1.0,
        elsewhere: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Run a step, ``slow`` times as long as it should take, beside other replicas'; its longest micro-batch's slices."""
        cutting = self.auto.cutting(lengths, sorted({*lengths, *elsewhere}))
        self.schedule = cutting.schedule
        given = cutting.slices if isinstance(cutting.slices, int) else list(cutting.slices)
        slices = slice_lengths(max(lengths), given if isinstance(given, int) or len(set(lengths)) == 1 else len(given))
        simulation = StepTimes(Truth(), STAGES, len(lengths)).simulate(cutting.schedule, slices)
        events = [e._replace(run=MEASURED) for e in events_of(simulation.grid, simulation.intervals)]
        self.auto.took(events if self.auto.wants_events else [], slow(slices) * simulation.makespan)
        return slices

    @property
    def planned(self) -> list[int]:
        return [plan["seq_length"] for plan in self.auto.state()["plans"]]


def test_trials_then_a_plan_that_is_the_best_of_them_or_better() -> None:
    run = Run()
    tried = [len(run.step([1024])) for _ in range(MEASURING)]
    assert tried == [TRIALS[0], *TRIALS * ROUNDS] and run.planned == [1024]
    chosen = run.step([1024])
    times = StepTimes(Truth(), STAGES, 1)
    assert times.seconds("1f1b", chosen) <= min(times.seconds("1f1b", slice_lengths(1024, n)) for n in TRIALS) * (
        1 + 1e-9
    )


@pytest.mark.parametrize("lengths", [(1024, 512), (512, 1024)])
def test_lengths_that_alternate_are_both_planned_in_the_end(lengths: tuple[int, int]) -> None:
    run = Run()
    for _ in range(2 * MEASURING + 1):
        for length in lengths:
            run.step([length])
    run.step([512])
    assert sorted(run.planned) == [512, 1024] and run.meter.begun <= 2


def test_an_outlier_that_never_comes_again_is_given_up() -> None:
    run = Run()
    run.step([4096])
    for _ in range(PATIENCE + MEASURING):
        run.step([512])
    assert run.planned == [512]


def test_lengths_that_never_repeat_are_seldom_measured_and_always_run() -> None:
    run = Run()
    run.step([5000])
    for length in range(1000, 1000 + 4 * PATIENCE):
        assert sum(run.step([length])) == length
    assert run.planned == [] and run.meter.begun <= 5


def test_micro_batches_of_different_lengths_are_run_unmeasured_and_by_the_plan_when_there_is_one() -> None:
    run = Run()
    assert len(run.step([1024, 512])) == 8 and run.meter.begun == 0
    for _ in range(MEASURING):
        run.step([1024, 1024])
    assert len(run.step([1024, 512])) == len(run.step([1024, 1024]))


def test_another_number_of_micro_batches_is_planned_from_what_is_known() -> None:
    run = Run()
    for _ in range(MEASURING):
        run.step([1024])
    run.step([1024] * 4)
    assert run.planned == [1024, 1024] and run.meter.begun == 1


def test_a_trial_that_needs_more_memory_than_there_is_is_left_out() -> None:
    run = Run(Meter(limit=1700.0))  # bytes; a token takes one: two whole sequences are too many
    tried = [len(run.step([1024] * 8)) for _ in range(1 + ROUNDS * (len(TRIALS) - 1))]
    assert set(tried) == set(TRIALS) - {1} and run.planned == [1024]
    assert len(run.step([1024] * 8)) > 1


@pytest.mark.parametrize(("limit", "runs"), [(5000.0, {16}), (7000.0, {16, 8, 4}), (50000.0, set(TRIALS))])
def test_what_trials_really_took_says_which_are_left_out(limit: float, runs: set[int]) -> None:
    """A token takes one byte as the engine counts, in truth ten more while its slice is computed, and two of a cut sequence."""

    class Watching(Meter):
        def peaks(self) -> tuple[float, ...] | None:
            return tuple(use.total for use in memory_use(truth, "1f1b", slice_lengths(1024, self.run.tried[-1]), 1))

        run: Any = None

    truth = MemoryModel((StageMemory(activations=1.0, working=10.0, joined=2.0),) * STAGES)
    meter = Watching(limit)
    run = meter.run = Run(meter)
    run.tried = []
    cutting = run.auto.cutting
    run.auto.cutting = lambda *given: (found := cutting(*given), run.tried.append(found.slices))[0]
    while not run.planned:
        run.step([1024])
    takes = {n: max(use.total for use in memory_use(truth, "1f1b", slice_lengths(1024, n), 1)) for n in TRIALS}
    assert set(run.tried) == runs and all(takes[n] <= limit for n in runs)
    assert all(takes[n] > limit for n in TRIALS if n < min(runs)) or limit == 5000.0, "one measurement makes careful"
    assert meter.watched == len(run.tried)


def compared(run: Run, slow: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
    """The steps in which the plan is compared with the best trials."""
    return [run.step([1024], slow) for _ in range(comparison_steps(1 + RIVALS))]


def test_a_plan_that_disappoints_gives_way_to_the_best_trial() -> None:
    run = Run()
    for _ in range(MEASURING):
        run.step([1024])
    planned, *ran = compared(run, lambda slices: 1.0 if len(set(slices)) == 1 else 10.0)
    times = StepTimes(Truth(), STAGES, 1)
    seconds = {slice_lengths(1024, n): times.seconds("1f1b", slice_lengths(1024, n)) for n in TRIALS}
    best, second, *_ = sorted(seconds, key=seconds.__getitem__)
    assert planned not in seconds
    turns = [planned, best, second], [best, second, planned], [second, planned, best]
    assert ran == [*turns[0], *turns[1], *turns[2], *turns[0], *turns[1]]
    assert any("used instead" in line for line in run.lines)
    assert run.step([1024]) == best
    (kept,) = run.auto.state()["plans"]
    assert kept["predicted_step_s"] == pytest.approx(times.seconds("1f1b", best))
    assert kept["bubble"]["total"] == pytest.approx(times.simulate("1f1b", best).bubble, rel=0.05)
    assert len(kept["memory_bytes"]) == STAGES and kept["options"]


def test_a_lucky_trial_does_not_displace_a_plan_that_is_faster_in_the_same_steps() -> None:
    run = Run()
    for _ in range(MEASURING):
        run.step([1024], lambda slices: 0.9)  # the machine was faster then
    planned = compared(run, lambda slices: 1.0)[0]
    assert run.step([1024]) == planned and not any("used instead" in line for line in run.lines)
    assert any("predicted" in line for line in run.lines)


def test_ragged_steps_here_or_elsewhere_do_not_count_in_the_comparison() -> None:
    run = Run()
    for _ in range(MEASURING):
        run.step([1024, 1024])
    first = run.step([1024, 1024])
    for _ in range(comparison_steps(1 + RIVALS)):
        assert len(run.step([1024, 512])) == len(first)
        assert run.step([1024, 1024], elsewhere=[512]) == first
    assert not any("taken" in line for line in run.lines)
    for _ in range(comparison_steps(1 + RIVALS) - 1):
        run.step([1024, 1024])
    assert sum("taken" in line for line in run.lines) == 1


def test_replicas_with_other_lengths_measure_and_plan_together() -> None:
    """What is decided together is decided by the lengths in all pipelines, never by a replica's own."""
    here, there = Run(), Run()
    for _ in range(3 * MEASURING):
        for short, long in ((512, 1024), (1024, 1024)):
            here.step([short], elsewhere=[long])
            there.step([long], elsewhere=[short])
            assert here.planned == there.planned and here.meter.begun == there.meter.begun
    assert here.planned == [1024]


def test_two_lengths_are_compared_beside_each_other() -> None:
    run = Run()
    for length in (512, 1024):
        for _ in range(MEASURING):
            run.step([length])
    for _ in range(comparison_steps(1 + RIVALS)):
        run.step([512])
        run.step([1024])
    assert sum("taken" in line for line in run.lines) == 2


def taken(comparison: Comparison, seconds: dict[str, list[float]]) -> None:
    """Run it to its end; a cutting's steps take these seconds, the last for all further ones."""
    ended, seconds = False, {name: list(each) for name, each in seconds.items()}
    while not ended:
        left = seconds[comparison.cutting.schedule]
        ended = comparison.took(left.pop(0) if len(left) > 1 else left[0])


@pytest.mark.parametrize(
    ("plan_s", "rival_s", "winner"),
    [
        # the plan's first step does not count, nor does one lucky step of the rival
        ([9.0, 1.0, 1.0, 1.0], [1.1, 0.5, 1.1], "plan"),
        ([9.0, 0.9, 1.1, 1.1], [1.0, 1.0, 1.0], "plan"),  # slower in most turns, but not at its best
        ([9.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 1.1], "rival"),
        ([9.0, 1.0, 1.0, 1.0], [0.995], "plan"),
    ],
)
def test_a_rival_wins_by_the_median_turn_and_by_the_fastest_step(
    plan_s: list[float], rival_s: list[float], winner: str
) -> None:
    plan, rival = Cutting((8,), "plan"), Cutting((4, 4), "rival")
    comparison = Comparison(plan, [rival])
    fastest = min(plan_s[1:]), min(rival_s)
    taken(comparison, {"plan": plan_s, "rival": rival_s})
    assert (
        comparison.winner(1.01).schedule == winner and (comparison.fastest(plan), comparison.fastest(rival)) == fastest
    )


def test_a_plan_without_rivals_stays() -> None:
    comparison = Comparison(Cutting((8,), "plan"), [])
    taken(comparison, {"plan": [2.0, 1.0]})
    assert comparison.winner(1.01).schedule == "plan" and comparison.fastest(comparison.cuttings[0]) == 1.0


def test_a_plan_of_another_schedule_than_the_given_one_is_refused(tmp_path: Any) -> None:
    run = Run()
    for _ in range(MEASURING):
        run.step([1024])
    plan = Plan.from_dict(run.auto.state()["plans"][0])
    other = {"1f1b": "terapipe", "terapipe": "1f1b"}[plan.schedule]
    plan.save(tmp_path / "plan.json")
    assert Run(plan_path=str(tmp_path / "plan.json")).planned == [1024]
    with pytest.raises(ConfigError, match=r"token_pipeline\.plan_path: .* is for the schedule"):
        Run(plan_path=str(tmp_path / "plan.json"), schedule=other)


def test_a_plan_for_other_micro_batches_is_refused_and_one_for_other_lengths_is_said_to_be_of_no_use(
    tmp_path: Any,
) -> None:
    run = Run()
    for _ in range(MEASURING):
        run.step([1024])
    path = tmp_path / "plan.json"
    Plan.from_dict(run.auto.state()["plans"][0]).save(path)
    with pytest.raises(ConfigError, match=r"plan_path: .* is for 1 micro_batches, must be for this run's 4"):
        Run(plan_path=str(path), micro_batches=4)
    other = Run(plan_path=str(path))
    other.step([512])
    said = f"plan: {path} is for 1 micro-batches of 1024 tokens, not for these 1 of 512"
    used = f"plan: {compact(Plan.load(path).slices)} tokens, {Plan.load(path).schedule}, from {path}"
    assert other.lines == [used, said]


def measured(path: Any, **keys: Any) -> Run:
    """A run that has measured and planned, and written its measurements."""
    run = Run(measurements_path=str(path), **keys)
    for _ in range(MEASURING):
        run.step([1024] * 8)
    assert run.planned == [1024]
    return run


@pytest.mark.parametrize("known_by", ["trials", "measurements", "plan", "checkpoint"])
def test_what_is_planned_is_what_runs(tmp_path: Any, known_by: str) -> None:
    """Slices and schedule, from the first step on; no trial and no equal cut is like any of these plans."""
    run = measured(tmp_path / "costs.json")
    plan = Plan.from_dict(run.auto.state()["plans"][0])
    if known_by == "measurements":
        run = Run(measurements_path=str(tmp_path / "costs.json"))
    elif known_by != "trials":
        plan = dataclasses.replace(plan, slices=(600, 424), schedule="terapipe")
    if known_by == "plan":
        plan.save(tmp_path / "plan.json")
        run = Run(plan_path=str(tmp_path / "plan.json"), micro_batches=8)
    elif known_by == "checkpoint":
        run = Run()
        run.auto.load({"plans": [plan.to_dict()]})
    assert len(set(plan.slices)) > 1 and plan.slices != slice_lengths(1024, len(plan.slices))
    assert run.step([1024] * 8) == plan.slices
    assert run.schedule == plan.schedule
    if known_by in ("plan", "checkpoint"):  # nothing that it is compared with
        for _ in range(comparison_steps(1) + 1):
            assert (run.step([1024] * 8), run.schedule) == (plan.slices, plan.schedule)


def test_measurements_are_used_again_in_the_same_run_only(tmp_path: Any) -> None:
    path = tmp_path / "costs.json"
    measured(path)
    again = Run(measurements_path=str(path))
    again.step([1024] * 8)
    assert again.planned == [1024] and again.meter.begun == 0
    other = Run(measurements_path=str(path), device="another")
    said = f'plan: {path} was measured on another run: device "this one", here "another": measured again'
    assert other.lines == [said]
    other.step([1024] * 8)
    assert other.planned == [] and other.meter.begun == 1


def test_what_was_free_when_it_was_measured_is_a_limit_for_whoever_uses_the_measurements(tmp_path: Any) -> None:
    """A token takes one byte: two whole sequences are too many for 1,700, not for 1 GB."""
    path = tmp_path / "costs.json"
    limited = [{"path": path}, {"path": path, "memory_gb": 1.0}]
    run = Run(Meter(limit=1700.0), measurements_path=str(path))
    for _ in range(1 + ROUNDS * (len(TRIALS) - 1)):
        run.step([1024] * 8)
    assert run.planned == [1024]
    limits = []
    for keys in limited:
        again = Run(measurements_path=str(keys.pop("path")), **keys)
        again.step([1024] * 8)
        limits.append(again.auto.state()["plans"][0]["memory_limit_bytes"])
    assert limits == [1700.0, 1e9]


def test_a_limit_that_was_given_belongs_to_its_run(tmp_path: Any) -> None:
    path = tmp_path / "costs.json"
    measured(path, meter=Meter(limit=1e9), memory_gb=1.0)
    again = Run(measurements_path=str(path))
    again.step([1024] * 8)
    assert again.auto.state()["plans"][0]["memory_limit_bytes"] is None


@pytest.mark.parametrize("known_by", ["measurements", "plan", "checkpoint", "another number of micro-batches"])
def test_every_plan_is_compared_with_its_prediction(tmp_path: Any, known_by: str) -> None:
    run = measured(tmp_path / "costs.json")
    Plan.from_dict(run.auto.state()["plans"][0]).save(tmp_path / "plan.json")
    count = 8
    if known_by == "measurements":
        other = Run(measurements_path=str(tmp_path / "costs.json"))
    elif known_by == "plan":
        other = Run(plan_path=str(tmp_path / "plan.json"), micro_batches=8)
    elif known_by == "checkpoint":
        other = Run()
        other.auto.load(run.auto.state())
    else:
        other, count = run, 4
    for _ in range(comparison_steps(1)):
        other.step([1024] * count)
    (line,) = [line for line in other.lines if "taken" in line]
    assert float(line.split("(")[1].split("%")[0]) == pytest.approx(0.0, abs=5.0)


def test_a_sequence_that_the_measured_slices_cannot_make_is_measured() -> None:
    """So little memory that one cut was measured: slices of 64 tokens, of which 1000 cannot be made."""
    run = Run(Meter(limit=1100.0))
    while not run.planned:
        run.step([1024] * 8)
    assert {len(plan["slices"]) for plan in run.auto.state()["plans"]} == {16}
    before = len(run.lines)
    while len(run.planned) < 2:
        run.step([1000] * 8)
    assert run.planned == [1024, 1000] and run.meter.begun == 2
    assert run.lines[before] == (
        "plan: measured were slices of 64 to 64 tokens, up to 1024, not sequences of 1000: measured again"
    )


def test_no_slice_shorter_than_the_granularity_is_tried() -> None:
    run = Run(granularity=128)
    tried = {len(run.step([1024])) for _ in range(1 + ROUNDS * (len(TRIALS) - 1))}
    assert tried == set(TRIALS) - {16} and run.planned == [1024]
    assert all(length % 128 == 0 for length in run.step([1024])[:-1])


def test_measuring_costs_less_than_ten_steps() -> None:
    """Over the best of equal slices, in a step of 32 ms on two stages: trials, and the comparison's rivals."""
    run, times = Run(), StepTimes(Truth(), STAGES, 1)
    best = min(times.seconds("1f1b", slice_lengths(1024, n)) for n in TRIALS)
    lost = sum(
        times.seconds("1f1b", run.step([1024])) / best - 1 for _ in range(MEASURING + comparison_steps(1 + RIVALS))
    )
    assert lost < 10


def test_too_little_memory_names_the_least_that_any_trial_takes() -> None:
    """One micro-batch is held whole however it is cut, and cut it keeps K and V besides."""

    class Kept(Meter):
        def end(self) -> tuple[MemoryModel | None, float | None]:
            return MemoryModel((StageMemory(activations=1e6, keys_values=1e6),) * STAGES), 1e9

    run = Run(Kept(), memory_gb=1.0)
    with pytest.raises(ConfigError, match=r"token_pipeline\.memory_gb: got 1, must be at least 1\.024.*unsliced"):
        for _ in range(MEASURING):
            run.step([1024])


def test_a_limit_from_the_file_is_called_by_its_field(tmp_path: Any) -> None:
    path = tmp_path / "costs.json"
    measured(path, meter=Meter(limit=1e9))
    data = json.loads(path.read_text())
    data["measured_on"]["memory_limit_bytes"] = 10.0
    path.write_text(json.dumps(data))
    again = Run(measurements_path=str(path))
    with pytest.raises(ConfigError, match=r"costs\.json: measured_on\.memory_limit_bytes, in GB: got 1e-08, must be"):
        again.step([1024] * 8)


def test_a_plan_that_takes_more_than_memory_gb_is_refused_or_not_used(tmp_path: Any) -> None:
    run = measured(tmp_path / "costs.json", meter=Meter(limit=1e9))
    state = run.auto.state()
    Plan.from_dict(state["plans"][0]).save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"plan_path: .*plan\.json is for \S+e-06 GB, must be for memory_gb, 1e-08"):
        Run(plan_path=str(tmp_path / "plan.json"), micro_batches=8, memory_gb=1e-8)
    other = Run(memory_gb=1e-8)
    other.auto.load(state)
    line = (other.lines or [""])[-1]
    assert other.planned == [] and line.endswith("e-06 GB and not for memory_gb, 1e-08: not used")


def test_a_checkpoint_s_plan_is_said_to_be_used_or_not(tmp_path: Any) -> None:
    state = measured(tmp_path / "costs.json").auto.state()
    (plan,) = state["plans"]
    other_schedule = {"1f1b": "terapipe", "terapipe": "1f1b"}[plan["schedule"]]
    for keys, ending, used in [
        ({}, "from the checkpoint, for 8 micro-batches of 1024 tokens", [1024]),
        (
            {"schedule": other_schedule},
            f'is for the schedule "{plan["schedule"]}" and not for the given one: not used',
            [],
        ),
    ]:
        run = Run(**keys)
        run.auto.load(state)
        assert run.planned == used
        assert run.lines and run.lines[-1].endswith(ending)
    run.auto.load({"plans": [{**plan, "schedule": other_schedule}]})
    run.auto.load({"plans": [{**plan, "schedule": other_schedule}]})
    assert run.lines[-1].endswith("from the checkpoint, is not used: there is another one")


def test_differences_are_named_by_their_place() -> None:
    there = {"a": 1, "stages": [{"n": 1, "d": "x"}, {"n": 2, "d": "x"}], "gone": True, "list": [1, 2]}
    here = {"a": 1, "stages": [{"n": 1, "d": "x"}, {"n": 3, "d": "x"}], "new": None, "list": [1]}
    assert differences(there, there) == []
    assert differences(there, here) == ["stages[1].n 2, here 3", "list [1, 2], here [1]", "gone true, here null"]

"""The choice of a plan: against all plans there are, under memory, for placements, and as a file."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.autotune.run_info import RunInfo, mismatch
from ds_terapipe.plan import improve
from ds_terapipe.plan.choose import can_choose, choose
from ds_terapipe.plan.costs.cost import MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.memory import MemoryModel, StageMemory, memory_use
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.parts import advice_on_two_stages
from ds_terapipe.plan.placed import placement_text
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Option, Plan, compact, option_name
from ds_terapipe.plan.slices import Cuts, best_cut, slice_times
from ds_terapipe.schedule import NAMES, Op, Placement, validate
from tests.plan.costs import ExampleCost, compositions
from tests.schedule import strategies

lengths_of_slices = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@st.composite
def costs(draw, count=None):
    return ExampleCost(
        draw(st.lists(st.floats(0.2, 3.0), min_size=count or 1, max_size=count or 4)),
        fixed=draw(st.sampled_from([0.0, 1e-3, 1e-2])), attention=draw(st.sampled_from([0.0, 1e-7, 1e-6])),
        weights=draw(st.sampled_from([0.0, 1e-5])), link=draw(st.sampled_from([0.0, 1e-6, 3e-5])),
        rough=draw(st.sampled_from([0.0, 1e-3])),
    )  # fmt: skip


def memory(stages):
    return MemoryModel(tuple(StageMemory(9.0 + s, 1.0, 2.0, 3.0, 1.0, 1.0) for s in range(stages)))


@settings(deadline=None, max_examples=80)
@given(strategies.placements(), strategies.names_and_late, lengths_of_slices, st.integers(1, 4), st.booleans(), st.data())
def test_step_times_are_the_simulators_on_any_placement(placement, schedule, lengths, micro_batches, once, data):
    times = StepTimes(data.draw(costs(len(placement.stages))), placement, micro_batches, once)
    result = times.simulate(schedule, lengths)
    validate(result.grid, [len(lengths)] * micro_batches, schedule, placement)
    assert len(result.places) == placement.places
    assert times.seconds(schedule, lengths) == pytest.approx(result.makespan, rel=1e-12)
    assert times.bound(lengths) <= result.makespan * (1 + 1e-12)


@pytest.mark.parametrize("lengths", [[256], [100, 90, 66]])
@pytest.mark.parametrize("schedule", [*NAMES, "late"])
def test_weight_gradients_are_work_of_every_stage_whether_cut_or_not(schedule, lengths):
    cost = ExampleCost([1.0, 2.0, 1.5], weights=2e-5)
    times = StepTimes(cost, 3, 5, weights_once=True)
    result = times.simulate(schedule, lengths)
    assert sum(a.op is Op.WEIGHT_GRADIENTS for a in result.grid[1]) == (
        0 if len(lengths) == 1 else {"late": 20, "zero_bubble": 13}.get(schedule, 5)
    )
    spans = zip(lengths, itertools.accumulate([0, *lengths]), strict=False)
    passes = sum(3 * cost.forward(1, length, start) for length, start in spans)
    assert result.places[1].busy == pytest.approx(5 * (passes + 2 * 2e-5 * 256), rel=1e-6)


@pytest.mark.parametrize("schedule", [*NAMES, "late"])
def test_operands_of_weight_gradients_are_held_until_their_action(schedule):
    """100 + 60 tokens of 3 micro-batches: the last is there, and of the others what the order makes later."""
    model = MemoryModel((StageMemory(weight_gradients=1.0),) * 2)
    uses = memory_use(model, schedule, [100, 60], 3, weights_once=True)
    held = {"late": [360.0] * 2, "zero_bubble": [160.0, 260.0]}
    assert [use.total for use in uses] == held.get(schedule, [160.0] * 2)


@pytest.mark.parametrize(("placement", "micro_batches", "lengths", "costs", "says"), [
    (Placement.of([0, 0]), 1, (8, 8), {"weights": 1e-3}, "one place waits for no other"),
    (Placement.plain(3), 12, (8, 8), {"weights": 1e-3}, "12 micro-batches fill 3 places without"),
    (Placement.plain(3), 11, (8, 8), {"weights": 1e-3}, ""),
    (Placement.plain(3), 2, (8, 8), {}, "weight gradients are not made apart"),
    (Placement.plain(3), 2, (16,), {"weights": 1e-3}, "weight gradients are not made apart"),
    (Placement.plain(3), 2, (8, 8), {"weights": 1e-6}, "weight gradients are 0% of the work"),
    (Placement.v(3), 2, (8, 8), {"link": 1e-2}, "messages take longer than all other waits"),
    (Placement.v(3), 2, (8, 8), {"link": 1e-6}, ""),
])  # fmt: skip
def test_a_search_is_left_out_where_it_saves_nothing(placement, micro_batches, lengths, costs, says):
    times = StepTimes(ExampleCost([1.0] * len(placement.stages), **costs), placement, micro_batches, "weights" in costs)
    assert improve.why_not(times, "1f1b", lengths) == says


@pytest.mark.parametrize(("where", "factors", "micro_batches", "weights", "schedule"), [
    (None, [1.0] * 4, 2, 1e-2, "zero_bubble"), (None, [1.0] * 4, 2, 0.0, "terapipe"),
    (Placement.interleaved(2, 2), [2.0, 1.0, 1.0, 3.0], 1, 1e-3, "interleaved"),
    (Placement.v(2), [1.0, 2.0, 1.0, 2.0], 2, 0.0, "searched"),
])  # fmt: skip
def test_the_order_is_that_for_the_placement_and_its_weight_gradients(where, factors, micro_batches, weights, schedule):
    cost, search_s = ExampleCost(factors, 1e-3, 1e-3, 1e-4, weights), float(where is not None)
    plan = choose(cost, Request(48, where or 4, micro_batches, weights_once=weights > 0, search_s=search_s))
    assert plan.schedule == schedule and Plan.from_dict(plan.to_dict()) == plan
    assert not any("W" in line for line in plan.order or ()) or weights


def fits(request, schedule, lengths):
    uses = memory_use(request.memory, schedule, lengths, request.micro_batches, request.weights_once)
    return request.memory_gb is None or max(use.total for use in uses) <= request.memory_gb * 1e9


@settings(deadline=None, max_examples=20)
@given(costs(), st.integers(1, 6), st.integers(0, 7), st.integers(1, 3), st.booleans(), st.floats(0.0, 1.2))
def test_small_cases_fit_and_are_near_the_best_of_all_plans(cost, quanta, rest, micro_batches, weights_once, room):
    stages, total = len(cost.factors), quanta * 8 + rest
    times = StepTimes(cost, stages, micro_batches, weights_once)
    request = Request(total, stages, micro_batches, memory=memory(stages), weights_once=weights_once)
    most = max(use.total for use in choose(cost, dataclasses.replace(request, schedule="terapipe")).memory)
    request = dataclasses.replace(request, memory_gb=room * most / 1e9 or None)
    cuts = [Cuts(total, 8).lengths(counts) for counts in compositions(quanta)]
    if not cost._rough:  # smooth costs as they are measured
        best = min(times.seconds(name, c) for name in NAMES for c in cuts)
        assert choose(cost, dataclasses.replace(request, memory_gb=None)).step_s <= best * 1.1
    feasible = [times.seconds(name, c) for name in NAMES for c in cuts if fits(request, name, c)]
    try:
        found = choose(cost, request)
    except ConfigError:
        assert not any(fits(request, name, [total]) for name in NAMES)
        return
    assert fits(request, found.schedule, found.slices)
    assert found.step_s == pytest.approx(times.seconds(found.schedule, found.slices))
    # lengths that are equal but no multiples of the granularity are allowed as well, and may be better still
    if all(length % 8 == 0 for length in found.slices[:-1]):
        assert found.step_s >= min(feasible) * (1 - 1e-9)


def test_a_long_sequence_is_cut_at_1024_places_at_most_and_a_short_one_searched_whole():
    plan = choose(ExampleCost([1.0, 1.2]), Request(1 << 15, 2, 1))
    assert len(plan.slices) > 2 and len(set(plan.slices)) > 1 and all(length % 32 == 0 for length in plan.slices)
    assert choose(ExampleCost([1.0] * 4), Request(7, Placement.interleaved(2, 2), 1, search_s=0.01)).slices == (7,)
    times = (request := Request(48, 3, 2)).times(ExampleCost([1.0] * 3, attention=1e-5))
    assert {*improve.other_cuts(times, request, (16,) * 3)} == {(24, 16, 8), (32, 8, 8)}


@pytest.mark.parametrize(("schedule", "micro_batches", "factors"), [
    ("auto", 4, [1.0, 1.0, 1.0, 2.0]), ("terapipe", 1, [1.0, 1.0, 1.0, 2.0]), ("1f1b", 4, [1.0] * 4),
])  # fmt: skip
def test_never_slower_than_equal_slices_or_terapipes_optimum(schedule, micro_batches, factors):
    cost, stages = ExampleCost(factors, attention=2e-8, link=1e-7, rough=5e-4), len(factors)
    found, times = choose(cost, Request(1000, stages, micro_batches, schedule)), StepTimes(cost, stages, micro_batches)
    uncut = StepTimes(cost, stages, 1)
    assert uncut.bound([1000]) == pytest.approx(uncut.seconds("1f1b", [1000])), "there and back, nothing beside it"
    for name in NAMES if schedule == "auto" else (schedule,):
        for count in range(1, 17):
            equal = [1000 // count + (i < 1000 % count) for i in range(count)]
            assert found.step_s <= times.seconds(name, equal) * (1 + 1e-12)
    if schedule != "1f1b":
        cuts = Cuts(1000)
        optimum = best_cut(slice_times(cost, stages, cuts), (stages - 1) / micro_batches)
        assert found.step_s <= times.seconds("terapipe", cuts.lengths(optimum.counts)) * (1 + 1e-12)
    assert schedule == "auto" or {option.schedule for option in found.options} == {found.schedule} == {schedule}


def test_what_does_not_fit_says_what_would():
    cost = ExampleCost([1.0] * 4)
    request = Request(128, 4, 4, memory=MemoryModel((StageMemory(activations=1e6),) * 4), memory_gb=0.1)
    with pytest.raises(ConfigError, match=r"memory_gb: got 0\.1, must be at least 0\.\d+: .*stage 0 takes") as raised:
        choose(cost, request)
    (thriftiest,) = (name for name in NAMES if f" {name}, " in str(raised.value))
    assert thriftiest != "terapipe"  # which holds all of a step
    need = float(str(raised.value).split("at least ")[1].split(":")[0])
    assert choose(cost, dataclasses.replace(request, memory_gb=need)).schedule == thriftiest
    with pytest.raises(ConfigError):
        choose(cost, dataclasses.replace(request, memory_gb=need - 0.002))


def test_a_sequence_that_cannot_be_cut_as_measured_is_an_error_of_one_line():
    true = ExampleCost([1.0, 1.0])
    samples = [Sample(63, c, true.forward(0, 63, c), true.backward(0, 63, c)) for c in range(0, 1008, 63)]
    cost = MeasuredCost([StageCost(samples)] * 2, [[(63, 0.0)]])
    known, unknown = (Request(total, 2, 2, min_length=63, max_slice=63) for total in (1008, 1000))  # 63 is no multiple of 8
    assert can_choose(cost, known) and choose(cost, known).slices == (63,) * 16
    assert not can_choose(cost, unknown)
    with pytest.raises(ConfigError, match="length: got 1000, must be one that can be cut into slices of 63 to 63"):
        choose(cost, unknown)


@pytest.fixture(scope="module")
def plan():
    request = Request(512, 4, 4, memory=memory(4), memory_gb=1.0, weights_once=True, about={"model": "gpt"})
    return choose(ExampleCost([1.0] * 4, fixed=1e-4, link=1e-6), request)


def test_a_saved_plan_is_the_same(plan, tmp_path):
    plan.save(tmp_path / "sub" / "plan.json")
    assert Plan.load(tmp_path / "sub" / "plan.json") == plan
    (alone := dataclasses.replace(plan, options=())).save(tmp_path / "alone.json")
    assert Plan.load(tmp_path / "alone.json") == alone
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["plan.json"]
    with pytest.raises(ConfigError, match="cannot be written"):
        plan.save(tmp_path / "sub")
    assert {path.name for path in tmp_path.iterdir()} == {"sub", "alone.json"}  # and nothing half written


def test_a_plan_prints_what_was_chosen_and_what_lost(plan):
    assert compact((512, 512, 512, 496, 16)) == "512x3, 496, 16"
    assert f"{plan.schedule}, {len(plan.slices)} slices" in plan.lines()[0]
    assert all(option.step_s >= plan.step_s for option in plan.losing if option.fits)
    printed = "\n".join(plan.lines()).split("other options:")[1].splitlines()[1:]
    assert len(printed) == 10 and len(plan.losing) > 10
    for option, line in zip(plan.losing, printed, strict=False):
        assert option_name(option.schedule, option.slices) in line and f"{1e3 * option.step_s:.1f} ms" in line
        assert f"{option.step_s / plan.step_s:.2f}x" in line and ("does not fit" in line) == (not option.fits)
    assert all("  1.00x  " in line for line in dataclasses.replace(plan, step_s=0.0).lines()[-10:])
    step, _, memory = plan.summary()
    assert "of 1.000 GB, activations " in memory and f"; {option_name(*plan.losing[0][:2])} " in step and "unsliced " in step
    equal = dataclasses.replace(plan, options=[Option(name, (512,), 2.0) for name in NAMES]).summary()[0]
    assert f"; {NAMES[0]}, unsliced 2.000 s" in equal and equal.count("2.000 s") == 1
    assert {*itertools.product(NAMES, (1, 2, 4, 8, 16))} <= {(o.schedule, len(o.slices)) for o in plan.options}


FOUR = {"places": [0, 0, 1, 1], "boundaries": [0, 1, 2, 3, 4], "forward_only": 1}
PLACES = "placement: got .*, must be the places of 4 stages"


@pytest.mark.parametrize(("change", "says"), [
    (lambda d: json.dumps(d)[:-30], "is no JSON .*must be a plan and whole"),
    (lambda d: d.update(format="x"), 'format: got "x", must be "ds_terapipe plan 1"'),
    (lambda d: d.pop("slices"), "slices: missing, must be a list of positive integers"),
    (lambda d: d.update(slices=[256, 255]), "slices: got .*add up to seq_length, 512, not 511"),
    (lambda d: d["memory_bytes"][2].update(messages=-1), r"memory_bytes\[2\]\.messages: got -1"),
    (lambda d: d["options"][0].update(slices=[1]), r"options\[0\]\.slices: got \[1\], must be lengths"),
    (lambda d: d.update(schedule="searched", order=["0F0.0"] * 4), "order: got no backward pass, .*, use an order that can run"),
    (lambda d: d.update(placement={**FOUR, "places": [0] * 3}), PLACES),
    (lambda d: d.update(placement={**FOUR, "boundaries": [0, 1, 1, 3, 4]}), PLACES),
    (lambda d: d.update(placement={**FOUR, "forward_only": None}), PLACES),
])  # fmt: skip
def test_a_broken_plan_is_one_line_with_file_and_field(plan, tmp_path, change, says):
    path, data = tmp_path / "plan.json", plan.to_dict()
    other = change(data)
    path.write_text(other if isinstance(other, str) else json.dumps(data))
    with pytest.raises(ConfigError, match=says) as raised:
        Plan.load(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


DIVIDED, PLAIN = Placement.of([0, 0, 1], [0, 2, 4, 8], 1), Placement.plain(3)
FACTORS = (3.0, 1.5, 2.0)
OPTIONS = {"attention": 1e-7, "link": 1e-6, "weights": 1e-5}


@pytest.mark.parametrize(("boundaries", "micro_batches", "room", "use"), [
    ([0, 2, 4, 6, 8], 1, 1.0, '"stages_per_place": 2'), ([0, 2, 4, 6, 8], 1, 1e-5, ""), ([0, 2, 4, 7, 8], 1, 1.0, ""),
    ([0, 2, 4, 6, 8], 32, 1.0, ""),
])  # fmt: skip
def test_two_stages_on_a_place_are_advised_where_they_pay_and_fit(boundaries, micro_batches, room, use):
    cost, memory = ExampleCost((1.0,) * 4, **OPTIONS), MemoryModel((StageMemory(activations=1.0, received=30.0),) * 4)
    request = Request(256, Placement.plain(4, boundaries), micro_batches, memory=memory, memory_gb=room)
    plan = choose(cost, request)
    found = advice_on_two_stages(cost, request, plan)
    assert use in found and bool(use) == bool(found), (found, max(use.total for use in plan.memory))
    request, plan = (dataclasses.replace(each, **{key: 1e3}) for each, key in ((request, "overhead_s"), (plan, "step_s")))
    assert advice_on_two_stages(cost, request, plan) == ""  # no order saves of what follows the last action


def placed(placement=DIVIDED):
    memory = MemoryModel((StageMemory(activations=1.0),) * 3)
    return choose(ExampleCost(FACTORS, **OPTIONS), Request(256, placement, 2, memory=memory, memory_gb=1))


def test_a_plan_says_where_its_stages_are(tmp_path):
    (made := placed()).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    text = "\n".join(made.lines())
    assert "for 3 stages on 2 places, 2 micro-batches" in text and "memory of place 0, the fullest" in text
    assert [use["place"] for use in made.to_dict()["memory_bytes"]] == [0, 1]
    assert "placement" not in placed(PLAIN).to_dict() and "for 3 stages, 2 micro" in "\n".join(placed(PLAIN).lines())


@pytest.mark.parametrize(("theirs", "ours", "alike"), [
    (DIVIDED, DIVIDED, True), (PLAIN, DIVIDED, False), (DIVIDED, Placement.of([0, 0, 1], None, 2), False),
    (DIVIDED, Placement.of([0, 0, 1], [0, 1, 4, 8], 1), True),  # a plan is of places, whatever their layers
])  # fmt: skip
def test_a_plan_is_for_its_own_placement(theirs, ours, alike):
    found = mismatch(placed(theirs), RunInfo(ours, 1, 2, False, False), "auto", None)
    assert (found and found[:2]) == (None if alike else (placement_text(theirs), f"this run's {placement_text(ours)}"))

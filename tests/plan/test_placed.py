"""Plans for placements: frozen layers that share a place with others take what they take forward, and no more."""

from __future__ import annotations

import json

import pytest

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.autotune.run_info import RunInfo, mismatch
from ds_terapipe.plan import Cuts, MeasuredCost, MemoryModel, Plan, Request, Sample, StageCost, StageMemory, choose
from ds_terapipe.plan.placed import placement_text
from ds_terapipe.plan.slices import slice_times
from ds_terapipe.schedule import Placement
from tests.plan.costs import ExampleCost

DIVIDED = Placement.of([0, 0, 1], [0, 2, 4, 8], 1)
FACTORS = (3.0, 1.5, 2.0)


class Joined(ExampleCost):
    """The same as two stages, the first of which has the frozen layers' forward in its own."""

    def __init__(self, frozen, factors, **options):
        super().__init__(factors, **options)
        self._frozen = frozen / factors[0]

    def forward(self, stage, length, context):
        return super().forward(stage, length, context) * (1 + self._frozen * (stage == 0))

    def backward(self, stage, length, context):
        return 2 * super().forward(stage, length, context)


OPTIONS = {"attention": 1e-7, "link": 1e-6, "weights": 1e-5}


# the first place is slower, or the second
@pytest.mark.parametrize(("factors", "once"), [(FACTORS, False), (FACTORS, True), ((1.0, 1.0, 2.0), False)])
def test_a_divided_place_takes_what_its_parts_take(factors, once):
    parts, joined = ExampleCost(factors, **OPTIONS), Joined(factors[0], factors[1:], **OPTIONS)
    got = choose(parts, Request(256, 3, 3, placement=DIVIDED, weights_once=once))
    wanted = choose(joined, Request(256, 2, 3, weights_once=once))
    assert (got.schedule, got.slices) == (wanted.schedule, wanted.slices)
    assert got.step_s == pytest.approx(wanted.step_s, rel=1e-12)
    assert [option[:2] for option in got.options] == [option[:2] for option in wanted.options]
    assert got.placement == DIVIDED and wanted.placement is None
    cuts = Cuts.of(96, granularity=8, min_length=8)
    assert slice_times(parts, DIVIDED, cuts) == pytest.approx(slice_times(joined, 2, cuts), rel=1e-12)


def test_memory_that_is_too_little_names_the_place():
    memory = MemoryModel((StageMemory(keys_values=1e6), StageMemory(activations=1e7), StageMemory(activations=2e7)))
    request = Request(256, 3, 2, placement=DIVIDED, memory=memory, memory_gb=1e-3)
    with pytest.raises(ConfigError, match="that is what place 1 takes with the thriftiest plan"):
        choose(ExampleCost(FACTORS, **OPTIONS), request)


def plan(placement=DIVIDED):
    memory = MemoryModel((StageMemory(activations=1.0),) * 3)
    return choose(
        ExampleCost(FACTORS, **OPTIONS), Request(256, 3, 2, placement=placement, memory=memory, memory_gb=1.0)
    )


def test_a_plan_says_where_its_stages_are(tmp_path):
    made = plan()
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    text = "\n".join(made.lines())
    assert "for 3 stages on 2 places, 2 micro-batches" in text and "memory of place 0, the fullest" in text
    assert [use["place"] for use in made.to_dict()["memory_bytes"]] == [0, 1]
    assert "placement" not in plan(None).to_dict() and "for 3 stages, 2 micro" in "\n".join(plan(None).lines())


@pytest.mark.parametrize(
    "change",
    [
        {"places": [0, 0]}, {"places": [0, 0, 2]}, {"places": [0, 0, "1"]}, {"boundaries": [0, 2, 2, 8]},
        {"forward_only": 4}, {"forward_only": None},
    ],
)  # fmt: skip
def test_a_broken_placement_is_one_line(tmp_path, change):
    data = plan().to_dict()
    data["placement"].update(change)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"plan\.json: placement: got .*, must be the places of 3 stages"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("theirs", "ours", "alike"),
    [
        (DIVIDED, DIVIDED, True),
        (DIVIDED, Placement.of([0, 0, 1], [0, 1, 4, 8], 1), True),  # a plan is of places, whatever their layers
        (None, Placement.plain(3, [0, 2, 4, 8]), True),
        (None, DIVIDED, False),
        (DIVIDED, None, False),
        (DIVIDED, Placement.of([0, 0, 1], None, 2), False),
        (Placement.plain(3, None, 1), None, False),
    ],
)
def test_a_plan_is_for_its_own_placement(theirs, ours, alike):
    found = mismatch(plan(theirs), RunInfo(3, 1, 2, False, False, placement=ours), "auto", None)
    assert (found is None) == alike
    if found is not None:
        assert found[:2] == (placement_text(theirs), f"this run's {placement_text(ours)}")


def test_measurements_say_where_the_stages_were(tmp_path):
    path, stages = tmp_path / "costs.json", [StageCost([Sample(8, 0, 1.0, 2.0)]) for _ in range(3)]
    about = {"placement": {"places": [0, 0, 1], "boundaries": [0, 2, 4, 8], "forward_only": 1}}
    MeasuredCost(stages, [[(8, 0.0)]] * 2, measured_on=about).save(path)
    assert MeasuredCost.load(path).placement == DIVIDED
    assert MeasuredCost(stages, [[(8, 0.0)]] * 2).placement is None
    about["placement"]["places"] = [0]
    MeasuredCost(stages, [[(8, 0.0)]] * 2, measured_on=about).save(path)
    with pytest.raises(ConfigError, match=r"costs\.json: measured_on\.placement: got "):
        MeasuredCost.load(path)

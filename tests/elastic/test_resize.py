"""Policies choose a shape for a step, a shape divides the batch and takes time, and some are refused at the beginning."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.elastic.moves.start import places_of
from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.resize import Shape, balanced, check, wanted_stages
from ds_terapipe.elastic.settings import ResizeSettings, parse
from ds_terapipe.elastic.shapes.predict import LayerCosts, Machine, Prediction, choose, predict
from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule import Op, Placement, complete, order
from ds_terapipe.schedule.replay import replay


def wanted(policy: Any, step: int = 0, present: int = 4, start: int = 4, sizes: Any = (1,) * 8, frozen: int = 0) -> int:
    return wanted_stages(ResizeSettings(policy=policy), step, present, start, sizes, frozen)


def test_off_stays_and_a_listed_step_holds_from_that_step_on() -> None:
    assert wanted("off", step=100, frozen=7) == 4
    assert [wanted([[3, 2], [5, 1], [9, 4]], step=step) for step in range(11)] == [4, 4, 4, 2, 2, 1, 1, 1, 1, 4, 4]


def test_halve_goes_by_the_compression_test_and_never_grows() -> None:
    sizes = [6, 1, 1, 1, 1, 1, 1, 2]  # on four stages, the largest has 6: the embedding
    assert [wanted("halve", sizes=sizes, frozen=frozen) for frozen in range(8)] == [4, 2, 2, 1, 1, 1, 1, 1]
    # a quarter of even layers each: half the stages when half is frozen, one when three quarters are
    assert [wanted("halve", frozen=frozen) for frozen in range(8)] == [4, 4, 4, 4, 2, 2, 1, 1]
    assert wanted("halve", present=2, frozen=4) == 2 and wanted("halve", present=1) == 1
    assert wanted("halve", present=6, start=6, sizes=(1,) * 6, frozen=5) == 3  # stops at an odd number


def smallest_maximum(sizes: Sequence[float], stages: int) -> float:
    cuts = itertools.combinations(range(1, len(sizes)), stages - 1)
    return min(max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cut, len(sizes)))) for cut in cuts)


@given(st.data(), st.integers(1, 7))
def test_balanced_is_the_best_there_is(data: Any, entries: int) -> None:
    costs = st.lists(st.integers(0, 9), min_size=entries, max_size=entries)
    forward, backward = data.draw(costs), data.draw(costs)
    frozen, stages = data.draw(st.integers(0, entries)), data.draw(st.integers(1, entries))
    total = [f + (b if index >= frozen else 0) for index, (f, b) in enumerate(zip(forward, backward, strict=True))]
    parts = balanced(forward, backward, frozen, stages)
    assert parts[0] == 0 and parts[-1] == entries and len(parts) == stages + 1
    assert all(a < b for a, b in itertools.pairwise(parts))
    assert max(sum(total[a:b]) for a, b in itertools.pairwise(parts)) == smallest_maximum(total, stages)


def test_frozen_entries_cost_their_forward_and_parts_stay_where_others_would_gain_little() -> None:
    ones, twos = [1.0] * 8, [2.0] * 8
    for frozen, stages, parts in ((0, 2, (0, 4, 8)), (4, 2, (0, 5, 8)), (7, 2, (0, 5, 8)), (3, 1, (0, 8))):
        assert balanced(ones, twos, frozen, stages) == parts  # of 4: 4 + 3 and 9, not 4 and 12
    assert balanced(ones[:6], twos[:6], 0, 2, present=(0, 3, 6)) == (0, 3, 6)
    assert balanced(ones[:6], twos[:6], 3, 2, present=(0, 3, 6)) == (0, 4, 6)  # 6 and 6, not 3 and 9
    for costs, present, parts in (
        ([1.0, 1.0, 1.0, 1.0, 1.04, 1.0], (0, 4, 6), (0, 3, 6)),
        ([1.0, 0.9, 0.98], (0, 2, 3), (0, 2, 3)),  # 1.88 instead of 1.9
    ):
        assert balanced(costs, [0.0] * len(costs), 0, 2, present=present) == parts


def checked(block: Any, trainable: Any = (True,) * 6, stages: int = 4, processes: int = 4, **given: Any) -> None:
    options = {"tensor": 1, "batch": 8, "micro": 1, "data": True, "batches": (), **given}
    check(parse({"elastic_pipeline": block}), ModelLayers(trainable), stages, processes, *options.values())


SCHEDULE = {"policy": "schedule", "frozen_layers": [[1, 2], [9, 5]]}
HEAD = "(the head, the last entry with trained parameters, is never frozen)"


@pytest.mark.parametrize(("block", "given", "message"), [
    ({"freeze": SCHEDULE}, {"trainable": (True,) * 5},
     f"elastic_pipeline.freeze.frozen_layers: got 5, must be at most 4 entries {HEAD}, use at most 4"),
    ({"freeze": {"policy": "alpha"}}, {"data": False},
     'elastic_pipeline.freeze.interval: got "epoch", must be a number of steps where there is no training_data, use e.g. '
     '"interval": 1000'),
    ({"resize": {"policy": [[1, 4]]}}, {"stages": 2, "tensor": 2},
     "got 4, must be a number of stages that times the tensor-parallel size (2) divides the 4 processes, use 1 or 2"),
    ({"resize": {"policy": "halve"}}, {"batch": 6}, "replicas, here 4, divide the batch of 6 samples, use 2 or 4"),
    ({"resize": {"policy": [[5, 8]]}}, {"processes": 8}, "got 8, must be at most the entries of the layer list, 6"),
    ({"resize": {"policy": [[1, 2]]}}, {"batches": ((8, 1), (6, 2), (3, 1))},
     "got 2, must be a number of stages whose replicas, here 2, divide the batch of 3 samples, use 4"),
])  # fmt: skip
def test_what_cannot_run_is_refused_at_the_start(block: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(block, **given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("places", "each", "slices"), [(2, 1, 4), (2, 2, 4), (4, 2, 2), (4, 3, 1)])
def test_a_predicted_step_takes_as_long_as_its_actions(places: int, each: int, slices: int) -> None:
    count, placement, micro_batches = places * each, Placement.interleaved(places, each), 2 * places
    grid = complete(order("interleaved", placement, [slices] * micro_batches), placement)
    took = replay(grid, lambda action: (1 + (action.op is Op.BACKWARD)) / slices, placement=placement)
    ones, on = (1.0,) * count, [stage.place for stage in placement.stages]
    twice, four = (2.0,) * count, (4.0,) * count  # of a micro-batch of two
    costs = LayerCosts(2, twice, four, ones, ones, ones, twice, tuple(range(count)))
    found = predict(Shape(places, 1, 1, micro_batches), costs, Machine(0, 0, 0), 0, slices, places=on)
    assert found.seconds == pytest.approx(max(row[-1].end for row in took.intervals))
    live = sum(min(micro_batches, count - stage) for stage in range(0, count, places))  # on the first place, the fullest
    assert found.parts == tuple(range(count + 1)) and found.peak_bytes == 2 * each + live
    for replicas, summed in ((1, 0.0), (2, 7 + 3 * each)):  # a ring of two sends half of the bytes twice
        more = predict(Shape(places, replicas, 1, micro_batches), costs, Machine(3, 7, 11), 0, slices, places=on)
        assert more.seconds - found.seconds == pytest.approx(summed + 11 * each)


def test_a_place_has_fewer_stages_where_there_are_few_layers() -> None:
    settings = TokenPipelineConfig(slices=2, stages_per_place=2, placement="v")
    assert [places_of(places, settings, layers=6) for places in (1, 2, 4)] == [(0,), (0, 1, 1, 0), (0, 1, 2, 3)]


def prediction(stages: int, seconds: float, peak: float = 0.0) -> Prediction:
    return Prediction(Shape(stages, 4 // stages, 1, stages), (0, 4), seconds, peak)


NOW, HALF, ONE = prediction(4, 10.0, 5.0), prediction(2, 7.0, 8.0), prediction(1, 6.0, 12.0)


# one stage does not fit; nothing does, and what is there stays; the change takes more than it saves, 80 s
@pytest.mark.parametrize(("most", "left", "taken"), [
    (None, math.inf, ONE), (10.0, math.inf, HALF), (4.0, math.inf, NOW), (None, 100.0, ONE), (None, 20.0, NOW),
])  # fmt: skip
def test_the_fastest_that_fits_and_pays_is_taken(most: float | None, left: float, taken: Prediction) -> None:
    found = choose(NOW, [ONE, HALF], most, left, 100.0)
    assert found.taken == taken
    assert set(found.too_large) == {each for each in (ONE, HALF) if most is not None and each.peak_bytes > most}
    for seconds, pays in ((9.6, False), (9.4, True)):  # what is hardly faster is not taken
        assert (choose(NOW, [prediction(2, seconds)], None, math.inf, 0.0).taken != NOW) == pays

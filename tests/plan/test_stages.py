"""Layers over stages: against all partitions, and the advice from times of single layers."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan import LayerSeconds, MeasuredCost, Sample, StageCost, gain, partition
from ds_terapipe.plan.costs.layers import WORTH
from ds_terapipe.plan.stages import describe, even_layers, read_layers


def sums(costs, bounds):
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_slowest_stage_is_the_least_there_is(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, stages)
    assert len(found.layers) == stages and min(found.layers) >= 1 and sum(found.layers) == len(costs)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = (sums(costs, (0, *cut, len(costs))) for cut in cuts)
    best = min(every, key=lambda seconds: (max(seconds), sum(s * s for s in seconds)))
    assert found.slowest == pytest.approx(max(best))
    assert sum(s * s for s in found.seconds) == pytest.approx(sum(s * s for s in best))


def test_a_partition_prints_what_a_command_line_takes():
    found = partition([1.0] * 7 + [3.0], 2)
    assert (found.text, found.boundaries, found.seconds) == ("5,3", (0, 5, 8), (5.0, 5.0))
    assert read_layers(found.text, 8, 2) == read_layers(" 5, 3", 8) == found.layers
    assert even_layers(8, 3) == (3, 3, 2)
    costs = [1.0, 1.0, 1.0, 1.0, 4.0]
    assert gain(costs, [3, 2]) == pytest.approx(1 - 4 / 5) and gain(costs, [4, 1]) == 0


@pytest.mark.parametrize(
    ("text", "stages", "use"),
    [
        ("5,2", 2, "4,4"),
        ("8", 2, "4,4"),
        ("9,-1", None, "4,4"),
        ("4,4", 3, "3,3,2"),
        ("4;4", 2, "4,4"),
        ("", None, "8"),
    ],
)
def test_other_texts_are_one_line_that_says_what_to_use(text, stages, use):
    with pytest.raises(ConfigError, match=f"--stage-layers: got .*, 8 together, use e.g. {use}$"):
        read_layers(text, 8, stages)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: partition([1.0, 2.0], 3), "stages: got 3, must be from 1 to the number of layers, 2"),
        (lambda: partition([1.0, float("nan")], 1), "layer 1: got nan s, must be a time"),
        (lambda: describe([1.0] * 4, [3, 2]), r"stage layers: got \[3, 2\], .*4 together, use e.g. 2,2"),
        (lambda: describe([1.0] * 4, [4, 0]), "one layer or more per stage"),
    ],
)
def test_what_cannot_be_divided_is_an_error(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


ADVICE = [
    # an own module
    (((1.0, 2.0, 3.0), (1.0, 0.5, 0.5)), (0, 0), "2,4 layers would take 16.7% less than 3,3 in the slowest stage: begin the "
     "stages of the PipelineModule at its layers 0, 2 in place of 0, 3"),
    # embedding 1, norm and head 3 stay with their neighbours and do not count
    (((1.0, 2.0), (2.0, 2.0, 2.0, 1.0, 2.0)), (1, 2), "2,2 layers would take 22.2% less than 1,3 in the slowest stage: build the "
     "pipeline with layers_per_stage=[2, 2], in train.py --stage-layers 2,2"),
    # as good as any: 3,1 takes 7 as well
    (((1.0, 2.0, 2.0), (2.0, 2.0, 1.0, 2.0)), (1, 2), ""),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "ends", "says"), ADVICE)
def test_other_stages_are_advised_by_the_times_of_layers(stages, ends, says):
    assert LayerSeconds(stages, ends).advice() == says


@pytest.mark.parametrize(("gain", "says"), [(0.99 * WORTH, False), (1.01 * WORTH, True)])
def test_a_line_is_worth_a_gain_of_more_than_three_per_cent(gain, says):
    assert bool(LayerSeconds(((1 - gain, gain), (0.1,))).advice()) is says


def saved(path, layers):
    data = MeasuredCost([StageCost([Sample(8, 0, 1.0, 2.0)]) for _ in range(2)], [[(8, 0.0)]]).to_dict()
    path.write_text(json.dumps({**data, "layers": layers} if layers is not None else data))
    return MeasuredCost.load(path).layers


def test_measurements_keep_the_times_of_layers(tmp_path):
    layers = LayerSeconds(((1.0, 2.0), (2.0, 2.0, 2.0)), (1, 0))
    assert saved(tmp_path / "costs.json", {"stages": layers.stages, "ends": layers.ends}) == layers
    MeasuredCost([StageCost([Sample(8, 0, 1.0, 2.0)])] * 2, [[(8, 0.0)]], layers=layers).save(tmp_path / "other.json")
    assert MeasuredCost.load(tmp_path / "other.json").layers == layers
    assert saved(tmp_path / "costs.json", None) is None


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"stages": [[1.0], [1.0, 2.0]]}, "layers.ends"), ({"stages": [[1.0]], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], []], "ends": [0, 0]}, "layers.stages"), ([], "layers"),
        ({"stages": [[1.0], [-1.0]], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], "ab"], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], [1.0]], "ends": [0, True]}, "layers.ends"),
    ],
)  # fmt: skip
def test_what_a_file_has_wrong_in_layers_is_one_line(tmp_path, data, field):
    with pytest.raises(ConfigError, match=rf"^.*costs\.json: {field}: [^\n]*$"):
        saved(tmp_path / "costs.json", data)

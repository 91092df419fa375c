"""Advice on stages from the times of single layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan import LayerSeconds, MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.layers import WORTH


def test_stages_of_an_own_module_are_told_by_where_they_begin() -> None:
    layers = LayerSeconds(((1.0, 2.0, 3.0), (1.0, 0.5, 0.5)))
    assert (layers.present.layers, layers.best.layers) == ((3, 3), (2, 4))
    assert layers.gain == pytest.approx(1 - 5 / 6)
    assert layers.advice() == (
        "2,4 layers would take 16.7% less than 3,3 in the slowest stage: begin the stages of the PipelineModule at "
        "its layers 0, 2 in place of 0, 3"
    )


def test_layers_at_the_ends_stay_with_their_neighbours_and_do_not_count() -> None:
    # embedding 1, Transformer layers 2 each, norm and head 3 together
    layers = LayerSeconds(((1.0, 2.0, 2.0), (2.0, 2.0, 1.0, 2.0)), (1, 2))
    assert layers.movable == [3.0, 2.0, 2.0, 5.0]
    assert (layers.present.text, layers.present.seconds) == ("2,2", (5.0, 7.0))
    assert (layers.best.text, layers.advice()) == ("2,2", "")  # 3,1 takes 7 as well
    layers = LayerSeconds(((1.0, 2.0), (2.0, 2.0, 2.0, 1.0, 2.0)), (1, 2))
    assert layers.advice() == (
        "2,2 layers would take 22.2% less than 1,3 in the slowest stage: build the pipeline with "
        "layers_per_stage=[2, 2], in train.py --stage-layers 2,2"
    )


@pytest.mark.parametrize(("gain", "says"), [(0.99 * WORTH, False), (1.01 * WORTH, True)])
def test_a_line_is_worth_a_gain_of_more_than_three_per_cent(gain: float, says: bool) -> None:
    layers = LayerSeconds(((1 - gain, gain), (0.1,)))
    assert layers.gain == pytest.approx(gain) and bool(layers.advice()) is says


def test_measurements_keep_them(tmp_path: Path) -> None:
    layers = LayerSeconds(((1.0, 2.0), (2.0, 2.0, 2.0)), (1, 0))
    stages = [StageCost([Sample(8, 0, 1.0, 2.0)]) for _ in range(2)]
    path = tmp_path / "costs.json"
    MeasuredCost(stages, [[(8, 0.0)]], layers=layers).save(path)
    assert MeasuredCost.load(path).layers == layers
    written = json.loads(path.read_text())
    del written["layers"]
    path.write_text(json.dumps(written))
    assert MeasuredCost.load(path).layers is None


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"stages": [[1.0], [1.0, 2.0]]}, "layers.ends"),
        ({"stages": [[1.0]], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], []], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], [-1.0]], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], "ab"], "ends": [0, 0]}, "layers.stages"),
        ({"stages": [[1.0], [1.0]], "ends": [1, 0]}, "layers.ends"),
        ({"stages": [[1.0], [1.0]], "ends": [0, True]}, "layers.ends"),
        ([], "layers"),
    ],
)
def test_what_a_file_has_wrong_is_one_line(tmp_path: Path, data: object, field: str) -> None:
    stages = [StageCost([Sample(8, 0, 1.0, 2.0)]) for _ in range(2)]
    written = {**MeasuredCost(stages, [[(8, 0.0)]]).to_dict(), "layers": data}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=rf"^.*costs\.json: {field}: [^\n]*$"):
        MeasuredCost.load(path)

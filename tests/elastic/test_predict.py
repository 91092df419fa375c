"""What a step would take in a shape, and which shape is taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.elastic.policies.resize import Shape, shapes
from ds_terapipe.elastic.shapes.predict import LayerCosts, Machine, Prediction, choose, predict

FREE = Machine(0.0, 0.0, 0.0)


def costs(entries: int = 8, **given: Any) -> LayerCosts:
    """Layers of 1 s forward, 2 s backward, 10 bytes of weights, 30 of gradients and moments, 5 of activations."""
    each = {"forward": 1.0, "backward": 2.0, "weights": 10.0, "state": 30.0, "trained": 10.0, "activations": 5.0}
    values = {name: (value,) * entries for name, value in each.items()}
    return LayerCosts(micro_batch=1, **{**values, "same": tuple(range(entries)), **given})


def test_a_pipeline_fills_and_then_takes_its_slowest_stage() -> None:
    assert predict(Shape(1, 1, 1, 4), costs(), FREE, 0).seconds == 4 * 24
    assert predict(Shape(2, 1, 1, 4), costs(), FREE, 0).seconds == 24 + 3 * 12
    assert predict(Shape(4, 1, 1, 4), costs(), FREE, 0).seconds == 24 + 3 * 6
    assert predict(Shape(2, 1, 1, 4), costs(), FREE, 0, parts=(0, 2, 8)).seconds == 24 + 3 * 18
    assert predict(Shape(2, 1, 1, 4), costs(), FREE, 0, slices=4).seconds == (24 + 15 * 12) / 4
    assert predict(Shape(1, 2, 1, 2), costs(), FREE, 0, slices=4).seconds == 2 * 24  # nothing to overlap
    assert predict(Shape(2, 1, 3, 4), costs(), FREE, 0).seconds == 3 * (24 + 3 * 12)


def test_frozen_layers_cost_their_forward_pass_and_no_memory_but_their_weights() -> None:
    found = predict(Shape(2, 1, 1, 4), costs(), FREE, 4)
    assert found.parts == (0, 5, 8) and found.seconds == 16 + 3 * 9
    assert found.peak_bytes == max(50 + 30 + 2 * 5, 3 * 40 + 3 * 5)


def test_replicas_add_up_what_trains() -> None:
    machine = Machine(reduce_seconds=0.5, reduce_latency=3.0, update_seconds=0.25)
    one, two = Shape(1, 1, 1, 4), Shape(1, 2, 1, 2)
    assert predict(one, costs(), machine, 0).seconds == 4 * 24 + 0.25 * 80
    assert predict(two, costs(), machine, 0).seconds == 2 * 24 + (3 + 0.5 * 80) + 0.25 * 80
    assert predict(two, costs(), machine, 6).seconds == 2 * 12 + (3 + 0.5 * 20) + 0.25 * 20
    four = predict(Shape(2, 4, 1, 1), costs(), machine, 0)
    assert four.seconds == 24 + (3 + 0.5 * 1.5 * 40) + 0.25 * 40


def test_memory_counts_live_micro_batches_and_a_shared_weight_once() -> None:
    assert predict(Shape(2, 1, 1, 9), costs(), FREE, 0).peak_bytes == 4 * 40 + 2 * 4 * 5
    assert predict(Shape(2, 1, 1, 1), costs(), FREE, 0).peak_bytes == 4 * 40 + 4 * 5
    tied = costs(same=(0, 1, 2, 3, 4, 5, 6, 0))
    assert predict(Shape(1, 1, 1, 1), tied, FREE, 0).peak_bytes == 7 * 40 + 8 * 5
    assert predict(Shape(2, 1, 1, 1), tied, FREE, 0).peak_bytes == 4 * 40 + 4 * 5


@given(st.integers(1, 12), st.integers(1, 2), st.integers(1, 24), st.integers(1, 4))
def test_all_shapes_use_all_processes_and_the_whole_batch(processes: int, tensor: int, batch: int, micro: int) -> None:
    found = shapes(processes * tensor, tensor, batch, micro)
    for shape in found:
        assert shape.stages * shape.replicas == processes
        assert shape.replicas * shape.micro_batch * shape.micro_batches == batch and shape.micro_batch <= micro
    assert [shape.stages for shape in found] == [
        n for n in range(1, processes + 1) if processes % n == 0 and batch % (processes // n) == 0
    ]


def prediction(stages: int, seconds: float, peak: float = 0.0) -> Prediction:
    return Prediction(Shape(stages, 4 // stages, 1, stages), (0, 4), seconds, peak)


NOW, HALF, ONE = prediction(4, 10.0, 5.0), prediction(2, 7.0, 8.0), prediction(1, 6.0, 12.0)


@pytest.mark.parametrize(
    ("most", "left", "change", "taken"),
    [
        (None, math.inf, 100.0, ONE),
        (10.0, math.inf, 100.0, HALF),  # one stage does not fit
        (4.0, math.inf, 100.0, NOW),  # nothing does; what is there stays
        (None, 100.0, 100.0, ONE),
        (None, 20.0, 100.0, NOW),  # saves 80 s
    ],
)
def test_the_fastest_that_fits_and_pays(most: float | None, left: float, change: float, taken: Prediction) -> None:
    found = choose(NOW, [ONE, HALF], most, left, change)
    assert found.taken == taken
    assert set(found.too_large) == {each for each in (ONE, HALF) if most is not None and each.peak_bytes > most}


def test_what_is_hardly_faster_is_not_taken() -> None:
    assert choose(NOW, [prediction(2, 9.6)], None, math.inf, 0.0).taken == NOW
    assert choose(NOW, [prediction(2, 9.4)], None, math.inf, 0.0).taken.seconds == 9.4

from __future__ import annotations

import pytest
from hypothesis import given

from ds_terapipe.schedule import Op, Placement, forward_only, order, with_messages, with_weight_gradients

from . import strategies


def test_golden_messages():
    rows = [" ".join(map(str, row)) for row in with_messages(order("terapipe", 3, [2]))]
    assert rows == [
        "0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1 0RECV_B0.1 0B0.1 0RECV_B0.0 0B0.0",
        "1RECV_F0.0 1F0.0 1SEND_F0.0 1RECV_F0.1 1F0.1 1SEND_F0.1 "
        "1RECV_B0.1 1B0.1 1SEND_B0.1 1RECV_B0.0 1B0.0 1SEND_B0.0",
        "2RECV_F0.0 2F0.0 2RECV_F0.1 2F0.1 2B0.1 2SEND_B0.1 2B0.0 2SEND_B0.0",
    ]


def test_golden_messages_of_evaluation():
    rows = [" ".join(map(str, row)) for row in with_messages(forward_only(2, [2]))]
    assert rows == ["0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1", "1RECV_F0.0 1F0.0 1RECV_F0.1 1F0.1"]


@given(strategies.names, strategies.stages, strategies.slices)
def test_messages_are_all_that_is_added(name, stages, slices):
    grid = order(name, stages, slices)
    before = [list(row) for row in grid]
    lowered = with_messages(grid)
    assert grid == before
    assert [[action for action in row if action.op.is_compute] for row in lowered] == grid


@given(strategies.names, strategies.stages, strategies.slices)
def test_both_ends_of_a_channel_name_the_units_in_one_order(name, stages, slices):
    lowered = with_messages(order(name, stages, slices))
    for stage, row in enumerate(lowered):
        for op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            sent = [action.counterpart for action in row if action.op is op]
            peer = stage + 1 if op is Op.SEND_FORWARD else stage - 1
            if not 0 <= peer < stages:
                assert sent == []
                continue
            receive = Op.RECV_FORWARD if op is Op.SEND_FORWARD else Op.RECV_BACKWARD
            assert sent == [action for action in lowered[peer] if action.op is receive]
            assert len(sent) == sum(slices)


def test_golden_messages_of_places():
    # Stages 1 and 2 hand over in memory; nothing goes back to stage 0, which is forward-only.
    placement = Placement.of([0, 1, 1, 0], forward_only=1)
    rows = [" ".join(map(str, row)) for row in with_messages(order("1f1b", placement, [1]), placement)]
    assert rows == [
        "0F0.0 0SEND_F0.0 3RECV_F0.0 3F0.0 3B0.0 3SEND_B0.0",
        "1RECV_F0.0 1F0.0 2F0.0 2SEND_F0.0 2RECV_B0.0 2B0.0 1B0.0",
    ]


@given(strategies.names, strategies.placements(), strategies.few_slices)
def test_messages_of_any_placement(name, placement, slices):
    grid = order(name, placement, slices)
    lowered = with_messages(grid, placement)
    assert [[action for action in row if action.op.is_compute] for row in lowered] == grid
    for stage in range(len(placement.stages)):
        ops = [action.op for action in lowered[placement.place_of(stage)] if action.stage == stage]
        assert ops.count(Op.SEND_FORWARD) == sum(slices) * placement.sends_forward(stage)
        assert ops.count(Op.RECV_FORWARD) == sum(slices) * placement.receives_forward(stage)
        assert ops.count(Op.SEND_BACKWARD) == sum(slices) * placement.sends_backward(stage)
        assert ops.count(Op.RECV_BACKWARD) == sum(slices) * placement.receives_backward(stage)


def test_weight_gradients_are_computations_too():
    grid = with_weight_gradients(order("1f1b", 2, [2]))
    rows = [" ".join(map(str, row[-4:])) for row in with_messages(grid)]
    assert rows == ["0B0.1 0RECV_B0.0 0B0.0 0W0.0", "1SEND_B0.1 1B0.0 1SEND_B0.0 1W0.0"]


def test_a_grid_has_a_row_for_each_place():
    with pytest.raises(ValueError, match="got 2 places for a grid of 3 rows, must be a row for each place"):
        with_messages(order("1f1b", 3, [1]), Placement.of([0, 1, 0]))


def test_messages_are_put_in_once():
    with pytest.raises(ValueError, match=r"0SEND_F0\.0, must be computations only"):
        with_messages(with_messages(order("1f1b", 2, [1])))

from __future__ import annotations

import pytest
from hypothesis import given

from ds_terapipe.schedule import Op, forward_only, order, with_messages

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


def test_messages_are_put_in_once():
    with pytest.raises(ValueError, match=r"0SEND_F0\.0, must be computations only"):
        with_messages(with_messages(order("1f1b", 2, [1])))

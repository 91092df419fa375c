"""Steps come to their end where all streams of a device share one queue, as CUDA_DEVICE_MAX_CONNECTIONS=1 has it."""

import pytest

from ds_terapipe.schedule import NAMES, ScheduleError, order, replay, validate
from ds_terapipe.schedule.hardware_queue import queue_deadlock
from ds_terapipe.schedule.lower import with_messages, with_weight_gradients
from tests.schedule.strategies import grid_of


@pytest.mark.parametrize("slices", [[4], [4, 4], [1] * 4, [4] * 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_two_receives_ahead_lock_up(name, stages, slices):
    grid = with_weight_gradients(with_messages(order(name, stages, slices)))
    assert not queue_deadlock(grid)
    assert queue_deadlock(grid, posted_ahead=2)


def test_an_order_that_only_more_queues_let_through_is_refused_before_the_first_step():
    units = [f"{m}.0" for m in range(8)]
    grid = grid_of(
        " ".join([f"0F{u} 0SEND_F{u}" for u in units] + [f"0RECV_B{u} 0B{u}" for u in units]),
        " ".join(f"1RECV_F{u} 1F{u} 1B{u} 1SEND_B{u}" for u in units),
    )
    assert not replay(grid, lambda action: 1).stuck
    with pytest.raises(ScheduleError, match=r"stages 0, 1 wait for ever with CUDA_DEVICE_MAX_CONNECTIONS=1") as raised:
        validate(grid, [1] * 8)
    assert str(raised.value).count("holds what was issued after it") == 2

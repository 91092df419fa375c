from __future__ import annotations

from ds_terapipe.schedule import Action, Op, Placement, Replay, order, replay, with_messages


def _seconds(action):
    assert action.op.is_compute
    return 1.0 if action.op is Op.FORWARD else 2.0


def test_spans_are_the_longest_path():
    # Two stages, one micro-batch of two slices: F 1 s, B 2 s, messages 0 s.
    grid = with_messages(order("1f1b", 2, [2]))
    result = replay(grid, _seconds)
    assert result.stuck == {}
    ends = {
        str(a): interval
        for row, intervals in zip(grid, result.intervals, strict=True)
        for a, interval in zip(row, intervals, strict=True)
    }
    assert ends["1F0.0"] == (1, 2)
    assert ends["1F0.1"] == (2, 3)
    assert ends["1B0.1"] == (3, 5)
    assert ends["0RECV_B0.1"] == (2, 5)  # stage 0 waits 3 s
    assert ends["0B0.1"] == (5, 7)
    assert ends["1B0.0"] == (5, 7)
    assert ends["0B0.0"] == (7, 9)
    assert result.makespan == 9


def test_slices_shorten_the_step():
    whole = replay(with_messages(order("1f1b", 4, [1])), _seconds).makespan
    sliced = replay(with_messages(order("1f1b", 4, [8])), lambda action: _seconds(action) / 8).makespan
    assert whole == 4 * 3
    assert sliced == 3 + 3 * 3 / 8


def test_stuck_stages_are_named_with_the_receive_they_wait_in():
    grid = with_messages(order("1f1b", 2, [1]))
    grid[0].remove(Action.from_text("0SEND_F0.0"))
    assert replay(grid, _seconds).stuck == {0: 1, 1: 0}


def test_a_receive_takes_no_message_but_its_own():
    grid = with_messages(order("terapipe", 2, [1, 1]))
    first, second = Action.from_text("1RECV_F0.0"), Action.from_text("1RECV_F1.0")
    i, j = grid[1].index(first), grid[1].index(second)
    grid[1][i], grid[1][j] = second, first
    assert replay(grid, _seconds).stuck == {0: grid[0].index(Action.from_text("0RECV_B1.0")), 1: 0}


def test_nothing_takes_no_time():
    assert replay([[]], _seconds) == Replay([[]], {})
    assert replay([[]], _seconds).makespan == 0


def _ends(grid, result):
    return {
        str(a): interval.end
        for row, intervals in zip(grid, result.intervals, strict=True)
        for a, interval in zip(row, intervals, strict=True)
    }


def test_a_message_takes_its_time_and_the_sender_goes_on():
    grid = with_messages(order("terapipe", 2, [1]))
    ends = _ends(grid, replay(grid, _seconds, lambda action: 0.5))
    assert ends["0SEND_F0.0"] == 1
    assert ends["1RECV_F0.0"] == 1.5
    assert ends["1B0.0"] == 1.5 + 1 + 2
    assert ends["0RECV_B0.0"] == 5
    assert ends["0B0.0"] == 7


def test_messages_of_a_channel_leave_one_after_the_other():
    # Forward messages of 3 s each, sent at 1 s, 2 s and 3 s: the link is what the second stage waits for.
    grid = with_messages(order("terapipe", 2, [3]))
    ends = _ends(grid, replay(grid, _seconds, lambda action: 3.0 if action.op is Op.SEND_FORWARD else 0.0))
    assert [ends[f"1RECV_F0.{i}"] for i in range(3)] == [4, 7, 10]


def test_directions_do_not_share_a_channel():
    grid = with_messages(order("1f1b", 2, [1, 1]))
    both = replay(grid, _seconds, lambda action: 1.0).makespan
    forward = replay(grid, _seconds, lambda action: 1.0 if action.op is Op.SEND_FORWARD else 0.0).makespan
    assert forward < both
    assert _ends(grid, replay(grid, _seconds, lambda action: 1.0))["1RECV_F1.0"] == 5  # when 1B0.0 is done, not later


def test_stages_on_one_place_hand_over_without_a_message():
    placement = Placement.of([0, 0, 1])
    grid = with_messages(order("1f1b", placement, [1]), placement)
    ends = _ends(grid, replay(grid, _seconds, lambda action: 0.5, placement))
    assert (ends["1F0.0"], ends["2F0.0"], ends["2B0.0"]) == (2, 3.5, 5.5)
    assert (ends["1RECV_B0.0"], ends["1B0.0"], ends["0B0.0"]) == (6, 8, 10)


def test_messages_of_two_stages_queue_on_one_link():
    # From place 0 to place 1 go the outputs of stages 0 and 2.
    around = Placement.interleaved(2, 2)
    rows = [
        "0F0.0 0SEND_F0.0 2RECV_F0.0 2F0.0 2SEND_F0.0 0F1.0 0SEND_F1.0",
        "1RECV_F0.0 1F0.0 1SEND_F0.0 1RECV_F1.0 3RECV_F0.0 3F0.0",
    ]
    grid = [list(map(Action.from_text, row.split())) for row in rows]
    times = {"2SEND_F0.0": 5.0}
    ends = _ends(grid, replay(grid, lambda action: 1.0, lambda action: times.get(str(action), 1.0), around))
    assert (ends["2F0.0"], ends["0F1.0"]) == (5, 6)
    assert ends["1RECV_F1.0"] == 11  # at 10 stage 2's message is through
    apart = Placement.of([0, 1, 0, 2])
    grid = [grid[0], grid[1][:4], grid[1][4:]]
    assert _ends(grid, replay(grid, lambda action: 1.0, lambda a: times.get(str(a), 1.0), apart))["1RECV_F1.0"] == 7


def test_of_two_places_gradients_queue_with_outputs():
    # Place 0 sends the gradient of stage 2 and the next output of stage 0 over one link.
    placement = Placement.of([0, 1, 0])
    rows = [
        "0F0.0 0SEND_F0.0 2RECV_F0.0 2F0.0 2B0.0 2SEND_B0.0 0F1.0 0SEND_F1.0",
        "1RECV_F0.0 1F0.0 1SEND_F0.0 1RECV_F1.0",
    ]
    grid = [list(map(Action.from_text, row.split())) for row in rows]
    ends = _ends(grid, replay(grid, lambda action: 1.0, lambda a: 9.0 if a.op is Op.SEND_BACKWARD else 0.0, placement))
    assert (ends["2B0.0"], ends["0F1.0"], ends["1RECV_F1.0"]) == (4, 5, 13)


def test_only_sends_are_asked_for_the_time_of_a_message():
    asked = []
    grid = with_messages(order("1f1b", 3, [2]))
    replay(grid, _seconds, lambda action: asked.append(action) or 0.0)
    assert sorted(map(str, asked)) == sorted(str(a) for row in grid for a in row if a.op.is_send)

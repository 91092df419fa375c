"""Waits are timed, failures of other processes are told from a user's own, and nothing of the watchdog outlives its engine."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed

from ds_terapipe.job import Job
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.transport import board, p2p, positions, processes, watchdog as watchdog_module
from ds_terapipe.pipeline.transport.positions import Position
from ds_terapipe.pipeline.transport.watchdog import PipelineStalled, Watchdog, launching
from ds_terapipe.schedule import Action, Placement, Unit, order, with_messages

ACTION = Action.from_text("0F0.0")

GRID = with_messages(order("1f1b", 2, [3]))
VIEW = RankView(Placement.plain(2), 0, (0, 1))
KEY = "ds_terapipe/position/0/{}"


class Store(torch.distributed.HashStore):
    """One whose host can be "gone" or "stopped"; counts how often it was asked since."""

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.asked, self.hold, self.held = "", 0, threading.Event(), False

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        self._fail()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._fail()
        if self.lost == "stopped":  # what is only sent goes into a buffer, an answer never comes
            self.held = not self.hold.wait(20)
        return super().check(keys)

    def _fail(self) -> None:
        self.asked += bool(self.lost)
        if self.lost == "gone":
            raise torch.distributed.DistNetworkError("Broken pipe")

    def say(self, key: str, **known: Any) -> None:
        """Write down where another rank is."""
        super().set(key, Position(**{"written": 1e9, "step": 4, "action": 3, **known}).to_text())

    def course(self, moves: bool = False, **known: Any) -> Iterator[None]:
        """Beats in which rank 1 writes down where it is, at one time always or not."""
        for beat in range(1000):
            self.say(KEY.format(1), written=beat * moves, **known)
            yield

    def told(self) -> Position:
        return Position.from_text(self.get(KEY.format(0)).decode())


class Clock:
    """Time that passes when somebody waits or sleeps. Stands in for the modules ``time`` and ``threading``.

    ``watch(course)`` runs the watching thread: a beat of ``course`` for each of its waits, the last of which ends it.
    """

    Lock, current_thread = threading.Lock, staticmethod(threading.current_thread)

    def __init__(self) -> None:
        self.now, self.course, self.run = 100.0, iter(()), lambda: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def Event(self) -> Any:
        def wait(seconds: float) -> bool:
            self.sleep(seconds)
            return next(self.course, True)

        happened: list[bool] = []
        return SimpleNamespace(wait=wait, set=lambda: happened.append(True), is_set=lambda: bool(happened))

    def Thread(self, target: Callable[[], None], name: str, daemon: bool) -> Any:
        self.run = target
        return SimpleNamespace(start=lambda: None, join=lambda seconds: None, is_alive=lambda: False)

    def watch(self, course: Iterator[None]) -> None:
        self.course = course
        self.run()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (watchdog_module, positions, processes):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(watchdog_module, "threading", clock)
    monkeypatch.setattr(watchdog_module.os, "_exit", sys.exit)
    return clock


@pytest.fixture
def store(clock, monkeypatch) -> Store:
    """The store of a job of three: the two stages of a pipeline, and a rank of another pipeline. This is rank 0."""
    store = Store()
    job = SimpleNamespace(rank=0, ranks=(0, 1, 2), store=store)
    monkeypatch.setattr(Job, "current", lambda: job)
    monkeypatch.setattr(watchdog_module, "_watchdogs", itertools.count())
    monkeypatch.setattr(board, "_READ_WITHIN_S", 0.5)
    return store


@pytest.fixture
def watchdog(store):
    watchdog = Watchdog(VIEW, timeout_s=5.0)
    yield watchdog
    watchdog.close()


def message(effect: Any) -> Mock:
    return Mock(**{"wait.side_effect": effect})


CLOSED = RuntimeError("[/src/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:7. This is typically caused by what")


def test_time_waited_is_counted_once_and_from_zero_with_a_step(watchdog, clock):
    watchdog.begin(0, GRID, VIEW)
    arriving = message(lambda limit: clock.sleep(1.0))
    with watchdog.waiting("what holds the next one"):
        watchdog.wait(arriving, "a message")
        clock.sleep(0.5)
    assert watchdog.waited_s == 1.5 and arriving.wait.mock_calls == [call(timedelta(seconds=5))]
    with watchdog.waiting("work in which others are waited for", counts=False):
        clock.sleep(1.0)
    assert watchdog.waited_s == 1.5
    watchdog.begin(1, GRID, VIEW)
    assert watchdog.waited_s == 0.0


def test_errors_of_communication_are_stalls_and_a_users_are_left_alone(watchdog, monkeypatch):
    for error in (RuntimeError("shape '[2, 3]' is invalid"), ValueError("Connection closed"), StopIteration()):
        with pytest.raises(type(error)) as caught, watchdog.waiting("the optimiser step"):
            raise error
        assert caught.value is error
    for error in (
        CLOSED,
        RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
        RuntimeError("NCCL communicator was aborted on rank 0"),
        torch.distributed.DistBackendError("remote process exited"),
    ):
        monkeypatch.setattr(p2p.dist, "isend", Mock(side_effect=error))
        with pytest.raises(PipelineStalled) as caught:  # it is not even issued to a rank that is gone
            p2p.Sender(1, None, watchdog).send(Unit(0, 1), [torch.ones(1)], "activations of 0.1")
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("how", ["gone", "stopped"])
def test_a_lost_store_costs_neither_time_nor_a_second_try(watchdog, store, clock, how):
    watchdog.begin(0, GRID, VIEW)
    store.lost = how
    text = r"positions unknown: the process with the store .* does not answer\nstep"
    with pytest.raises(PipelineStalled, match=text):
        watchdog.wait(message(CLOSED), "activations of 0.1 from rank 1")
    assert not store.held
    asked = store.asked
    clock.watch(iter([None] * 3))
    watchdog._board.close(0.0 if how == "stopped" else 20.0)  # after its texts are written
    assert store.asked == asked > 0
    store.hold.set()


def test_building_engines_takes_as_long_as_ranks_do_something(store, clock):
    """A store that is too busy to answer for a while ends nothing, and is asked again."""

    def course() -> Iterator[None]:
        for beat in range(200):
            store.lost = "stopped" if 50 <= beat < 150 else ""
            if beat == 150:
                store.hold.set()
            store.say(KEY.format(1), written=beat)  # rank 2 has not come yet
            yield

    with launching(5.0) as watchdog:
        clock.watch(course())
        assert watchdog._board._ask(lambda own: None).wait(20)
        found = watchdog._positions.of_others()
    assert clock.now > 130 and store.asked and not store.held and found is not None and found[1].written == 199


@pytest.mark.parametrize(("known", "said"), [
    ({}, "no sign of life"), ({"note": "failed: KeyError: 'x'", "ended": True, "moves": True}, "failed: KeyError: 'x'"),
])  # fmt: skip
def test_building_engines_ends_with_a_rank(store, clock, caplog, known, said):
    with pytest.raises(SystemExit, match="70"), launching(2.0) as watchdog:
        clock.watch(store.course(**known))
    assert watchdog.ended.startswith("gave up waiting for all ranks to build their engines")
    assert re.match(r"rank 0 waited \d+\.\d s for all ranks to build their engines: no answer \(token", caplog.messages[0])
    assert said in caplog.text and "rank 2: position unknown" in caplog.text


def test_a_wait_that_fails_while_the_thread_gives_up_leaves_the_end_to_it(store, clock):
    """Python's own exit beside a thread that ends the process aborts now and then."""
    joined = []
    with pytest.raises(PipelineStalled), launching(2.0) as watchdog:
        with pytest.raises(SystemExit, match="70"):
            clock.watch(store.course())
        watchdog._thread = SimpleNamespace(join=lambda *seconds: joined.append(seconds), is_alive=lambda: False)
        raise CLOSED
    assert joined[0] == (), "without a limit: the thread ends the process"


@pytest.mark.parametrize(("ended", "moves"), [(False, False), (True, True), (True, False), ("with the store", False)])
def test_an_action_that_stands_still_ends_when_another_rank_has_ended(watchdog, store, clock, caplog, ended, moves):
    """Such as a layer that waits for a device whose hardware queue is held: no message is awaited."""
    watchdog.begin(4, GRID, VIEW)

    def course() -> Iterator[None]:
        for beat in range(12):
            store.say(KEY.format(1), ended=ended is True, written=1e9 + clock.now)
            store.lost = "gone" if ended == "with the store" else ""
            watchdog.action_begins(beat % 5 if moves else 3, ACTION)
            yield

    if moves or not ended:
        clock.watch(course())
        assert not caplog.messages
        return
    with pytest.raises(SystemExit) as end:
        clock.watch(course())
    assert end.value.args == (70,)
    assert re.match(r"rank 0 \(stage 0\) waited 5.\d s for its own action in step 4: another rank", caplog.messages[0])


def test_ranks_that_gloo_cannot_connect_are_told_the_setting(store, monkeypatch):
    def refused(ranks, **options):
        raise RuntimeError("Gloo connectFullMesh failed with connection refused\nmore")

    monkeypatch.setattr(torch.distributed, "new_group", refused)
    says = r"^rank 0 waited .* for all ranks to build .*: Gloo .* refused: gloo could not .* GLOO_SOCKET_IFNAME"
    with pytest.raises(PipelineStalled, match=says), launching(60.0):
        Job([0, 1]).new_group(timeout_s=5.0, backend="gloo")


def test_an_error_is_written_down_for_those_that_wait(store):
    with pytest.raises(KeyError), launching(60.0):
        raise KeyError("x")
    assert "failed: KeyError: 'x'" in store.get(KEY.format(0)).decode()


@pytest.fixture
def streamed(store, monkeypatch):
    """A watchdog of a device's stream, and the stream's marks, which it comes to when the test says so."""
    points = []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: points.append(device))
    new_point = partial(Mock, **{"is_completed.return_value": False})
    watchdog = Watchdog(VIEW, 3.0, lambda: points.append(new_point()) or points[-1], torch.device("cuda", 3))
    yield watchdog, points
    watchdog.close()


def test_a_stream_that_goes_on_is_left_alone_and_one_that_stands_still_is_reported(streamed, store, clock, caplog):
    watchdog, points = streamed
    store.say(KEY.format(1), note="waits 2.0 s for activations of 0.0 from rank 0")
    watchdog.begin(4, GRID, VIEW)
    arriving = Mock()
    for index in range(8):  # the host is through long before the stream
        watchdog.action_begins(index, ACTION)
        watchdog.wait(arriving, f"gradients of 0.{index} from rank 1")
    assert arriving.wait.mock_calls == [call()] * 8, "a wait with a time limit blocks the host on a device"

    def course() -> Iterator[None]:
        for point in points[:6]:
            yield from (None, None)  # in all longer than the limit
            point.is_completed.return_value = True
        assert not caplog.messages
        yield from itertools.repeat(None, 99)

    with pytest.raises(SystemExit, match="70"):
        clock.watch(course())
    assert "rank 0 (stage 0) waited 4.0 s for gradients of 0.6 from rank 1 in step 4: no answer" in caplog.messages[0]
    report = next(message for message in caplog.messages if "\n" in message)
    (marked,) = [line for line in report.splitlines() if "<-- stage 0" in line]
    assert f"[{GRID[0][6]}]" in marked and "CUDA_DEVICE_MAX_CONNECTIONS is 1" in report
    told = store.told()
    assert (told.step, told.action) == (4, 6) and told.ended
    assert points[8] == torch.device("cuda", 3), "the thread is on the stage's device"


def test_a_groups_own_limit_is_the_last_resort(streamed, watchdog):
    assert watchdog.group_timeout_s == watchdog.timeout_s  # the host's waits end by it
    assert streamed[0].group_timeout_s > 2 * streamed[0].timeout_s

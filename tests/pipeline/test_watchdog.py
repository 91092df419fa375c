"""Waits are timed, failures of other processes are told from a user's own, and nothing of the watchdog outlives its engine."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.pipeline.seat import Seat
from ds_terapipe.pipeline.transport import board, processes
from ds_terapipe.pipeline.transport import watchdog as watchdog_module
from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.watchdog import PipelineStalled, Position, Positions, Watchdog, launching
from ds_terapipe.schedule import Placement, order, with_messages
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.spawn import mark, run_ranks, run_to_exit

GRID = with_messages(order("1f1b", 2, [3]))
SEAT = Seat(Placement.plain(2), 0, (0, 1))


def _key(rank: int) -> str:
    return f"ds_terapipe/position/0/{rank}"


class Store(torch.distributed.HashStore):
    """One whose host can be "gone" or "stopped"; counts how often it was asked since."""

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.asked, self.hold = "", 0, threading.Event()

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        self._fail()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._fail()
        if self.lost == "stopped":  # what is only sent goes into a buffer, an answer never comes
            self.hold.wait(60)
        return super().check(keys)

    def _fail(self) -> None:
        self.asked += bool(self.lost)
        if self.lost == "gone":
            raise torch.distributed.DistNetworkError("Broken pipe")


@pytest.fixture
def store(monkeypatch) -> Store:
    """The store of a job of three: the two stages of a pipeline, and a rank of another pipeline."""
    store = Store()
    monkeypatch.setattr(watchdog_module, "_get_default_store", lambda: store)
    monkeypatch.setattr(watchdog_module, "_engines", itertools.count())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(watchdog_module, "_SILENT_AFTER_S", 0.3)
    monkeypatch.setattr(watchdog_module, "_PUBLISH_EVERY_S", 0.05)
    monkeypatch.setattr(watchdog_module, "_LOOKS", 0)
    monkeypatch.setattr(board, "_READ_WITHIN_S", 0.5)
    return store


@pytest.fixture
def watchdog(store):
    watchdog = Watchdog(SEAT, timeout_s=5.0)
    yield watchdog
    watchdog.close()


class Late:
    """A message that arrives after a while, or not at all."""

    def __init__(
        self, after_s: float, error: Exception | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.after_s, self.error, self.sleep = after_s, error, sleep

    def wait(self, timeout: timedelta) -> None:
        assert timeout == timedelta(seconds=5)
        self.sleep(self.after_s)
        if self.error is not None:
            raise self.error


def closed() -> Exception:
    return RuntimeError(
        "[/src/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:7. This is typically caused by what"
    )


def other(store: Store, rank: int, **known: Any) -> None:
    store.set(_key(rank), Position(**{"written": time.time(), "step": 4, "action": 3, **known}).to_text())


@given(
    st.floats(0, 2e9), st.integers(0, 9), st.integers(0, 999), st.text(alphabet="ab 1:.", max_size=20), st.booleans()
)
def test_a_position_survives_its_text(written, step, action, note, ended):
    position = Position(round(written, 3), step, action, note, ended)
    assert Position.from_text(position.to_text()) == position


class Clock:
    """Time that passes when a test says so; stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now, self.time = 100.0, time.time

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(watchdog, monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog_module, "time", clock)
    return clock


def test_time_waited_is_counted_once_and_begins_anew_with_a_step(watchdog, clock):
    watchdog.begin(0, GRID, SEAT)
    with watchdog.waiting("what holds the next one"):
        watchdog.wait(Late(1.0, sleep=clock.sleep), "a message")
        clock.sleep(0.5)
    assert watchdog.waited_s == 1.5
    with watchdog.waiting("work in which others are waited for", counts=False):
        clock.sleep(1.0)
    assert watchdog.waited_s == 1.5
    watchdog.begin(1, GRID, SEAT)
    assert watchdog.waited_s == 0.0


def test_a_users_error_in_a_wait_is_left_alone(watchdog):
    for error in (RuntimeError("shape '[2, 3]' is invalid"), ValueError("Connection closed"), StopIteration()):
        with pytest.raises(type(error)) as caught, watchdog.waiting("the optimiser step"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        closed(),
        RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
        RuntimeError("NCCL communicator was aborted on rank 0"),
        torch.distributed.DistBackendError("remote process exited"),
    ],
)
def test_errors_of_communication_are_stalls(watchdog, error):
    with pytest.raises(PipelineStalled) as caught:
        watchdog.wait(Late(0.0, error), "activations of 0.1 from rank 1")
    assert caught.value.__cause__ is error


def test_the_report(watchdog, store, caplog):
    other(store, 1)
    other(store, 2, step=3, note="waits 2.0 s for the all-reduce")
    watchdog.begin(4, GRID, SEAT)
    watchdog.at(8)
    with pytest.raises(PipelineStalled) as caught, watchdog.waiting("the optimiser step of the other ranks"):
        watchdog.wait(Late(0.1, closed()), "gradients of 0.2 from rank 1")
    lines = str(caught.value).splitlines()
    assert re.fullmatch(
        r"rank 0 \(stage 0\) waited \d+\.\d s for gradients of 0\.2 from rank 1 in step 4: Connection closed by peer "
        r"\[::1\]:7 \(token_pipeline\.timeout_s is 5\)",
        lines[0],
    )
    assert caplog.messages == [lines[0]]  # before anything else: there may be no time for more
    assert (
        lines[1] == "  rank 2: last seen in step 3, action 3, waits 2.0 s for the all-reduce; no sign of life for 0.3 s"
    )
    assert lines[2] == "  rank 1 (stage 1): last seen in step 4, action 3; no sign of life for 0.3 s"
    assert lines[3].split()[:3] == ["step", "stage", "0"]
    marked = {line.split("<--")[1].strip(): line for line in lines if "<--" in line}
    assert f"[{GRID[0][8]}]" in marked["stage 0"] and f"[{GRID[1][3]}]" in marked["stage 1"]
    told = Position.from_text(store.get(_key(0)).decode())
    assert (
        told.ended
        and told.note == "gave up waiting for gradients of 0.2 from rank 1: Connection closed by peer [::1]:7"
    )


def test_who_failed_says_why_and_then_nobody_is_suspected(watchdog, store):
    failing = Positions(Board(store), 1)
    other(store, 2)
    failing.publish(Position(time.time(), 4, 3, "failed: KeyError: 'x'", ended=True))
    with pytest.raises(PipelineStalled) as caught:
        watchdog.wait(Late(0.0, closed()), "gradients of 0.2 from rank 1")
    assert "  rank 1 (stage 1): last seen in step 4, action 3, failed: KeyError: 'x'" in str(caught.value)
    assert "no sign of life" not in str(caught.value) and "rank 2" not in str(caught.value)


def test_an_error_is_written_down_for_the_others(watchdog, store):
    watchdog.begin(2, GRID, SEAT)
    watchdog.failed(KeyError("first\nsecond"))
    watchdog.failed(ValueError("what came of it"))
    time.sleep(0.2)  # the thread publishes it again and again
    told = Position.from_text(store.get(_key(0)).decode())
    assert told.ended and told.note == r"failed: KeyError: 'first\nsecond'" and told.step == 2


@pytest.mark.parametrize("how", ["gone", "stopped"])
def test_a_lost_store_costs_neither_time_nor_a_second_try(watchdog, store, how):
    watchdog.begin(0, GRID, SEAT)
    time.sleep(0.1)
    store.lost, start = how, time.monotonic()
    with pytest.raises(
        PipelineStalled, match=r"positions unknown: the process with the store .* does not answer\nstep"
    ):
        watchdog.wait(Late(0.0, closed()), "activations of 0.1 from rank 1")
    assert time.monotonic() - start < 30.0  # a stopped store holds whoever waits for its answer for 60
    asked = store.asked
    time.sleep(0.3)
    assert store.asked == asked
    store.hold.set()


def test_a_store_lost_between_two_looks_leaves_what_the_first_one_saw(watchdog, store, clock):
    other(store, 1)
    watchdog.begin(4, GRID, SEAT)
    clock.sleep = lambda seconds: setattr(store, "lost", "gone")  # its host has written its own report, and ends
    with pytest.raises(PipelineStalled, match=r"rank 1 \(stage 1\): last seen in step") as caught:
        watchdog.wait(Late(0.0, closed(), sleep=lambda seconds: None), "activations of 0.1 from rank 1")
    assert store.lost and "positions unknown" not in str(caught.value) and "no sign of life" not in str(caught.value)


def test_living_ranks_keep_publishing_and_closing_ends_the_thread(watchdog, store):
    told, deadline = set(), time.monotonic() + 60
    while len(told) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
        told.add(store.get(_key(0)))
    assert len(told) == 4
    watchdog.close()
    watchdog.close()
    assert not watchdog._thread.is_alive()


# ------------------------------------------------------------------------------------- while engines are built: no time limit


@pytest.fixture
def launch_of_three(store, monkeypatch):
    """What rank 0 does while engines are built, and how often it would have ended the process."""
    exits: list[int] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(watchdog_module.os, "_exit", exits.append)
    monkeypatch.setattr(watchdog_module, "_SILENT_AFTER_S", 0.0)
    monkeypatch.setattr(watchdog_module, "_GRACE_S", 0.2)
    monkeypatch.setattr(watchdog_module, "_LOOKS", 1)
    return exits


def launched(store: Store, rank: int, **known: Any) -> None:
    at = Position(**{"written": time.time(), "step": 0, "action": 0, **known})
    store.set(f"ds_terapipe/position/launch/{rank}", at.to_text())


def test_building_engines_takes_as_long_as_ranks_do_something(store, launch_of_three):
    with launching(0.2):
        for _ in range(10):
            launched(store, 1)  # rank 2 has not come yet
            time.sleep(0.1)
    assert not launch_of_three


@pytest.mark.parametrize("what", ["silent", "failed", "gone"])
def test_building_engines_ends_with_a_rank(store, launch_of_three, caplog, monkeypatch, what):
    if what == "gone":
        store.append(f"ds_terapipe/processes/{processes._machine()}", "1 99999999 5\n")
    with launching(0.2 if what != "gone" else 60.0) as watchdog:
        launched(store, 1)
        until = time.monotonic() + 60
        while not launch_of_three and time.monotonic() < until:
            if what == "failed":
                launched(store, 1, note="failed: KeyError: 'x'", ended=True)
            time.sleep(0.02)
        assert watchdog.ended.startswith("gave up waiting for all ranks to build their engines")
    assert launch_of_three[0] == 70
    messages = list(caplog.messages)
    if what == "gone":
        assert messages.pop(0) == "rank 0: lost rank 1 (process 99999999 is gone)"
    assert re.match(r"rank 0 waited \d+\.\d s for all ranks to build their engines: no answer \(token", messages[0])
    said = {"silent": "no sign of life", "failed": "failed: KeyError: 'x'", "gone": "rank 1: process 99999999 is gone"}
    assert said[what] in caplog.text and "rank 2: position unknown" in caplog.text


def test_an_error_of_another_ranks_is_read_by_those_that_wait(store, launch_of_three):
    with pytest.raises(KeyError), launching(60.0):
        raise KeyError("x")
    assert "failed: KeyError: 'x'" in store.get("ds_terapipe/position/launch/0").decode()
    with pytest.raises(
        PipelineStalled, match=r"rank 0 waited .* for all ranks to build their engines: Connection closed"
    ):
        with launching(60.0):
            raise closed()
    with pytest.raises(ValueError, match="Connection closed"), launching(60.0):
        raise ValueError("Connection closed")  # a user's


# ----------------------------------------------------------------------------------------- where a stream waits, not the host


class Streamed:
    """A message that a stream waits for."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "a wait with a time limit blocks the host on a device"
        return True


class Point:
    """A mark that the stream comes to when the test says so."""

    def __init__(self) -> None:
        self.reached = False

    def is_completed(self) -> bool:
        return self.reached


@pytest.fixture
def points() -> list[Point]:
    return []


@pytest.fixture
def streamed(store, points, monkeypatch):
    """A watchdog of a device's stream, and how often it would have ended the process."""

    def new_mark() -> Point:
        points.append(Point())
        return points[-1]

    exits: list[int] = []
    monkeypatch.setattr(watchdog_module.os, "_exit", exits.append)
    monkeypatch.setattr(watchdog_module, "_SILENT_AFTER_S", 0.0)
    watchdog = Watchdog(SEAT, timeout_s=0.5, new_mark=new_mark)
    yield watchdog, exits
    watchdog.close()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_position_is_the_streams(streamed, points, store):
    watchdog, _ = streamed
    watchdog.begin(4, GRID, SEAT)
    for index in (2, 5, 7):
        watchdog.at(index)
        watchdog.wait(Streamed(), f"message {index}")
    watchdog.at(9)
    assert watchdog._where() == (4, 2, GRID)
    points[0].reached = True
    assert watchdog._where() == (4, 5, GRID)
    points[1].reached = points[2].reached = True
    assert watchdog._where() == (4, 9, GRID) and not watchdog._marks


def test_a_stream_that_goes_on_is_left_alone_and_one_that_stands_still_is_reported(streamed, points, store, caplog):
    watchdog, exits = streamed
    other(store, 1, note="waits 2.0 s for activations of 0.0 from rank 0")
    watchdog.begin(4, GRID, SEAT)
    for index in range(8):  # the host is through long before the stream
        watchdog.at(index)
        watchdog.wait(Streamed(), f"gradients of 0.{index} from rank 1")
    for point in points[:6]:
        time.sleep(0.15)  # in all longer than the limit
        point.reached = True
        watchdog._drop_reached()
    assert not exits and not caplog.messages
    wait_until(lambda: exits)
    assert exits[0] == 70
    first, *_ = caplog.messages
    assert re.match(
        r"rank 0 \(stage 0\) waited \d+\.\d s for gradients of 0\.6 from rank 1 in step 4: no answer", first
    )
    report = next(message for message in caplog.messages if "\n" in message)
    marked = [line for line in report.splitlines() if "<-- stage 0" in line]
    assert f"[{GRID[0][6]}]" in marked[0]
    told = Position.from_text(store.get(_key(0)).decode())
    assert (told.step, told.action) == (4, 6) and told.ended


def test_the_watching_thread_asks_on_the_stages_device(store, monkeypatch):
    told: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append((threading.current_thread().name, device)))
    watchdog = Watchdog(SEAT, timeout_s=5.0, new_mark=Point, device=torch.device("cuda", 3))
    wait_until(lambda: told)
    watchdog.close()
    assert told == [("ds_terapipe-watchdog", torch.device("cuda", 3))]


def test_a_groups_own_limit_is_the_last_resort(streamed, watchdog):
    assert watchdog.group_timeout_s == watchdog.timeout_s  # the host's waits end by it
    assert streamed[0].group_timeout_s > 2 * streamed[0].timeout_s


def watching() -> int:
    return sum(thread.name == "ds_terapipe-watchdog" for thread in threading.enumerate())


def engines_come_and_go(rank: int, world_size: int) -> list[int]:
    alive = []
    for destroy in (True, False):
        engine = build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2})
        engine.train_batch(iter([micro_batch(m, masked=False) for m in range(2)]))
        alive.append(watching())
        if destroy:
            engine.destroy()
        alive.append(watching())
    return alive


def test_destroy_ends_the_thread():
    assert run_ranks(engines_come_and_go, 2) == [[1, 0, 1, 1]] * 2


def run_off_the_end(rank: int, world_size: int, destroy: bool) -> None:
    engine = build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2})
    engine.train_batch(iter([micro_batch(m, masked=False) for m in range(2)]))
    if destroy:
        engine.destroy()
        torch.distributed.destroy_process_group()
    mark("end")


@pytest.mark.parametrize("destroy", [True, False])
def test_nothing_keeps_the_interpreter_alive(destroy):
    for end in run_to_exit(run_off_the_end, 2, destroy):  # kills what is still there after a minute
        assert end.code == 0, end.output
        assert end.mark("end")

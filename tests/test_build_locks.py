"""A lock that a killed compilation has left: said where somebody waits for it, and listed."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from ds_terapipe import build_locks
from ds_terapipe.commands import report


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_wait_is_said_once_and_names_the_file(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_locks, "SAID_AFTER_S", 0.05)
    original = FileBaton.wait
    threading.Timer(0.4, lock.unlink).start()
    with caplog.at_level(logging.WARNING), build_locks.waits_are_said():
        FileBaton(str(lock), wait_seconds=0.01).wait()
        FileBaton(str(lock), wait_seconds=0.01).wait()  # it is gone: no wait, and no word
        time.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if str(lock) in record.getMessage()] == [
        caplog.messages[-1]
    ]
    assert "remove this file" in caplog.messages[-1]
    assert FileBaton.wait is original


def test_a_short_wait_is_not_worth_a_word(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    threading.Timer(0.05, lock.unlink).start()
    with caplog.at_level(logging.WARNING), build_locks.waits_are_said():
        FileBaton(str(lock), wait_seconds=0.01).wait()
    assert not caplog.messages


def test_the_report_lists_it(lock: Path) -> None:
    old = time.time() - 600
    os.utime(lock, (old, old))
    ours = lock.parent.parent.parent / "ds_terapipe_lamb_cpu_311" / "lock"  # stays, and holds nobody up
    ours.parent.mkdir()
    ours.touch()
    (found,) = build_locks.locks()
    assert found.path == str(lock) and found.age_s == pytest.approx(600, abs=5)
    text = report.as_text(
        {"versions": {}, "hook": {"on": True, "wraps": "x"}, "names": {}, "ops": [], "locks": [found._asdict()]}
    )
    assert f"{lock}, 10 minutes old" in text


def test_initialize_with_a_key_says_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there: what DeepSpeed does without our keys is its own."""
    register = importlib.import_module("ds_terapipe.register")
    seen = []

    def initialize(model: object = None, config: object = None) -> tuple[None, None, None, None]:
        seen.append(FileBaton.wait is not original)
        return None, None, None, None

    original = FileBaton.wait
    wrapped = register.wrap(initialize)
    wrapped(model=None, config={"train_batch_size": 1})
    monkeypatch.setattr(register, "_wanted", lambda *_: register.Wanted(False, True, False))
    monkeypatch.setattr(register, "_being_built", lambda: False)
    monkeypatch.setattr(register, "_optimizer_keys", lambda config, given, wanted: NoKeys(config))
    wrapped(model=None, config={"train_batch_size": 1})
    assert seen == [False, True] and FileBaton.wait is original


class NoKeys:
    """Of an optimizer that asks for nothing."""

    def __init__(self, config: object) -> None:
        self.config = config

    def put_into(self, given: object) -> object:
        import contextlib

        return contextlib.nullcontext()

    def finish(self, engine: object) -> None:
        pass

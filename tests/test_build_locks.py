"""A lock that a killed compilation has left: said where somebody waits for it, and listed."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from ds_terapipe import build_locks, cli
from ds_terapipe.commands import report
from tests.mutants import applied


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """As by a process that compiles."""
    file = os.open(lock, os.O_RDONLY)
    try:
        yield
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (held, "which another process holds while it compiles an extension"),
        (contextlib.nullcontext, "which no process of this machine holds: a launch was killed"),
    ],
    ids=["held", "stale"],
)
def test_a_wait_is_said_once_and_names_the_file(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, holder: Any, text: str
) -> None:
    monkeypatch.setattr(build_locks, "STALE_AFTER_S", 0.05)
    monkeypatch.setattr(build_locks, "SAID_AFTER_S", 0.1)
    original = FileBaton.wait
    threading.Timer(0.6, lock.unlink).start()
    with caplog.at_level(logging.WARNING), holder(lock), build_locks.waits_are_said():
        FileBaton(str(lock), wait_seconds=0.01).wait()
        FileBaton(str(lock), wait_seconds=0.01).wait()  # it is gone: no wait, and no word
    (message,) = caplog.messages
    assert str(lock) in message and text in message
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
    with held(lock):
        (found,) = build_locks.locks()
        assert found.path == str(lock) and found.age_s == pytest.approx(600, abs=5) and not found.stale
        assert build_locks.remove_stale() == [] and lock.exists()
        assert f"{lock}, 10 minutes old, held" in as_text(locks=[found._asdict()])
    (found,) = build_locks.locks()
    assert found.stale
    text = as_text(locks=[found._asdict()])
    assert f"{lock}, 10 minutes old, stale: no process holds it" in text and "report --remove-stale-locks" in text


# for tests.mutants
def held_one_stays(mutant: str | None) -> bool:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, applied(mutant):
        patch.setenv("TORCH_EXTENSIONS_DIR", folder)
        path = Path(folder, "deepspeed_shm_comm", "lock")
        path.parent.mkdir()
        path.touch()
        with held(path):
            return build_locks.remove_stale() == [] and path.exists()


def as_text(**data: Any) -> str:
    return report.as_text({**EMPTY, **data})


def test_stale_ones_are_removed_on_request(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "collect", lambda: EMPTY)
    other = lock.parent.parent / "deepspeed_cpu_adam" / "lock"
    other.parent.mkdir()
    other.touch()
    with held(other):
        assert cli.main(["report"]) == 0 and lock.exists()
        assert cli.main(["report", "--remove-stale-locks"]) == 0
    assert other.exists() and not lock.exists()
    assert f"\nremoved\n  {lock}\n" in capsys.readouterr().out


EMPTY = {"versions": {}, "hook": {"on": True, "wraps": "x"}, "names": {}, "ops": [], "locks": [], "buffers": []}
KEYS = {"with our key": '{"token_pipeline": {}}', "without": '{"train_batch_size": 1}'}
SAYS = """
import deepspeed
from torch.utils.file_baton import FileBaton
print("says", hasattr(FileBaton.wait, "ds_terapipe_says"))
"""


@pytest.mark.parametrize(("keys", "joined"), [("with our key", False), ("with our key", True), ("without", False)])
def test_a_script_that_waits_before_initialize_says_it_where_its_arguments_have_our_keys(
    tmp_path: Path, keys: str, joined: bool
) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(KEYS[keys])
    arguments = [f"--deepspeed_config={config}"] if joined else ["--deepspeed_config", str(config)]
    command = [sys.executable, "-c", SAYS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == f"says {keys == 'with our key'}"


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
        return contextlib.nullcontext()

    def finish(self, engine: object) -> None:
        pass

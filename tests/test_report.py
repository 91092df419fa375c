"""``ds_terapipe report``, and what launches leave behind: locks of compilations, DeepSpeed's buffers in shared memory."""

import contextlib
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from ds_terapipe import build_locks, cli, shared_memory
from ds_terapipe.commands import report
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.spawn import launched, run_script

EMPTY = {"versions": {}, "hook": {"on": True, "wraps": "x"}, "names": {}, "ops": [], "locks": [], "buffers": []}


def as_text(**data: Any) -> str:
    return report.as_text({**EMPTY, **data})


def test_it_shows_versions_the_hook_or_why_it_is_off_names_and_ops(capsys, tmp_path, monkeypatch):
    for name in ("DS_TERAPIPE_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["report", "--json", str(tmp_path / "report.json")]) == 0
    text = capsys.readouterr().out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["versions"]["deepspeed"] in text
    assert data["hook"]["on"], data["hook"]["problem"]
    assert "deepspeed/__init__.py:" in data["hook"]["wraps"]
    assert data["names"]["deepspeed"]["missing"] == []
    ops = {op["name"]: op for op in data["ops"]}
    ours = ops["fused_lamb_terapipe_cpu"]
    assert ours["compatible"] and ours["remark"].split()[-1] in ("avx512", "avx2", "scalar")
    assert ops["slices_terapipe"]["compatible"]
    assert "cpu_adam" in ops and "cpu_adam" in text
    monkeypatch.setenv("DS_TERAPIPE_AUTOLOAD", "1")  # the other one is
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = report.hook()
    assert not found["on"] and "TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off" in found["problem"]


def lock_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    return folder / "lock"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return lock_in(tmp_path / "py311_cpu" / "deepspeed_shm_comm")


@pytest.mark.parametrize(("holder", "said"), [
    (contextlib.nullcontext, "which no process of this machine holds: a launch was killed"),
    (open, "which another process holds while it compiles an extension"),
])  # fmt: skip
def test_a_wait_is_said_once_and_names_the_file(lock, monkeypatch, caplog, holder, said):
    def wait(baton: FileBaton) -> None:
        """Until both times for a word have come."""
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread.args[0] == baton.lock_file_path:
                thread.join()

    monkeypatch.setattr(build_locks, "STALE_AFTER_S", 0.0)
    monkeypatch.setattr(build_locks, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(FileBaton, "wait", wait)
    with caplog.at_level(logging.WARNING), holder(lock), build_locks.waits_are_said():
        FileBaton(str(lock)).wait()
        lock.unlink()
        FileBaton(str(lock)).wait()  # it is gone: no word
    (message,) = caplog.messages
    assert str(lock) in message and said in message and FileBaton.wait is wait


def test_a_lock_is_listed_and_removed_on_request_where_it_is_stale(lock, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "collect", lambda: EMPTY)
    old = time.time() - 600
    os.utime(lock, (old, old))
    lock_in(tmp_path / "ds_terapipe_lamb_cpu_311")  # ours stays, and holds no process up
    with lock.open():  # as a process that compiles does
        (found,) = build_locks.locks()
        assert found.path == str(lock) and found.age_s == pytest.approx(600, abs=5) and not found.stale
        assert f"{lock}, 10 minutes old, held" in as_text(locks=[found._asdict()])
        assert build_locks.remove_stale() == [] and lock.exists()
    (found,) = build_locks.locks()
    assert found.stale
    text = as_text(locks=[found._asdict()])
    assert f"{lock}, 10 minutes old, stale: no process holds it" in text and "report --remove-stale-locks" in text
    assert cli.main(["report"]) == 0 and lock.exists()
    other = lock_in(lock.parent.parent / "deepspeed_cpu_adam")
    with other.open():
        assert cli.main(["report", "--remove-stale-locks"]) == 0
    assert other.exists() and not lock.exists()
    assert f"\nremoved\n  {lock}\n" in capsys.readouterr().out


def test_a_script_that_waits_before_initialize_says_it_where_its_arguments_have_our_keys(tmp_path: Path) -> None:
    script = """
import torch
torch._import_device_backends()
from torch.utils.file_baton import FileBaton
print("says", hasattr(FileBaton.wait, "ds_terapipe_says"))
"""
    config = tmp_path / "ds_config.json"
    for keys, arguments, says in (
        ({"token_pipeline": {}}, [f"--deepspeed_config={config}"], True),
        ({"train_batch_size": 1}, ["--deepspeed_config", str(config)], False),
    ):
        config.write_text(json.dumps(keys))
        assert f"says {says}" in run_script(script, tmp_path, *arguments).output


# As DeepSpeed's op: the rank makes its file and maps it, and never takes the name away.
MAPS = """
import mmap, sys
from ds_terapipe import shared_memory
with open(sys.argv[1], "w+b") as file:
    file.truncate(65536)
    kept = mmap.mmap(file.fileno(), 0)
if sys.argv[2] == "ours":
    shared_memory.release_at_exit()
print("mapped", flush=True)
sys.stdin.readline()
"""
NAME = f"{shared_memory.FOLDER}/deepspeed_allreduce_buffer_{os.getuid()}_test_{os.getpid()}"


def test_a_buffer_of_dead_processes_is_listed_and_a_launch_that_failed_takes_its_name_away() -> None:
    path = Path(f"{NAME}_alone")

    def maps(whose: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", MAPS, path, whose], stdin=-1, stdout=-1, text=True)

    def listed() -> list[dict[str, Any]]:
        return [buffer._asdict() for buffer in shared_memory.left_behind() if buffer.path == str(path)]

    with maps("theirs") as process:
        assert process.stdout.readline() == "mapped\n"
        assert path.exists() and not listed()
        process.send_signal(signal.SIGKILL)
    text = as_text(buffers=listed())
    assert f"of launches that have ended, 0 MB of memory; remove the files\n  {path}" in text
    with maps("ours") as process:
        assert process.stdout.readline() == "mapped\n" and path.exists()
        process.communicate("go on\n")
    assert process.returncode == 0 and not path.exists()


def trained(rank: int, world_size: int, name: str) -> tuple[list[str], bytes]:
    """Names of buffers that are left once engines are built, and the content of the other rank's after a step."""
    import torch.distributed

    def open_buffer(number: int) -> mmap.mmap:
        with open(f"{name}_{number}", "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    Path(f"{name}_{rank}").write_bytes(bytes(1 << 16))
    torch.distributed.barrier()
    mine, others = open_buffer(rank), open_buffer(1 - rank)
    engine = build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2})
    left = [str(path) for number in range(world_size) if (path := Path(f"{name}_{number}")).exists()]
    mine[:5] = b"rank%d" % rank
    engine.train_batch(iter([micro_batch(m, masked=False) for m in range(2)]))
    torch.distributed.barrier()
    engine.destroy()
    Path(f"{name}_{rank}").unlink(missing_ok=True)
    return left, others[:5]


ranks = launched(trained, 2, NAME)


def test_an_engine_needs_no_names_of_buffers(ranks: list[tuple[list[str], bytes]]) -> None:
    assert ranks == [([], b"rank1"), ([], b"rank0")]

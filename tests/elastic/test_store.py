"""Files of the cache: what is read is what was written, or nothing; limits; whose folders live."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys

import pytest

from ds_terapipe.elastic.cache import store
from ds_terapipe.elastic.cache.store import Tier
from tests.spawn import run_ranks

PARTS = [b"head", bytes(range(256)) * 8]
WHOLE = b"".join(PARTS)


def tier(root, run="one", limit=None):
    return Tier(root, run, limit)


def test_what_is_read_is_what_was_written(tmp_path):
    one = tier(tmp_path)
    assert one.read("a/b") is None
    assert one.write("a/b", PARTS) and bytes(one.read("a/b")) == WHOLE
    assert one.write("a/b", [b"other"]) and bytes(one.read("a/b")) == b"other"
    one.remove("a/b")
    assert one.read("a/b") is None and one.used_bytes == 0


def test_a_damaged_entry_is_none(tmp_path):
    """A flipped bit anywhere, header too, or an entry that is cut off anywhere."""
    one, rng = tier(tmp_path), random.Random(0)
    for number in range(100):
        name = f"a/{number}"
        assert one.write(name, [*PARTS, bytes([number])])
        path = tmp_path / "one" / name
        data = bytearray(path.read_bytes())
        where = rng.randrange(len(data) * 8) if number >= 40 else number * 8
        if number % 3:
            data[where // 8] ^= 1 << where % 8
        else:
            del data[where // 8 :]
        path.write_bytes(data)
        assert one.read(name) is None, (number, where)
        assert one.write(name, PARTS) and bytes(one.read(name)) == WHOLE


def test_an_entry_under_another_name_is_none(tmp_path):
    one = tier(tmp_path)
    one.write("a/b", PARTS)
    os.rename(tmp_path / "one" / "a" / "b", tmp_path / "one" / "a" / "c")
    assert one.read("a/c") is None


def test_the_limit_is_that_of_all_processes(tmp_path):
    one, other = tier(tmp_path, limit=5000), tier(tmp_path, limit=5000)
    assert one.write("a", PARTS) and other.write("b", PARTS)
    assert not one.write("c", PARTS) and one.full and not other.write("c", PARTS)
    assert one.write("a", PARTS)  # in the place of what it had
    assert one.used_bytes == other.used_bytes == sum((tmp_path / "one" / n).stat().st_size for n in "ab")
    other.remove("a")
    assert one.write("c", PARTS) and not one.full
    one.drop(".")


def test_no_space_left(tmp_path, monkeypatch):
    one = tier(tmp_path)
    assert one.write("a", PARTS)
    before = one.used_bytes

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    assert not one.write("b", PARTS) and one.full and not one.write("a", [b"other"])
    assert one.used_bytes == before and bytes(one.read("a")) == WHOLE
    assert sorted(os.listdir(tmp_path / "one")) == ["a", "lock", "used"]


def test_two_runs_leave_each_other_alone(tmp_path):
    one, other = tier(tmp_path, "one"), tier(tmp_path, "other", limit=3000)
    assert one.write("a", PARTS) and other.write("a", [b"its own"])
    assert bytes(one.read("a")) == WHOLE and bytes(other.read("a")) == b"its own"
    assert not other.write("b", PARTS * 2) and one.write("b", PARTS * 2)
    other.close(keep=False)
    assert not (tmp_path / "other").exists() and bytes(one.read("b")) == WHOLE * 2


def test_the_last_process_removes_the_folder(tmp_path):
    one, other = tier(tmp_path), tier(tmp_path)
    one.write("a", PARTS)
    one.close(keep=False)
    assert other.read("a") is not None
    other.close(keep=False)
    assert not (tmp_path / "one").exists()


def test_a_folder_is_kept_for_a_run_that_goes_on(tmp_path):
    one = tier(tmp_path)
    one.write("a", PARTS)
    (tmp_path / "one" / f"b.{os.getpid()}-1").write_bytes(b"half")  # of a write that was killed
    used = one.used_bytes
    one.close(keep=True)
    (tmp_path / "one" / "used").write_bytes(b"12345")
    again = tier(tmp_path)
    assert bytes(again.read("a")) == WHOLE and again.used_bytes == used
    assert sorted(os.listdir(tmp_path / "one")) == ["a", "lock", "used"]


CHILD = """
import sys, time
from pathlib import Path
from ds_terapipe.elastic.cache.store import Tier
tier = Tier(Path(sys.argv[1]), "child", None)
tier.write("a", [b"x" * 1000])
print("ready", flush=True)
time.sleep(60)
"""


def test_a_dead_run_is_removed_and_a_live_one_is_not(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        tier(tmp_path, "one")
        assert (tmp_path / "child" / "a").is_file()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    tier(tmp_path, "two")
    assert not (tmp_path / "child").exists() and (tmp_path / "one").is_dir()


def write_at_once(rank, world_size, root):
    one = tier(root, limit=200_000)
    done = [one.write(f"{number % 7}/{number}", [bytes([rank]) * 900]) for number in range(300)]
    found = [one.read(f"{number % 7}/{number}") for number in range(300)]
    return sum(done), [set(bytes(each)) for each in found if each is not None]


@pytest.mark.parametrize("ranks", [2])
def test_processes_write_at_once(tmp_path, ranks):
    for done, found in run_ranks(write_at_once, ranks, tmp_path):
        assert done and found and all(len(each) == 1 for each in found)  # never half of one and half of the other
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file() and path.name not in ("lock", "used")]
    assert 100_000 < sum(path.stat().st_size for path in files) <= 200_000

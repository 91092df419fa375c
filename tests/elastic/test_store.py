"""Files of the cache: what is read is what was written, or nothing; limits; whose folders live."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_terapipe.elastic.cache import store
from ds_terapipe.elastic.cache.store import Tier

PARTS = [b"head", bytes(range(256)) * 8]
WHOLE = b"".join(PARTS)


def test_what_is_read_is_what_was_written_under_its_name(tmp_path: Path) -> None:
    one = Tier(tmp_path, "one", None)
    assert one.read("a/b") is None
    assert one.write("a/b", PARTS) and bytes(one.read("a/b")) == WHOLE
    assert one.write("a/b", [b"other"]) and bytes(one.read("a/b")) == b"other"
    os.link(tmp_path / "one" / "a" / "b", tmp_path / "one" / "a" / "c")
    assert one.read("a/c") is None
    one.remove("a/b")
    assert one.read("a/b") is None and one.used_bytes == 0


def test_a_damaged_entry_is_none(tmp_path: Path) -> None:
    """A flipped bit anywhere, header too, or an entry that is cut off anywhere."""
    one, rng = Tier(tmp_path, "one", None), random.Random(0)
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


def test_the_limit_is_that_of_all_processes_and_of_a_run_alone(tmp_path: Path) -> None:
    one, other = Tier(tmp_path, "one", 5000), Tier(tmp_path, "one", 5000)
    assert one.write("a", PARTS) and other.write("b", PARTS)
    assert not one.write("c", PARTS) and one.full and not other.write("c", PARTS)
    assert one.write("a", PARTS)  # in the place of what it had
    assert one.used_bytes == other.used_bytes == sum((tmp_path / "one" / n).stat().st_size for n in "ab")
    other.remove("a")
    assert one.write("c", PARTS) and not one.full
    another = Tier(tmp_path, "other", 3000)
    assert another.write("a", [b"its own"]) and not another.write("b", PARTS * 2)
    another.close(keep=False)
    assert not (tmp_path / "other").exists() and bytes(one.read("c")) == WHOLE


def test_no_space_left_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Tier(tmp_path, "one", None)
    assert one.write("a", PARTS)
    before = one.used_bytes

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    assert not one.write("b", PARTS) and one.full and not one.write("a", [b"other"])
    assert one.used_bytes == before and bytes(one.read("a")) == WHOLE
    assert sorted(os.listdir(tmp_path / "one")) == ["a", "lock", "used"]


def test_the_last_process_removes_the_folder_or_keeps_it_for_a_run_that_goes_on(tmp_path: Path) -> None:
    one, other = Tier(tmp_path, "one", None), Tier(tmp_path, "one", None)
    one.write("a", PARTS)
    (tmp_path / "one" / f"b.{os.getpid()}-1").write_bytes(b"half")  # of a write that was killed
    used = one.used_bytes
    one.close(keep=False)
    assert other.read("a") is not None
    other.close(keep=True)
    (tmp_path / "one" / "used").write_bytes(b"12345")
    again = Tier(tmp_path, "one", None)
    assert bytes(again.read("a")) == WHOLE and again.used_bytes == used
    assert sorted(os.listdir(tmp_path / "one")) == ["a", "lock", "used"]
    again.close(keep=False)
    assert not (tmp_path / "one").exists()


CHILD = """
import sys, time
from pathlib import Path
from ds_terapipe.elastic.cache.store import Tier
number, root = int(sys.argv[2]), Path(sys.argv[1])
tier = Tier(root, "child", 200_000)
for n in range(300):
    tier.write(f"{n % 7}/{n}", [bytes([number]) * 900])
found = [tier.read(f"{n % 7}/{n}") for n in range(300)]
print(all(len(set(bytes(each))) == 1 for each in found if each is not None), flush=True)
time.sleep(60)
"""


def test_processes_write_at_once_and_a_dead_run_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    children = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(2)]
    try:  # never half of one and half of the other
        assert [child.stdout.readline() for child in children if child.stdout is not None] == ["True\n"] * 2
        Tier(tmp_path, "one", None)
        entries = (path for path in (tmp_path / "child").rglob("*") if path.name not in ("lock", "used"))
        assert 100_000 < sum(path.stat().st_size for path in entries if path.is_file()) <= 200_000
    finally:
        for child in children:
            child.kill()
            child.wait()
    Tier(tmp_path, "two", None)
    assert not (tmp_path / "child").exists() and (tmp_path / "one").is_dir()

"""DeepSpeed's buffers in shared memory: no name is left by a launch, and those of dead launches are listed."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_terapipe import shared_memory
from tests.mutants.claims import holds
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.spawn import run_ranks
from tests.test_build_locks import as_text

SIZE = 1 << 16

# As DeepSpeed's op: the rank makes its file and maps it, and never takes the name away.
MAPS = """
import mmap, os, sys
from ds_terapipe import shared_memory
with open(sys.argv[1], "w+b") as file:
    file.truncate(65536)
    kept = mmap.mmap(file.fileno(), 0)
if sys.argv[2] == "ours":
    shared_memory.release_at_exit()
print("mapped", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """The name of a buffer of this test's."""
    path = shared_memory.FOLDER / f"deepspeed_allreduce_buffer_{os.getuid()}_test_{os.getpid()}_0"
    yield path
    path.unlink(missing_ok=True)


def listed(path: Path) -> bool:
    return str(path) in {buffer.path for buffer in shared_memory.left_behind()}


def test_those_of_dead_processes_are_listed(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", MAPS, path, "theirs"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "mapped\n"
        assert path.exists() and not listed(path)
        process.send_signal(signal.SIGKILL)
    assert listed(path)
    text = as_text(buffers=[buffer._asdict() for buffer in shared_memory.left_behind() if buffer.path == str(path)])
    assert f"of launches that have ended, 0 MB of memory; remove the files\n  {path}" in text


def test_the_end_of_a_launch_that_failed_early_takes_the_name_away(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", MAPS, path, "ours"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "mapped\n" and path.exists()
        process.communicate("go on\n")
    assert process.returncode == 0 and not path.exists()


def trained(rank: int, world_size: int, name: str) -> tuple[list[str], bytes]:
    """What is there of the buffers of all ranks once engines are built, and what is in another rank's then."""
    import torch.distributed

    def open_buffer(number: int) -> mmap.mmap:
        with open(f"{name}_{number}", "r+b") as file:
            return mmap.mmap(file.fileno(), SIZE)

    Path(f"{name}_{rank}").write_bytes(bytes(SIZE))
    torch.distributed.barrier()
    mine, others = open_buffer(rank), open_buffer(1 - rank)
    engine = build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2})
    left = [path.name for path in Path(name).parent.glob(f"{Path(name).name}*")]
    mine[:5] = b"rank%d" % rank
    engine.train_batch(iter([micro_batch(m, masked=False) for m in range(2)]))
    torch.distributed.barrier()
    engine.destroy()
    return left, others[:5]


def test_an_engine_needs_no_names(path: Path) -> None:
    check(run_ranks(trained, 2, str(path).removesuffix("_0")))


def check(ranks: list[tuple[list[str], bytes]]) -> None:
    assert ranks == [([], b"rank1"), ([], b"rank0")]


# for tests.mutants
def names_go(mutant: str | None) -> bool:
    name = str(shared_memory.FOLDER / f"deepspeed_allreduce_buffer_{os.getuid()}_mutant_{os.getpid()}")
    try:
        return holds(check, run_ranks(trained, 2, name, mutant=mutant))
    finally:
        for rank in (0, 1):
            Path(f"{name}_{rank}").unlink(missing_ok=True)

"""Freed memory stays in the process, unless somebody has decided otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told")

# Page faults of steps that allocate, write and free 16 MiB in small and large blocks.
#
# What glibc gives back by itself depends on what the process has done before: its limits follow the largest block that was freed,
# and nothing that lies under a small block in use goes back. So the process starts from glibc's first limit, held fast: each of
# these blocks is mapped by itself. Where memory is kept the heap may grow for some steps, until a step finds room in the gaps of
# the one before. Huge pages, where a system gives them unasked, would have one fault for 512 pages.
FAULTS = """
import ctypes, resource, sys, torch
from ds_terapipe.pipeline.host_memory import keep_freed_memory
PR_SET_THP_DISABLE, M_MMAP_THRESHOLD = 41, -3
libc = ctypes.CDLL(None)
assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0 and libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    blocks = [torch.ones(size) for size in [2**18] * 8 + [2**21]]
counts = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, *counts)
"""
PAGES = 16 * 2**20 // os.sysconf("SC_PAGESIZE")

# What is free at the end of the heap once a block of 30 MiB, the last there, has been freed.
FREE_END = """
import ctypes, sys
from ds_terapipe.pipeline.host_memory import keep_freed_memory
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena o s h hblkhd u f uordblks fordblks keepcost".split()]
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo.restype = Info
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
libc.free(libc.malloc(30 * 2**20))
print(kept, libc.mallinfo().keepcost)
"""


def run(program: str, what: str, **environment: str) -> tuple[str, list[int]]:
    """What ``keep_freed_memory`` returned in a process of its own, or None where it was not called, and the numbers printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    command = [sys.executable, "-c", program, what]
    out = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    kept, *numbers = out.splitlines()[-1].split()
    return kept, [int(number) for number in numbers]


def test_a_step_that_repeats_itself_has_no_page_faults():
    kept, counts = run(FAULTS, "keep")
    _, without = run(FAULTS, "leave")
    assert kept == "True"
    assert max(counts[-4:]) < 50
    assert min(without) >= PAGES


def test_the_free_end_of_the_heap_is_kept():
    kept, (free,) = run(FREE_END, "keep")
    _, (without,) = run(FREE_END, "leave")
    assert kept == "True"
    assert without < 2**20 < 30 * 2**20 <= free


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_ARENA_MAX": "2"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
        {"LD_PRELOAD": "libm.so.6"},
    ],
)
def test_who_has_chosen_is_left_alone(environment):
    kept, _ = run(FREE_END, "keep", **environment)
    assert kept == "False"

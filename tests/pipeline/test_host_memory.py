"""Freed memory stays in the process, unless somebody has decided otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told")

# Page faults of allocating, writing and freeing 16 MB in small and large blocks, when that was done before.
FAULTS = """
import ctypes, resource, sys, torch
from ds_terapipe.pipeline.host_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    blocks = [torch.ones(size) for size in [2**18] * 8 + [2**21]]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(what: str, **environment: str) -> tuple[str, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    command = [sys.executable, "-c", FAULTS, what]
    out = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    kept, count = out.split()[-2:]
    return kept, int(count)


def test_a_step_that_repeats_itself_has_no_page_faults():
    kept, count = faults("keep")
    _, without = faults("leave")
    assert kept == "True"
    assert count < 200 < 1000 < without  # 16 MB are 4096 pages


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_ARENA_MAX": "2"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
        {"LD_PRELOAD": "libm.so.6"},
    ],
)
def test_who_has_chosen_is_left_alone(environment):
    kept, _ = faults("keep", **environment)
    assert kept == "False"

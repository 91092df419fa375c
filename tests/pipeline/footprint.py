"""Resources of this process: process groups, threads, open files, shared memory, resident memory."""

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

from torch.distributed import distributed_c10d


class Footprint(NamedTuple):
    """Counts, but for ``resident``, which is bytes in use, as what ``malloc`` holds free has been given back to the system."""

    groups: int  # process groups that this rank is in
    threads: int  # of the process, those that are not Python's too: gloo has three for a group of two ranks
    files: int  # open file descriptors, sockets among them
    shared: int  # mapped files of /dev/shm
    resident: int


def footprint() -> Footprint:
    """Of this process, after a garbage collection."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(
        groups=len(distributed_c10d._world.pg_map), threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")), shared=Path("/proc/self/maps").read_text().count("/dev/shm/"),
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
    )  # fmt: skip


def settled(before: Footprint, within_s: float = 60.0) -> Footprint:
    """The footprint once it has no more threads and files than ``before``, or after ``within_s`` seconds.

    The job's store closes a connection when its thread comes to run after the other end has closed it.
    """
    deadline = time.monotonic() + within_s
    while True:
        now = footprint()
        if (now.threads <= before.threads and now.files <= before.files) or time.monotonic() > deadline:
            return now
        time.sleep(0.02)

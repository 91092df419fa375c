"""Memory that a step frees stays in the process for the next step.

On a CPU tensors come from the C library's ``malloc``. glibc gives large blocks and a free end of its heap back to the system as
soon as they are freed, by limits that depend on what the process allocated before, and gets them again page by page, each page
zeroed: thousands of page faults in a step that allocates the same tensors as the one before. PyTorch's CUDA allocator keeps
memory for the same reason; here glibc is told to.
"""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**30  # free at the end of the heap, before any is given back
_LARGEST_KEPT = 32 * 2**20  # bytes of a block; the most that glibc takes


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, for this whole process; True where it does.

    Left alone are other C libraries, and whoever has set limits in the environment (``MALLOC_*``, ``GLIBC_TUNABLES``) or brought
    another allocator (``LD_PRELOAD``).
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or os.environ.get("LD_PRELOAD") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))

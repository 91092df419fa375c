"""Cases that run on the stand-in, in a process of their own: ``python -m tests.device_stand_in.cases NAME...`` prints JSON."""

import json
import sys
import time
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

import torch
from torch import nn

from tests.device_stand_in import compute, runtime

_ELEMENTS = 1 << 20


def random_numbers() -> list[bool]:
    """Masks: equal after the generator is set back, otherwise not; a generator of the user's own counts."""
    x, dropout, own = torch.ones(256, device="cuda"), nn.Dropout(0.5), torch.Generator("cuda")
    state = torch.cuda.get_rng_state()
    first, second = dropout(x), dropout(x)
    torch.cuda.set_rng_state(state)
    made = [torch.rand(9, device="cuda", generator=own.manual_seed(seed)) for seed in (1, 1, 2)]
    return [first.equal(dropout(x)), first.equal(second), made[0].equal(made[1]), made[0].equal(made[2])]


def races() -> dict[str, list[str]]:
    """Races in a hand-over between streams that leaves out one thing, or none."""
    runtime.races()
    found = {}
    for left_out in ("nothing", "polled", "wait_stream", "record_stream", "event", "copy's event", "host's wait"):
        _hand_over(left_out)
        torch.cuda.synchronize()
        found[left_out] = sorted(runtime.races())
    return found


def _hand_over(left_out: str) -> None:
    main, side, copies = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(_ELEMENTS, device="cuda")
    if left_out != "wait_stream":
        side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
        done = side.record_event()
    if left_out != "record_stream":
        x.record_stream(side)
    del x
    torch.full((_ELEMENTS,), 3.0, device="cuda")  # may take the memory of x
    if left_out == "event":  # what PyTorch's allocators ask for by chance is no order
        while runtime.LIBRARY.cudaEventQuery(c_void_p(done.cuda_event)):
            time.sleep(0.001)
    elif left_out == "polled":  # the host asks until it is done
        while not done.query():
            time.sleep(0.001)
    else:
        main.wait_event(done)
    y += 1
    if left_out != "copy's event":
        copies.wait_stream(main)
    with torch.cuda.stream(copies):
        on_host = torch.empty(_ELEMENTS, pin_memory=True)
        on_host.copy_(y, non_blocking=True)
    if left_out != "host's wait":
        copies.synchronize()
    on_host.add_(1)


def memory() -> dict[str, int]:
    """The allocator's counters beside the runtime's, of two devices that nothing else used."""

    def used(device: int) -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    held = [torch.empty(3 << 20, dtype=torch.uint8, device=f"cuda:{device}") for device in (2, 2, 3)]
    counters = {
        "allocated": torch.cuda.memory_allocated(2), "reserved": torch.cuda.memory_reserved(2), "used": used(2), "other": used(3)
    }  # fmt: skip
    held.clear()
    torch.cuda.empty_cache()
    counters["left"] = used(2) + used(3)
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda:2")
    except torch.OutOfMemoryError:
        counters["refused"] = 1
    return counters


_CASES: tuple[Callable[[], Any], ...] = (random_numbers, races, memory)

if __name__ == "__main__":
    compute.install()
    print(json.dumps({case.__name__: case() for case in _CASES if case.__name__ in sys.argv[1:]}))

"""Hand-overs between streams on the stand-in: ``python -m tests.device_stand_in.cases`` prints their races as JSON."""

import json
import time
from ctypes import c_void_p

import torch

from tests.device_stand_in import compute, runtime

_ELEMENTS = 1 << 20


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


if __name__ == "__main__":
    compute.install()
    print(json.dumps(races()))

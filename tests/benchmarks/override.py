"""What the override of attention costs other models in the process: ``python -m tests.benchmarks.override``.

Microseconds per call of ``F.scaled_dot_product_attention`` outside of a slice, with and without an engine's interception alive,
in turn; the shortest of several repeats. The tensors are small, so that the call itself is what takes time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ds_terapipe.pipeline.operators.interception import Interception

CALLS = 2000


def microseconds(call: Callable[[], object]) -> float:
    """Of one of many calls."""
    for _ in range(CALLS // 10):
        call()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / CALLS


def with_and_without(call: Callable[[], object], engines: nn.Module, repeats: int) -> tuple[float, float]:
    """The shortest, without and with an interception of the engine's own modules."""
    without, with_one = [], []
    for _ in range(repeats):
        without.append(microseconds(call))
        interception = Interception([engines])
        with_one.append(microseconds(call))
        interception.close()
    return min(without), min(with_one)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the override of attention costs other models in the process.")
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="of which the shortest counts (default: 15)"
    )
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    own, other = nn.Linear(8, 8), nn.Linear(8, 8)
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    cases: dict[str, Callable[[], object]] = {
        "attention, forward": attend,
        "attention, forward and backward": lambda: torch.autograd.grad(attend().sum(), (q, k, v)),
        "another model's linear layer": lambda: other(x),
        "the engine's own, outside of a slice": lambda: own(x),
    }
    for name, call in cases.items():
        without, with_one = with_and_without(call, own, repeats)
        print(f"{name:<38}{without:8.2f} us without, {with_one:8.2f} us with", flush=True)


if __name__ == "__main__":
    main()

"""Cost of the override of attention for other models in the process.

``python -m tests.benchmarks.override`` times calls outside of a slice, with and without an engine's interception alive. The
tensors are small, so that the call itself is what takes time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.benchmarks import measure

CALLS, CASES = 2000, ("attention", "attention and its backward", "another model's linear layer")


def make() -> Callable[[str], None]:
    """Function that makes the calls of a column: a case, or a case and " with"."""
    from ds_terapipe.pipeline.operators.interception import Interception

    own, other, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    calls = [attend, lambda: torch.autograd.grad(attend().sum(), (q, k, v)), lambda: other(x)]
    cases = dict(zip(CASES, calls, strict=True))

    def run(column: str) -> None:
        call = cases[column.removesuffix(" with")]
        interception = Interception([own]) if column.endswith(" with") else None
        for _ in range(CALLS):
            call()
        if interception is not None:
            interception.close()

    return run


def main() -> None:
    options = measure.parser("override", __doc__, rounds=3).parse_args()
    repeats = {f"{case}{how}": 2 if options.quick else 15 for case in CASES for how in ("", " with")}
    result = measure.on_ranks(measure.calls, make, repeats, measure.settings_of(options))
    lines = [result.state]
    for case in CASES:
        without, with_one = (1e6 * result.seconds[f"{case}{how}"] / CALLS for how in ("", " with"))
        lines.append(f"{case:38}{without:8.2f} us without, {with_one:8.2f} us with: {with_one / without:.2f}x")
    measure.Report(options).add("calls", result, lines)


if __name__ == "__main__":
    main()

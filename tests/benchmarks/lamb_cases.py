"""The columns of the LAMB benchmark on a CPU: optimizer steps over the same tensors, run inside a worker.

All optimizers share parameters, gradients and moments: each keeps the same two averages of the same gradients, so what
one leaves the next can go on with, and a model needs 16 bytes per parameter however many columns there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.benchmarks.lamb_eager import EagerLamb
from tests.benchmarks.lamb_shapes import CLASSES, MODELS, of_class
from tests.benchmarks.workers import Seat

STREAM_ELEMENTS = 64 * 2**20  # 256 MB each way, eight times the last-level cache of what this was written on
STREAM_BYTES = 12  # read, write, and the read that a write to memory begins with
# Bytes moved per parameter when no tensor stays in a cache. AdamW: p, g, m, v read, p, m, v written. LAMB: in phase 1
# p, g, m, v read and m, v written, in phase 2 p, m, v read and p written, of which 12 fall away where phase 2 finds its
# tensors in a cache; 4 more to look for nan and inf in the gradients. Eager: the 13 passes of lamb_eager._update,
# temporaries counted as the stream is, with the read before a first write.
BYTES = {"adamw": 28, "lamb": 44, "unchecked": 40, "search": 4, "read": 4, "eager": 128}
UNMOVING = ("stream", "search", "read")  # these change no parameter
_SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def fused_lamb(parameters: Sequence[Tensor], check_gradients: bool = True) -> torch.optim.Optimizer:
    """The package's LAMB."""
    from ds_terapipe.optim.lamb import FusedLamb

    return FusedLamb(parameters, **_SETTINGS, check_gradients=check_gradients)


class Case:
    """The tensors of one model and what is timed on them. Called with a column's name, it takes one step."""

    def __init__(self, model: str) -> None:
        self.shapes = MODELS[model]()
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.empty(one.shape).normal_(0, 0.02, generator=generator) for one in self.shapes]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3, generator=generator)
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._stream = torch.ones(STREAM_ELEMENTS), torch.zeros(STREAM_ELEMENTS)

    def _chosen(self, column: str) -> tuple[str, list[Tensor]]:
        """``adamw:attention`` is AdamW on the tensors of that class."""
        name, _, kind = column.partition(":")
        places = of_class(self.shapes, kind) if kind else range(len(self.parameters))
        return name, [self.parameters[place] for place in places]

    def _make(self, column: str) -> torch.optim.Optimizer:
        name, parameters = self._chosen(column)
        if name == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, **_SETTINGS, fused=True)
        elif name == "eager":
            optimizer = EagerLamb(parameters, **_SETTINGS)
            optimizer.param_groups[0]["step"] = 1
        else:
            optimizer = fused_lamb(parameters, check_gradients=name == "lamb")
        for parameter in parameters:
            mean, square = self.moments[parameter]
            # One step done: what each takes for the count of its steps.
            step = {"adamw": torch.tensor(1.0), "eager": None}.get(name, 1)
            state = {"exp_avg": mean, "exp_avg_sq": square} | ({} if step is None else {"step": step})
            optimizer.state[parameter] = state
        optimizer.step()
        return optimizer

    def __call__(self, column: str) -> None:
        if column == "stream":
            source, target = self._stream
            torch.mul(source, 1.000001, out=target)  # not copy_, which may write past the cache
        elif column == "read":
            for parameter in self.parameters:
                parameter.grad.sum()
        elif column == "search":
            self._search()
        else:
            self._optimizer(column).step()

    def _optimizer(self, column: str) -> torch.optim.Optimizer:
        if column not in self.optimizers:
            self.optimizers[column] = self._make(column)
        return self.optimizers[column]

    def _search(self) -> None:
        """What a step of FusedLamb begins with, alone: the squares of the gradients, in which a nan or inf shows."""
        ((_, (table,)),) = self._optimizer("lamb")._tables.values()  # type: ignore[attr-defined]
        self.control = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # a scale, no clipping
        table.op.square_sum(table.tables, self.control)


def prepare(seat: Seat, model: str) -> None:
    """Request: allocate the model's tensors in this worker, in place of an earlier model's."""
    seat.step = None
    seat.step = Case(model)  # type: ignore[assignment]


def timed(seat: Seat, column: str, threads: int, steps: int) -> float:
    """Request: seconds of the fastest of ``steps`` steps of a column, after one that is not counted."""
    case: Callable[[str], None] = seat.step  # type: ignore[assignment]
    torch.set_num_threads(threads)
    try:
        best = float("inf")
        for turn in range(steps + 1):
            start = time.perf_counter()
            case(column.removesuffix("2"))
            if turn:
                best = min(best, time.perf_counter() - start)
        return best
    finally:
        torch.set_num_threads(1)


def columns(eager: bool, classes: bool) -> list[str]:
    """What is timed in a round. AdamW is timed twice: what the two differ by is the noise."""
    out = ["stream", "adamw", "lamb", "unchecked", "search", "read", *(["eager"] if eager else []), "adamw2"]
    return out + [f"{name}:{kind}" for kind in CLASSES for name in ("adamw", "lamb") if classes]

"""A pipeline with more stages than there are cores: layers that compute next to nothing and sleep for a modelled time.

Everything around them is the real thing: the engine, its schedules, slices and attention buffers, and messages over
gloo. A stage is one layer. A pass through it ends when its modelled time is over, counted from its beginning.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.plan.costs.cost import Tokens

HIDDEN = 8


@dataclass(frozen=True)
class SleepCost:
    """Seconds of a slice on a stage, as the layers sleep and as the simulator is told.

    A forward takes ``fixed + token * l + pair * l * (c + (l + 1) / 2)`` for l tokens after a context of c. A backward
    takes twice as long and makes the weight gradients too. Messages take no time. All stages are alike.
    """

    fixed: float
    token: float
    pair: float
    sequences: int = 1
    max_length: int = 1 << 20

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.fixed + self.token * length + self.pair * length * (context + (length + 1) / 2)

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return 2 * self.forward(stage, length, context)

    def weights(self, stage: int, length: Tokens) -> Tokens:
        return 0.0 * length

    def message(self, boundary: int, length: Tokens) -> Tokens:
        return 0.0 * length


class Case(NamedTuple):
    """One training step: ``sequences`` micro-batches of one sequence in slices of ``lengths`` tokens."""

    schedule: str
    sequences: int
    lengths: tuple[int, ...]


class Taken(NamedTuple):
    """Mean loss of a case's first step, seconds of every timed one, and whether the system granted real-time priority."""

    loss: float
    seconds: list[float]
    first_in_line: bool


@contextmanager
def first_in_line() -> Iterator[bool]:
    """Real-time priority for the threads of this process, where the system grants it (value: whether it does).

    A stage that has slept for its time is a device that is done: other programs must not keep its process from saying so.
    """
    threads = [int(thread) for thread in os.listdir("/proc/self/task")] if sys.platform == "linux" else []
    granted = bool(threads)
    try:
        try:
            for thread in threads:
                with suppress(ProcessLookupError):  # a thread that is gone
                    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
        except OSError:
            granted = False
        yield granted
    finally:
        for thread in threads:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


class _Edge(torch.autograd.Function):
    """A layer's first operation, or its last, where its backward begins: that of the first sleeps until the time is over.

    ``anchor`` is a parameter: the first stage's inputs need no gradient, and its backward must come by all the same. ``clock``
    has the seconds of the backward, and then its beginning.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, clock: list[float], last: bool) -> Tensor:
        ctx.clock, ctx.last = clock, last
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.last:
            ctx.clock.append(time.perf_counter())
        else:
            time.sleep(max(sum(ctx.clock) - time.perf_counter(), 0.0))
        return gradient, gradient.new_zeros(1), None, None


class SleepingLayer(nn.Module):
    """Causal attention with one head of width 8 that takes its modelled time once ``asleep`` is set."""

    def __init__(self, cost: SleepCost) -> None:
        super().__init__()
        self.cost, self.asleep = cost, False
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        began = time.perf_counter()
        context = SliceContext.current
        start = 0 if context is None or context.span is None else context.span.start
        length = hidden.shape[1]
        clock = [self.cost.backward(0, length, start) if self.asleep else 0.0]
        hidden = _Edge.apply(hidden, self.anchor, clock, False)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        hidden = _Edge.apply(hidden + self.out(mixed), self.anchor, clock, True)
        if self.asleep:
            time.sleep(max(began + self.cost.forward(0, length, start) - time.perf_counter(), 0.0))
        return hidden


class SquareLoss:
    """Mean square error per token, in the form that the engine runs per slice."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.token_sum(outputs, labels) / self.token_weight(labels)

    def token_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().sum()

    def token_weight(self, labels: Tensor) -> Tensor:
        return labels.new_tensor(labels.shape[0] * labels.shape[1])


def data_for(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The step's micro-batches: inputs and labels, each [1, tokens, 8]."""
    random = torch.Generator().manual_seed(0)
    shape = (1, sum(case.lengths), HIDDEN)
    return [(torch.randn(shape, generator=random), torch.randn(shape, generator=random)) for _ in range(case.sequences)]


def new_engine(cost: SleepCost, case: Case, stages: int) -> Any:
    """An engine with one layer a stage, none of which sleeps yet; collective."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ds_terapipe

    # one seed a stage and not PipelineModule's seed_layers, which sets all random states in every pass: half a millisecond
    torch.manual_seed(dist.get_rank())
    layers = [LayerSpec(SleepingLayer, cost) for _ in range(stages)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=SquareLoss(), partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.sequences,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "token_pipeline": {
            "slices": list(case.lengths),
            "schedule": case.schedule,
            "cut": {"inputs": [1], "labels": [1]},
            "verify": False,
            "weight_gradients": "slice",  # the modelled backward has them
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return ds_terapipe.initialize(model=model, optimizer=optimizer, config=config)[0]


def run_cases(
    rank: int, world: int, cost: SleepCost, cases: Sequence[Case], steps: int, enough_s: float
) -> list[Taken]:
    """Every case on ``world`` stages, on all ranks at once: one step without sleep (shapes are announced, groups connect),
    then at most ``steps`` timed ones, none after ``enough_s`` seconds have been measured.

    A step is timed from a barrier to the end of ``train_batch`` on the slowest rank.
    """
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1), os.dup2(sink, 2)
    return [_run_case(cost, case, world, steps, enough_s) for case in cases]


def _run_case(cost: SleepCost, case: Case, stages: int, steps: int, enough_s: float) -> Taken:
    engine = new_engine(cost, case, stages)
    batches = itertools.cycle(data_for(case))
    loss = float(engine.train_batch(batches))
    for module in engine.module.modules():
        if isinstance(module, SleepingLayer):
            module.asleep = True
    seconds: list[float] = []
    with first_in_line() as first:
        while len(seconds) < steps and math.fsum(seconds) < enough_s:
            dist.barrier()
            began = time.perf_counter()
            engine.train_batch(batches)
            slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all must stop after the same step
            seconds.append(float(slowest))
    engine.destroy()
    return Taken(loss, seconds, first)

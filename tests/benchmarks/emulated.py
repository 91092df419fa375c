"""A pipeline with more stages than there are cores: layers that compute next to nothing and sleep for a modelled time.

Everything around them is the real thing: the engine, its schedules, slices and attention buffers, and messages over gloo. A
stage is one layer; a pass through it ends when its modelled time is over, counted from its beginning, so the little that it
does compute lies within that time.
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
    """Seconds of a slice on a stage, as the layers sleep and as the simulator is told (a cost model of ``ds_terapipe.plan``).

    A forward takes ``fixed + token * l + pair * l * (c + (l + 1) / 2)`` for l tokens after a context of c: a part per slice,
    so that cutting is not free, a part per token, and attention, per pair of a query and a key that it sees. A backward
    takes ``backward_factor`` times as long and makes the weight gradients too. A message takes ``message_s``, whatever its
    length. All stages are alike.
    """

    fixed: float
    token: float
    pair: float
    backward_factor: float = 2.0
    message_s: float = 0.0
    sequences: int = 1
    max_length: int = 1 << 20

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.fixed + self.token * length + self.pair * length * (context + (length + 1) / 2)

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.backward_factor * self.forward(stage, length, context)

    def weights(self, stage: int, length: Tokens) -> Tokens:
        return 0.0 * length

    def message(self, boundary: int, length: Tokens) -> Tokens:
        return self.message_s + 0.0 * length


@dataclass(frozen=True)
class Case:
    """One training step: ``sequences`` micro-batches of one sequence in slices of ``lengths`` tokens, under ``schedule``."""

    schedule: str
    sequences: int
    lengths: tuple[int, ...]


class Taken(NamedTuple):
    """What a rank measured of a case: the mean loss of the first step, the seconds of every timed one, and whether the system
    granted real-time priority."""

    loss: float
    seconds: list[float]
    first_in_line: bool = False


@contextmanager
def first_in_line() -> Iterator[bool]:
    """Real-time priority for the threads of this process, where the system grants it (value: whether it does).

    A stage that has slept for its time is a device that is done: other programs on the machine must not keep its process
    from saying so. Little else is done in this time, so they are hardly kept from anything. A nice value would not do:
    Linux's automatic groups weigh it within one session only.
    """
    threads = [int(thread) for thread in os.listdir("/proc/self/task")] if sys.platform == "linux" else []
    try:
        granted = bool(threads)
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


class _Pass:
    """One backward pass through a layer: when it began and how long it shall take."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, 0.0

    def begin(self) -> None:
        self.began = time.perf_counter()

    def end(self) -> None:
        time.sleep(max(self.began + self.seconds - time.perf_counter(), 0.0))


class _Below(torch.autograd.Function):
    """What a layer begins with: its backward is the last of the layer's and sleeps until the time is over.

    ``anchor`` is a parameter: the first stage's inputs need no gradient, and its backward must come by all the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, backward: _Pass) -> Tensor:
        ctx.backward_pass = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.backward_pass.end()
        return gradient, gradient.new_zeros(1), None


class _Above(torch.autograd.Function):
    """What a layer ends with: its backward is the first of the layer's and looks at the clock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: _Pass) -> Tensor:
        ctx.backward_pass = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.backward_pass.begin()
        return gradient, None


class SleepingLayer(nn.Module):
    """Causal attention with one head of width 8, [b, s, 8] to [b, s, 8], that takes its modelled time once ``asleep`` is set."""

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
        backward = _Pass(self.cost.backward(0, length, start) if self.asleep else 0.0)
        hidden = _Below.apply(hidden, self.anchor, backward)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        hidden = _Above.apply(hidden + self.out(mixed), backward)
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

    # one seed a stage and not PipelineModule's seed_layers, which sets all random states anew in every pass: half a millisecond
    torch.manual_seed(dist.get_rank())
    model = PipelineModule(
        [LayerSpec(SleepingLayer, cost) for _ in range(stages)],
        num_stages=stages,
        loss_fn=SquareLoss(),
        partition_method="uniform",
    )
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
    rank: int, world: int, cost: SleepCost, cases: Sequence[Case], steps: int, enough_s: float, log: str
) -> list[Taken]:
    """Every case on ``world`` stages, on all ranks at once: one step without sleep (shapes are announced, groups connect),
    then at most ``steps`` timed ones, none after ``enough_s`` seconds have been measured.

    A step is timed from a barrier to the end of ``train_batch`` on the slowest rank: what comes before and after the
    schedule (agreement on the batch, reductions, optimiser, loss to all ranks) is in it. ``log`` takes the ranks' output.
    """
    with open(log, "ab", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    return [_run_case(cost, case, world, steps, enough_s) for case in cases]


def _run_case(cost: SleepCost, case: Case, stages: int, steps: int, enough_s: float) -> Taken:
    engine = new_engine(cost, case, stages)
    batches = itertools.cycle(data_for(case))
    loss = float(engine.train_batch(batches))
    for module in engine.module.modules():
        if isinstance(module, SleepingLayer):
            module.asleep = True
    seconds: list[float] = []
    slowest = torch.zeros(1, dtype=torch.float64)
    with first_in_line() as first:
        while len(seconds) < steps and math.fsum(seconds) < enough_s:
            dist.barrier()
            began = time.perf_counter()
            engine.train_batch(batches)
            slowest[0] = time.perf_counter() - began
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all must stop after the same step
            seconds.append(float(slowest))
    engine.destroy()
    return Taken(loss, seconds, first)

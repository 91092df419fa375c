"""The simulator against the real engine on 4, 8 and 16 places, on a machine with two cores.

``python -m tests.benchmarks.emulation`` trains a model whose layers sleep for their modelled time, as docs/benchmarks.md says.
All around them is the real thing. Messages, the engine's own work and the lateness of sleeps take no time in the simulator: all
that is in the error. The whole takes fifteen minutes.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.deferred import keeper_of_linear
from ds_terapipe.pipeline.operators.weight_gradients import Operands
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.choose import choose
from ds_terapipe.plan.costs.cost import Tokens
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.request import Request
from ds_terapipe.schedule import Placement
from tests.benchmarks import measure
from tests.benchmarks.models import TokenLoss
from tests.pipeline.training import build_engine
from tests.plan.costs import ExampleCost

HIDDEN, SHORTEST, SEQUENCES = 8, 8, 2
PER_TOKEN = 0.0075  # seconds of the weight gradients on a place
ENOUGH_S = 13.0  # long steps are steady: of those, fewer
ORDERS = {  # under each placement
    "plain": ("terapipe", "1f1b", "zero_bubble"), "interleaved": ("interleaved", "zero_bubble"), "v": ("1f1b", "zero_bubble"),
}  # fmt: skip


class SleepCost(ExampleCost):
    """Seconds of a slice on a stage, as the layers sleep and as the simulator is told.

    With one stage on a place no pass is below 60 ms, and 20 slices cost a tenth more than none. Forward, backward and weight
    gradients take about as long. Messages take no time. All stages are alike, and take their ``factors`` of this.
    """

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.factors[stage] * (0.006 + 0.00675 * length + 1.5e-5 * length * (context + (length + 1) / 2))

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.forward(stage, length, context)


class Case(NamedTuple):
    """One training step in slices of ``lengths`` tokens."""

    placement: str
    schedule: str
    lengths: tuple[int, ...]


def times_of(case: Case, places: int, sequences: int) -> StepTimes:
    """Simulated times of a case's placement."""
    placement = Placement.named(case.placement, places, 1 if case.placement == "plain" else 2)
    stages = len(placement.stages)
    cost = SleepCost([places / stages] * stages, weights=PER_TOKEN)
    return StepTimes(cost, placement, sequences, weights_once=True)


def sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0.0))


class SleepingWeights(NamedTuple):
    """The rule of weight gradients that are zero and take so many ``seconds`` a token."""

    seconds: float
    needs_all: bool = False

    def __call__(self, parameters: Sequence[Tensor], operands: list[Operands]) -> list[Tensor]:
        time.sleep(self.seconds * sum(inputs.shape[0] for (inputs,) in operands))
        return [torch.zeros_like(each) for each in parameters]


class SleepingLayer(nn.Module):
    """Causal attention with one head of width 8 that takes the modelled time of its stage once ``asleep`` is set."""

    asleep = False

    def __init__(self, stage: int, cost: SleepCost) -> None:
        super().__init__()
        # one seed a stage and not PipelineModule's seed_layers, which sets all random states in every pass: half a millisecond
        torch.manual_seed(stage)
        self.stage, self.cost = stage, cost
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        began, context, length = time.perf_counter(), SliceContext.current, hidden.shape[1]
        start = 0 if context is None or context.span is None else context.span.start
        # the first stage's inputs need no gradient, and its backward must come by all the same
        hidden = hidden + self.anchor
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, dim=-1))
        result = hidden + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        if self.asleep:
            # the backward begins at the result and sleeps where it ends; its weight gradients may be made later
            ends, keeper = list[float](), keeper_of_linear(hidden, self.out.weight, self.out.bias)
            weights, seconds = self.cost.weights(self.stage, 1), self.cost.backward(self.stage, length, start)
            seconds += 0.0 if keeper else weights * length

            def end(gradient: Tensor) -> None:
                if keeper is not None:
                    keeper.keep(SleepingWeights(weights), (self.anchor,), (gradient.reshape(length, -1),))
                sleep_until(ends[-1])

            result.register_hook(lambda gradient: ends.append(time.perf_counter() + seconds))
            hidden.register_hook(end)
            sleep_until(began + self.cost.forward(self.stage, length, start))
        return result


def run_cases(cases: Sequence[Case], sequences: int, steps: int) -> list[float]:
    """Return the seconds of each case's fastest step, of at most ``steps`` or `ENOUGH_S` seconds. Collective."""
    losses, found, places = dict[bool, float](), [], dist.get_world_size()
    for case in cases:
        times, random = times_of(case, places, sequences), torch.Generator().manual_seed(0)
        token_pipeline = {
            "slices": list(case.lengths), "schedule": case.schedule, "cut": {"inputs": [1], "labels": [1]}, "verify": False,
            "stages_per_place": times.stages // places, "placement": "v" if case.placement == "v" else "interleaved",
        }  # fmt: skip
        engine = build_engine(
            [LayerSpec(SleepingLayer, stage, times.cost) for stage in range(times.stages)], TokenLoss(), stages=places, batch=1,
            token_pipeline=token_pipeline, micro_batches=sequences, optimizer=partial(torch.optim.SGD, lr=0.01),
            module={"seed_layers": False, "dynamic_shape": False},
        )  # fmt: skip
        shape = (sequences, 1, sum(case.lengths))
        inputs, labels = torch.randn(*shape, HIDDEN, generator=random), torch.randint(HIDDEN, shape, generator=random)
        batches = itertools.cycle(zip(inputs, labels, strict=True))
        loss = float(engine.train_batch(batches))
        if not math.isclose(loss, losses.setdefault(case.placement == "plain", loss), rel_tol=1e-5):
            raise measure.WrongResult(f"the first step of {case} has the loss {loss}, others of its model {losses}")
        for module in engine.module.modules():
            module.asleep = True
        comes_first()
        seconds = list[float]()
        while len(seconds) < steps and math.fsum(seconds) < ENOUGH_S:
            seconds += measure.timed(lambda engine=engine, batches=batches: engine.train_batch(batches), 1)
        engine.destroy()
        found.append(min(seconds))
    return found


def comes_first() -> None:
    """Take real-time priority for the threads of this process, where the system grants it.

    A stage that has slept for its time is a device that is done: other programs must not keep its process from saying so.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except OSError:
        measure.say("no real-time priority: other programs delay the emulated stages")


def cases_for(processes: int, sequences: int, tokens: int, slices: int) -> list[Case]:
    """Uncut 1F1B, then for each placement the orders in equal slices, and what the planner chooses."""
    cases, equal = [Case("plain", "1f1b", (tokens,))], tuple(slice_lengths(tokens, slices))
    for placement, schedules in ORDERS.items():
        cases += [Case(placement, schedule, equal) for schedule in schedules]
        times = times_of(cases[-1], processes, sequences)
        request = Request(tokens, times.placement, sequences, granularity=1, min_length=SHORTEST, weights_once=True)
        plan = choose(times.cost, request)
        cases.append(Case(placement, plan.schedule, tuple(plan.slices)))
    return list(dict.fromkeys(cases))


def main() -> None:
    options = measure.parser("emulation", __doc__)
    options.add_argument("--processes", type=measure.listed(int), help="places (default 4,8,16; 2 with --quick)")
    options.add_argument("--steps", type=int, default=3, help=f"of a case, until {ENOUGH_S:g} s are full (default 3)")
    options = options.parse_args()
    tokens, slices, sequences = (32, 4, 1) if options.quick else (160, 8, SEQUENCES)
    print("processes    placement     schedule  slices  simulated s  measured s   error  times uncut")
    for processes in options.processes or ([2] if options.quick else [4, 8, 16]):
        cases = cases_for(processes, sequences, tokens, slices)
        simulated = [times_of(case, processes, sequences).seconds(case.schedule, case.lengths) for case in cases]
        measured = measure.on_ranks(run_cases, cases, sequences, options.steps, ranks=processes)
        for case, said, taken in zip(cases, simulated, measured, strict=True):
            line = f"{processes:9}  {case.placement:>11}  {case.schedule:>11}  {len(case.lengths):6}  {said:11.3f}  {taken:10.3f}"
            ratios = f"{measured[0] / taken:.2f} (simulated {simulated[0] / said:.2f})"
            print(f"{line}  {taken / said - 1:+6.1%}  {ratios}", flush=True)


if __name__ == "__main__":
    main()

"""The simulator against the real engine on 4, 8 and 16 stages, on a machine with two cores.

``python -m tests.benchmarks.emulation`` trains a model whose layers compute next to nothing and sleep for their modelled
time, in as many processes as there are stages. All around them is the real thing: the engine, its schedules, slices and
attention buffers, and messages over gloo. It prints for each the step unsliced, in eight equal slices and in the slices
that the planner chooses, simulated and measured. Messages, the engine's own work and the lateness of sleeps take no time
in the simulator: all that is in the error. The whole takes seven minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.choose import Request, choose
from ds_terapipe.plan.costs.cost import Tokens
from ds_terapipe.plan.evaluate import StepTimes
from tests.benchmarks import measure
from tests.benchmarks.models import TokenLoss
from tests.spawn import run_ranks

HIDDEN, SHORTEST, SEQUENCES = 8, 8, 2
ENOUGH_S = 13.0  # long steps are steady: of those, fewer
ERROR_LIMIT = 0.05


class SleepCost(NamedTuple):
    """Seconds of a slice on a stage, as the layers sleep and as the simulator is told.

    A forward takes ``fixed + token * l + pair * l * (c + (l + 1) / 2)`` for l tokens after a context of c. A backward
    takes twice as long and makes the weight gradients too. Messages take no time. All stages are alike.
    """

    # no pass is below 60 ms, and 20 slices cost a tenth more than none
    fixed: float = 0.006
    token: float = 0.00675
    pair: float = 1.5e-5
    sequences: int = 1
    max_length: int = 1 << 20

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.fixed + self.token * length + self.pair * length * (context + (length + 1) / 2)

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return 2 * self.forward(stage, length, context)

    def weights(self, stage: int, length: Tokens) -> Tokens:
        return 0.0 * length

    message = weights


COST = SleepCost()


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


# ------------------------------------------------------------------------------------------------------------- the ranks


def comes_first() -> bool:
    """Take real-time priority for the threads of this process, where the system grants it.

    A stage that has slept for its time is a device that is done: other programs must not keep its process from saying so.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


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

    asleep = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        began, context, length = time.perf_counter(), SliceContext.current, hidden.shape[1]
        start = 0 if context is None or context.span is None else context.span.start
        clock = [COST.backward(0, length, start) if self.asleep else 0.0]
        hidden = _Edge.apply(hidden, self.anchor, clock, False)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        hidden = _Edge.apply(hidden + self.out(mixed), self.anchor, clock, True)
        if self.asleep:
            time.sleep(max(began + COST.forward(0, length, start) - time.perf_counter(), 0.0))
        return hidden


def new_engine(case: Case, stages: int) -> Any:
    """An engine with one layer a stage, none of which sleeps yet; collective."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ds_terapipe

    # one seed a stage and not PipelineModule's seed_layers, which sets all random states in every pass: half a millisecond
    torch.manual_seed(dist.get_rank())
    layers = [LayerSpec(SleepingLayer) for _ in range(stages)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=TokenLoss(), partition_method="uniform")
    token_pipeline = {
        "slices": list(case.lengths), "schedule": case.schedule, "cut": {"inputs": [1], "labels": [1]}, "verify": False,
        "weight_gradients": "slice",  # the modelled backward has them
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": case.sequences, "gradient_clipping": 0.0,
        "steps_per_print": None, "zero_allow_untested_optimizer": True, "token_pipeline": token_pipeline,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return ds_terapipe.initialize(model=model, optimizer=optimizer, config=config)[0]


def run_cases(rank: int, world: int, cases: Sequence[Case], steps: int) -> list[Taken]:
    """Every case on ``world`` stages, on all ranks at once: one step without sleep (shapes are announced, groups connect),
    then at most ``steps`` timed ones, none after `ENOUGH_S` seconds have been measured."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1), os.dup2(sink, 2)
    return [_run_case(case, world, steps) for case in cases]


def _run_case(case: Case, stages: int, steps: int) -> Taken:
    engine, random = new_engine(case, stages), torch.Generator().manual_seed(0)
    shape = (case.sequences, 1, sum(case.lengths))
    inputs, labels = torch.randn(*shape, HIDDEN, generator=random), torch.randint(HIDDEN, shape, generator=random)
    batches = itertools.cycle(zip(inputs, labels, strict=True))
    loss = float(engine.train_batch(batches))
    for module in engine.module.modules():
        if isinstance(module, SleepingLayer):
            module.asleep = True
    first, seconds = comes_first(), list[float]()
    while len(seconds) < steps and math.fsum(seconds) < ENOUGH_S:
        seconds += measure.timed(lambda: engine.train_batch(batches), 1)
    engine.destroy()
    return Taken(loss, seconds, first)


# -------------------------------------------------------------------------------------------------------------- the table


class Row(NamedTuple):
    """A case on so many stages: seconds simulated and of the fastest step, and whether the system let it come first."""

    processes: int
    case: Case
    simulated: float
    measured: float
    first_in_line: bool = True

    @property
    def error(self) -> float:
        return self.measured / self.simulated - 1


def cases_for(processes: int, sequences: int, tokens: int, slices: int) -> list[Case]:
    """Unsliced 1F1B, then for each schedule the equal slices and the planner's, each once."""
    cases = [Case("1f1b", sequences, (tokens,))]
    for schedule in ("terapipe", "1f1b"):
        request = Request(tokens, processes, sequences, schedule, granularity=1, min_length=SHORTEST)
        cuts = [tuple(slice_lengths(tokens, slices)), tuple(choose(COST, request).slices)]
        cases += [Case(schedule, sequences, cut) for cut in dict.fromkeys(cuts) if len(cut) > 1]
    return cases


def run(processes: int, cases: Sequence[Case], steps: int) -> list[Row]:
    """Run the cases in new processes. Raises WrongResult where they train differently."""
    simulated = [StepTimes(COST, processes, case.sequences).seconds(case.schedule, case.lengths) for case in cases]
    ranks = run_ranks(run_cases, processes, cases, steps, timeout=120 + 2 * steps * sum(simulated))
    check_losses([taken.loss for rank in ranks for taken in rank])
    return [
        Row(processes, case, seconds, min(taken[0].seconds), all(one.first_in_line for one in taken))
        for case, seconds, *taken in zip(cases, simulated, *ranks, strict=True)
    ]


def check_losses(losses: Sequence[float]) -> None:
    """All cases train the same in their first step."""
    if not all(math.isclose(loss, losses[0], rel_tol=1e-5) for loss in losses):
        raise measure.WrongResult(f"first steps have the losses {losses}")


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each case; the first of a number of processes is the unsliced one, which the others are compared with."""
    lines = ["processes  schedule  slices  simulated s  measured s   error  times unsliced"]
    for row in rows:
        whole = next(one for one in rows if one.processes == row.processes)
        lines.append(
            f"{row.processes:9}  {row.case.schedule:>8}  {len(row.case.lengths):6}  {row.simulated:11.3f}  {row.measured:10.3f}  "
            f"{row.error:+6.1%}  {whole.measured / row.measured:.2f} (simulated {whole.simulated / row.simulated:.2f})"
        )
    worst = max((row.error for row in rows), key=abs)
    lines.append(
        f"worst error {worst:+.1%}, limit {ERROR_LIMIT:.0%}: {'met' if abs(worst) <= ERROR_LIMIT else 'missed'}"
    )
    if not all(row.first_in_line for row in rows):
        lines.append("INCONCLUSIVE, no real-time priority: other programs delay the emulated stages")
    return lines


def stages(text: str) -> list[int]:
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"got {text}, must be numbers from 2 up, e.g. 4,8")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = measure.parser("emulation", __doc__)
    options.add_argument("--processes", type=stages, help="stages (default 4,8,16; 2 with --quick)")
    options.add_argument(
        "--steps", type=int, default=3, help=f"measured per case, until {ENOUGH_S:g} s are full (default 3)"
    )
    options = options.parse_args(arguments)
    tokens, slices, sequences = (32, 4, 1) if options.quick else (160, 8, SEQUENCES)
    rows: list[Row] = []
    for processes in options.processes or ([2] if options.quick else [4, 8, 16]):
        cases = cases_for(processes, sequences, tokens, slices)
        measure.say(f"{processes} processes: {len(cases)} cases")
        rows += run(processes, cases, options.steps)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The simulator against the real engine on 4, 8 and 16 stages, on a machine with two cores.

``python -m tests.benchmarks.emulation`` trains a model whose layers compute next to nothing and sleep for their modelled
time, in as many processes as there are stages. All around them is the real thing: the engine, its schedules, slices and
attention buffers, and messages over gloo. It prints for each the step unsliced, in eight equal slices and in the slices
that the planner chooses, simulated and measured. Messages, the engine's own work and the lateness of sleeps take no time
in the simulator: all that is in the error. The whole takes seven minutes.
"""

from __future__ import annotations

import itertools
import math
import os
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
from tests.plan.costs import ExampleCost

HIDDEN, SHORTEST, SEQUENCES = 8, 8, 2
ENOUGH_S = 13.0  # long steps are steady: of those, fewer


class SleepCost(ExampleCost):
    """Seconds of a slice on a stage, as the layers sleep and as the simulator is told.

    No pass is below 60 ms, and 20 slices cost a tenth more than none. A backward takes twice as long as a forward and makes
    the weight gradients too. Messages take no time. All stages are alike.
    """

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return 0.006 + 0.00675 * length + 1.5e-5 * length * (context + (length + 1) / 2)


COST = SleepCost(())


class Case(NamedTuple):
    """One training step: ``sequences`` micro-batches of one sequence in slices of ``lengths`` tokens."""

    schedule: str
    sequences: int
    lengths: tuple[int, ...]


def sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0.0))


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
        hidden = (
            hidden + self.anchor
        )  # the first stage's inputs need no gradient, and its backward must come by all the same
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, dim=-1))
        result = hidden + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        if self.asleep:
            # the backward begins at the result and sleeps where it ends
            ends, seconds = list[float](), COST.backward(0, length, start)
            result.register_hook(lambda gradient: ends.append(time.perf_counter() + seconds))
            hidden.register_hook(lambda gradient: sleep_until(ends[-1]))
            sleep_until(began + COST.forward(0, length, start))
        return result


def new_engine(case: Case) -> Any:
    """An engine with one layer a stage, none of which sleeps yet; collective."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ds_terapipe

    # one seed a stage and not PipelineModule's seed_layers, which sets all random states in every pass: half a millisecond
    torch.manual_seed(dist.get_rank())
    stages = dist.get_world_size()
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


def run_cases(cases: Sequence[Case], steps: int) -> list[float]:
    """Seconds of every case's fastest step: one step without sleep (shapes are announced, groups connect), then at most
    ``steps`` timed ones, none after `ENOUGH_S` seconds have been measured. For all ranks."""
    losses, found = [], []
    for case in cases:
        engine, random = new_engine(case), torch.Generator().manual_seed(0)
        shape = (case.sequences, 1, sum(case.lengths))
        inputs, labels = torch.randn(*shape, HIDDEN, generator=random), torch.randint(HIDDEN, shape, generator=random)
        batches = itertools.cycle(zip(inputs, labels, strict=True))
        losses.append(float(engine.train_batch(batches)))
        if not math.isclose(losses[-1], losses[0], rel_tol=1e-5):
            raise measure.WrongResult(f"first steps have the losses {losses}")
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
    """Unsliced 1F1B, then for each schedule the equal slices and the planner's, each once."""
    cases = [Case("1f1b", sequences, (tokens,))]
    for schedule in ("terapipe", "1f1b"):
        request = Request(tokens, processes, sequences, schedule, granularity=1, min_length=SHORTEST)
        cuts = [tuple(slice_lengths(tokens, slices)), tuple(choose(COST, request).slices)]
        cases += [Case(schedule, sequences, cut) for cut in dict.fromkeys(cuts) if len(cut) > 1]
    return cases


def main() -> None:
    options = measure.parser("emulation", __doc__)
    options.add_argument("--processes", type=measure.listed(int), help="stages (default 4,8,16; 2 with --quick)")
    options.add_argument("--steps", type=int, default=3, help=f"of a case, until {ENOUGH_S:g} s are full (default 3)")
    options = options.parse_args()
    tokens, slices, sequences = (32, 4, 1) if options.quick else (160, 8, SEQUENCES)
    print("processes  schedule  slices  simulated s  measured s   error  times unsliced")
    for processes in options.processes or ([2] if options.quick else [4, 8, 16]):
        cases = cases_for(processes, sequences, tokens, slices)
        simulated = [StepTimes(COST, processes, sequences).seconds(case.schedule, case.lengths) for case in cases]
        measured = measure.on_ranks(run_cases, cases, options.steps, ranks=processes)
        for case, said, taken in zip(cases, simulated, measured, strict=True):
            line = f"{processes:9}  {case.schedule:>8}  {len(case.lengths):6}  {said:11.3f}  {taken:10.3f}"
            ratios = f"{measured[0] / taken:.2f} (simulated {simulated[0] / said:.2f})"
            print(f"{line}  {taken / said - 1:+6.1%}  {ratios}", flush=True)


if __name__ == "__main__":
    main()

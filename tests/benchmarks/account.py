"""Where the time between a step and its bound goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.benchmarks import gpt
from tests.benchmarks.workers import Seat, Workers


def bubble(stages: int, sequences: int, slices: int) -> float:
    """Idle time of a stage relative to its work, with ``sequences`` micro-batches of ``slices`` equal slices."""
    return (stages - 1) / (sequences * slices)


def bound(one_process: float, stages: int, sequences: int, slices: int) -> float:
    """Seconds per step if nothing but the bubble were lost: ``one_process`` seconds over the stages, and the bubble."""
    return one_process / stages * (1 + bubble(stages, sequences, slices))


@dataclass(frozen=True)
class Costs:
    """Measured once, for one sequence.

    ``cut``: seconds of a step of our engine with one stage, by number of slices, 1 among them. ``stages``: seconds of
    the forward and backward pass of each stage, whole. ``one_way``: seconds of a message between stages, by number of
    slices.
    """

    cut: dict[int, float]
    stages: list[float]
    one_way: dict[int, float]


@dataclass(frozen=True)
class Account:
    """Seconds of one step. ``bound`` and the parts add up to ``step``; None is a part that could not be measured, and
    is in ``rest``.

    ``cutting``: slices are less efficient than the whole. ``two_at_once``: two processes slow each other, by the
    probes of the quietest round. ``imbalance``: the slower stage sets the pace. ``messages``: all of them, as if none
    were hidden behind work. ``rest``: Python, slices of unequal work (a later one has more context), waiting.
    """

    sequences: int
    slices: int
    step: float
    bound: float
    cutting: float | None
    two_at_once: float
    imbalance: float
    messages: float

    @property
    def rest(self) -> float:
        known = (self.bound, self.cutting or 0.0, self.two_at_once, self.imbalance, self.messages)
        return self.step - sum(known)


def account(sequences: int, slices: int, step: float, one_process: float, contention: float, costs: Costs) -> Account:
    """The account of a step of ``sequences`` micro-batches in ``slices`` slices; seconds, and the probes' contention."""
    stages = len(costs.stages)
    stretch = sequences * (1 + bubble(stages, sequences, slices))
    limit = bound(one_process, stages, sequences, slices)
    cutting = None
    if 1 in costs.cut and slices in costs.cut:
        cutting = stretch * (costs.cut[slices] - costs.cut[1]) / stages
    return Account(
        sequences=sequences,
        slices=slices,
        step=step,
        bound=limit,
        cutting=cutting,
        two_at_once=limit * max(0.0, contention - 1),
        imbalance=stretch * (max(costs.stages) - sum(costs.stages) / stages),
        messages=2 * (stages - 1) * sequences * slices * costs.one_way[slices],
    )


def stage_seconds(seat: Seat, shape: gpt.Shape, stages: int, repeats: int) -> list[float]:
    """Request: seconds of the forward and backward pass of one sequence through each stage, minimum of ``repeats``."""
    tokens, positions, labels = gpt.batch(shape, 1)
    modules = [gpt.stage(shape, index, stages) for index in range(stages)]
    loss_fn = gpt.TokenLoss()
    best = [float("inf")] * stages
    for _ in range(repeats + 1):
        inputs, boundary = (tokens, positions), []
        forward = []
        for module in modules:
            start = time.perf_counter()
            outputs = module(inputs)
            result = loss_fn(outputs, labels) if module is modules[-1] else outputs
            forward.append(time.perf_counter() - start)
            boundary.append(result)
            inputs = outputs.detach().requires_grad_()
            boundary.append(inputs)
        for index in reversed(range(stages)):
            result, following = boundary[2 * index], boundary[2 * index + 1]
            start = time.perf_counter()
            result.backward(None if index == stages - 1 else following.grad)
            best[index] = min(best[index], forward[index] + time.perf_counter() - start)
        for module in modules:
            module.zero_grad(set_to_none=True)
    return best


def one_way_seconds(seat: Seat, tokens: int, hidden: int, trips: int) -> float:
    """Request, to two workers: seconds to send one [1, tokens, hidden] fp32 tensor, half of the fastest round trip."""
    message = torch.zeros(1, tokens, hidden)
    best = float("inf")
    for _ in range(trips):
        dist.barrier()
        start = time.perf_counter()
        if seat.rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
        best = min(best, (time.perf_counter() - start) / 2)
    return best


def measure_costs(shape: gpt.Shape, slices: list[int], cut: dict[int, float], timeout: float, log: str) -> Costs:
    """Stage times and message times in a fresh pair of workers; ``cut`` as in :class:`Costs`, measured elsewhere."""
    with Workers(2, (), log, timeout) as pair:
        stages = pair.call(stage_seconds, shape, 2, 3, ranks=[0])[0]
        lengths = {count: -(-shape.sequence // count) for count in slices}
        one_way = {
            count: max(pair.call(one_way_seconds, length, shape.hidden, 30)) for count, length in lengths.items()
        }
    return Costs(cut, stages, one_way)

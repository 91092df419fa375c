"""Stages built from lists of layers, on any placement and in any valid order, give the gradients of one process.

All places are in one process, their messages in queues.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.operators.gradient_sums import GradientSums
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.runtime import PipelineRuntime, Step
from ds_terapipe.pipeline.slicing import TensorCut, as_tuple, like, slice_lengths, spans
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.schedule import Action, Op, Placement, Unit
from tests.pipeline import models
from tests.schedule.strategies import few_slices, placements, random_grid, validated

BOTH = (TensorCut(1), TensorCut(1))


class Embedding(models.Embedding):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs), inputs[1]


class Block(models.Block):
    """Hands the positions on, which no gradient goes back for."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, positions = inputs
        return super().forward(hidden) * (1 + positions.unsqueeze(-1) / 10), positions


def batch_of(lengths: Sequence[int], slices: Sequence[int]) -> StepBatch:
    """A micro-batch of two sequences for each length, in so many slices."""
    batch = StepBatch(lengths=list(lengths), signatures=list(lengths))
    for m, length in enumerate(lengths):
        inputs, labels = models.micro_batch(m, length)
        batch.inputs.append(inputs)
        batch.labels.append(labels)
        batch.input_cuts.append(BOTH)
        batch.label_cuts.append(BOTH)
    batch.spans = [spans(slice_lengths(length, count)) for length, count in zip(lengths, slices, strict=True)]
    return batch


def gradients_of(layers: nn.ModuleList) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return found


def plain(layers: nn.ModuleList, batch: StepBatch) -> list[Tensor | None]:
    """Gradients of plain autograd over whole sequences."""
    for value, labels in zip(batch.inputs, batch.labels, strict=True):
        for layer in layers:
            value = layer(value)
        (squares(value, labels) / len(batch.inputs)).backward()
    return gradients_of(layers)


def assert_same(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    assert [g is None for g in got] == [g is None for g in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        if ours is not None and theirs is not None:
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-10 * torch.linalg.vector_norm(theirs)


def squares(outputs: Any, labels: Any) -> Tensor:
    return (outputs[0].mean(-1) - labels[0]).square().mean()


class Queues:
    """Two queues for each boundary of stages: what is sent in another order is taken for something else."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bool], deque[Any]] = defaultdict(deque)

    def send_forward(self, stage: int, unit: Unit, outputs: Any) -> None:
        tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in as_tuple(outputs)]
        self._waiting[stage, True].append(like(outputs, tensors))

    def receive_forward(self, stage: int, unit: Unit) -> Any:
        return self._waiting[stage - 1, True].popleft()

    def send_backward(self, stage: int, unit: Unit, gradients: Sequence[Tensor]) -> None:
        self._waiting[stage - 1, False].append([gradient.clone() for gradient in gradients])

    def receive_backward(self, stage: int, unit: Unit) -> list[Tensor]:
        return self._waiting[stage, False].popleft()

    def has(self, action: Action) -> bool:
        """Whether a receive would find something."""
        forward = action.op is Op.RECV_FORWARD
        return bool(self._waiting[action.stage - forward, forward])

    def begin(self, *given: Any) -> None:
        pass

    finish = begin


def plain_gradients(micro_batches: int) -> Any:
    """`GradientRules` of plain PyTorch: the mean over micro-batches, summed in ``grad``."""
    around = lambda parameters, first=True, last=True: nullcontext()  # noqa: E731
    return SimpleNamespace(scale=lambda loss: loss / micro_batches, around=around, summed_bytes=lambda parameters: 0)


def runtimes(placement: Placement, layers: Sequence[Any], micro_batches: int) -> list[PipelineRuntime]:
    """A runtime for each place; ``layers`` of the whole model, one on each stage."""
    queues, ranks, gradients = Queues(), tuple(range(placement.places)), plain_gradients(micro_batches)
    watchdog: Any = SimpleNamespace(ended="", begin=lambda *args: None, watches=False)
    found = []
    for place in range(placement.places):
        stages = {}
        for number in placement.stages_on(place):
            _, first, stop = placement.stages[number]
            trains = placement.goes_backward(number)
            stages[number] = Stage(number, layers[first:stop], first, trains=trains, gradients=gradients)
        found.append(PipelineRuntime(RankView(placement, place, ranks), stages, queues, watchdog))  # type: ignore[arg-type]
    return found


def run(places: Sequence[PipelineRuntime], steps: Sequence[Step]) -> int:
    """Run a step's rows side by side, as far as messages let them; returns what is left over."""
    queues: Any = places[0].links
    at, rows = [0] * len(places), [step.grid[place] for place, step in enumerate(steps)]
    for runtime, step, row in zip(places, steps, rows, strict=True):
        runtime.begin(step, row)
    while any(index < len(row) for index, row in zip(at, rows, strict=True)):
        before = sum(at)
        for place, row in enumerate(rows):
            while at[place] < len(row) and (not row[at[place]].op.is_receive or queues.has(row[at[place]])):
                places[place].execute(row[at[place]])
                at[place] += 1
        assert sum(at) > before, "the grid is stuck"
    left = sum(runtime.left_over for runtime in places)
    for runtime in places:
        runtime.end()
    return left


@given(st.integers(0, 10**6), placements(), few_slices, st.booleans(), st.booleans())
@settings(max_examples=50)
def test_any_valid_order_on_any_placement_gives_the_gradients_of_the_whole(seed, placement, slices, each_slice, once):
    """Nothing is left over, and weight gradients are kept for the actions that make them, if ``once``."""
    assume(placement.forward_only < len(placement.stages))
    made = validated(random_grid(seed, placement, slices, weights=True, each_slice=each_slice))
    torch.manual_seed(0)
    layers: Any = nn.ModuleList([Embedding(), *(Block() for _ in placement.stages[1:])]).double()
    layers[: placement.forward_only].requires_grad_(False)
    batch = batch_of([2 * count for count in made.slices], made.slices)

    wanted = plain(layers, batch)
    grid = made.grid if once else [[a for a in row if a.op is not Op.WEIGHT_GRADIENTS] for row in made.grid]
    places, kept = runtimes(placement, layers, len(slices)), list[int]()

    def watched(stage: Stage, make: Callable[..., None], *unit: Any) -> None:
        kept.append(stage.weight_gradients.kept_bytes)
        make(*unit)

    for stage in (stage for place in places for stage in place.stages.values()):
        stage.weight_gradients.make = partial(watched, stage, stage.weight_gradients.make)  # type: ignore[method-assign]
    interception = Interception(layers)
    try:
        assert run(places, [Step(0, batch, grid, StepLosses(batch, squares, BOTH))] * len(places)) == 0
    finally:
        interception.close()
    assert_same(gradients_of(layers), wanted)
    assert (max(kept, default=0) > 0) == (once and max(slices) > 1)


def test_the_end_of_another_stage_on_the_place_rounds_no_sum_of_16_bits() -> None:
    stage = Stage(0, [nn.Linear(1, 1), nn.Linear(1, 1, dtype=torch.bfloat16)], 0, gradients=plain_gradients(1))
    stage.begin(StepBatch(), None, weights_apart=False)
    (mine, other), slices = stage._summed, [1.0, 2.0**-9, 2.0**-9, 2.0**-9]  # each of the last three is lost beside 1
    for others_end in (0, 1, 3):
        sums = GradientSums()
        for number, gradient in enumerate(slices):
            mine.grad, other.grad = torch.full_like(mine, gradient), torch.ones_like(other)
            sums.put_aside([mine])
            if number < others_end:
                sums.give_back([other])
                assert mine.grad is None and other.grad is not None
        sums.give_back([mine])
        assert mine.grad is not None and mine.grad.item() == torch.tensor(sum(slices)).bfloat16().item() > 1

"""Stages built from lists of layers, on any placement and in any valid order, give the gradients of one process.

First all places in one process, their messages in queues; then real processes, where an old and a new runtime of the same
layers are alive together and closed one after the other.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.operators.gradient_sums import GradientSums
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.runtime import PipelineRuntime, Step
from ds_terapipe.pipeline.slicing import TensorCut, slice_lengths, spans
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.step_grid import FORWARD_ONLY, grid_of_step
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.schedule import Action, Op, Placement
from tests.pipeline import models
from tests.pipeline.fake_links import PlainGradients, assemblies, run
from tests.schedule.strategies import few_slices, placements, random_grid, validated
from tests.spawn import launched

SLICES = 3, 2  # of the micro-batches, in two processes
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


def gradients_of(layers: Sequence[Any]) -> list[Tensor | None]:
    modules = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))
    found = [None if p.grad is None else p.grad.clone() for p in modules.parameters()]
    modules.zero_grad()
    return found


def plain(layers: Sequence[Any], batch: StepBatch, loss: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of plain autograd over whole sequences."""
    total = torch.zeros(())
    for value, labels in zip(batch.inputs, batch.labels, strict=True):
        for layer in layers:
            value = layer(value)
        part = loss(value, labels) / len(batch.inputs)
        part.backward()
        total = total + part.detach()
    return total, gradients_of(layers)


def assert_same(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    assert [g is None for g in got] == [g is None for g in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        if ours is not None and theirs is not None:
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-10 * torch.linalg.vector_norm(theirs)


def squares(outputs: Any, labels: Any) -> Tensor:
    return (outputs[0].mean(-1) - labels[0]).square().mean()


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

    _, wanted = plain(layers, batch, squares)
    grid = made.grid if once else [[a for a in row if a.op is not Op.WEIGHT_GRADIENTS] for row in made.grid]
    places, kept = assemblies(placement, layers, PlainGradients(len(slices))), list[int]()

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


PLACEMENT = Placement.of([0, 1, 1, 0], forward_only=1)


def worker(rank: int, world_size: int) -> bool:
    """Whether an older runtime of the same layers made the same gradients."""
    pipelines = [[0, 1]]
    watchdog = Watchdog(RankView.of(Placement.plain(2), rank, pipelines), 60.0)
    torch.manual_seed(0)
    layers = [Embedding().requires_grad_(False), *(Block() for _ in range(3))]
    given: Any = {"device": torch.device("cpu"), "watchdog": watchdog, "gradients": PlainGradients(len(SLICES))}
    build = partial(PipelineRuntime.build, PLACEMENT, pipelines, dict(enumerate(layers)), **given)
    old = build()
    old.intercept()
    step(old)
    first = gradients_of(layers)
    new = build()
    new.intercept()
    old.close()  # the layers stay as the new one needs them
    step(new)
    second = gradients_of(layers)
    step(new, evaluation=True)
    new.close()
    new.close()
    assert "forward" not in layers[1].qkv.__dict__
    watchdog.close()
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Calls(Observer):
    """Writes down how it is called."""

    watches = True

    def __init__(self, name: str, calls: list[Any], watches: bool = True) -> None:
        self.name, self.calls, self.watches = name, calls, watches  # type: ignore[misc]

    def step_begins(self) -> None:
        self.calls.append((self.name, "step begins"))

    def action_begins(self, index: int, action: Action) -> None:
        self.calls.append((self.name, index, action))

    def message(self, stage: int, name: str, value: Any) -> None:
        self.calls.append((self.name, stage, name))

    def action_ends(self, action: Action) -> None:
        self.calls.append((self.name, "ends", action))

    def step_ends(self) -> None:
        self.calls.append((self.name, "step ends"))


def calls_of(row: Sequence[Action]) -> list[Any]:
    """The calls of two observers in a step."""
    names, messages = ("outer", "inner"), {Op.RECV_FORWARD: "received", Op.SEND_FORWARD: "sent"}
    calls: list[Any] = [(name, "step begins") for name in names]
    for index, action in enumerate(row):
        calls += [(name, index, action) for name in names]
        calls += [(name, action.stage, messages[action.op]) for name in names if action.op in messages]
        calls += [(name, "ends", action) for name in names[::-1]]
    return [*calls, *((name, "step ends") for name in names)]


def step(runtime: PipelineRuntime, evaluation: bool = False) -> None:
    batch = batch_of([4 * count for count in SLICES], SLICES)
    losses = StepLosses(batch, squares, BOTH) if runtime.view.has_last else None
    calls: list[Any] = []
    grid = grid_of_step(FORWARD_ONLY if evaluation else "1f1b", PLACEMENT, SLICES, () if evaluation else (1, 2, 3))
    with torch.set_grad_enabled(not evaluation):
        watching = [Calls("outer", calls), Calls("off", calls, watches=False), Calls("inner", calls)]
        runtime.run(Step(0, batch, grid, losses), watching)
    assert calls == calls_of(grid[runtime.view.place])
    assert runtime.left_over == 0


ranks = launched(worker, 2, timeout=240)


def test_an_old_and_a_new_runtime_of_the_same_layers_do_the_same(ranks):
    assert ranks == [True, True]


def test_the_end_of_another_stage_on_the_place_rounds_no_sum_of_16_bits() -> None:
    stage = Stage(0, [nn.Linear(1, 1), nn.Linear(1, 1, dtype=torch.bfloat16)], 0, gradients=PlainGradients(1))
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

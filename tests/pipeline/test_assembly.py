"""Stages built from lists of layers, on any placement, give the gradients of one process.

First all places in one process, their messages in queues; then real processes, where an old and a new assembly of the same
layers are alive together and closed one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from ds_terapipe.pipeline.assembly import Assembly, Step
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.seat import Seat
from ds_terapipe.pipeline.slicing import TensorCut
from ds_terapipe.pipeline.stage import PlainGradients, Stage
from ds_terapipe.pipeline.step_grid import FORWARD_ONLY, grid_of_step
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.schedule import Op, Placement, Unit
from tests.pipeline.fake_links import assemblies, run
from tests.spawn import launched

VOCABULARY, WIDTH, BLOCKS = 17, 8, 6
LENGTHS = (12, 9)  # of the micro-batches
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(max(LENGTHS), WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, positions = inputs
        return self.table(tokens) + self.places(positions), positions


class Block(nn.Module):
    """Attention and two linear layers; hands the positions on, which no gradient goes back for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, positions = inputs
        q, k, v = self.qkv(self.norm(hidden)).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return hidden + self.out(mixed) * (1 + positions.unsqueeze(-1) / 10), positions


def logits(embedding: Embedding, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return F.linear(inputs[0], embedding.table.weight)


class PerToken:
    """The mean over even labels, in the form that runs slice by slice."""

    def token_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * (labels.flatten() % 2 == 0)).sum()

    def token_weight(self, labels: Tensor) -> Tensor:
        return (labels % 2 == 0).sum()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.token_sum(outputs, labels) / self.token_weight(labels)


class Case(NamedTuple):
    """``places`` of the stages; ``frozen`` ones have no trained weight; the first ``forward_only`` do not go backward."""

    places: Sequence[int]
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float64
    forward_only: int = 0
    frozen: tuple[int, ...] = ()
    apart: bool = True  # weight gradients of their own
    slices: int = 3
    per_token: bool = False  # the loss slice by slice

    @property
    def placement(self) -> Placement:
        """The layers, embedding and head included, over the stages as evenly as it goes."""
        stages, layers = len(self.places), BLOCKS + 2
        return Placement.of(self.places, [layers * s // stages for s in range(stages + 1)], self.forward_only)

    def model(self) -> list[Any]:
        """All layers, with the same weights each time, frozen where they are to be."""
        torch.manual_seed(0)
        embedding = Embedding()
        layers = [embedding, *(Block() for _ in range(BLOCKS)), partial(logits, embedding)]
        for layer in layers[:-1]:
            layer.to(self.dtype)
        for number in {*range(self.forward_only), *self.frozen}:
            _, first, stop = self.placement.stages[number]
            for layer in layers[first:stop]:
                if isinstance(layer, nn.Module):
                    layer.requires_grad_(False)
        return layers

    def grid(self, evaluation: bool = False) -> Any:
        counts = (self.slices,) * len(LENGTHS)
        if evaluation:
            return grid_of_step(FORWARD_ONLY, self.placement, counts)
        going_back = range(self.forward_only, len(self.places))
        deferring = tuple(s for s in going_back if s not in self.frozen) if self.apart else ()
        return grid_of_step(self.schedule, self.placement, counts, deferring)

    def batch(self) -> StepBatch:
        batch = StepBatch(lengths=list(LENGTHS), signatures=list(LENGTHS))
        for m, length in enumerate(LENGTHS):
            tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(m))
            batch.inputs.append((tokens[:, :-1], torch.arange(length).expand(2, -1)))
            batch.labels.append(tokens[:, 1:])
            batch.input_cuts.append((TensorCut(1), TensorCut(1)))
            batch.label_cuts.append((TensorCut(1),))
        batch.cut(self.slices)
        return batch

    def losses(self, batch: StepBatch) -> StepLosses:
        loss = PerToken()
        return StepLosses(batch, loss if self.per_token else loss.__call__, (TensorCut(1),))


def gradients_of(layers: Sequence[Any]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in nn.ModuleList(layers[:-1]).parameters()]


def check(case: Case, total: Tensor, got: Sequence[Tensor | None]) -> None:
    """Loss and gradients are those of one process."""
    layers, batch, loss = case.model(), case.batch(), torch.zeros(())
    for value, labels in zip(batch.inputs, batch.labels, strict=True):
        for layer in layers:
            value = layer(value)
        part = PerToken()(value, labels) / len(LENGTHS)
        part.backward()
        loss = loss + part.detach()
    wanted, limit = gradients_of(layers), TOLERANCE[case.dtype]
    assert abs(total - loss) <= limit * abs(loss)
    assert [g is None for g in got] == [g is None for g in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        if ours is not None and theirs is not None:
            assert torch.linalg.vector_norm(ours - theirs) <= limit * torch.linalg.vector_norm(theirs)


PLACES, SCHEDULES = ([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]), ("1f1b", "terapipe")
CASES = [
    *(Case(places, schedule) for places in PLACES for schedule in SCHEDULES),
    *(Case(places, schedule, forward_only=2) for places in PLACES for schedule in SCHEDULES),
    *(Case(places, dtype=torch.float32, apart=False, per_token=True) for places in PLACES),
    Case([0, 1], forward_only=1, per_token=True),  # a place that only goes forward
    Case([0, 0, 0, 1], forward_only=2),  # in the middle of a place
    Case([0, 1, 1, 2], forward_only=2),  # the last of the prefix begins a place that trains
    Case([0, 1, 2], frozen=(1,)),  # nothing to train on a place that gradients go through
    Case([0, 1, 1, 0], frozen=(1, 2), forward_only=1),
    Case([0, 1, 0, 1], slices=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_placement_gives_the_gradients_of_one_process(case):
    layers, batch = case.model(), case.batch()
    places, interception = assemblies(case.placement, layers, PlainGradients(len(LENGTHS))), Interception(layers)
    losses, grid = case.losses(batch), case.grid()
    made = [watch_weights(stage) for place in places for stage in place.stages.values()]
    try:
        left = run(places, [Step(0, batch, grid, losses)] * len(places))
    finally:
        interception.close()
    assert left == 0
    check(case, losses.total / len(LENGTHS), gradients_of(layers))
    apart = case.apart and case.slices > 1
    going_back = [number for number in range(case.forward_only, len(case.places)) if number not in case.frozen]
    assert sum(map(len, made)) == (len(going_back) * len(LENGTHS) if apart else 0)
    assert all(count > 0 for of_stage in made for count in of_stage)
    units, stages = case.slices * len(LENGTHS), len(case.places)
    assert sum(place.live.forward_units for place in places) == units * stages
    assert sum(place.live.backward_units for place in places) == units * (stages - case.forward_only)
    assert not any(a.op is Op.SEND_BACKWARD and a.stage <= case.forward_only for row in grid for a in row)


def watch_weights(stage: Stage) -> list[int]:
    """Filled with the bytes that are kept for weight gradients whenever some are made."""
    made: list[int] = []
    make = stage.weight_gradients.make

    def watched(*unit: int) -> None:
        made.append(stage.weight_gradients.kept_bytes)
        make(*unit)

    stage.weight_gradients.make = watched  # type: ignore[method-assign]
    return made


class Recorded(PlainGradients):
    """Remembers what it was told of passes."""

    def __init__(self) -> None:
        super().__init__(1)
        self.told: list[tuple[bool, bool]] = []

    def around(self, first: bool = True, last: bool = True) -> Any:
        self.told.append((first, last))
        return super().around(first, last)


def test_a_part_of_the_weight_gradients_is_the_first_or_the_last():
    """In 16 bits parts are summed in fp32 from the first to the last."""
    case, told = Case([0]), Recorded()
    stage = Stage(0, case.model(), 0, gradients=told)
    for units in (["0.2", "1.2", "0.1", "0.0", "1.0"], ["0.0", "1.0"]):
        for unit in units:
            stage.make_weight_gradients(Unit.from_text(unit))
    parts = [(True, False), (True, False), (False, False), (False, True), (False, True)]
    assert told.told == [*parts, (True, True), (True, True)] and stage.left_over == 0


REAL = [Case(places, forward_only=forward_only) for places in (*PLACES, [0, 1]) for forward_only in (0, 1)]
REAL.append(Case([0, 1, 1, 0], "terapipe", per_token=True))


def worker(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    """Of each case the loss and an evaluation's where they are known, all gradients, whether an older assembly made the same."""
    found, pipelines = [], [[0, 1]]
    watchdog = Watchdog(Seat.of(Placement.plain(2), rank, pipelines), 60.0)
    for case in REAL:
        layers = case.model()
        build = partial(
            Assembly.build, case.placement, pipelines, dict(enumerate(layers)),
            device=torch.device("cpu"), watchdog=watchdog, gradients=PlainGradients(len(LENGTHS)),
        )  # fmt: skip
        old = build()
        old.intercept()
        step(case, old)
        first = gradients_of(layers)
        nn.ModuleList(layers[:-1]).zero_grad()
        new = build()
        new.intercept()
        old.close()  # the layers stay as the new one needs them
        loss, second = step(case, new), gradients_of(layers)
        same = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))
        found.append((loss, step(case, new, evaluation=True), second, same))
        new.close()
        new.close()
        assert "forward" not in layers[1].qkv.__dict__
    watchdog.close()
    return found


def step(case: Case, assembly: Assembly, evaluation: bool = False) -> float | None:
    batch = case.batch()
    if not assembly.seat.has_first:
        batch.inputs.clear()
    losses = case.losses(batch) if assembly.seat.has_last else None
    with torch.set_grad_enabled(not evaluation):
        assembly.run(Step(0, batch, case.grid(evaluation), losses))
    assert assembly.left_over == 0
    return None if losses is None else float(losses.total) / len(LENGTHS)


ranks = launched(worker, 2, timeout=240)


@pytest.mark.parametrize("index", range(len(REAL)), ids=lambda index: str(REAL[index]))
def test_two_processes_run_any_placement(ranks, index):
    losses, evaluated, gradients, same = zip(*(rank[index] for rank in ranks), strict=True)
    (loss,) = (each for each in losses if each is not None)
    assert [each for each in evaluated if each is not None] == pytest.approx([loss])
    # each rank has all layers, and runs its own: a gradient is the sum of what the ranks have, tied ones included
    got = []
    for parts in zip(*gradients, strict=True):
        there = [part for part in parts if part is not None]
        got.append(sum(there[1:], there[0]) if there else None)
    check(REAL[index], torch.tensor(loss, dtype=torch.float64), got)
    assert all(same)


def test_a_copy_of_a_layer_computes_with_its_own_weights():
    layers = Case([0, 1]).model()
    interception = Interception(layers)
    twin = copy.deepcopy(layers[1])
    with torch.no_grad():
        twin.out.weight.zero_()
    interception.close()
    x = torch.ones(1, 3, WIDTH, dtype=torch.float64)
    assert not torch.equal(twin.out(x), layers[1].out(x))

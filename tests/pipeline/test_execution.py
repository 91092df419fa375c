"""Any order that the validator accepts gives the gradients of the whole, two micro-batches on their way back at once included.

The stages of a pipeline in one process, as in test_assembly.py; then real engines whose schedule is such an order, for the
optimisers that gather gradients themselves.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_terapipe.pipeline import engine as engine_module
from ds_terapipe.pipeline.assembly import Step
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.slicing import TensorCut, slice_lengths, spans
from ds_terapipe.pipeline.stage import PlainGradients
from ds_terapipe.schedule import Grid, Op, Placement, validate
from tests.pipeline.fake_links import assemblies, run
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.test_assembly import WIDTH, Block
from tests.pipeline.training import Trace, build_engine, errors, train, train_plain
from tests.schedule.strategies import RandomGrid, few_slices, interleaved_grid, placements, random_grid, random_grids
from tests.spawn import launched

TOKENS_PER_SLICE = 2
BOTH = (TensorCut(1), TensorCut(1))


def squares(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return (outputs[0] - labels).square().mean()


def batch_of(slices: list[int]) -> StepBatch:
    """A micro-batch of two sequences for each number of slices."""
    batch = StepBatch(lengths=[count * TOKENS_PER_SLICE for count in slices])
    for m, length in enumerate(batch.lengths):
        generator = torch.Generator().manual_seed(m)
        inputs, labels = (torch.randn(2, length, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        batch.inputs.append((inputs, torch.arange(length).expand(2, -1)))
        batch.labels.append(labels)
        batch.input_cuts.append(BOTH)
    batch.spans = [spans(slice_lengths(n, count)) for n, count in zip(batch.lengths, slices, strict=True)]
    return batch


def check_grid(made: RandomGrid, once: bool = True) -> None:
    """Gradients are those of plain autograd, and nothing is left over; the grid's weight gradients run if ``once``."""
    torch.manual_seed(0)
    layers, batch = [Block().double() for _ in made.placement.stages], batch_of(made.slices)
    for layer in layers[: made.placement.forward_only]:
        layer.requires_grad_(False)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        (squares(nn.Sequential(*layers)(inputs), labels) / len(made.slices)).backward()
    wanted = [p.grad for p in trained]
    nn.ModuleList(layers).zero_grad()
    grid = made.grid if once else [[a for a in row if a.op is not Op.WEIGHT_GRADIENTS] for row in made.grid]
    places = assemblies(made.placement, layers, PlainGradients(len(batch.spans)))
    interception = Interception(layers)
    try:
        left = run(places, [Step(0, batch, grid, StepLosses(batch, squares, BOTH))] * len(places))
    finally:
        interception.close()
    assert left == 0
    assert not any(p.grad is not None for layer in layers[: made.placement.forward_only] for p in layer.parameters())
    for parameter, gradient in zip(trained, wanted, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-10 * gradient.norm()


@given(random_grids(weights=True), st.booleans())
@settings(max_examples=50)
def test_any_valid_grid_gives_the_gradients_of_the_whole(made, once):
    validate(made.grid, made.slices, placement=made.placement)
    check_grid(made, once)


@given(st.integers(0, 10**6), placements(), few_slices, st.booleans())
@settings(max_examples=50)
def test_so_does_any_on_any_placement(seed, placement, slices, each_slice):
    assume(placement.forward_only < len(placement.stages))
    check_grid(random_grid(seed, placement, slices, weights=True, each_slice=each_slice))


@pytest.mark.parametrize("number", range(4))
def test_micro_batches_that_come_back_together(number):
    check_grid(interleaved_grid(number, 3, [3, 3, 2], weights=True))


# ------------------------------------------------------------------------------- engines, with what gathers gradients itself

STEPS, SLICES, MICRO_BATCHES = 2, 4, 3
LATE = {"bf16": {"enabled": True, "immediate_grad_update": False}}
ZERO1 = {"zero_optimization": {"stage": 1}}
CONFIGS = {
    "zero1 fp32": ZERO1,
    "bf16, gathered after backward": LATE,
    "bf16 zero1, fp32 sum, gathered after backward": {**LATE, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}},
}


def interleaved(name: str, placement: Placement, slices: tuple[int, ...], deferring: tuple[int, ...] = ()) -> Grid:
    """A random order, with micro-batches that come back together."""
    made = interleaved_grid(0, placement.places, slices, weights=bool(deferring))
    validate(made.grid, made.slices)
    return made.grid


ORDERS = {"random": ("micro_batch", interleaved), "random, gradients by slice": ("slice", interleaved)}


def train_in_random_orders(rank: int, world_size: int) -> dict[tuple[str, str], dict[str, float]]:
    found, known = {}, engine_module.grid_of_step
    for name, config in CONFIGS.items():
        # in 16 bits the schedule's own order is what the others are measured against
        own = {"own": ("micro_batch", known)} if "bf16" in name else {}
        for kind, (weights, plan) in {**ORDERS, **own}.items():
            engine_module.grid_of_step = plan
            keys = {"slices": SLICES, "weight_gradients": weights, "verify": False}
            engine = build_engine(
                tied_gpt(), masked_loss, micro_batches=MICRO_BATCHES, config=config, token_pipeline=keys
            )
            trace = train(engine, steps_of(STEPS, MICRO_BATCHES))
            engine.destroy()
            measured = errors(trace, exact("bf16" in name))
            found[name, kind] = {what: measured[what] for what in ("gradients", "weights", "weights together")}
    engine_module.grid_of_step = known
    return found


@cache
def exact(bf16: bool) -> Trace:
    """One process: fp64 from weights that bf16 can hold, or fp32."""
    wide, start = (torch.float64, torch.bfloat16) if bf16 else (torch.float32, torch.float32)
    steps, sgd = steps_of(STEPS, MICRO_BATCHES), partial(torch.optim.SGD, lr=0.2)
    return train_plain(tied_gpt(), masked_loss, steps, sgd, dtype=wide, start=start)


measured = launched(train_in_random_orders, 2, timeout=240)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_engines_in_random_orders(measured, name, kind):
    for rank in measured:
        for what, error in rank[name, kind].items():
            limit = (1.5 if what == "weights" else 1.2) * rank[name, "own"][what] if "bf16" in name else 1e-5
            assert error <= limit, f"{what} differ by {error:.2e} in {kind}, allowed are {limit:.2e}"

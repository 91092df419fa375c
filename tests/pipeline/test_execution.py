"""Any order that the validator accepts gives the gradients of the whole, two micro-batches on their way back at once included.

The stages of a pipeline in one process: the engine's own execution and gradients, with messages in plain queues, which carry
tensors and no names. Then real engines whose schedule is such an order, for the optimisers that gather gradients themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_terapipe.pipeline import engine as engine_module
from ds_terapipe.pipeline.assembly import Step
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.slicing import TensorCut
from ds_terapipe.pipeline.stage import PlainGradients
from ds_terapipe.schedule import Grid, Op, Placement, order, validate, with_messages, with_weight_gradients
from tests.pipeline.fake_links import assemblies, run
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import Trace, build_engine, errors, train, train_plain
from tests.schedule.strategies import RandomGrid, few_slices, interleaved_grid, placements, random_grid, random_grids
from tests.spawn import launched

WIDTH, TOKENS_PER_SLICE = 6, 2


class Layer(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).unsqueeze(1).chunk(3, dim=-1)
        return hidden + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def batch_of(slices: list[int], dtype: torch.dtype = torch.float64) -> StepBatch:
    """A micro-batch of two sequences for each number of slices."""
    batch = StepBatch(lengths=[count * TOKENS_PER_SLICE for count in slices])
    for m, length in enumerate(batch.lengths):
        generator = torch.Generator().manual_seed(m)
        inputs, labels = (torch.randn(2, length, WIDTH, dtype=dtype, generator=generator) for _ in range(2))
        batch.inputs.append(inputs)
        batch.labels.append(labels)
        batch.input_cuts.append((TensorCut(1, None),))
    batch.spans = [_spans(count) for count in slices]
    return batch


def _spans(count: int) -> Any:
    batch = StepBatch(lengths=[count * TOKENS_PER_SLICE])
    batch.cut(count)
    return batch.spans[0]


def run_grid(made: RandomGrid, once: bool) -> tuple[float, int]:
    """The worst relative difference of a gradient from plain autograd's, and what is left over; the grid's W run if ``once``."""
    torch.manual_seed(0)
    layers, batch = [Layer().double() for _ in made.placement.stages], batch_of(made.slices)
    for layer in layers[: made.placement.forward_only]:
        layer.requires_grad_(False)
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        (squares(nn.Sequential(*layers)(inputs), labels) / len(made.slices)).backward()
    wanted = [p.grad for layer in layers for p in layer.parameters() if p.requires_grad]
    for layer in layers:
        layer.zero_grad()
    grid = made.grid if once else [[a for a in row if a.op is not Op.WEIGHT_GRADIENTS] for row in made.grid]
    left = run_in_one_process(made.placement, layers, batch, grid)
    got = [p.grad for layer in layers for p in layer.parameters() if p.requires_grad]
    assert not any(p.grad is not None for layer in layers[: made.placement.forward_only] for p in layer.parameters())
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)), left


def run_in_one_process(placement: Placement, layers: Sequence[nn.Module], batch: StepBatch, grid: Grid) -> int:
    """All places side by side; what is left over."""
    places = assemblies(placement, layers, PlainGradients(len(batch.spans)))
    interception = Interception(layers)
    losses = StepLosses(batch, squares, (TensorCut(1, None),))
    try:
        return run(places, [Step(0, batch, grid, losses)] * len(places))
    finally:
        interception.close()


@given(random_grids(weights=True), st.booleans())
@settings(max_examples=60)
def test_any_valid_grid_gives_the_gradients_of_the_whole(made, once):
    validate(made.grid, made.slices, placement=made.placement)
    difference, left = run_grid(made, once)
    assert difference <= 1e-10 and left == 0


@given(st.integers(0, 10**6), placements(), few_slices, st.booleans())
@settings(max_examples=60)
def test_so_does_any_on_any_placement(seed, placement, slices, each_slice):
    assume(placement.forward_only < len(placement.stages))
    made = random_grid(seed, placement, slices, weights=True, each_slice=each_slice)
    difference, left = run_grid(made, once=True)
    assert difference <= 1e-10 and left == 0


@pytest.mark.parametrize("number", range(4))
def test_micro_batches_that_come_back_together(number):
    difference, left = run_grid(interleaved_grid(number, 3, [3, 3, 2], weights=True), once=True)
    assert difference <= 1e-10 and left == 0


# ------------------------------------------------------------------------------- engines, with what gathers gradients itself

STEPS, SLICES, MICRO_BATCHES, LENGTH = 2, 4, 3, 24
BF16 = {"bf16": {"enabled": True}}
LATE = {"bf16": {"enabled": True, "immediate_grad_update": False}}
ZERO1 = {"zero_optimization": {"stage": 1}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
CONFIGS = {
    "plain fp32": {},
    "zero1 fp32": ZERO1,
    "bf16": BF16,
    "bf16, gathered after backward": LATE,
    "bf16 zero1": {**BF16, **ZERO1},
    "bf16 zero1, fp32 sum, gathered after backward": {**LATE, **ZERO1, **FP32_SUM},
}
sgd = partial(torch.optim.SGD, lr=0.2)


def with_grids(number: int) -> Any:
    """``grid_of_step`` whose grids are random, with micro-batches that come back together."""

    def plan(name: str, placement: Placement, slices: tuple[int, ...], deferring: tuple[int, ...] = ()) -> Grid:
        made = interleaved_grid(number, placement.places, slices, weights=bool(deferring))
        validate(made.grid, made.slices)
        return made.grid

    return plan


def finer(name: str, placement: Placement, slices: tuple[int, ...], deferring: tuple[int, ...] = ()) -> Grid:
    """The schedule's own order, its weight gradients slice by slice."""
    grid = with_messages(order(name, placement, slices), placement)
    grid = with_weight_gradients(grid, placement, deferring, each_slice=True)
    validate(grid, slices, name, placement)
    return grid


def train_in_random_orders(rank: int, world_size: int) -> dict[tuple[str, str, str], dict[str, float]]:
    found = {}
    known = engine_module.grid_of_step
    for name, config in CONFIGS.items():
        reference = exact("bf16" in name)
        for keys in ("micro_batch", "slice"):
            # in 16 bits the schedule's own order is what the random one is measured against
            orders = {"random": with_grids(0), **({"own": known} if "bf16" in name else {})}
            if keys == "micro_batch":
                orders["a W for each slice"] = finer
            for kind, plan in orders.items():
                engine_module.grid_of_step = plan
                engine = build_engine(
                    tied_gpt(), masked_loss, micro_batches=MICRO_BATCHES, config=config,
                    token_pipeline={"slices": SLICES, "weight_gradients": keys, "verify": False},
                )  # fmt: skip
                trace = train(engine, steps_of(STEPS, MICRO_BATCHES, length=LENGTH))
                engine.destroy()
                assert trace.gradients[-1]
                measured = errors(trace, reference)
                found[name, keys, kind] = {
                    what: measured[what] for what in ("gradients", "weights", "weights together")
                }
    engine_module.grid_of_step = known
    return found


@cache
def exact(bf16: bool) -> Trace:
    """One process: fp64 from weights that bf16 can hold, or fp32."""
    wide, start = (torch.float64, torch.bfloat16) if bf16 else (torch.float32, torch.float32)
    return train_plain(
        tied_gpt(), masked_loss, steps_of(STEPS, MICRO_BATCHES, length=LENGTH), sgd, dtype=wide, start=start
    )


measured = launched(train_in_random_orders, 2, timeout=240)


@pytest.mark.parametrize("keys", ["micro_batch", "slice"])
@pytest.mark.parametrize("name", CONFIGS)
def test_engines_in_random_orders(measured, name, keys):
    for rank in measured:
        for kind in ("random", "a W for each slice")[: 2 if keys == "micro_batch" else 1]:
            for what, error in rank[name, keys, kind].items():
                own = rank[name, keys, "own"][what] if "bf16" in name else 0.0
                limit = (1.5 if what == "weights" else 1.2) * own if "bf16" in name else 1e-5
                assert error <= limit, f"{what} differ by {error:.2e} in {kind}, allowed are {limit:.2e}"

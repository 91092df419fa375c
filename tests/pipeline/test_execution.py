"""Any order that the validator accepts gives the gradients of the whole, two micro-batches on their way back at once included.

The stages of a pipeline in one process: the engine's own execution and gradients, with messages in plain queues, which carry
tensors and no names. Then real engines whose schedule is such an order, for the optimisers that gather gradients themselves.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_terapipe.pipeline import engine as engine_module
from ds_terapipe.pipeline.accounting import LiveUnits, StepMemory
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.context import SliceContext
from ds_terapipe.pipeline.execution import ActionExecution
from ds_terapipe.pipeline.gradient_sums import GradientSums
from ds_terapipe.pipeline.gradients import SlicedGradients
from ds_terapipe.pipeline.interception import Overrides
from ds_terapipe.pipeline.plan import StepPlan
from ds_terapipe.pipeline.slicing import TensorCut
from ds_terapipe.pipeline.weight_gradients import WeightGradients
from ds_terapipe.schedule import Op, Unit, validate
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import Trace, build_engine, errors, train, train_plain
from tests.schedule.strategies import RandomGrid, interleaved_grid, random_grids
from tests.spawn import run_ranks

WIDTH, TOKENS_PER_SLICE = 6, 2


class Layer(nn.Module):
    """Attention and two linear layers, as an engine would run it: it says that it is layer 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if SliceContext.current is not None:
            SliceContext.current.enter_layer(0)
        q, k, v = self.qkv(self.norm(hidden)).unsqueeze(1).chunk(3, dim=-1)
        return hidden + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


class Wire:
    """Two queues for each boundary, of tensors alone: what is sent in another order is taken for something else."""

    def __init__(self, stages: int) -> None:
        self.forward = [deque[Tensor]() for _ in range(stages)]
        self.backward = [deque[list[Tensor]]() for _ in range(stages)]

    def end(self, stage: int) -> Any:
        """One stage's end."""

        def send_backward(unit: Unit, inputs: Tensor) -> None:
            self.backward[stage - 1].append([inputs.grad])

        return SimpleNamespace(
            send_forward=lambda unit, outputs: self.forward[stage + 1].append(outputs.detach()),
            receive_forward=lambda unit: self.forward[stage].popleft().requires_grad_(),
            send_backward=send_backward,
            receive_backward=lambda unit: self.backward[stage].popleft(),
        )

    def waiting(self, op: Op, stage: int) -> int:
        """Messages that a receive would find."""
        return len((self.forward if op is Op.RECV_FORWARD else self.backward)[stage])


class Stage(SlicedGradients, ActionExecution):
    """One stage, with what execution needs of an engine."""

    def __init__(self, stage: int, stages: int, module: nn.Module, batch: StepBatch, wire: Wire) -> None:
        self._stage, self._last, self.module, self._batch, self._wire = (
            stage,
            stages - 1,
            module,
            batch,
            wire.end(stage),
        )
        self._context, self._weight_gradients = SliceContext(), WeightGradients()
        self._live, self._memory, self._gradient_sums = LiveUnits(), StepMemory(), GradientSums(module.parameters())
        self._inputs, self._outputs, self._outgoing, self._gradients, self._losses = {}, {}, {}, {}, {}
        self._layout = SimpleNamespace(outputs=(TensorCut(1, None),))
        self.optimizer = self.torch_autocast_z0_gradscaler = self.total_loss = None
        self._compute_loss, self.eval_return_logits = True, False
        self.fwd_outputs: list[Any] = []
        self.module.loss_fn = squares

    def is_first_stage(self) -> bool:
        return self._stage == 0

    def is_last_stage(self) -> bool:
        return self._stage == self._last

    def gradient_accumulation_steps(self) -> int:
        return len(self._batch.spans)

    def _autocast(self) -> Any:
        return nullcontext()

    def _reentrant_activation_checkpointing(self) -> bool:
        return False

    def left_over(self) -> int:
        """What actions have left and no action took."""
        kept = (self._inputs, self._outputs, self._outgoing, self._gradients, self._losses, self._live._live)
        return sum(map(len, kept)) + self._weight_gradients.kept_bytes


def batch_of(slices: list[int]) -> StepBatch:
    """A micro-batch of two sequences for each number of slices."""
    lengths = [count * TOKENS_PER_SLICE for count in slices]
    batch = StepBatch(lengths=lengths)
    for m, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(m)
        inputs, labels = (torch.randn(2, length, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        batch.inputs.append(inputs)
        batch.labels.append(labels)
        batch.input_cuts.append((TensorCut(1, None),))
        batch.spans.append(())
    batch.spans = [_spans(count) for count in slices]
    return batch


def _spans(count: int) -> Any:
    batch = StepBatch(lengths=[count * TOKENS_PER_SLICE])
    batch.cut(count)
    return batch.spans[0]


def run_grid(made: RandomGrid, once: bool) -> tuple[float, int]:
    """The worst relative difference of a gradient from plain autograd's, and what is left over."""
    torch.manual_seed(0)
    layers, batch = [Layer().double() for _ in made.grid], batch_of(made.slices)
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        (squares(nn.Sequential(*layers)(inputs), labels) / len(made.slices)).backward()
    wanted = [[p.grad for p in layer.parameters()] for layer in layers]
    for layer in layers:
        layer.zero_grad()
    wire = Wire(len(layers))
    stages = [Stage(number, len(layers), layer, batch, wire) for number, layer in enumerate(layers)]
    for stage in stages:
        stage._context.weight_gradients = stage._weight_gradients if once else None
    at = [0] * len(layers)
    while any(index < len(row) for index, row in zip(at, made.grid, strict=True)):
        before = sum(at)
        for number, row in enumerate(made.grid):
            while at[number] < len(row):
                action = row[at[number]]
                if action.op.is_receive and not wire.waiting(action.op, number):
                    break
                stages[number]._execute(action)
                at[number] += 1
        assert sum(at) > before, "the grid is stuck"
    got = [[p.grad for p in layer.parameters()] for layer in layers]
    pairs = [(a, b) for ours, theirs in zip(got, wanted, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs), sum(stage.left_over() for stage in stages)


@pytest.fixture
def _overrides():
    Overrides.acquire()
    yield
    Overrides.release()


@pytest.mark.usefixtures("_overrides")
@given(random_grids(weights=True), st.booleans())
@settings(max_examples=60)
def test_any_valid_grid_gives_the_gradients_of_the_whole(made, once):
    validate(made.grid, made.slices)
    difference, left = run_grid(made, once)
    assert difference <= 1e-10 and left == 0


@pytest.mark.usefixtures("_overrides")
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
    """``plan_step`` whose grids are random, with micro-batches that come back together."""

    def plan(name: str, stages: int, slices: tuple[int, ...], once: bool = False) -> StepPlan:
        made = interleaved_grid(number, stages, slices, weights=once)
        validate(made.grid, made.slices)
        return StepPlan(tuple(tuple(row) for row in made.grid))

    return plan


def train_in_random_orders(rank: int, world_size: int) -> dict[tuple[str, str, str], dict[str, float]]:
    found = {}
    known = engine_module.plan_step
    for name, config in CONFIGS.items():
        reference = exact("bf16" in name)
        for keys in ("micro_batch", "slice"):
            # in 16 bits the schedule's own order is what the random one is measured against
            orders = {"random": with_grids(0), **({"own": known} if "bf16" in name else {})}
            for order, plan in orders.items():
                engine_module.plan_step = plan
                engine = build_engine(
                    tied_gpt(), masked_loss, micro_batches=MICRO_BATCHES, config=config,
                    token_pipeline={"slices": SLICES, "weight_gradients": keys, "verify": False},
                )  # fmt: skip
                trace = train(engine, steps_of(STEPS, MICRO_BATCHES, length=LENGTH))
                engine.destroy()
                assert trace.gradients[-1]
                measured = errors(trace, reference)
                found[name, keys, order] = {what: measured[what] for what in ("gradients", "weights")}
    engine_module.plan_step = known
    return found


@cache
def exact(bf16: bool) -> Trace:
    """One process: fp64 from weights that bf16 can hold, or fp32."""
    wide, start = (torch.float64, torch.bfloat16) if bf16 else (torch.float32, torch.float32)
    return train_plain(
        tied_gpt(), masked_loss, steps_of(STEPS, MICRO_BATCHES, length=LENGTH), sgd, dtype=wide, start=start
    )


@pytest.fixture(scope="module")
def measured() -> list[dict[tuple[str, str, str], dict[str, float]]]:
    return run_ranks(train_in_random_orders, 2, timeout=240)


@pytest.mark.parametrize("keys", ["micro_batch", "slice"])
@pytest.mark.parametrize("name", CONFIGS)
def test_engines_in_random_orders(measured, name, keys):
    for rank in measured:
        for what, error in rank[name, keys, "random"].items():
            limit = 1.2 * rank[name, keys, "own"][what] if "bf16" in name else 1e-5
            assert error <= limit, f"{what} differ by {error:.2e}, allowed are {limit:.2e}"

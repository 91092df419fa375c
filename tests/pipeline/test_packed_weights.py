"""Packed weights: the same products, and never those of a weight that is another one by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ds_terapipe.pipeline.packed_weights import PackedWeights, is_available
from tests.pipeline.models import Block, Embedding, Head, gpt, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import run_ranks

pytestmark = pytest.mark.skipif(not is_available(), reason="this PyTorch has no MKL to pack weights for")

TOKENS = 6


def packed_products(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many products with packed weights ``run()`` makes, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        result = run()
    return sum(event.count for event in recorded.key_averages() if event.key == "mkl::_mkl_linear"), result


def both_ways(packs: PackedWeights, layer: nn.Linear, x: torch.Tensor, gradient: torch.Tensor) -> int:
    """Packed products made of one forward and one backward; what they give has to be what ``layer`` gives."""
    with torch.no_grad():
        made, (out, back) = packed_products(
            lambda: (packs.linear(x, layer.weight, layer.bias), packs.input_gradient(gradient, layer.weight))
        )
        for got, expected in ((out, layer(x)), (back, gradient @ layer.weight)):
            assert got is None or float((got - expected).abs().max()) < 1e-5
    assert made == (out is not None) + (back is not None)
    return made


def pack_what_is_due(packs: PackedWeights, waiting: bool = True) -> int:
    due = packs.due(forward=True, backward=False, waiting=waiting)
    packs.pack(due)
    again = packs.due(forward=True, backward=True, waiting=True)
    packs.pack(again)
    assert packs.due(forward=True, backward=True, waiting=True) == []  # once a step
    return len(due) + len(again)


def packed_for(layer: nn.Linear, batch: int, lengths: list[int], waiting: bool = True) -> PackedWeights:
    """In a step of slices of these lengths, after one that has used the layer."""
    packs = PackedWeights()
    packs.begin([4, 4])
    packs.note(layer.weight, torch.randn(batch, 4, layer.in_features), 4)
    packs.begin(lengths)
    pack_what_is_due(packs, waiting)
    return packs


@settings(deadline=None, max_examples=40)
@given(
    *(st.integers(1, 40) for _ in range(2)), st.integers(1, 3), st.integers(1, 70), st.booleans(), st.integers(0, 99)
)
def test_the_same_products(inputs, outputs, batch, tokens, bias, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    packs = packed_for(layer, batch, [tokens, tokens + 1, tokens])
    for shape in ((batch, tokens), (tokens, batch)):  # both layouts of Megatron and DeepSpeed
        assert both_ways(packs, layer, torch.randn(*shape, inputs), torch.randn(*shape, outputs)) == 2


def test_a_gradient_in_another_order_in_memory():
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 2, [TOKENS] * 2)
    x, gradient = torch.randn(TOKENS, 2, 8).transpose(0, 1), torch.randn(1, 1, 12).expand(2, TOKENS, 12)
    assert both_ways(packs, layer, x, gradient) == 2


def test_only_for_the_length_of_most_slices():
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, [5, TOKENS, TOKENS])
    for tokens, expected in ((TOKENS, 2), (5, 0)):
        assert both_ways(packs, layer, torch.randn(1, tokens, 8), torch.randn(1, tokens, 12)) == expected


def test_other_shapes_are_an_error_as_ever():
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, [TOKENS] * 2)
    assert packs.linear(torch.randn(1, TOKENS, 7), layer.weight, layer.bias) is None
    assert packs.linear(torch.randn(0, 8), layer.weight, layer.bias) is None


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], 0),  # nothing is cut
        ([TOKENS], 0),
        ([TOKENS, 5, 4] * 2, 0),  # too few are alike
        ([TOKENS, TOKENS, 5, 4], 0),
        ([TOKENS] * 2, 2),
    ],
)
def test_what_pays(lengths, expected):
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, lengths)
    assert both_ways(packs, layer, torch.randn(1, TOKENS, 8), torch.randn(1, TOKENS, 12)) == expected


@pytest.mark.parametrize(("slices", "expected"), [(3, 0), (4, 1)])
def test_what_pays_where_nobody_waits(slices, expected):
    layer, packs = nn.Linear(8, 12), PackedWeights()
    packs.note(layer.weight, torch.randn(4, 8), 4)
    packs.begin([TOKENS] * slices)
    assert len(packs.due(forward=True, backward=False, waiting=False)) == expected


def test_a_weight_with_now_more_and_now_less_rows_is_left_alone():
    experts = [nn.Linear(8, 12) for _ in range(2)]
    packs = PackedWeights()
    for rows in (4, 8):
        packs.note(experts[0].weight, torch.randn(rows, 8), 4)
        packs.note(experts[1].weight, torch.randn(0, 8), 4)
    packs.begin([TOKENS] * 2)
    assert pack_what_is_due(packs) == 2
    for expert in experts:
        for rows in (0, TOKENS, 2 * TOKENS):
            assert both_ways(packs, expert, torch.randn(rows, 8), torch.randn(rows, 12)) == 0


def write(layer: nn.Linear, packs: PackedWeights) -> None:
    with torch.no_grad():
        layer.weight += 1


def replace(layer: nn.Linear, packs: PackedWeights) -> None:
    layer.weight.data = torch.randn(12, 8)


def turn(layer: nn.Linear, packs: PackedWeights) -> None:
    layer.weight.data = layer.weight.data.view(8, 12).t()  # the same memory and the same counter


def end(layer: nn.Linear, packs: PackedWeights) -> None:
    packs.end()
    layer.weight.data += 1  # as DeepSpeed's optimisers write: no counter tells


def begin(layer: nn.Linear, packs: PackedWeights) -> None:
    layer.weight.data += 1
    packs.begin([TOKENS] * 2)


@pytest.mark.parametrize("change", [write, replace, turn, end, begin])
def test_a_weight_that_has_changed_is_not_the_packed_one(change):
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, [TOKENS] * 2)
    change(layer, packs)
    x, gradient = torch.randn(1, TOKENS, 8), torch.randn(1, TOKENS, 12)
    assert both_ways(packs, layer, x, gradient) == 0
    packs.begin([TOKENS] * 2)
    pack_what_is_due(packs)
    assert both_ways(packs, layer, x, gradient) == 2


def test_nothing_is_packed_after_a_step():
    packs = packed_for(nn.Linear(8, 12), 1, [TOKENS] * 4)
    packs.end()
    assert packs.due(forward=True, backward=True, waiting=True) == []  # an evaluation


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_not_packed(dtype):
    layer = nn.Linear(8, 12, dtype=dtype)
    packs = PackedWeights()
    packs.note(layer.weight, torch.randn(4, 8, dtype=dtype), 4)
    packs.begin([TOKENS] * 4)
    assert packs.due(forward=True, backward=True, waiting=True) == [] and packs.most_bytes == 0


def test_bytes_are_those_of_two_copies():
    layer = nn.Linear(8, 12)
    assert packed_for(layer, 1, [TOKENS] * 4).most_bytes == 2 * 8 * 12 * 4
    assert PackedWeights(wanted=False).most_bytes == 0


def train_packed(rank: int, world_size: int, pack: bool, more: dict[str, Any]) -> dict[str, Any]:
    """Two stages, 4 slices of 6 tokens; step by step the packed products and the losses."""
    engine = build_engine(gpt(), masked_loss, token_pipeline={"slices": 4, "pack_weights": pack, **more})
    products, losses = [], []
    for step in steps_of(4, 2):
        made, trace = packed_products(lambda step=step: train(engine, [step]))
        assert packed_products(lambda step=step: engine.eval_batch(iter(step)))[0] == 0
        products.append(made)
        losses += trace.losses
    linears = sum(isinstance(m, nn.Linear) for m in engine.module.modules())
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    held = engine.packed_weights_bytes
    engine.destroy()
    return {"products": products, "losses": losses, "linears": linears, "weights": weights, "bytes": held}


def test_every_product_of_a_step_is_packed_from_the_second_on():
    packed, plain = (run_ranks(train_packed, 2, pack, {}) for pack in (True, False))
    for mine, other in zip(packed, plain, strict=True):
        # 4 slices of 2 micro-batches, forward and the gradient of the input
        assert mine["products"] == [0, *[mine["linears"] * 4 * 2 * 2] * 3]
        assert other["products"] == [0] * 4 and other["bytes"] == 0 < mine["bytes"]
        torch.testing.assert_close(mine["losses"], other["losses"], rtol=1e-5, atol=0)
        for name, weight in mine["weights"].items():
            torch.testing.assert_close(weight, other["weights"][name], rtol=1e-5, atol=1e-6, msg=name)


def test_not_where_weight_gradients_are_made_per_slice():
    for mine in run_ranks(train_packed, 2, True, {"weight_gradients": "slice"}):
        assert mine["products"] == [0] * 4


class Reentrant(Block):
    """A layer that checkpoints itself, so that its keys are made twice: first without gradients."""

    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=True)


def train_reentrant(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[int], list[float]]:
    layers = [LayerSpec(Embedding), *(LayerSpec(Reentrant) for _ in range(2)), LayerSpec(Head)]
    products, losses = [], []
    engine = build_engine(layers, masked_loss, token_pipeline=options, stages=1)
    for step in steps_of(3, 2):
        made, trace = packed_products(lambda step=step: train(engine, [step]))
        products.append(made)
        losses += trace.losses
    engine.destroy()
    return products, losses


def test_a_reentrant_checkpoint_makes_the_same_keys_again():
    ((products, losses),) = run_ranks(train_reentrant, 1, {"slices": 4})
    ((none, expected),) = run_ranks(train_reentrant, 1, {"slices": 1})
    # 4 slices of 2 micro-batches: the four linear layers of 2 blocks in both passes, the head's in the only one; one stage
    # waits for no gradient, so those products are as ever
    assert products == [0, *[4 * 2 * (4 * 2 * 2 + 1)] * 2] and none == [0] * 3
    assert losses == pytest.approx(expected, rel=1e-5)

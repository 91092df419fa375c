"""Packed weights: the same products, and never those of a weight that is another one by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ds_terapipe.pipeline.packed_weights import PackedWeights, is_available
from tests.pipeline.models import gpt, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import run_ranks

pytestmark = pytest.mark.skipif(not is_available(), reason="this PyTorch has no MKL to pack weights for")

TOKENS = 6


def packed_products(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many products with packed weights ``run()`` makes, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        result = run()
    return sum(event.count for event in recorded.key_averages() if event.key == "mkl::_mkl_linear"), result


def both_ways(packs: PackedWeights, layer: nn.Linear, x: torch.Tensor, gradient: torch.Tensor) -> tuple[int, float]:
    """Packed products made of one forward and one backward, and the largest difference from ``layer``'s own."""
    with torch.no_grad():
        made, (out, back) = packed_products(
            lambda: (packs.linear(x, layer.weight, layer.bias), packs.input_gradient(gradient, layer.weight))
        )
        expected = layer(x), gradient @ layer.weight
    return made, max(float((a - b).abs().max()) for a, b in zip((out, back), expected, strict=True))


def packed_for(layer: nn.Linear, batch: int, lengths: list[int], waiting: bool = True) -> PackedWeights:
    """In a step of slices of these lengths, after one that has used the layer."""
    packs = PackedWeights()
    packs.begin([4, 4])
    packs.note(layer.weight, torch.randn(batch, 4, layer.in_features), 4)
    packs.begin(lengths)
    packs.pack_forward(waiting)
    packs.pack_backward()
    return packs


@settings(deadline=None, max_examples=40)
@given(
    *(st.integers(1, 40) for _ in range(2)), st.integers(1, 3), st.integers(1, 70), st.booleans(), st.integers(0, 99)
)
def test_the_same_products(inputs, outputs, batch, tokens, bias, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    packs = packed_for(layer, batch, [tokens, 1, tokens] if tokens > 1 else [1, 1])
    for shape in ((batch, tokens), (tokens, batch)):  # both layouts of Megatron and DeepSpeed
        made, difference = both_ways(packs, layer, torch.randn(*shape, inputs), torch.randn(*shape, outputs))
        assert made == 2
        assert difference < 1e-5


def test_a_gradient_in_another_order_in_memory():
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 2, [TOKENS] * 2)
    x, gradient = torch.randn(TOKENS, 2, 8).transpose(0, 1), torch.randn(1, 1, 12).expand(2, TOKENS, 12)
    made, difference = both_ways(packs, layer, x, gradient)
    assert made == 2 and difference < 1e-5


def test_the_most_frequent_length_is_packed():
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, [5, TOKENS, 4, TOKENS])
    for tokens, expected in ((TOKENS, 2), (5, 0)):
        made, difference = both_ways(packs, layer, torch.randn(1, tokens, 8), torch.randn(1, tokens, 12))
        assert made == expected and difference < 1e-5


@pytest.mark.parametrize(
    ("lengths", "waiting", "expected"),
    [
        ([], True, 0),  # nothing is cut
        ([TOKENS, 5, 4], True, 0),  # nothing is used twice
        ([TOKENS] * 2, True, 2),
        ([TOKENS] * 3, False, 1),  # the forward's alone would cost more than it gains
        ([TOKENS] * 4, False, 2),
    ],
)
def test_what_pays(lengths, waiting, expected):
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, lengths, waiting)
    made, difference = both_ways(packs, layer, torch.randn(1, TOKENS, 8), torch.randn(1, TOKENS, 12))
    assert made == expected and difference < 1e-5


def write(layer: nn.Linear, packs: PackedWeights) -> None:
    with torch.no_grad():
        layer.weight += 1


def replace(layer: nn.Linear, packs: PackedWeights) -> None:
    layer.weight.data = torch.randn(12, 8)


def end(layer: nn.Linear, packs: PackedWeights) -> None:
    packs.end()
    layer.weight.data += 1  # as DeepSpeed's optimisers write: no counter tells


def begin(layer: nn.Linear, packs: PackedWeights) -> None:
    layer.weight.data += 1
    packs.begin([TOKENS] * 2)


@pytest.mark.parametrize("change", [write, replace, end, begin])
def test_a_weight_that_has_changed_is_not_the_packed_one(change):
    layer = nn.Linear(8, 12)
    packs = packed_for(layer, 1, [TOKENS] * 2)
    change(layer, packs)
    made, difference = both_ways(packs, layer, torch.randn(1, TOKENS, 8), torch.randn(1, TOKENS, 12))
    assert made == 0 and difference < 1e-5
    if change is begin:  # packed anew
        packs.pack_forward(waiting=True)
        packs.pack_backward()
        made, difference = both_ways(packs, layer, torch.randn(1, TOKENS, 8), torch.randn(1, TOKENS, 12))
        assert made == 2 and difference < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_not_packed(dtype):
    layer = nn.Linear(8, 12, dtype=dtype)
    packs = packed_for(layer, 1, [TOKENS] * 4)
    made, _ = both_ways(packs, layer, torch.randn(1, TOKENS, 8, dtype=dtype), torch.randn(1, TOKENS, 12, dtype=dtype))
    assert made == 0 and packs.most_bytes == 0


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

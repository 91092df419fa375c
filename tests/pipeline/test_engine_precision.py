"""In bf16 slices are as exact as DeepSpeed's whole sequences."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_terapipe.clipping import clip_gradients
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import build_engine, train, train_plain
from tests.spawn import launched

SLICES, MICRO_BATCHES, STEPS = 8, 2, 2
LOSS_ROUNDING = 2.0**-11  # of a mean of losses made from bf16 logits
BF16 = {"bf16": {"enabled": True}}
CONFIGS = {"bf16": BF16, "bf16 zero1": {**BF16, "zero_optimization": {"stage": 1}}}
WAYS = {"unsliced": None, "sliced": "auto", "by slice": "slice"}  # weight gradients; None: DeepSpeed's own engine
RUNS = {"bf16": ("unsliced", "sliced"), "bf16 zero1": tuple(WAYS)}


def trained(name: str, way: str) -> dict[str, float]:
    """Errors on two stages against fp64, from weights that bf16 can hold."""
    keys = None if WAYS[way] is None else {"slices": SLICES, "weight_gradients": WAYS[way], "verify": False}
    options: Any = {"micro_batches": MICRO_BATCHES, "config": CONFIGS[name]}
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline=keys, **options)
    steps = steps_of(STEPS, MICRO_BATCHES, length=48)
    got = train(engine, steps)
    engine.destroy()
    sgd = partial(torch.optim.SGD, lr=0.2)
    exact = train_plain(tied_gpt(), masked_loss, steps, sgd, dtype=torch.float64, start=torch.bfloat16)
    return {
        "loss": sum(abs(a / b - 1) for a, b in zip(got.losses, exact.losses, strict=True)) / STEPS,
        "gradients": together(zip(got.gradients, exact.gradients, strict=True)),
        "weights": together([(got.weights, exact.weights)]),
    }


def together(pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    """The error of all tensors as of one: that of a small one is a matter of luck, and of the processor."""
    found = [(mine[name].double().flatten(), exact[name].double().flatten()) for mine, exact in pairs for name in mine]
    return float(sum((a - b).square().sum() for a, b in found) / sum(b.square().sum() for _, b in found)) ** 0.5


def worker(rank: int, world_size: int) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {way: trained(name, way) for way in ways} for name, ways in RUNS.items()}


ranks = launched(worker, 2, timeout=240)


@pytest.mark.parametrize("name", CONFIGS)
def test_slices_are_as_exact_as_the_whole(ranks: list[Any], name: str) -> None:
    for own, *ours in (found[name].values() for found in ranks):
        for got in ours:
            assert got["gradients"] <= 1.2 * own["gradients"] and got["weights"] <= 1.2 * own["weights"], (got, own)
            assert got["loss"] <= max(1.2 * own["loss"], LOSS_ROUNDING), (got, own)


def test_rows_of_a_sparse_gradient_are_added_before_their_norm() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
    table(torch.tensor([1, 1, 3])).sum().backward()
    gradients = [parameter.grad.to_dense() for parameter in table.parameters()]
    norm = clip_gradients(table.parameters(), 0.5, None, torch.device("cpu"))
    assert norm == gradients[0].norm() and torch.allclose(table.weight.grad.to_dense(), gradients[0] * 0.5 / (norm + 1e-6))

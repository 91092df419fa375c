"""Within a step the host waits for nothing: no action reads numbers of a tensor. What has to be looked at waits for the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_terapipe.pipeline.operators.context import PlacementError
from tests.megatron.common import MICRO_BATCH, Model, batches
from tests.megatron.common import build as build_megatron
from tests.pipeline.host_reads import host_reads
from tests.pipeline.models import Block, LayerSpec, masked_loss, micro_batch, tied_gpt
from tests.pipeline.training import build_engine
from tests.spawn import launched

SLICES, MICRO_BATCHES, BF16 = 4, 2, {"bf16": {"enabled": True}}
RANGES = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"clip": 0.5},
    "bf16": {"config": BF16},
    "recomputed": {"module": RANGES, "config": {"pipeline": {"use_reentrant": False}}},
    "recomputed, reentrant": {"module": RANGES},
}
MEGATRON = {"megatron": Model(), "megatron, recomputed": Model(checkpoint_interval=1)}


class Noisy(Block):
    """A block that a recomputation does not repeat."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + 0.1 * torch.rand(hidden.shape, generator=self.generator))

    generator = torch.Generator().manual_seed(0)


READS: dict[str, Any] = {
    "item": lambda hidden: hidden.sum().item(),
    "tolist": lambda hidden: hidden[0, 0].tolist(),
    "a mask": lambda hidden: hidden[hidden > 0],
    "unique": lambda hidden: hidden.unique(),
    "to the host": lambda hidden: hidden.detach().cpu(),
}


class Reading(Block):
    """A block that reads numbers, one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, hidden: Tensor) -> Tensor:
        READS[self.way](hidden)
        return super().forward(hidden)


def reads_of(engine: Any, data: Iterator[Any]) -> dict[str, Any]:
    """What is read in a second step; the first one looks at the model."""
    losses = [float(engine.train_batch(data))]
    with host_reads() as found:
        losses.append(float(engine.train_batch(data)))
    ran = engine.slices_run
    weights = {name: parameter.detach().float() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return {"reads": Counter(found), "ran": ran, "losses": losses, "weights": weights}


def work(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        engine = build_engine(tied_gpt(4), masked_loss, token_pipeline={"slices": SLICES}, **options)
        found[name] = reads_of(engine, iter([micro_batch(m, length=24) for m in range(2 * MICRO_BATCHES)]))
    for name, model in MEGATRON.items():
        made = build_megatron(model, stages=2)
        once = {"slices": SLICES, "weight_gradients": "micro_batch"}
        engine = build_engine([], None, made=made, token_pipeline=once, batch=MICRO_BATCH, config=BF16)
        found[name] = reads_of(engine, batches())
    for name in READS:
        specs = tied_gpt(4)
        specs[2] = LayerSpec(Reading, name)
        engine = build_engine(specs, masked_loss, token_pipeline={"slices": SLICES})
        data = iter([micro_batch(m, length=24) for m in range(2 * MICRO_BATCHES)])
        found[f"reads, {name}"] = reads_of(engine, data)["reads"]
    found["noisy"] = noisy()
    return found


def noisy() -> str:
    specs = tied_gpt(4)
    specs[2:-2] = [LayerSpec(Noisy) for _ in specs[2:-2]]
    module = {**RANGES, "checkpointable_layers": ["Noisy"]}
    engine = build_engine(specs, masked_loss, token_pipeline={"slices": SLICES, "verify": False}, module=module)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    try:
        engine.train_batch(iter([micro_batch(m, length=24) for m in range(MICRO_BATCHES)]))
    except PlacementError as error:
        assert all(map(torch.equal, before, engine.module.parameters())), "the optimiser has stepped all the same"
        return str(error)
    return "nothing was raised"


ranks = launched(work, 2, timeout=200)


@pytest.mark.parametrize("name", [*CASES, *MEGATRON])
def test_no_action_reads_numbers(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert not found[name]["reads"]
        assert [len(slices) for slices in found[name]["ran"]] == [SLICES] * MICRO_BATCHES


@pytest.mark.parametrize("name", READS)
def test_a_layer_that_reads_is_found(ranks: list[dict[str, Any]], name: str) -> None:
    """Of the first stage, in every unit; so the test before can fail."""
    first, second = (found[f"reads, {name}"] for found in ranks)
    assert sum(first.values()) >= SLICES * MICRO_BATCHES and not second, first


def test_megatron_in_bf16_rounds_alike_in_a_recomputation(ranks: list[dict[str, Any]]) -> None:
    """Its layers have a bias on Q, K and V; with and without a graph they would add it in two ways."""
    for found in ranks:
        plain, recomputed = (found[name] for name in MEGATRON)
        assert plain["losses"] == recomputed["losses"]
        assert all(torch.equal(weight, recomputed["weights"][name]) for name, weight in plain["weights"].items())


def test_a_layer_that_recomputes_something_else_ends_the_run_before_the_optimiser(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "of a step made keys that no attention call of the forward pass made (near layer" in found["noisy"]
        assert "(Noisy)" in found["noisy"]

"""Weights that entries of a layer list share: who sees them, and which stages are refused for them."""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from tests.pipeline.models import SEED, Block, Embedding, Head
from tests.pipeline.training import build_engine, raised
from tests.spawn import launched


class ByWeight(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class Inside(nn.Module):
    def __init__(self, block: nn.Module, copied: bool = False) -> None:
        super().__init__()
        self.block = copy.deepcopy(block) if copied else block

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


def made(kind: type[nn.Module], entry: int) -> Any:
    torch.manual_seed(SEED + entry)
    return kind()


def sharing(kind: str) -> list[Any]:
    """A layer list whose entries share weights, or only look as if they did."""
    tokens, head, block = made(Embedding, 0), made(Head, 5), made(Block, 1)
    blocks = [made(Block, entry) for entry in range(1, 5)]
    if kind in ("head's weight", "frozen"):
        head.project.weight = tokens.tokens.weight.requires_grad_(kind != "frozen")
    if kind == "neighbours":
        blocks[3] = blocks[2]  # the second stage's first layers
    names = [name for name, _ in block.named_parameters()]
    blocks = {
        "one block": [block] * 4,
        "in specs": [LayerSpec(Inside, block) for _ in range(4)],
        "copied": [LayerSpec(Inside, block, copied=True) for _ in range(4)],
        "tied": [TiedLayerSpec("shared", Block, tied_weight_attr=names) for _ in range(4)],
    }.get(kind, blocks)
    last = {
        "a weight": LayerSpec(ByWeight, tokens.tokens.weight),
        "a partial": partial(lambda layer, hidden: F.linear(hidden, layer.weight), tokens.tokens),
        "a closure": lambda hidden: F.linear(hidden, tokens.tokens.weight),
    }
    return [tokens, *blocks, last.get(kind, head)]


SHARED = {  # entries and weights that are named
    "head's weight": ("0 and 5", 'Embedding, ..., tied_weight_attr=["tokens.weight"]'),
    "one block": ("1, 2, 3 and 4", 'Block, ..., tied_weight_attr=["before_attention.weight", '),
    "in specs": ("1, 2, 3 and 4", 'Inside, ..., tied_weight_attr=["before_attention.weight", '),
    "a weight": ("0 and 5", 'Embedding, ..., tied_weight_attr=["tokens.weight"]'),
    "a partial": ("0 and 5", 'Embedding, ..., tied_weight_attr=["tokens.weight"]'),
    "the loss": ("0 and the loss", 'Embedding, ..., tied_weight_attr=["tokens.weight"]'),
    "a closure": ("0 and 5", 'Embedding, ..., tied_weight_attr=["tokens.weight", "positions.weight"]'),
}
APART = ("copied", "frozen", "tied", "neighbours", "nothing")  # no trained weight is on both stages


def built(rank: int, world_size: int) -> dict[str, str]:
    """Errors of engines on two stages."""
    found = {}
    for kind in (*SHARED, *APART):
        specs, loss = sharing(kind), nn.Module()
        loss.shared = specs[0].tokens if kind == "the loss" else None
        found[kind] = raised(lambda given=(specs, loss): build_engine(*given, token_pipeline={"slices": 2}).destroy())
    return found


ranks = launched(built, 2)


def test_weights_that_stages_would_train_copies_of_are_named_and_others_may_be_shared(ranks: list[Any]) -> None:
    for found in ranks:
        for kind, (entries, weights) in SHARED.items():
            assert found[kind].startswith(
                f"ConfigError: model: got entries {entries} of the layer list on stages 0 and 1, which share trained weights and "
                f'would train copies, must be tied or on one stage, use TiedLayerSpec("shared", {weights}'
            ), (kind, found[kind])
        assert {kind: found[kind] for kind in APART} == dict.fromkeys(APART, "")

"""Weights that entries of a layer list share: who sees them, and which stages are refused for them."""

import copy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_terapipe import ConfigError
from ds_terapipe.pipeline.shared_weights import refuse_split, shared_weights, split
from tests.pipeline.models import SEED, Block, Embedding, Head


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
        blocks[1] = blocks[0]
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
    "the loss": ("5 and the loss", 'Head, ..., tied_weight_attr=["project.weight", "project.bias"]'),
    "a closure": ("0 and 5", 'Embedding, ..., tied_weight_attr=["tokens.weight", "positions.weight"]'),
}


def found_on(kind: str, cuts: tuple[int, ...]) -> list[Any]:
    """Results of the check on ranks with these first entries, each with a part of a ``PipelineModule``."""
    specs, ranks, said = sharing(kind), [], []
    loss: Any = nn.Module()
    loss.project = specs[-1].project if kind == "the loss" else None
    for first, stop in pairwise(cuts):
        module: Any = nn.Module()
        module._layer_specs, module._local_start, module._local_stop, module.loss_fn = specs, first, stop, loss
        module.tied_modules = nn.ModuleDict()
        for entry, spec in enumerate(specs[first:stop], start=first):
            layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if isinstance(spec, TiedLayerSpec):
                module.tied_modules[spec.key] = layer
            elif isinstance(layer, nn.Module):
                module.add_module(str(entry), layer)
        ranks.append(module)
    for module in ranks:  # each rank looks at its own, and then at what all of them said
        shared_weights(module, SimpleNamespace(gather=lambda users: said.append(users) or []))
    results = [shared_weights(module, SimpleNamespace(gather=lambda users: said)) for module in ranks]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 6)])
def test_what_is_shared_is_found_wherever_the_layers_are(cuts):
    for kind, (entries, weights) in SHARED.items():
        with pytest.raises(ConfigError) as refused:
            refuse_split(found_on(kind, cuts), (0, 6, 6) if kind == "the loss" else (0, 3, 6), (0, 1), "model", " or so")
        assert str(refused.value).startswith(
            f"model: got entries {entries} of the layer list on stages 0 and 1, which share trained weights and would train "
            f'copies, must be tied or on one stage, use TiedLayerSpec("shared", {weights}'
        ), kind
        assert str(refused.value).endswith(" or so")
    assert [found_on(kind, cuts) for kind in ("copied", "frozen", "tied", "nothing")] == [[]] * 4


def test_entries_that_lie_together_may_share():
    found = found_on("neighbours", (0, 3, 6))
    assert split(found, (0, 3, 6), (0, 1)) is None and split(found, (0, 2, 6), (0, 1)) == found[0]
    assert found[0].entries == (1, 2) and found[0].kind == "Block" and "qkv.weight" in found[0].names

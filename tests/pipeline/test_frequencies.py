"""An embedding whose gradient is scaled by how often a token comes in the sequence: exact, or refused in one line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe import ConfigError
from tests.pipeline.models import HIDDEN, VOCABULARY, Block, Embedding, Head, masked_loss, steps_of
from tests.pipeline.training import SGD, build_engine, train, train_plain, worst
from tests.spawn import launched

SLICES, STEPS = 4, 2


class Scaled(Embedding):
    """Its table is ``kind``, which scales."""

    kind: type[nn.Embedding] = nn.Embedding
    trains = True

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.kind(VOCABULARY, HIDDEN, scale_grad_by_freq=True).requires_grad_(self.trains)


class OwnForward(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 1.0


class Other(Scaled):
    kind = OwnForward


class FrozenTable(Scaled):
    trains = False


def model(first: type[nn.Module]) -> list[Any]:
    return [LayerSpec(kind) for kind in (first, Block, Block, Head)]


RULE = (
    "token_pipeline: layer 0.tokens ({}) has scale_grad_by_freq=True, must be False where its gradient is made slice by slice "
    "(a slice does not know how often a token is in the whole sequence), use {}"
)
MICRO_BATCH, UNCUT = '"weight_gradients": "micro_batch"', '"slices": 1'
REFUSED: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any], str]] = {
    "by slice": (Scaled, {"weight_gradients": "slice"}, {}, RULE.format("Embedding", MICRO_BATCH)),
    "auto": (Scaled, {"weight_gradients": "slice", "slices": "auto"}, {}, RULE.format("Embedding", MICRO_BATCH)),
    "checkpointed": (
        Scaled,
        {},
        {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
        RULE.format("Embedding", MICRO_BATCH),
    ),
    "autocast": (
        Scaled,
        {},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        RULE.format("Embedding", UNCUT),
    ),
    "a forward of its own": (Other, {"weight_gradients": "micro_batch"}, {}, RULE.format("OwnForward", UNCUT)),
}


def refused(name: str) -> str:
    first, keys, config, _ = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        build_engine(model(first), masked_loss, token_pipeline={"slices": SLICES, **keys}, config=config)
    return str(raised.value)


def difference(first: type[nn.Module], keys: dict[str, Any], change: bool = False) -> tuple[float, str]:
    """Of the gradients of some steps from those of one process; and what a ``change`` to slices says."""
    engine = build_engine(model(first), masked_loss, token_pipeline=keys)
    said = ""
    if change:
        with pytest.raises(ConfigError) as raised:
            engine.set_slices(SLICES)
        said = str(raised.value)
    steps = steps_of(STEPS, 2)
    got = train(engine, steps)
    engine.destroy()
    wanted = train_plain(model(first), masked_loss, steps, partial(torch.optim.SGD, lr=SGD["params"]["lr"]))
    return max(worst(a, b) for a, b in zip(got.gradients, wanted.gradients, strict=True)), said


def worker(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: refused(name) for name in REFUSED}
    found["deferred"] = difference(Scaled, {"slices": SLICES})[0]
    found["frozen"] = difference(FrozenTable, {"slices": SLICES, "weight_gradients": "slice"})[0]
    found["uncut"], found["changed"] = difference(Scaled, {"slices": 1, "weight_gradients": "slice"}, change=True)
    return found


ranks = launched(worker, 2, timeout=200)


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_would_be_scaled_slice_by_slice_is_refused(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank[name] for rank in ranks] == [REFUSED[name][3]] * 2


def test_one_that_is_made_once_is_exact_and_one_that_is_frozen_or_uncut_needs_nothing(ranks: list[Any]) -> None:
    for rank in ranks:
        assert max(rank["deferred"], rank["frozen"], rank["uncut"]) <= 1e-5
        assert rank["changed"] == RULE.format("Embedding", MICRO_BATCH)

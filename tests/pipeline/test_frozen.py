"""A stage without a trained weight: it trains nothing, goes forward only where all before it is frozen, and needs no optimiser
of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe import ConfigError, FusedLamb
from tests.pipeline.models import (
    Block,
    Embedding,
    FrozenBlock,
    FrozenEmbedding,
    Head,
    Tokens,
    masked_loss,
    steps_of,
    tied_gpt,
)
from tests.pipeline.training import ADAMW, SGD, build_engine, difference, train, train_plain
from tests.spawn import run_ranks

STEPS, AUTO_STEPS, SLICES, MICRO_BATCHES = 3, 7, 4, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": SGD},
    "AdamW": {"optimizer": ADAMW, "clip": 0.05},
    "FusedLamb": {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-2}}},
    "ZeRO-1": {"optimizer": ADAMW, "config": {"zero_optimization": {"stage": 1}}},
    "bf16": {"optimizer": ADAMW, "config": {"bf16": {"enabled": True}}},
    "checkpointed": {
        "optimizer": SGD,
        "config": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
    },
    "auto": {"optimizer": SGD, "slices": "auto"},
}


class Nothing(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


MODELS = {
    "first": [FrozenEmbedding, FrozenBlock, FrozenBlock, Block, Block, Head],
    "no weights": [Embedding, Block, Block, Nothing, Nothing, Nothing],
}


def hidden_loss(hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, mask = labels
    return ((hidden.float().mean(-1) - targets / 53).square() * mask).sum() / mask.sum()


def one(model: str, config: str, folder: str) -> dict[str, Any]:
    specs = [LayerSpec(kind) for kind in MODELS[model]]
    options = dict(CONFIGS[config])
    slices, loss = options.pop("slices", SLICES), masked_loss if model == "first" else hidden_loss
    engine = build_engine(specs, loss, token_pipeline={"slices": slices}, micro_batches=MICRO_BATCHES, **options)
    steps = steps_of(STEPS if slices != "auto" else AUTO_STEPS, MICRO_BATCHES)
    trace = train(engine, steps)
    row = engine._watch._grid[engine.stage_id]
    found = {
        "losses": trace.losses,
        "weights": trace.weights,
        "norms": trace.norms,
        "ops": {action.op.name for action in row},
        "units": engine.units_run,
    }
    engine.save_checkpoint(f"{folder}/{model}/{config}")
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    if config == "bf16":  # DeepSpeed 0.19.8 can't load one without ZeRO
        engine.destroy()
        return {**found, "resumed": 0.0}
    engine.load_checkpoint(f"{folder}/{model}/{config}")
    found["resumed"] = max(
        (float((p - before[n]).abs().max()) for n, p in engine.module.named_parameters()), default=0.0
    )
    engine.destroy()
    return found


def runs() -> list[tuple[str, str]]:
    """A reentrant checkpoint of an embedding that is trained is refused."""
    return [
        (model, config) for model in MODELS for config in CONFIGS if (model, config) != ("no weights", "checkpointed")
    ]


def nothing_trained() -> tuple[str, float]:
    """What training says, and the loss of an evaluation."""
    specs = [LayerSpec(kind) for kind in (FrozenEmbedding, FrozenBlock, FrozenBlock, FrozenBlock)]
    engine = build_engine(specs, hidden_loss, token_pipeline={"slices": SLICES})
    data = steps_of(1, MICRO_BATCHES)[0]
    with pytest.raises(ConfigError) as raised:
        engine.train_batch(iter(data))
    loss = float(engine.eval_batch(iter(data)))
    engine.destroy()
    return str(raised.value), loss


class FrozenOnTheFirst(Tokens):
    """Of several that share a weight only the first stage's is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(torch.distributed.get_rank() > 0)


def tied_apart() -> str:
    """What is said of a weight that one stage trains and another does not."""
    specs = tied_gpt(2)
    for spec in (specs[0], specs[-1]):
        spec.typename = FrozenOnTheFirst
    with pytest.raises(ConfigError) as raised:
        build_engine(specs, masked_loss, token_pipeline={"slices": SLICES})
    return str(raised.value)


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {f"{model} {config}": one(model, config, folder) for model, config in runs()}
    return {**found, "nothing": nothing_trained(), "tied": tied_apart()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(worker, 2, str(tmp_path_factory.mktemp("checkpoints")), timeout=240)


def plain(model: str, config: str) -> Any:
    """The same in one process, in fp32; what rounds to bf16 begins with weights that bf16 can hold."""
    options = CONFIGS[config]
    make = {
        "SGD": partial(torch.optim.SGD, lr=0.2),
        "AdamW": partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
        "FusedLamb": partial(FusedLamb, lr=1e-2),
    }[options["optimizer"]["type"]]
    specs, loss = [LayerSpec(kind) for kind in MODELS[model]], masked_loss if model == "first" else hidden_loss
    start = torch.bfloat16 if config == "bf16" else torch.float32
    steps = steps_of(AUTO_STEPS if "slices" in options else STEPS, MICRO_BATCHES)
    return train_plain(specs, loss, steps, make, clip=options.get("clip", 0.0), start=start)


@pytest.mark.parametrize(("model", "config"), runs())
def test_a_stage_that_trains_nothing_trains_with_the_others(ranks, model, config):
    wanted = plain(model, config)
    for number, rank in enumerate(ranks):
        found = rank[f"{model} {config}"]
        limit = 2e-2 if config == "bf16" else 1e-5
        assert found["losses"] == pytest.approx(wanted.losses, rel=limit)
        if "clip" in CONFIGS[config]:
            assert found["norms"] == pytest.approx(wanted.norms, rel=1e-4)
        if config != "bf16":
            assert max((difference(w, wanted.weights[n]) for n, w in found["weights"].items()), default=0.0) <= 1e-5
        assert found["resumed"] == 0.0
        forward_only = model == "first" and number == 0
        assert ("BACKWARD" in found["ops"]) != forward_only
        assert (
            "RECV_BACKWARD" not in found["ops"] if model == "first" else "RECV_FORWARD" in found["ops"] or number == 0
        )
        assert (found["units"][1] == 0) == forward_only and found["units"][0] > 0
    trains = 1 if model == "first" else 0
    deferring = ["WEIGHT_GRADIENTS" in rank[f"{model} {config}"]["ops"] for rank in ranks]
    if (
        CONFIGS[config].get("slices") != "auto" and config != "checkpointed"
    ):  # else it may have ended uncut, or is made by slice
        assert deferring == [number == trains for number in range(2)]


def test_a_model_of_which_nothing_is_trained_can_be_evaluated(ranks):
    for rank in ranks:
        said, loss = rank["nothing"]
        assert said.startswith("model: got no parameter that is trained, must have one on some stage, use ")
        assert loss == ranks[0]["nothing"][1] > 0


def test_a_tied_weight_is_trained_by_all_that_share_it_or_by_none(ranks):
    for rank in ranks:
        assert rank["tied"] == (
            'model: got the tied layer "tokens" trained on stage 1 and not on stage 0, must be the same on all stages that '
            "share it, use requires_grad_() alike"
        )

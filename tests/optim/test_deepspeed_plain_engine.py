"""FusedLamb on ``DeepSpeedEngine`` without a pipeline: fp32 and bf16, ZeRO 0, 1 and 2, with layers cut over 3 ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import ds_terapipe
from tests.optim import replay
from tests.optim.replay import BF16, FP16, FP32_SUM, SKIPPED, check_replay, lamb, poisoned, replayed, resumed, zero
from tests.pipeline.training import allow_fp16
from tests.spawn import launched, run_ranks

CLIP = {"gradient_clipping": 0.05}
SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {"config": CLIP},
    "fp32, two groups": {"grouped": True, "exclude": "bias_norm"},
    "fp32 zero1": {"config": {**CLIP, **zero(1)}},
    "fp32 zero1, two groups": {"grouped": True, "config": zero(1), "exclude": "bias_norm"},
    "fp32 zero2": {"config": {**CLIP, **zero(2)}},
    "bf16": {"config": BF16},
    "bf16 zero1": {"config": {**CLIP, **BF16, **zero(1)}},
    "bf16 zero1, fp32 sum": {"config": {**CLIP, **BF16, **zero(1), **FP32_SUM}, "grouped": True},
    "bf16 zero2": {"config": {**BF16, **zero(2)}, "grouped": True},
    "fp16": {"config": {**CLIP, "fp16": {"enabled": True, "loss_scale": 128}}},
    "fp16, dynamic scale": {"grouped": True, "config": FP16},
    "fp16 zero1": {"config": {**CLIP, **FP16, **zero(1)}},
}
ELASTIC = {"config": zero(1, elastic_checkpoint=True)}
RESUMED = ["fp32", "fp16, dynamic scale", "fp32 zero1, two groups", "fp32 zero1, elastic", "bf16", "bf16 zero2"]


class Net(nn.Module):
    """Two layers that are trained, one that is frozen, a parameter that is never used; sizes that do not divide by ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.frozen, self.last = nn.Linear(13, 31), nn.Linear(31, 17), nn.Linear(17, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.to(self.first.weight.dtype)))
        return nn.functional.mse_loss(self.last(torch.relu(self.frozen(hidden))).float(), y)


def engine(config: dict[str, Any] | None = None, grouped: bool = False, **params: Any) -> Any:
    model, batch = Net(), {"train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "gradient_clipping": 0.0}
    groups = replay.decayed_and_not(model.named_parameters()) if grouped else None
    settings = {**batch, "optimizer": lamb(**params), **(config or {})}
    return ds_terapipe.initialize(model=model, config=settings, model_parameters=groups)[0]


def train(built: Any, step: int) -> None:
    random = torch.Generator().manual_seed(10 * step + built.global_rank)
    x, y = torch.randn(2, 13, generator=random), torch.randn(2, 5, generator=random)
    built.backward(built(x.to(built.device), y.to(built.device)))
    built.step()


def is_fresh(built: Any) -> bool:
    """Whether nothing has happened yet: no step counted, no moment, the weights those that the model was made with."""
    tensors, steps, _ = replay.state(built)
    initial, high = dict(Net().named_parameters()), replay.masters(built)
    now = {name: p.detach().cpu() for name, p in built.module.named_parameters()}
    weights = [torch.equal(p, initial[n].to(p.dtype)) and torch.equal(high[n], p.float()) for n, p in now.items()]
    return not any(steps) and not any(bool(moment.any()) for moment in tensors[: 2 * len(steps)]) and all(weights)


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    if get_accelerator().device_name() == "cpu":
        allow_fp16()
    found: dict[str, Any] = {"fresh": {}, "replay": {}, "nan": {}, "resumed": {}}
    for name, setup in SETUPS.items():
        built = engine(**setup)
        found["fresh"][name] = is_fresh(built)
        found["replay"][name] = replayed(built, train, **{k: v for k, v in setup.items() if k != "config"})
        found["nan"][name] = poisoned(built, train, built.module.last.bias if rank == world_size - 1 else None)
        built.destroy()
    for name in RESUMED:
        build = partial(engine, **SETUPS.get(name, ELASTIC))
        found["resumed"][name] = resumed(build, train, f"{folder}/{name.replace(' ', '-')}")
    return found


ranks = launched(worker, 3, timeout=400, folder=True)


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_one_unsharded_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        check_replay(rank["replay"][name], clipped="gradient_clipping" in SETUPS[name].get("config", {}))
        assert "zero" not in name or rank["replay"][name]["cut"] >= 1, "no layer is cut: the test does not test"


@pytest.mark.parametrize("name", SETUPS)
def test_building_the_engine_changes_nothing_and_a_nan_on_one_rank_skips_everywhere(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """``FP16_UnfusedOptimizer``, which fp16 and bf16 have without ZeRO, makes a step with zero gradients."""
    assert [(rank["fresh"][name], rank["nan"][name]) for rank in ranks] == [(True, SKIPPED)] * 3


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["resumed"][name] for rank in ranks] == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    """All of it on one rank, with fp16 as DeepSpeed allows it there."""
    (found,) = run_ranks(worker, 1, str(tmp_path), timeout=280, env={"DS_ACCELERATOR": "cuda"})
    assert set(found["fresh"].values()) == set(found["resumed"].values()) == {True}
    assert set(found["nan"].values()) == {SKIPPED}
    for name, errors in found["replay"].items():
        check_replay(errors, clipped="gradient_clipping" in SETUPS[name].get("config", {}))

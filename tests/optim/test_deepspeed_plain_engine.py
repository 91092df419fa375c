"""FusedLamb on ``DeepSpeedEngine`` without a pipeline: fp32 and bf16, ZeRO 0, 1 and 2, with layers cut over 3 and 2 ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import ds_terapipe
from tests.mutants.claims import holds
from tests.optim.replay import decayed_and_not, lamb, masters, off_by, replay, same, state
from tests.pipeline.test_engine_fp16 import allow_fp16
from tests.spawn import launched, run_ranks

CLOSE = 1e-6  # rounding of fp32, as in test_deepspeed_pipeline.py
CLIP = 0.05
BF16 = {"bf16": {"enabled": True}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {"clip": CLIP},
    "fp32, two groups": {"grouped": True, "params": {"exclude": "bias_norm"}},
    "fp32 zero1": {"clip": CLIP, "config": zero(1)},
    "fp32 zero1, two groups": {"grouped": True, "config": zero(1), "params": {"exclude": "bias_norm"}},
    "fp32 zero2": {"clip": CLIP, "config": zero(2)},
    "bf16": {"config": BF16},
    "bf16 zero1": {"clip": CLIP, "config": {**BF16, **zero(1)}},
    "bf16 zero1, fp32 sum": {"clip": CLIP, "config": {**BF16, **zero(1), **FP32_SUM}, "grouped": True},
    "bf16 zero2": {"config": {**BF16, **zero(2)}, "grouped": True},
    "fp16": {"clip": CLIP, "config": {"fp16": {"enabled": True, "loss_scale": 128}}},
    "fp16, dynamic scale": {"grouped": True, "config": {"fp16": {"enabled": True, "initial_scale_power": 6}}},
    "fp16 zero1": {"clip": CLIP, "config": {"fp16": {"enabled": True, "initial_scale_power": 6}, **zero(1)}},
}
RESUMED = ["fp32", "fp16, dynamic scale", "fp32 zero1, two groups", "fp32 zero1, elastic", "bf16", "bf16 zero2"]
ALSO = {"fp32 zero1, elastic": {"config": zero(1, elastic_checkpoint=True)}}


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


def engine(
    clip: float = 0.0,
    config: dict[str, Any] | None = None,
    grouped: bool = False,
    params: dict[str, Any] | None = None,
) -> Any:
    model = Net()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "steps_per_print": None,
        "optimizer": lamb(**(params or {})),
        **(config or {}),
    }
    groups = decayed_and_not(model.named_parameters()) if grouped else None
    built, *_ = ds_terapipe.initialize(model=model, config=settings, model_parameters=groups)
    return built


def train(built: Any, step: int) -> None:
    random = torch.Generator().manual_seed(10 * step + built.global_rank)
    x, y = torch.randn(2, 13, generator=random), torch.randn(2, 5, generator=random)
    built.backward(built(x.to(built.device), y.to(built.device)))
    built.step()


def is_fresh(built: Any) -> bool:
    """Whether nothing has happened yet: no step counted, no moment, the weights those that the model was made with."""
    tensors, steps, _ = state(built)
    initial = dict(Net().named_parameters())
    masters_are = masters(built)
    now = {name: p.detach().cpu() for name, p in built.module.named_parameters()}
    weights = [torch.equal(p, initial[name].to(p.dtype)) for name, p in now.items()]
    weights += [torch.equal(masters_are[name], p.float()) for name, p in now.items()]
    moments = tensors[: 2 * len(steps)]
    return not any(steps) and not any(bool(moment.any()) for moment in moments) and all(weights)


def poisoned(built: Any, rank: int) -> tuple[bool, int, bool]:
    """A step in which the last rank alone has a nan, then a good one."""
    before, skipped = state(built), built.skipped_steps
    hook = built.module.last.bias.register_hook(lambda g: g * float("nan")) if rank == built.world_size - 1 else None
    train(built, 0)
    if hook is not None:
        hook.remove()
    kept, counted = same(before, state(built)), built.skipped_steps - skipped
    train(built, 1)
    return kept, counted, all(bool(torch.isfinite(p).all()) for p in built.module.parameters())


def resumed(setup: dict[str, Any], folder: str) -> bool:
    first = engine(**setup)
    train(first, 0)
    train(first, 1)
    first.save_checkpoint(folder, tag="two")
    train(first, 2)
    second = engine(**setup)
    second.load_checkpoint(folder, tag="two")
    train(second, 2)
    equal = same(state(first), state(second)) and second.global_steps == 3
    first.destroy()
    second.destroy()
    return equal


def replayed(built: Any, setup: dict[str, Any]) -> dict[str, float]:
    return replay(built, partial(train, built), 3, grouped=setup.get("grouped", False), **setup.get("params", {}))


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    if get_accelerator().device_name() == "cpu":
        allow_fp16()
    found: dict[str, Any] = {"fresh": {}, "replay": {}, "nan": {}, "resumed": {}}
    for name, setup in SETUPS.items():
        built = engine(**setup)
        found["fresh"][name] = is_fresh(built)
        errors = replayed(built, setup)
        cut = sum(
            1
            for p in built.module.parameters()
            if getattr(p, "_hp_mapping", None) is not None and p._hp_mapping.hp_fragment_address.numel < p.numel()
        )
        found["replay"][name] = {**errors, "cut": cut}
        found["nan"][name] = poisoned(built, rank)
        built.destroy()
    for name in RESUMED:
        setup = {**SETUPS, **ALSO}[name]
        found["resumed"][name] = resumed(setup, f"{folder}/{name.replace(' ', '-')}")
    return found


ranks = launched(worker, 3, timeout=400, folder=True)


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_one_unsharded_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        errors = rank["replay"][name]
        assert errors["parameters"] <= CLOSE and errors["ratios"] <= CLOSE, errors
        assert errors["unequal"] == 0, "ratios differ between ranks"
        assert errors["unlike"] == 0, "gradients or weights differ between the ranks that hold them"
        assert errors["frozen"] == 0, "a frozen parameter moved"
        assert errors["moved"] > 1e-4
        assert errors["norm"] <= 10 * CLOSE  # DeepSpeed adds the squares up in fp32
        assert bool(errors["clipped"]) == ("clip" in SETUPS[name])
        if "zero" in name:
            assert errors["cut"] >= 1, "no layer is cut: the test does not test"


@pytest.mark.parametrize("name", SETUPS)
def test_building_the_engine_changes_and_counts_nothing(ranks: list[dict[str, Any]], name: str) -> None:
    """``FP16_UnfusedOptimizer``, which fp16 and bf16 have without ZeRO, makes a step with zero gradients."""
    assert [rank["fresh"][name] for rank in ranks] == [True] * 3


@pytest.mark.parametrize("name", SETUPS)
def test_a_nan_on_one_rank_skips_everywhere(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["nan"][name] for rank in ranks] == [(True, 1, True)] * 3


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["resumed"][name] for rank in ranks] == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    """All of it on one rank, with fp16 as DeepSpeed allows it there."""
    (found,) = run_ranks(worker, 1, str(tmp_path), timeout=280, env={"DS_ACCELERATOR": "cuda"})
    assert set(found["fresh"].values()) == {True} and set(found["resumed"].values()) == {True}
    for name, errors in found["replay"].items():
        assert errors["parameters"] <= CLOSE and errors["ratios"] <= CLOSE and errors["norm"] <= 10 * CLOSE, (
            name,
            errors,
        )
        assert found["nan"][name] == (True, 1, True), name


# ------------------------------------------------------------------------------------------------------ under a mutant


def replays(rank: int, world_size: int, names: Sequence[str]) -> list[dict[str, float]]:
    found = []
    for name in names:
        built = engine(**SETUPS[name])
        found.append(replayed(built, SETUPS[name]))
        built.destroy()
    return found


def steps_off_by(mutant: str | None, *names: str) -> float:
    """The largest error of these setups' steps under a mutant, in tolerances; for ``tests.mutants``."""
    return max(off_by(found, CLOSE) for found in run_ranks(replays, 3, names, timeout=240, mutant=mutant))


def skips_and_goes_on(rank: int, world_size: int, names: Sequence[str], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"nan": {}, "resumed": {}}
    for number, name in enumerate(names):
        built = engine(**SETUPS[name])
        train(built, 0)
        found["nan"][name] = poisoned(built, rank)
        built.destroy()
        found["resumed"][name] = resumed(SETUPS[name], f"{folder}/{number}")
    return found


def no_step_is_lost(mutant: str | None, *names: str) -> bool:
    """Whether these setups skip a step together, and go on from checkpoints, under a mutant; for ``tests.mutants``."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(skips_and_goes_on, 3, names, folder, timeout=240, mutant=mutant)
    claims = (test_a_nan_on_one_rank_skips_everywhere, test_training_goes_on_bit_for_bit)
    return all(holds(claim, found, name) for claim in claims for name in names)

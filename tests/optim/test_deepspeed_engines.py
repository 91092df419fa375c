"""``"optimizer": {"type": "FusedLamb"}`` in engines: pipelines with tied weights, plain ones, tensor-parallel GPTs of Megatron.

Each is replayed: its gradients are the engine's own, so that attention key biases, whose true gradient is zero and which LAMB
turns from rounding noise into whole steps, are compared like all other parameters.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

import ds_terapipe
from ds_terapipe.errors import ConfigError
from tests.optim.replay import (
    CLOSE,
    SKIPPED,
    check_replay,
    decayed_and_not,
    lamb,
    masters,
    poisoned,
    replayed,
    resumed,
    state,
)
from tests.pipeline.models import SEED, masked_loss, steps_of, tied_gpt
from tests.pipeline.training import allow_fp16, mine
from tests.spawn import launched, run_ranks

# Without ZeRO DeepSpeed accumulates bf16 gradients in bf16 and rounds them again as it clips them, by 2^-9 of each: so much do
# ratios differ, and parameters, which move by lr times as much; twice that, as the steps add up.
CLIPPED_IN_BF16 = (0.02 * 2.0**-8, 2.0**-8)
Config = dict[str, Any]
CLIP, CLIP_LOW = {"gradient_clipping": 0.3}, {"gradient_clipping": 0.05}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 6}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
ZERO1, ZERO2 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2))
ELASTIC = {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}
SLICES = {"token_pipeline": {"slices": [7, 2, 9, 1, 5]}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.02, "warmup_num_steps": 100}}


class Setup(NamedTuple):
    """Keys of the configuration, and how an engine is made and trained.

    Attributes:
        grouped: whether biases and norms are a parameter group without decay.
        resumes: whether it goes on from a checkpoint too.
        limits: how far parameters and ratios may be off.
    """

    config: Config
    stages: int = 2
    grouped: bool = False
    params: Config = {}
    resumes: bool = False
    limits: tuple[float, float] = (CLOSE, CLOSE)


PIPELINES = {
    "fp32": Setup(CLIP, resumes=True),
    "fp32, slices": Setup({**CLIP, **SLICES}, params={"mode": "deepspeed"}),
    "fp32, four stages": Setup({}, 4, params={"max_grad_norm": 0.3}),
    "fp32 zero1": Setup({**CLIP, **ZERO1}),
    "fp32 zero1, two groups": Setup({"gradient_clipping": 0.0, **ZERO1}, grouped=True, resumes=True),
    "bf16": Setup({"gradient_clipping": 0.0, **BF16}, resumes=True),
    "bf16, four stages": Setup({**CLIP, **BF16}, 4, limits=CLIPPED_IN_BF16),
    "bf16 zero1": Setup({**CLIP, **BF16, **ZERO1}, resumes=True),
    "fp16, slices": Setup({**CLIP, **FP16, **SLICES}),
    "bf16 zero1, fp32 sum, slices": Setup({"gradient_clipping": 0.0, **BF16, **ZERO1, **FP32_SUM, **SLICES}),
}
PLAIN = {
    "fp32": Setup(CLIP_LOW, resumes=True),
    "fp32, two groups": Setup({}, grouped=True, params={"exclude": "bias_norm"}),
    "fp32 zero1": Setup({**CLIP_LOW, **ZERO1}),
    "fp32 zero1, two groups": Setup(ZERO1, grouped=True, params={"exclude": "bias_norm"}, resumes=True),
    "fp32 zero1, elastic": Setup(ELASTIC, resumes=True),
    "fp32 zero2": Setup({**CLIP_LOW, **ZERO2}),
    "bf16": Setup(BF16, resumes=True),
    "bf16 zero1": Setup({**CLIP_LOW, **BF16, **ZERO1}),
    "bf16 zero1, fp32 sum": Setup({**CLIP_LOW, **BF16, **ZERO1, **FP32_SUM}, grouped=True),
    "bf16 zero2": Setup({**BF16, **ZERO2}, grouped=True, resumes=True),
    "fp16": Setup({**CLIP_LOW, "fp16": {"enabled": True, "loss_scale": 128}}),
    "fp16, dynamic scale": Setup(FP16, grouped=True, resumes=True),
    "fp16 zero1": Setup({**CLIP_LOW, **FP16, **ZERO1}),
}
TENSOR_PARALLEL = {
    "fp32, two stages": Setup(CLIP),
    "fp32 zero1": Setup({**CLIP, **ZERO1}, 1),
    "fp32, two stages, slices": Setup({**CLIP, "token_pipeline": {"slices": 4}}),
    "bf16, two stages": Setup({**CLIP, **BF16, **ZERO1, **FP32_SUM}),
    "bf16 zero1": Setup({**CLIP, **BF16, **ZERO1}, 1),
}


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


def initialized(model: nn.Module, setup: Setup, **config: Any) -> Any:
    """DeepSpeed's engine, or ours with ``token_pipeline``."""
    settings = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "optimizer": lamb(**setup.params), **config, **setup.config
    }  # fmt: skip
    groups = decayed_and_not(model.named_parameters()) if setup.grouped else None
    engine, *_ = ds_terapipe.initialize(model=model, config=settings, model_parameters=groups)
    assert engine.optimizer_name() == "FusedLamb" and type(engine.basic_optimizer).__name__ == "FusedLamb"
    return engine


def pipeline(setup: Setup) -> Any:
    cut = {"num_stages": setup.stages, "partition_method": "uniform", "seed_layers": True, "base_seed": SEED}
    model = PipelineModule(tied_gpt(2), loss_fn=masked_loss, **cut)
    return initialized(model, setup, gradient_accumulation_steps=setup.stages // 2, scheduler=WARMUP)


def plain(setup: Setup) -> Any:
    return initialized(Net(), setup, **({} if "gradient_clipping" in setup.config else {"gradient_clipping": 0.0}))


def tensor_parallel(setup: Setup) -> Any:
    from tests.megatron.common import Model, batches, build, deepspeed_config

    model = Model(dtype=torch.bfloat16 if "bf16" in setup.config else torch.float32)
    module = build(model, tensor=2, stages=setup.stages)
    engine = initialized(module, setup, **deepspeed_config(model, module.topology().get_dim("data"), optimizer=lamb()))
    engine.batches = batches(engine.grid.data_parallel_id, engine.dp_world_size)
    return engine


def train(engine: Any, step: int) -> None:
    if hasattr(engine, "batches"):
        engine.train_batch(engine.batches)
    elif isinstance(engine.module, PipelineModule):
        engine.train_batch(iter(mine(engine, steps_of(step + 1, 2)[step])))
    else:
        random = torch.Generator().manual_seed(10 * step + engine.global_rank)
        x, y = torch.randn(2, 13, generator=random), torch.randn(2, 5, generator=random)
        engine.backward(engine(x.to(engine.device), y.to(engine.device)))
        engine.step()


def victim(engine: Any, rank: int, setup: Setup) -> Any:
    """A parameter of the last rank alone; of four stages the last has but the tied weight. None on the others."""
    if rank != (1 if setup.stages == 4 else engine.world_size - 1):
        return None
    split = [p for p in engine.module.parameters() if getattr(p, "tensor_model_parallel", False)]
    return split[0] if split else [p for p in engine.module.parameters() if p.dim() == 1][-1]


def is_fresh(engine: Any) -> bool:
    """Whether nothing has happened yet: no step counted, no moment, the weights those that the model was made with."""
    tensors, steps, _ = state(engine)
    initial, high = dict(Net().named_parameters()), masters(engine)
    now = {name: p.detach().cpu() for name, p in engine.module.named_parameters()}
    weights = [torch.equal(p, initial[n].to(p.dtype)) and torch.equal(high[n], p.float()) for n, p in now.items()]
    return not any(steps) and not any(bool(moment.any()) for moment in tensors[: 2 * len(steps)]) and all(weights)


def worker(rank: int, world_size: int, build: Any, setups: dict[str, Setup], folder: str) -> dict[str, Any]:
    if get_accelerator().device_name() == "cpu":
        allow_fp16()
    found: dict[str, Any] = {}
    for number, (name, setup) in enumerate(setups.items()):
        engine = build(setup)
        fresh = build is not plain or is_fresh(engine)
        params = {key: value for key, value in setup.params.items() if key != "max_grad_norm"}
        errors = replayed(engine, train, setup.grouped, **params)
        skipped = poisoned(engine, train, victim(engine, rank, setup))
        engine.destroy()
        goes_on = not setup.resumes or resumed(partial(build, setup), train, f"{folder}/{number}")
        found[name] = errors, fresh, skipped, goes_on
        if build is tensor_parallel:
            from ds_terapipe.megatron.parallel import destroy_parallel

            destroy_parallel()
    if build is pipeline:
        try:
            build(Setup(ZERO1, 4, grouped=True))
        except ConfigError as error:
            found["refused"] = str(error)
    return found


Ranks = list[dict[str, Any]]
pipelines = launched(worker, 4, pipeline, PIPELINES, timeout=400, folder=True)
replicas = launched(worker, 3, plain, PLAIN, timeout=400, folder=True)
parallel = launched(worker, 4, tensor_parallel, TENSOR_PARALLEL, timeout=400, folder=True)


def check(ranks: Ranks, name: str, setup: Setup) -> None:
    """Steps are those of one unsharded optimizer; building the engine does nothing; a nan on one rank skips everywhere.

    Training goes on from a checkpoint bit for bit.
    """
    for rank in ranks:
        errors, fresh, skipped, goes_on = rank[name]
        clipped = bool(setup.config.get("gradient_clipping") or setup.params.get("max_grad_norm"))
        check_replay(errors, clipped, *setup.limits)
        assert fresh and skipped == SKIPPED and goes_on


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(pipelines: Ranks, name: str) -> None:
    check(pipelines, name, PIPELINES[name])


@pytest.mark.parametrize("name", PLAIN)
def test_plain_engines(replicas: Ranks, name: str) -> None:
    """``FP16_UnfusedOptimizer``, which fp16 and bf16 have without ZeRO, makes a step with zero gradients when it is built."""
    check(replicas, name, PLAIN[name])
    cut = [rank[name][0]["cut"] for rank in replicas]
    assert "zero_optimization" not in PLAIN[name].config or min(cut) >= 1, "no layer is cut: the test does not test"


@pytest.mark.skipif(find_spec("megatron") is None, reason="extra megatron")
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallel_engines(parallel: Ranks, name: str) -> None:
    check(parallel, name, TENSOR_PARALLEL[name])


def test_stages_with_different_groups_are_refused_under_zero(pipelines: Ranks) -> None:
    """Of four stages the last has the tied weight alone, and so no group of biases and norms."""
    for rank in pipelines:
        assert rank["refused"].startswith("zero_optimization.stage: got parameter groups whose number differs")
        assert "(1 to 2, empty ones not counted)" in rank["refused"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    """All plain engines on one rank, with fp16 as DeepSpeed allows it there."""
    ranks = run_ranks(worker, 1, plain, PLAIN, str(tmp_path), timeout=280, env={"DS_ACCELERATOR": "cuda"})
    for name, setup in PLAIN.items():
        check(ranks, name, setup)

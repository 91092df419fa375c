"""``"optimizer": {"type": "FusedLamb"}`` in engines: pipelines with tied weights, and plain ones.

Each is replayed: its own gradients are put together from all ranks and given to one unsharded FusedLamb, and both must make
the same steps. What differs is then the optimizer alone: attention key biases, whose true gradient is zero and which LAMB turns
from rounding noise into whole steps, are compared like all other parameters.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

import ds_terapipe
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.op import backends
from tests.megatron.common import of_all_ranks, whole_tensors
from tests.optim.tables import same
from tests.optim.test_lamb_device_led import led
from tests.pipeline.models import SEED, masked_loss, steps_of, tied_gpt
from tests.pipeline.training import allow_fp16, mine, raised
from tests.spawn import launched, run_ranks

LAMB: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.8, 0.95]}
# Each step rounds to fp32 once more: 3 steps of 6e-8, and the ratio's own rounding of 1e-7 times lr.
CLOSE = 1e-6
Config = dict[str, Any]
CLIP, CLIP_LOW = {"gradient_clipping": 0.3}, {"gradient_clipping": 0.05}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 6}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
ZERO1, ZERO2 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2))
SLICES = {"token_pipeline": {"slices": [7, 2, 9, 1, 5]}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.02, "warmup_num_steps": 100}}


class Setup(NamedTuple):
    """Keys of the configuration, and how an engine is made and trained."""

    config: Config
    stages: int = 2
    grouped: bool = False  # whether biases and norms are a parameter group without decay
    params: Config = {}
    resumes: bool = False  # whether it goes on from a checkpoint too


# that they train as one process does, slices, precisions and tensor-parallel layouts with LAMB among them, the rows prove
PIPELINES = {
    "fp32, four stages, slices": Setup({**SLICES}, 4, params={"max_grad_norm": 0.3, "mode": "deepspeed"}),
    "fp32 zero1, two groups": Setup({**CLIP, **ZERO1}, grouped=True, resumes=True),
    "bf16 zero1": Setup({**CLIP, **BF16, **ZERO1}, resumes=True), "fp16, slices": Setup({**CLIP, **FP16, **SLICES}),
}  # fmt: skip
PLAIN = {
    "fp32": Setup(CLIP_LOW, grouped=True, params={"exclude": "bias_norm"}, resumes=True),
    "fp32 zero1, two groups": Setup(ZERO1, grouped=True, params={"split_qkv": True}, resumes=True),
    "fp32 zero2": Setup({**CLIP_LOW, **ZERO2}, params={"exclude": "bias_norm"}), "bf16": Setup(BF16, resumes=True),
    "fp16 zero1": Setup({**CLIP_LOW, **FP16, **ZERO1}, params={"backend": "cuda"}),  # which counts the steps
    "bf16 zero1": Setup({**CLIP_LOW, **BF16, **ZERO1}, params={"backend": "plain"}),
    "bf16 zero1, fp32 sum": Setup({**CLIP_LOW, **BF16, **ZERO1, **FP32_SUM}, grouped=True),
    "bf16 zero2": Setup({**BF16, **ZERO2}, grouped=True, resumes=True),
    "fp16": Setup({**CLIP_LOW, **FP16}, grouped=True, params={"split_qkv": True}, resumes=True),
}  # fmt: skip


class Net(nn.Module):
    """Two layers that are trained, one that is frozen, a parameter that is never used; sizes that do not divide by ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.frozen, self.last = nn.Linear(13, 31), nn.Linear(31, 17), nn.Linear(17, 5)
        self.frozen.requires_grad_(False)
        self.first.weight.lamb_rows = (20, 10, 1)  # type: ignore[assignment]  # for split_qkv
        self.unused = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.to(self.first.weight.dtype)))
        return nn.functional.mse_loss(self.last(torch.relu(self.frozen(hidden))).float(), y)


def decayed_and_not(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, and biases and norms without decay."""
    found = [p for _, p in parameters]
    rest = {"params": [p for p in found if p.dim() <= 1], "weight_decay": 0.0}
    return [{"params": [p for p in found if p.dim() > 1]}, rest]


def initialized(model: nn.Module, setup: Setup, **config: Any) -> Any:
    """DeepSpeed's engine, or ours with ``token_pipeline``."""
    settings = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None,
        "optimizer": {"type": "FusedLamb", "params": {**LAMB, **setup.params}}, **config, **setup.config,
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


def train(engine: Any, step: int) -> None:
    if isinstance(engine.module, PipelineModule):
        engine.train_batch(iter(mine(engine, steps_of(step + 1, 2)[step])))
    else:
        random = torch.Generator().manual_seed(10 * step + engine.global_rank)
        x, y = torch.randn(2, 13, generator=random), torch.randn(2, 5, generator=random)
        engine.backward(engine(x.to(engine.device), y.to(engine.device)))
        engine.step()


def of_masters(engine: Any) -> Callable[[Any], Tensor]:
    """Takes the fp32 weight that the optimizer updates, of a parameter. Collective over replicas."""
    wrapper, clones = engine.optimizer, {}
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            clones.update({id(p): master for p, master in zip(low, high, strict=True)})
    return lambda p: (p.get_full_hp_param() if hasattr(p, "_hp_mapping") else clones.get(id(p), p)).float()


def of_gradients(engine: Any) -> Callable[[Any], Tensor | None]:
    """Takes the gradient that the wrapper is about to clip and use, unscaled, of a parameter. Collective over replicas."""
    wrapper, scale = engine.optimizer, float(getattr(engine.optimizer, "loss_scale", 1.0))

    def of(p: Any) -> Tensor | None:
        if isinstance(wrapper, BF16_Optimizer):
            # what no backward pass came to is zero in its flat buffer
            gradient = getattr(p, "_hp_grad", torch.zeros_like(p)) if p.requires_grad else None
        elif isinstance(wrapper, DeepSpeedZeroOptimizer):
            gradient = safe_get_full_grad(p) if p.requires_grad else None
        else:
            gradient = p.grad
        return None if gradient is None else gradient.float().reshape(p.shape) / scale

    return of


def whole(engine: Any, of: Callable[[Any], Tensor | None], unlike: set[str]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value).float() for name, value in whole_tensors(engine.module, of, unlike).items()}


def replayed(engine: Any, setup: Setup) -> tuple[list[str], int]:
    """Compare three steps with FusedLamb in PyTorch on the same gradients; return differences, and how many layers are cut."""
    take_step, clip = engine._take_model_step, engine.gradient_clipping()
    found: dict[str, Tensor] = {}
    unlike: set[str] = set()

    def observed(*args: Any, **kwargs: Any) -> None:
        found.update(whole(engine, of_gradients(engine), unlike))
        take_step(*args, **kwargs)

    engine._take_model_step = observed
    start = whole(engine, of_masters(engine), unlike)
    trained = set().union(*of_all_ranks({name for name, p in engine.module.named_parameters() if p.requires_grad}))
    right = {name: nn.Parameter(value.clone()) for name, value in start.items() if name in trained}
    groups = decayed_and_not(right.items()) if setup.grouped else [{"params": [*right.values()]}]
    params = {key: value for key, value in setup.params.items() if key != "max_grad_norm"}
    reference = FusedLamb(groups, **{**LAMB, **params, "backend": "plain"})
    reference.set_names({p: name for name, p in right.items()})
    for name, p in engine.module.named_parameters():
        if hasattr(p, "lamb_rows"):
            right[name].lamb_rows = p.lamb_rows
    wrong, clipped = [], False
    for step in range(3):
        found.clear()
        for group in reference.param_groups:
            group["lr"] = engine.get_lr()[0]
        train(engine, step)
        norm = float(torch.stack([g.double().square().sum() for g in found.values()]).sum().sqrt())
        clipped |= norm > clip > 0
        for name, p in right.items():
            p.grad = found[name] * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) if name in found else None
        reference.step()
        expected = {layer.name: layer.trust_ratio for layer in reference.statistics()}
        seen = of_all_ranks({layer.name: layer.trust_ratio for layer in engine.basic_optimizer.statistics()})
        for name, value in whole(engine, of_masters(engine), unlike).items():
            new = right[name].detach() if name in right else start[name]
            error = float((value - new).abs().max() / new.abs().max())
            if not error <= (CLOSE if name in right else 0.0):
                wrong.append(f"step {step}: {name} is off by {error:.1e}")
        for name, ratio in expected.items():
            held = {ratios[name] for ratios in seen if name in ratios}
            if not (len(held) == 1 and abs(min(held) / ratio - 1) <= CLOSE):
                wrong.append(f"step {step}: {name} has the ratios {held}, not {ratio}")
        reported = float(engine.get_global_grad_norm()) if clip else norm
        if not abs(reported / norm - 1) <= 10 * CLOSE:  # DeepSpeed adds squares in fp32
            wrong.append(f"step {step}: the norm is {reported}, not {norm}")
    engine._take_model_step = take_step
    wrong += [f"{name} has not moved" for name, p in right.items() if (p.detach() - start[name]).abs().max() <= 1e-4]
    wrong += [f"copies of {name} differ" for name in unlike]
    wrong += [] if clipped == (clip > 0) else ["no step was clipped"]
    mapped = [(p, p._hp_mapping) for p in engine.module.parameters() if getattr(p, "_hp_mapping", None) is not None]
    return wrong, sum(mapping.hp_fragment_address.numel < p.numel() for p, mapping in mapped)


def state(engine: Any) -> list[Tensor]:
    """Bit for bit what a skipped step must not change, on this rank: weights, masters, moments, counts, rates."""
    saved = engine.basic_optimizer.state_dict()["state"]
    values = [saved[i][key] for i in sorted(saved) for key in sorted(saved[i])]
    held = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    each = [*values, *engine.module.parameters(), *held, *engine.get_lr()]
    return [torch.as_tensor(value).detach().clone() for value in each]


SKIPPED = (True, 1, True, 0)


def poisoned(engine: Any, rank: int, setup: Setup) -> tuple[bool, int, bool, int]:
    """A step in which a gradient is nan on one rank before replicas are averaged; then a good one.

    Returns :data:`SKIPPED` if the first changes nothing and is counted once, and the second is made with finite numbers.
    """
    before, skipped = state(engine), engine.skipped_steps
    last = 1 if setup.stages == 4 else engine.world_size - 1  # of four stages the last has but the tied weight
    vectors = [p for p in engine.module.parameters() if p.dim() == 1 and rank == last]
    hooks = [p.register_hook(lambda g: g * float("nan")) for p in vectors[-1:]]
    train(engine, 0)
    for hook in hooks:
        hook.remove()
    kept, counted = same(before, state(engine)), engine.skipped_steps - skipped
    train(engine, 1)
    moved = not same(before, state(engine)) and all(bool(torch.isfinite(p).all()) for p in engine.module.parameters())
    return kept, counted, moved, engine.skipped_steps - skipped - counted


def resumed(build: Callable[[], Any], folder: str) -> bool:
    """Two steps, a checkpoint, two more; and these two again from the checkpoint: bit for bit the same on this rank?"""
    first = build()
    for step in range(4):
        if step == 2:
            first.save_checkpoint(folder, tag="two")
        train(first, step)
    second = build()
    second.load_checkpoint(folder, tag="two")
    for step in (2, 3):
        train(second, step)
    equal = same(state(first), state(second)) and second.global_steps == 4
    first.destroy()
    second.destroy()
    return equal


def worker(rank: int, world_size: int, build: Any, setups: dict[str, Setup], folder: str) -> dict[str, Any]:
    if get_accelerator().device_name() == "cpu":
        allow_fp16()
    found: dict[str, Any] = {}
    backends.pick = led
    for number, (name, setup) in enumerate(setups.items()):
        engine = build(setup)
        wrong, cut = replayed(engine, setup)
        skipped = poisoned(engine, rank, setup)
        engine.destroy()
        goes_on = not setup.resumes or resumed(partial(build, setup), f"{folder}/{number}")
        found[name] = wrong, cut, skipped, goes_on
    if build is pipeline:
        found["refused"] = raised(lambda: build(Setup(ZERO1, 4, grouped=True)))
    return found


Ranks = list[dict[str, Any]]
pipelines = launched(worker, 4, pipeline, PIPELINES, timeout=400, folder=True)
replicas = launched(worker, 3, plain, PLAIN, timeout=400, folder=True)


def check(ranks: Ranks, name: str) -> None:
    """Steps are those of one unsharded optimizer; a nan on one rank skips everywhere; a checkpoint goes on bit for bit."""
    for rank in ranks:
        wrong, _, skipped, goes_on = rank[name]
        assert not wrong and skipped == SKIPPED and goes_on


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(pipelines: Ranks, name: str) -> None:
    check(pipelines, name)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_engines(replicas: Ranks, name: str) -> None:
    check(replicas, name)
    cut = [rank[name][1] for rank in replicas]
    assert "zero_optimization" not in PLAIN[name].config or min(cut) >= 1, "no layer is cut: the test does not test"


def test_stages_with_different_groups_are_refused_under_zero(pipelines: Ranks) -> None:
    """Of four stages the last has the tied weight alone, and so no group of biases and norms."""
    for rank in pipelines:
        assert rank["refused"].startswith("ConfigError: zero_optimization.stage: got parameter groups whose number differs")
        assert "(1 to 2, empty ones not counted)" in rank["refused"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    """All plain engines on one rank, with fp16 as DeepSpeed allows it there."""
    ranks = run_ranks(worker, 1, plain, PLAIN, str(tmp_path), timeout=280, env={"DS_ACCELERATOR": "cuda"})
    for name in PLAIN:
        check(ranks, name)

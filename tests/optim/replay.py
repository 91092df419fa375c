"""An engine's own gradients, put together from all ranks and given to one unsharded FusedLamb: both must make the same steps.

What differs between a sharded and an unsharded run is then the optimizer alone, not the rounding of forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch import distributed as dist

from ds_terapipe.optim.lamb import FusedLamb

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.8, 0.95]}
Named = dict[str, Tensor]


def lamb(**params: Any) -> dict[str, Any]:
    """The block ``optimizer``."""
    return {"type": "FusedLamb", "params": {**SETTINGS, **params}}


def decayed_and_not(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, and biases and norms without decay."""
    found = list(parameters)
    matrices = [p for _, p in found if p.dim() > 1]
    rest = [p for _, p in found if p.dim() <= 1]
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]


def masters(engine: Any) -> Named:
    """The fp32 weights that the optimizer updates, of this rank's parameters. Collective over replicas."""
    wrapper, found = engine.optimizer, {}
    clones = {}
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            clones.update({id(p): master for p, master in zip(low, high, strict=True)})
    for name, p in engine.module.named_parameters():
        linked = hasattr(p, "_hp_mapping")
        value = p.get_full_hp_param() if linked else clones.get(id(p), p)
        found[name] = value.detach().float().cpu().clone()
    return found


def gradients(engine: Any) -> Named:
    """What the wrapper is about to clip and use, unscaled, of this rank's parameters. Collective over replicas."""
    found, scale = {}, float(getattr(engine.optimizer, "loss_scale", 1.0))
    for name, p in engine.module.named_parameters():
        if isinstance(engine.optimizer, BF16_Optimizer):
            # what no backward pass came to is zero in its flat buffer
            gradient = getattr(p, "_hp_grad", torch.zeros_like(p)) if p.requires_grad else None
        elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
            gradient = safe_get_full_grad(p) if p.requires_grad else None
        else:
            gradient = p.grad
        if gradient is not None:
            found[name] = (gradient.detach().float().reshape(p.shape) / scale).cpu()
    return found


def whole(engine: Any, values: Named, unlike: set[str]) -> Named:
    """One dict of all ranks, tensor-parallel parts put together. Collective.

    Names of tensors that are not the same bit by bit on the ranks that hold them are added to ``unlike``.
    """
    tensor = engine.grid.get_slice_parallel_world_size() if hasattr(engine, "grid") else 1
    cut = {
        name: (p.partition_dim, getattr(p, "partition_stride", 1))
        for name, p in engine.module.named_parameters()
        if tensor > 1 and getattr(p, "tensor_model_parallel", False)
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(n, cut.get(n), v.numpy()) for n, v in values.items()])
    parts: dict[str, dict[int, Tensor]] = {}
    cuts = {}
    for rank, mine in enumerate(everyone):
        for name, where, value in mine:
            place = rank % tensor if where is not None else 0
            tensor_value = torch.from_numpy(value)
            other = parts.setdefault(name, {}).setdefault(place, tensor_value)
            if not torch.equal(other, tensor_value):
                unlike.add(name)
            cuts[name] = where
    return {name: _joined([held[i] for i in sorted(held)], cuts[name]) for name, held in parts.items()}


def _joined(held: list[Tensor], where: tuple[int, int] | None) -> Tensor:
    if where is None:
        return held[0]
    dimension, stride = where
    chunks = [part.chunk(stride, dim=dimension) for part in held]
    return torch.cat([chunk[piece] for piece in range(stride) for chunk in chunks], dim=dimension)


def ratios(engine: Any) -> list[dict[str, float]]:
    """Trust ratios by name, of every rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = {layer.name: layer.trust_ratio for layer in engine.basic_optimizer.statistics()}
    dist.all_gather_object(everyone, mine)
    return everyone


class Reference:
    """One FusedLamb in PyTorch on whole fp32 parameters."""

    def __init__(self, start: Named, trained: set[str], clip: float, grouped: bool, **params: Any) -> None:
        self.clip = clip
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in start.items() if name in trained}
        groups = decayed_and_not(self.parameters.items()) if grouped else [{"params": [*self.parameters.values()]}]
        self.optimizer = FusedLamb(groups, **{**SETTINGS, **params}, backend="plain")
        self.optimizer.set_names({p: name for name, p in self.parameters.items()})

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, found: Named) -> float:
        """Clip and step; the norm before clipping, fp64."""
        norm = float(torch.stack([g.double().square().sum() for g in found.values()]).sum().sqrt())
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for name, p in self.parameters.items():
            p.grad = found[name] * factor if name in found else None
        self.optimizer.step()
        return norm


def replay(
    engine: Any, train_step: Callable[[int], Any], steps: int, grouped: bool = False, **params: Any
) -> dict[str, float]:
    """Train ``steps`` steps with the engine and with the reference on its gradients.

    Returns:
        Largest errors over all steps: of parameters and of ratios, relative to the largest element of the tensor, and of the
        reported gradient norm where there is clipping; how far the parameters moved; layers whose ratio is not the same on
        all ranks bit by bit, and how many tensors (gradients or weights) are not.
    """
    take_step = engine._take_model_step
    found: Named = {}
    unlike: set[str] = set()

    def observed(*args: Any, **kwargs: Any) -> None:
        found.update(whole(engine, gradients(engine), unlike))
        take_step(*args, **kwargs)

    engine._take_model_step = observed
    start = whole(engine, masters(engine), unlike)
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, trained)
    reference = Reference(start, set().union(*everyone), engine.gradient_clipping(), grouped, **params)
    worst = {"parameters": 0.0, "ratios": 0.0, "norm": 0.0, "unequal": 0.0, "frozen": 0.0}
    for step in range(steps):
        found.clear()
        reference.set_lr(engine.get_lr()[0])
        train_step(step)
        norm = reference.step(found)
        after = whole(engine, masters(engine), unlike)
        expected = {layer.name: layer.trust_ratio for layer in reference.optimizer.statistics()}
        seen = ratios(engine)
        for name, value in after.items():
            if name not in reference.parameters:
                worst["frozen"] = max(worst["frozen"], float((value - start[name]).abs().max()))
                continue
            right = reference.parameters[name].detach()
            worst["parameters"] = max(worst["parameters"], float((value - right).abs().max() / right.abs().max()))
            held = {mine[name] for mine in seen if name in mine}
            worst["unequal"] += len(held) != 1
            worst["ratios"] = max([worst["ratios"], *(abs(r - expected[name]) / expected[name] for r in held)])
        if reference.clip:
            worst["norm"] = max(worst["norm"], abs(float(engine.get_global_grad_norm()) - norm) / norm)
    del engine._take_model_step
    moved = [float((p.detach() - start[name]).abs().max()) for name, p in reference.parameters.items()]
    return {**worst, "moved": min(moved), "clipped": float(norm > reference.clip > 0), "unlike": float(len(unlike))}


def off_by(errors: Sequence[Mapping[str, float]], close: float) -> float:
    """The largest of some errors of :func:`replay`, in tolerances: ``close``, and ten of it for norms."""
    return max(max(each["parameters"], each["ratios"], each["norm"] / 10) for each in errors) / close


def state(engine: Any) -> list[Any]:
    """Bit for bit what a skipped step must not change, on this rank: weights, masters, moments, counts."""
    saved = engine.basic_optimizer.state_dict()["state"]
    used = [saved[i] for i in sorted(saved) if saved[i]]
    moments = [values[key] for values in used for key in ("exp_avg", "exp_avg_sq")]
    counts = [values["step"] for values in used]
    held = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    weights = [*engine.module.parameters(), *held]
    return [[t.detach().clone() for t in (*moments, *weights)], counts, engine.get_lr()]


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether two :func:`state` are equal bit by bit."""
    tensors = len(before[0]) == len(after[0]) and all(map(torch.equal, before[0], after[0]))
    return tensors and before[1:] == after[1:]

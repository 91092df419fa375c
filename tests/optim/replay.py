"""An engine's own gradients, put together from all ranks and given to one unsharded FusedLamb: both must make the same steps.

What differs between a sharded and an unsharded run is then the optimizer alone, not the rounding of forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
CLOSE = 1e-6
"""Each step rounds to fp32 once more: 3 steps of 6e-8, and the ratio's own rounding of 1e-7 times lr."""
Named = dict[str, Tensor]
Train = Callable[[Any, int], Any]
"""Trains an engine for the step of this number."""


def lamb(**params: Any) -> dict[str, Any]:
    """The block ``optimizer``."""
    return {"type": "FusedLamb", "params": {**SETTINGS, **params}}


def decayed_and_not(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, and biases and norms without decay."""
    found = [p for _, p in parameters]
    rest = {"params": [p for p in found if p.dim() <= 1], "weight_decay": 0.0}
    return [{"params": [p for p in found if p.dim() > 1]}, rest]


def masters(engine: Any) -> Named:
    """The fp32 weights that the optimizer updates, of this rank's parameters. Collective over replicas."""
    wrapper, clones = engine.optimizer, {}
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            clones.update({id(p): master for p, master in zip(low, high, strict=True)})
    return {
        name: (p.get_full_hp_param() if hasattr(p, "_hp_mapping") else clones.get(id(p), p))
        .detach()
        .float()
        .cpu()
        .clone()
        for name, p in engine.module.named_parameters()
    }


def gradients(engine: Any) -> Named:
    """The gradients that the wrapper is about to clip and use, unscaled, of this rank's parameters. Collective over replicas."""
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


def of_all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def whole(engine: Any, values: Named, unlike: set[str]) -> Named:
    """One dict of all ranks, tensor-parallel parts put together. Collective.

    Names of tensors that are not the same bit by bit on the ranks that hold them are added to ``unlike``.
    """
    tensor = engine.grid.get_slice_parallel_world_size() if hasattr(engine, "grid") else 1
    cuts = {
        name: (p.partition_dim, getattr(p, "partition_stride", 1))
        for name, p in engine.module.named_parameters()
        if tensor > 1 and getattr(p, "tensor_model_parallel", False)
    }
    parts: dict[str, dict[int, Tensor]] = {}
    for rank, (theirs, there) in enumerate(of_all_ranks(({n: v.numpy() for n, v in values.items()}, cuts))):
        cuts.update(there)
        for name, array in theirs.items():
            value, place = torch.from_numpy(array), rank % tensor if name in there else 0
            if not torch.equal(parts.setdefault(name, {}).setdefault(place, value), value):
                unlike.add(name)
    return {name: _joined([held[i] for i in sorted(held)], cuts.get(name)) for name, held in parts.items()}


def _joined(held: list[Tensor], where: tuple[int, int] | None) -> Tensor:
    if where is None:
        return held[0]
    dimension, stride = where
    chunks = [part.chunk(stride, dim=dimension) for part in held]
    return torch.cat([chunk[piece] for piece in range(stride) for chunk in chunks], dim=dimension)


def replayed(engine: Any, train: Train, grouped: bool = False, **params: Any) -> dict[str, float]:
    """Train three steps with the engine and with one FusedLamb in PyTorch on its gradients.

    Returns:
        Largest errors over all steps: of parameters and of ratios, relative to the largest element of the tensor, and of the
        reported gradient norm where there is clipping; how far the parameters moved; layers whose ratio is not the same on
        all ranks bit by bit, and how many tensors (gradients or weights) are not; layers that are cut.
    """
    take_step, clip = engine._take_model_step, engine.gradient_clipping()
    found: Named = {}
    unlike: set[str] = set()

    def observed(*args: Any, **kwargs: Any) -> None:
        found.update(whole(engine, gradients(engine), unlike))
        take_step(*args, **kwargs)

    engine._take_model_step = observed
    start = whole(engine, masters(engine), unlike)
    trained = set().union(*of_all_ranks({name for name, p in engine.module.named_parameters() if p.requires_grad}))
    right = {name: nn.Parameter(value.clone()) for name, value in start.items() if name in trained}
    groups = decayed_and_not(right.items()) if grouped else [{"params": [*right.values()]}]
    reference = FusedLamb(groups, **{**SETTINGS, **params}, backend="plain")
    reference.set_names({p: name for name, p in right.items()})
    worst = {"parameters": 0.0, "ratios": 0.0, "norm": 0.0, "unequal": 0.0, "frozen": 0.0}
    for step in range(3):
        found.clear()
        for group in reference.param_groups:
            group["lr"] = engine.get_lr()[0]
        train(engine, step)
        norm = float(torch.stack([g.double().square().sum() for g in found.values()]).sum().sqrt())
        for name, p in right.items():
            p.grad = found[name] * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) if name in found else None
        reference.step()
        expected = {layer.name: layer.trust_ratio for layer in reference.statistics()}
        mine = {layer.name: layer.trust_ratio for layer in engine.basic_optimizer.statistics()}
        seen = of_all_ranks(mine)
        for name, value in whole(engine, masters(engine), unlike).items():
            if name not in right:
                worst["frozen"] = max(worst["frozen"], float((value - start[name]).abs().max()))
                continue
            new = right[name].detach()
            worst["parameters"] = max(worst["parameters"], float((value - new).abs().max() / new.abs().max()))
            held = {ratios[name] for ratios in seen if name in ratios}
            worst["unequal"] += len(held) != 1
            worst["ratios"] = max([worst["ratios"], *(abs(r - expected[name]) / expected[name] for r in held)])
        if clip:
            worst["norm"] = max(worst["norm"], abs(float(engine.get_global_grad_norm()) - norm) / norm)
    del engine._take_model_step
    moved = min(float((p.detach() - start[name]).abs().max()) for name, p in right.items())
    maps = [(getattr(p, "_hp_mapping", None), p.numel()) for p in engine.module.parameters()]
    cut = sum(mapping is not None and mapping.hp_fragment_address.numel < size for mapping, size in maps)
    return {**worst, "moved": moved, "clipped": float(norm > clip > 0), "unlike": float(len(unlike)), "cut": float(cut)}


def check_replay(errors: dict[str, float], clipped: bool, parameters: float = CLOSE, ratios: float = CLOSE) -> None:
    """Steps are those of the unsharded optimizer, and ratios, gradients and weights alike on the ranks that hold them."""
    assert errors["parameters"] <= parameters and errors["ratios"] <= ratios, errors
    assert errors["unequal"] == errors["unlike"] == errors["frozen"] == 0 and errors["moved"] > 1e-4, errors
    assert errors["norm"] <= 10 * CLOSE and bool(errors["clipped"]) == clipped, errors  # DeepSpeed adds squares in fp32


def state(engine: Any) -> list[Any]:
    """Bit for bit what a skipped step must not change, on this rank: weights, masters, moments, counts."""
    saved = engine.basic_optimizer.state_dict()["state"]
    used = [saved[i] for i in sorted(saved) if saved[i]]
    held = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    tensors = [values[key] for values in used for key in ("exp_avg", "exp_avg_sq")] + [
        *engine.module.parameters(),
        *held,
    ]
    return [[t.detach().clone() for t in tensors], [values["step"] for values in used], engine.get_lr()]


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether two :func:`state` are equal bit by bit."""
    tensors = len(before[0]) == len(after[0]) and all(map(torch.equal, before[0], after[0]))
    return tensors and before[1:] == after[1:]


SKIPPED = (True, 1, True, 0)


def poisoned(engine: Any, train: Train, victim: nn.Parameter | None) -> tuple[bool, int, bool, int]:
    """A step in which a gradient of ``victim``, on its rank, is nan before replicas are averaged; then a good one.

    Returns :data:`SKIPPED` if the first changes nothing and is counted once, and the second is made with finite numbers.
    """
    before, skipped = state(engine), engine.skipped_steps
    hook = None if victim is None else victim.register_hook(lambda g: g * float("nan"))
    train(engine, 0)
    if hook is not None:
        hook.remove()
    kept, counted = same(before, state(engine)), engine.skipped_steps - skipped
    train(engine, 1)
    moved = not same(before, state(engine)) and all(bool(torch.isfinite(p).all()) for p in engine.module.parameters())
    return kept, counted, moved, engine.skipped_steps - skipped - counted


def resumed(build: Callable[[], Any], train: Train, folder: str) -> bool:
    """Two steps, a checkpoint, two more; and these two again from the checkpoint: bit for bit the same on this rank?"""
    first, second = build(), None
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

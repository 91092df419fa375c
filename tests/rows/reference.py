"""A row's training in one process, in plain PyTorch: no slices, no stages, no engine."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from tests.megatron import common
from tests.pipeline.models import Plain
from tests.rows.row import OURS, Row
from tests.rows.train import LOSSES, PLAIN, SCALE, Trained, data_of, document_numbers, falling, megatron_model, specs_of

CLASSES = {**dict.fromkeys(("bf16", "bf16 at once", "bf16 ZeRO-1"), torch.bfloat16), "fp16": torch.float16, "fp64": torch.float64}


def references(rank: int, world_size: int, row: Row) -> dict[str, Trained]:
    """The training in the row's own numbers, and where these have 16 bits in wide ones that start from the same weights."""
    own = CLASSES.get(row.precision, torch.float32)
    found = {"own": _train(row, own, own)}
    if row.is_narrow:  # FusedLamb takes no fp64
        found["exact"] = _train(row, torch.float32 if row.optimizer == "lamb" else torch.float64, own)
    return found


def _train(row: Row, dtype: torch.dtype, start: torch.dtype) -> Trained:
    model, loss_fn = _model_of(row)
    here = torch.device(get_accelerator().current_device_name())
    model.to(here).to(start).to(dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    masters = {name: nn.Parameter(p.detach().to(wide)) for name, p in model.named_parameters()}
    frozen_by_hand = ("0.", "1.") if row.freeze == "by hand" else ()
    optimizer = PLAIN[row.optimizer]([p for name, p in masters.items() if not name.startswith(frozen_by_hand)])
    scheduler, losses, first = falling(optimizer), list[float](), dict[str, Any]()
    for number, step in enumerate(data_of(row)):
        frozen = _prefixes(row, number)
        for master in masters.values():
            master.grad = None
        trained = {name: master for name, master in masters.items() if not name.startswith(frozen)}
        scale = SCALE * 2.0 ** max(0, number - 1) if dtype == torch.float16 else 1.0
        losses.append(_step(model, loss_fn, tree_map(lambda t: t.to(here), step), trained, scale, row.packed))
        if number == 0:
            first = {n: torch.zeros_like(m) if m.grad is None else m.grad.clone() for n, m in masters.items()}
        if row.clip:
            nn.utils.clip_grad_norm_([m for m in masters.values() if m.grad is not None], row.clip)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    assert len(set(losses)) == len(losses), losses  # it trains
    weights = {name: p.detach().cpu().double().numpy() for name, p in model.named_parameters()}
    return Trained(losses, {name: g.cpu().double().numpy() for name, g in first.items()}, weights)


def documents_apart(tokens: Tensor) -> AbstractContextManager[Any]:
    """Context manager in which causal attention has a mask of tokens by tokens that hides other documents."""
    attention, numbers = F.scaled_dot_product_attention, document_numbers(tokens)
    visible = (numbers[:, None, :, None] == numbers[:, None, None]).tril()

    def masked(*args: Any, is_causal: bool, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        assert is_causal and attn_mask is None
        return attention(*args, attn_mask=visible, **kwargs)

    return mock.patch.object(F, "scaled_dot_product_attention", masked)


def _step(model: Any, loss_fn: Any, step: list[Any], trained: dict[str, nn.Parameter], scale: float, packed: bool) -> float:
    """Add the gradients of a step's micro-batches to those of the masters; its loss."""
    total = 0.0
    for inputs, labels in step:
        with documents_apart(inputs[0]) if packed else nullcontext():
            loss = loss_fn(model(copy.deepcopy(inputs)), labels) / len(step)  # its layers may write into them
        (loss * scale).backward()
        total += loss.item()
        for name, parameter in model.named_parameters():
            if name in trained and parameter.grad is not None:
                gradient = parameter.grad.to(trained[name].dtype) / scale
                trained[name].grad = gradient if trained[name].grad is None else trained[name].grad + gradient
            parameter.grad = None
    return total


def _model_of(row: Row) -> tuple[nn.Module, Any]:
    if row.model in OURS:
        return Plain(specs_of(row)), LOSSES[row.loss]
    # what is built in fp64 has drawn other weights
    dtype = torch.float64 if row.precision == "fp64" else torch.float32
    pipeline = common.build(megatron_model(row._replace(recompute=0), dtype))
    return pipeline, pipeline.loss_fn


def _prefixes(row: Row, step: int) -> tuple[str, ...]:
    """Beginnings of the names of parameters that a step does not train."""
    tied = {"tied": "tied_modules.tokens.", "megatron": "tied_modules.embedding."}.get(row.model, "0.")
    return tuple(tied if entry == 0 else f"{entry}." for entry in range(row.frozen(step)))

"""The LAMB benchmark on a GPU: fp32 optimizers called directly, fp16 ones through DeepSpeed's engine.

A figure is the fastest of several groups of steps, the device waited for before and after each group: launches and what
a wrapper does on the host count, as they do in training. Each column has the device's memory for itself.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.benchmarks.lamb_shapes import MODELS, count
from tests.benchmarks.rounds import verdict
from tests.spawn import free_port

GROUPS, STEPS = 12, 5
STREAM_ELEMENTS = 2**28
STREAM_BYTES = 8  # a GPU writes without reading first
ADAMW_LIMIT, DEEPSPEED_REQUIRED = 1.15, 2.0
_SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
Step = Callable[[], None]


class Measured(NamedTuple):
    """Seconds per step of a column; None with the ``reason`` where it could not be run."""

    model: str
    column: str
    parameters: int
    seconds: float | None
    reason: str = ""


def _tensors(model: str, dtype: torch.dtype) -> list[Tensor]:
    """Parameters with gradients of the model's shapes."""
    tensors = [torch.empty(one.shape, dtype=dtype, device="cuda").normal_(0, 0.02) for one in MODELS[model]()]
    for tensor in tensors:
        tensor.requires_grad_()
        tensor.grad = torch.empty_like(tensor).normal_(0, 1e-3)
    return tensors


def _stream(model: str) -> Step:
    source, target = torch.ones(STREAM_ELEMENTS, device="cuda"), torch.empty(STREAM_ELEMENTS, device="cuda")
    return lambda: torch.mul(source, 1.000001, out=target) and None


def _adamw(model: str) -> Step:
    return torch.optim.AdamW(_tensors(model, torch.float32), **_SETTINGS, fused=True).step


def _fused_lamb(model: str, check_gradients: bool = True) -> Step:
    from ds_terapipe.optim.lamb import FusedLamb

    return FusedLamb(_tensors(model, torch.float32), **_SETTINGS, check_gradients=check_gradients).step


def _unchecked(model: str) -> Step:
    return _fused_lamb(model, check_gradients=False)


def _apex(model: str) -> Step:
    from apex.optimizers import FusedLAMB

    return FusedLAMB(_tensors(model, torch.float32), **_SETTINGS, max_grad_norm=0.0, use_nvlamb=True).step


class _Bare(nn.Module):
    """A module that is nothing but its parameters."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(tensor.detach()) for tensor in tensors])


def _through_engine(model: str, kind: str) -> Step:
    """One optimizer step of a DeepSpeed engine in fp16 with a dynamic loss scale, the gradients being there."""
    import deepspeed

    import ds_terapipe

    ds_terapipe.register()
    if not torch.distributed.is_initialized():
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"
        )
        deepspeed.init_distributed()
    module = _Bare(_tensors(model, torch.float16))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True},
        "optimizer": {"type": kind, "params": {**_SETTINGS, "betas": list(_SETTINGS["betas"])}},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    parameters = list(engine.module.parameters())
    gradients = [torch.empty_like(one).normal_(0, 1e-3) for one in parameters]

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # the wrapper drops them after a step
        engine.optimizer.step()

    return step


def _deepspeed_lamb(model: str) -> Step:
    return _through_engine(model, "Lamb")


def _fused_lamb_in_engine(model: str) -> Step:
    return _through_engine(model, "FusedLamb")


COLUMNS: dict[str, Callable[[str], Step]] = {
    "stream": _stream,
    "torch AdamW, fused": _adamw,
    "FusedLamb": _fused_lamb,
    "FusedLamb, check_gradients=False": _unchecked,
    "apex FusedLAMB": _apex,
    "DeepSpeed's FusedLamb, engine, fp16": _deepspeed_lamb,
    "FusedLamb, engine, fp16": _fused_lamb_in_engine,
    "torch AdamW, fused, again": _adamw,
}
BYTES = {"torch AdamW, fused": 28, "FusedLamb": 44, "FusedLamb, check_gradients=False": 40}


def _fastest(step: Step) -> float:
    best = float("inf")
    for group in range(GROUPS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        if group:  # the first one makes states and tables
            best = min(best, (time.perf_counter() - start) / STEPS)
    return best


def measure(models: Sequence[str], say: Callable[[str], None]) -> list[Measured]:
    """Every column on every model; one that cannot be run here is in the result with its reason."""
    found = []
    for model in models:
        parameters = count(MODELS[model]())
        for column, make in COLUMNS.items():
            if column.startswith("apex") and importlib.util.find_spec("apex") is None:
                found.append(Measured(model, column, parameters, None, "apex is not installed"))
                continue
            try:
                found.append(Measured(model, column, parameters, _fastest(make(model))))
            except Exception as error:  # whatever another project's op fails with is a line of the table
                found.append(Measured(model, column, parameters, None, str(error).strip().splitlines()[-1]))
            gc.collect()
            torch.cuda.empty_cache()
            say(f"{model}: {column}: {found[-1].seconds or found[-1].reason}")
    return found


def table(found: Sequence[Measured]) -> list[str]:
    """One line per column: milliseconds, bytes moved per second and their share of the stream's."""
    streams = {
        one.model: STREAM_BYTES * STREAM_ELEMENTS / one.seconds
        for one in found
        if one.column == "stream" and one.seconds
    }
    lines = [f"{'':56}{'ms':>9}{'GB/s':>8}{'of stream':>11}"]
    for one in found:
        title = f"{one.model}, {one.column}"
        if one.seconds is None:
            lines.append(f"{title:56}  not run: {one.reason}")
            continue
        moved = STREAM_BYTES * STREAM_ELEMENTS if one.column == "stream" else BYTES.get(one.column, 0) * one.parameters
        rate = moved / one.seconds
        share = f"{rate / 1e9:8.0f}{rate / streams[one.model]:11.0%}" if moved and one.model in streams else ""
        lines.append(f"{title:56}{one.seconds * 1e3:9.3f}{share}")
    return lines


def target_lines(found: Sequence[Measured]) -> list[str]:
    """FusedLamb against fused AdamW, and against DeepSpeed's in the same engine."""
    times = {(one.model, one.column): one.seconds for one in found if one.seconds is not None}
    lines = []
    for model in dict.fromkeys(one.model for one in found):
        twice = [
            times[key] for key in ((model, "torch AdamW, fused"), (model, "torch AdamW, fused, again")) if key in times
        ]
        noise = max(twice) / min(twice) - 1 if len(twice) == 2 else 0.0
        for column in ("FusedLamb", "FusedLamb, check_gradients=False"):
            ours = times.get((model, column))
            if not twice or ours is None:
                lines.append(f"{model}, {column}: not measured")
                continue
            outcome = verdict(min(twice) / ours, 1 / ADAMW_LIMIT, noise, conclusive=True)
            lines.append(f"{model}, {column}: {ours / min(twice):.3f}x AdamW's time, at most {ADAMW_LIMIT}: {outcome}")
        theirs = times.get((model, "DeepSpeed's FusedLamb, engine, fp16"))
        ours = times.get((model, "FusedLamb, engine, fp16"))
        if theirs is None or ours is None:
            lines.append(f"{model}, engine: not measured")
        else:
            outcome = verdict(theirs / ours, DEEPSPEED_REQUIRED, noise, conclusive=True)
            lines.append(
                f"{model}, engine: {theirs / ours:.2f}x DeepSpeed's speed, at least {DEEPSPEED_REQUIRED}: {outcome}"
            )
    return lines

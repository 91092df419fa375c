"""The same training in one process, in DeepSpeed's pipeline and in ours, as traces that can be compared."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import ds_terapipe
from ds_terapipe.job import error_of
from tests.pipeline.models import SEED, Block, Plain
from tests.ran import Ran, lengths_of, watched

sgd = partial(torch.optim.SGD, lr=0.2)
SGD = {"type": "SGD", "params": sgd.keywords}
ADAMW = {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1, "torch_adam": True}}


@dataclass
class Trace:
    """A training: loss of each step, gradients of each step and weights at the end by parameter name."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_plain(
    specs: Sequence[Any], loss_fn: Callable[..., Any], steps: Sequence[Sequence[Any]],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, clip: float = 0.0,
    dtype: torch.dtype = torch.float32, start: torch.dtype = torch.float32,
) -> Trace:  # fmt: skip
    """Train in this process in ``dtype``, from weights rounded to ``start``; a step is the mean over its micro-batches."""
    model = Plain(specs).to(start).to(dtype)
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    return train_module(model, stepper, steps, lambda x, y, step: loss_fn(model(x), _cast(y, dtype)) / len(step), clip)


def train_module(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Any]],
    part_of_loss: Callable[..., Tensor], clip: float = 0.0, before_step: Callable[[int], Any] = lambda number: None,
    after_step: Callable[[int], Any] = lambda number: None,
) -> Trace:  # fmt: skip
    """Train a module in this process; a step's loss is the sum of ``part_of_loss(*micro-batch, step)``."""
    trace = Trace()
    for number, step in enumerate(steps):
        before_step(number)
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in step:
            loss = part_of_loss(*micro_batch, step)
            loss.backward()
            total += loss.item()
        trace.losses.append(total)
        trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        parameters = [p for p in model.parameters() if p.grad is not None]
        trace.norms.append(float(nn.utils.clip_grad_norm_(parameters, clip or float("inf"))))
        optimizer.step()
        after_step(number)
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return tuple(_cast(item, dtype) for item in value)


def module_of(
    specs: Sequence[Any], loss_fn: Callable[..., Any] | None, stages: int = 2, kind: type[PipelineModule] = PipelineModule,
    **options: Any,
) -> Any:  # fmt: skip
    """Layers that are divided evenly, with the tests' seeds."""
    options = {"partition_method": "uniform", "seed_layers": True, "base_seed": SEED, "dynamic_shape": True, **options}
    return kind(list(specs), num_stages=stages, loss_fn=loss_fn, **options)


def build_engine(
    specs: Sequence[Any], loss_fn: Callable[..., Any] | None, *, token_pipeline: dict[str, Any] | None,
    micro_batches: int = 2, batch: int = 2, stages: int = 2, clip: float = 0.0,
    optimizer: dict[str, Any] | Callable[..., Any] = SGD, instance: bool = False, dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None, module: dict[str, Any] | None = None,
    kind: type[PipelineModule] = PipelineModule, made: PipelineModule | None = None, **initialize: Any,
) -> Any:  # fmt: skip
    """An engine on ``stages`` stages and as many replicas as the job has room for: ours, or with ``token_pipeline`` None
    DeepSpeed's own. ``config`` adds keys of ds_config.json, ``module`` arguments of ``PipelineModule``, or of ``kind``, a class
    made of it; ``made``: one that is there. With ``instance``, DeepSpeed is given what the callable ``optimizer`` makes."""
    model = made or module_of(specs, loss_fn, stages, kind, **(module or {}))
    if dtype == torch.float64:
        model = model.double()
        get_accelerator().supported_dtypes = lambda: [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": micro_batches, "gradient_clipping": clip,
        "steps_per_print": None, "zero_allow_untested_optimizer": True, **(config or {}),
    }  # fmt: skip
    if isinstance(optimizer, dict):
        settings["optimizer"] = optimizer
    else:
        initialize["optimizer"] = optimizer
    if token_pipeline is not None:
        settings["token_pipeline"] = token_pipeline
    parameters = [p for p in model.parameters() if p.requires_grad]
    if instance:
        initialize["optimizer"] = initialize["optimizer"](parameters)
    engine, *_ = ds_terapipe.initialize(model=model, config=settings, model_parameters=parameters, **initialize)
    if dtype == torch.float64:
        engine.communication_data_type = dtype  # else DeepSpeed reduces gradients in fp32
    return engine


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on most CPUs, which PyTorch runs all the same."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]


def mine(engine: Any, step: Sequence[Any]) -> list[Any]:
    """The micro-batches of a step that belong to this replica."""
    replicas, count = engine.dp_world_size, len(step) // engine.dp_world_size
    return list(step[engine.grid.data_parallel_id * count :][:count]) if replicas > 1 else list(step)


def passing(micro_batches: Sequence[Any]) -> Iterator[Any]:
    """Yield copies, whose memory has other numbers once the next one is asked for."""
    for micro_batch in micro_batches:
        copies = tree_map_only(Tensor, torch.clone, micro_batch)
        yield copies
        tree_map_only(Tensor, torch.zero_, copies)


def train(engine: Any, steps: Sequence[Sequence[Any]], after_step: Callable[[], None] | None = None) -> Trace:
    """Train with an engine; losses are the engine's, gradients (where parameters hold them) and weights this rank's.

    Ours must have run every step in the slices of its configuration, on tokens [b, s], or this fails.
    """
    ours, trace, step_taken = hasattr(engine, "slices_run"), Trace(), engine._take_model_step

    def observed(*args: Any, **kwargs: Any) -> None:
        found = {name: _gradient(engine, p) for name, p in engine.module.named_parameters()}
        trace.gradients.append({name: g.detach().cpu().clone() for name, g in found.items() if g is not None})
        step_taken(*args, **kwargs)

    engine._take_model_step = observed
    with watched(engine) if ours else nullcontext() as ran:
        for step in steps:
            mean = engine.train_batch(passing(mine(engine, step)) if ours else iter(mine(engine, step)))
            if ran is not None:
                _check_ran(engine, ran, mine(engine, step))
            exact = engine.total_loss / engine.micro_batches if engine.is_last_stage() else mean
            trace.losses.append(float(exact if exact.dtype == torch.float64 else mean))
            trace.norms.append(float(engine.get_global_grad_norm() or 0.0))
            if after_step is not None:
                after_step()
    engine._take_model_step = step_taken
    trace.weights = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    return trace


def _check_ran(engine: Any, ran: Ran, step: Sequence[Any]) -> None:
    totals = [(inputs if isinstance(inputs, Tensor) else inputs[0]).shape[1] for inputs, _ in step]
    slices = engine.token_pipeline.slices
    lengths = engine.slices_run if slices == "auto" else [lengths_of(total, slices) for total in totals]
    assert [sum(micro_batch) for micro_batch in lengths] == totals
    holders = [f for f in engine.module.forward_funcs if isinstance(f, nn.Module)]
    # layers with one call of attention: of the tests' GPT, or of ds_terapipe.hf, which is not imported here
    blocks = sum(any(isinstance(m, Block) or type(m).__name__ == "Decoder" for m in layer.modules()) for layer in holders)
    ran.check(lengths, blocks or None)


def _gradient(engine: Any, parameter: nn.Parameter) -> Tensor | None:
    """Gradients as the optimiser is about to use them, reduced over replicas; collective under ZeRO-1."""
    if engine.using_bf16_optimizer:
        return getattr(parameter, "_hp_grad", None)
    return safe_get_full_grad(parameter) if engine.zero_optimization() else parameter.grad


def difference(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||, in double precision."""
    a, b = got.detach().cpu().double(), expected.detach().cpu().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of the tensors in ``got``, each of which must be in ``expected``."""
    return max((difference(tensor, expected[name]) for name, tensor in got.items()), default=0.0)


def raised(call: Callable[[], Any]) -> str:
    """Type and text of the error that a call ends with; empty for one that succeeds."""
    error = error_of(call)
    return "" if error is None else f"{type(error).__name__}: {error}"

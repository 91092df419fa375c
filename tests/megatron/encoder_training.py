"""Trainings of BERTs and ViTs: in one process, and on engines of any kind and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

import ds_terapipe
from ds_terapipe.errors import ConfigError
from tests.megatron.common import allow_fp64, relative, whole_tensors
from tests.megatron.encoders import HEADS, MICRO_BATCH, MICRO_BATCHES, Encoder, batches, build, reference
from tests.mutants import installed, neutral, verify_hits
from tests.spawn import run_ranks

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "PipelineEngine": {},
    "TokenPipelineEngine": {"token_pipeline": {"slices": 1}},
    "ElasticPipelineEngine": {"elastic_pipeline": {}},
}


@dataclass(frozen=True)
class Training:
    """A training of a few steps.

    Attributes:
        model: what is trained.
        engine: of `KINDS`.
        tensor, stages: the layout of the two processes at the start.
        frozen: from which step on how many entries are frozen.
        resize: from which step on how many stages there are.
        steps: so many.
    """

    model: Encoder
    engine: str = "PipelineEngine"
    tensor: int = 1
    stages: int = 2
    frozen: tuple[tuple[int, int], ...] = ()
    resize: tuple[tuple[int, int], ...] = ()
    steps: int = STEPS

    def prefixes(self, step: int) -> tuple[str, ...]:
        """What the names of the parameters that this step does not train begin with."""
        entries = range(max((entries for begin, entries in self.frozen if begin <= step), default=0))
        tied = self.model.kind == "bert" and self.model.tied
        return tuple("tied_modules." if tied and entry == 0 else f"{entry}." for entry in entries) or ("nothing",)


@dataclass
class Result:
    """Loss of each step, gradients of the first, weights at the end, by name; and the shape of each step."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    shapes: list[tuple[int, int, int]] = field(default_factory=list)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """eps above the rounding noise of fp32 gradients, which AdamW would make whole steps of."""
    return torch.optim.AdamW(list(parameters), lr=3e-3, eps=1e-4, weight_decay=0.1)


def data_of(training: Training) -> list[list[Any]]:
    """The micro-batches of every step."""
    endless = batches(training.model)
    return [[next(endless) for _ in range(MICRO_BATCHES)] for _ in range(training.steps)]


def alone(rank: int, world: int, trainings: Sequence[Training]) -> list[Result]:
    """Plain PyTorch in one process; frozen parameters lose their gradients before the step.

    They require them all the same: megatron-core's linear layers with a frozen weight make no gradient of the bias either.
    """
    results = []
    for training in trainings:
        model = reference(training.model)
        optimizer, losses, gradients = optimizer_of(model.parameters.values()), [], {}
        for number, step in enumerate(data_of(training)):
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for inputs, labels in step:
                loss = model.loss(inputs, labels) / MICRO_BATCHES
                loss.backward()
                total += loss.item()
            losses.append(total)
            gradients = gradients or _arrays({n: p.grad for n, p in model.parameters.items()})
            for name, parameter in model.parameters.items():
                if name.startswith(training.prefixes(number)):
                    parameter.grad = None
            optimizer.step()
        results.append(Result(losses, gradients, _arrays(model.parameters)))
    return results


def refused(model: Encoder) -> list[str]:
    """What an engine says that is to cut its samples, in one process: before it is built, and after."""
    said = []
    for slices in (2, "auto"):
        try:
            engine_of(Training(model, "TokenPipelineEngine", stages=1), token_pipeline={"slices": slices})
        except ConfigError as error:
            said.append(str(error))
    engine = engine_of(Training(model, "TokenPipelineEngine", stages=1))
    try:
        engine.set_slices(2)
    except ConfigError as error:
        said.append(str(error))
    return said


def alone_and_refused(rank: int, world: int, trainings: Sequence[Training], models: Sequence[Encoder]) -> Any:
    """`alone` and `refused` in one process."""
    return alone(rank, world, trainings), [refused(model) for model in models]


def _arrays(tensors: Any) -> dict[str, np.ndarray]:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}


def engine_of(training: Training, **settings: Any) -> Any:
    """An engine of the training's kind; ``settings`` are further keys of its configuration."""
    allow_fp64()
    pipeline = build(training.model, tensor=training.tensor, stages=training.stages)
    keys = {**KINDS[training.engine], **settings}
    if training.frozen:
        frozen, resize = ([list(pair) for pair in pairs] for pairs in (training.frozen, training.resize))
        freeze = {"policy": "schedule", "frozen_layers": frozen}
        keys["elastic_pipeline"] = {"freeze": freeze, "resize": {"policy": resize}}
    config = {
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pipeline": {"use_reentrant": False},
        **keys,
    }
    parameters = list(pipeline.parameters())
    engine, *_ = ds_terapipe.initialize(
        model=pipeline, model_parameters=parameters, optimizer=optimizer_of, config=config
    )
    assert type(engine).__name__ == training.engine
    engine.communication_data_type = training.model.dtype
    return engine


def train(training: Training) -> Result:
    """On the processes of this job."""
    engine = engine_of(training)
    replicas, replica = engine.dp_world_size, engine.grid.get_data_parallel_rank()
    share, losses, gradients, shapes = MICRO_BATCHES // replicas, [], {}, []

    def keep(*args: Any) -> None:
        if not gradients:
            gradients.update(whole_tensors(engine.module, lambda p: p.grad))

    handle = engine.basic_optimizer.register_step_pre_hook(keep)
    for step in data_of(training):
        mean = engine.train_batch(iter(step[replica * share :][:share]))
        losses.append(_exact_loss(engine, float(mean)))
        shapes.append((getattr(engine, "frozen_layers", 0), engine.num_stages, engine.dp_world_size))
    handle.remove()
    weights = whole_tensors(engine.module)
    engine.destroy()
    return Result(losses, gradients, weights, shapes)


def _exact_loss(engine: Any, mean: float) -> float:
    """DeepSpeed rounds a loss to fp32 on its way to the other stages."""
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = float(engine.total_loss) / engine.micro_batches if engine.is_last_stage() else None
    dist.all_gather_object(everyone, mine)
    losses = [loss for loss in everyone if loss is not None]
    exact = sum(losses) / len(losses)
    assert abs(exact - mean) <= 1e-6 * abs(exact)
    return exact


def together(rank: int, world: int, trainings: Sequence[Training]) -> list[Result]:
    """One after the other; whoever needs another layout of processes comes last."""
    from ds_terapipe.megatron import destroy_parallel

    results, layout = [], None
    for training in trainings:
        if layout not in (None, (training.tensor, training.stages)):
            destroy_parallel()
        layout = training.tensor, training.stages
        results.append(train(training))
    return results if rank == 0 else []


def without_key_bias(name: str, value: np.ndarray) -> np.ndarray:
    """Attention key biases have a true gradient of zero; what is there, and what AdamW makes of it, is rounding noise."""
    return value.reshape(HEADS, 3, -1)[:, [0, 2]] if name.endswith("linear_qkv.bias") else value


# -------------------------------------------------------------------------------------------------------------- defects

EXACT = 1e-10


def off_by(mutant: str | None, kind: str) -> float:
    """How far the layers of a BERT or ViT, one behind the other, are from the reference under a mutant, in tolerances.

    Of the loss and of all gradients. One process measures it for all mutants.
    """
    return _measured(kind)[mutant]


@cache
def _measured(kind: str) -> dict[str | None, float]:
    from tests.mutants.encoders import CHECKS

    (names,) = [check.catches for check in CHECKS if check.args == (kind,)]
    return run_ranks(_measure, 1, kind, [None, neutral(names), *names])[0]


def _measure(rank: int, world: int, kind: str, names: Sequence[str | None]) -> dict[str | None, float]:
    model = Encoder(kind, dtype=torch.float64)
    wanted, pipeline = reference(model), build(model)
    inputs, labels = next(batches(model))
    wanted_loss = wanted.loss(inputs, labels)
    wanted_loss.backward()
    found = {}
    for name in names:
        with installed(name) as hits:
            hidden = inputs
            for layer in pipeline.forward_funcs:
                hidden = layer(hidden)
            loss = pipeline.loss_fn(hidden, labels)
            loss.backward()
        verify_hits(name, [hits])
        differences = [abs(float(loss) / float(wanted_loss) - 1)]
        for key, parameter in pipeline.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pair = (without_key_bias(key, tensor.numpy()) for tensor in (gradient, wanted.parameters[key].grad))
            differences.append(relative(*pair))
            parameter.grad = None
        found[name] = max(differences) / EXACT
    return found

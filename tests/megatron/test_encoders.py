"""BERT and ViT pipelines train as megatron-core's BertModel and a plain ViT do in one process, in every layout and engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed as dist

pytest.importorskip("megatron.core")

import ds_terapipe
from ds_terapipe.errors import ConfigError
from tests.megatron.common import allow_fp64, relative, whole_tensors
from tests.megatron.encoders import HEADS, MICRO_BATCH, MICRO_BATCHES, Encoder, batches, build, reference
from tests.spawn import launched

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
EXACT, KINDS = torch.float64, ("bert", "classifier", "vit")
KEYS: dict[str, dict[str, Any]] = {
    "PipelineEngine": {},
    "TokenPipelineEngine": {"token_pipeline": {"slices": 1}},
    "ElasticPipelineEngine": {
        "elastic_pipeline": {
            "freeze": {"policy": "schedule", "frozen_layers": [[1, 1], [3, 3]]},
            "resize": {"policy": [[3, 1]]},
        }
    },
}
THEIRS, OURS, ELASTIC = KEYS


class Training(NamedTuple):
    """A training of three steps, of an elastic one six, on two stages or two tensor-parallel ranks."""

    model: Encoder
    engine: str
    tensor: int = 1

    @property
    def steps(self) -> int:
        return 6 if self.engine == ELASTIC else 3

    @property
    def stages(self) -> int:
        return 1 if self.tensor > 1 or (dist.is_initialized() and dist.get_world_size() == 1) else 2

    def frozen(self, step: int) -> tuple[str, ...]:
        """What the names of the parameters that this step does not train begin with."""
        entries = 0 if self.engine != ELASTIC or step < 1 else 1 if step < 3 else 3
        tied = self.model.kind == "bert" and self.model.tied
        return tuple("tied_modules." if tied and entry == 0 else f"{entry}." for entry in range(entries)) or (
            "nothing",
        )


class Result(NamedTuple):
    """Loss of each step, gradients of the first and weights at the end by name, and frozen entries, stages and replicas."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    shapes: list[tuple[int, int, int]]


TRAININGS = {
    "BERT, exact": Training(Encoder("bert", dtype=EXACT), OURS),
    "BERT, classes": Training(Encoder("classifier", checkpoints=1, dtype=EXACT), OURS),
    "BERT, rotary, untied": Training(Encoder("bert", rope=True, tied=False, checkpoints=1, dtype=EXACT), THEIRS),
    "ViT": Training(Encoder("vit"), THEIRS),
    "ViT, exact": Training(Encoder("vit", pool="mean", dtype=EXACT), OURS),
    "BERT, frozen and reshaped": Training(Encoder("bert"), ELASTIC),
    "ViT, frozen and reshaped": Training(Encoder("vit"), ELASTIC),
    "BERT, TP2": Training(Encoder("bert"), THEIRS, tensor=2),
    "BERT, TP2, exact": Training(Encoder("bert", tied=False, dtype=EXACT), OURS, tensor=2),
    "ViT, TP2": Training(Encoder("vit", dtype=EXACT), THEIRS, tensor=2),
}  # whatever needs another layout of processes comes last


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """eps above the rounding noise of fp32 gradients, which AdamW would make whole steps of."""
    return torch.optim.AdamW(list(parameters), lr=3e-3, eps=1e-4, weight_decay=0.1)


def data_of(training: Training) -> list[list[Any]]:
    endless = batches(training.model)
    return [[next(endless) for _ in range(MICRO_BATCHES)] for _ in range(training.steps)]


def arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}


def train_alone(training: Training) -> Result:
    """Plain PyTorch in one process; frozen parameters lose their gradients before the step.

    They require them all the same: megatron-core's linear layers with a frozen weight make no gradient of the bias either.
    """
    model = reference(training.model)
    optimizer, losses, gradients = optimizer_of(model.parameters.values()), [], {}
    for number, step in enumerate(data_of(training)):
        optimizer.zero_grad(set_to_none=True)
        each = [model.loss(inputs, labels) / MICRO_BATCHES for inputs, labels in step]
        torch.stack(each).sum().backward()
        losses.append(sum(loss.item() for loss in each))
        gradients = gradients or arrays({n: p.grad for n, p in model.parameters.items()})
        for name, parameter in model.parameters.items():
            if name.startswith(training.frozen(number)):
                parameter.grad = None
        optimizer.step()
    return Result(losses, gradients, arrays(dict(model.parameters)), [])


def engine_of(training: Training, **settings: Any) -> Any:
    """``settings`` are further keys of its configuration."""
    allow_fp64()
    pipeline = build(training.model, tensor=training.tensor, stages=training.stages)
    config = {
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pipeline": {"use_reentrant": False},
        **KEYS[training.engine],
        **settings,
    }
    engine, *_ = ds_terapipe.initialize(
        model=pipeline, model_parameters=list(pipeline.parameters()), optimizer=optimizer_of, config=config
    )
    assert type(engine).__name__ == training.engine
    engine.communication_data_type = training.model.dtype
    return engine


def train(training: Training) -> Result:
    """On the processes of this job."""
    engine = engine_of(training)
    losses, shapes, gradients = [], [], {}

    def keep(*args: Any) -> None:
        if not gradients:
            gradients.update(whole_tensors(engine.module, lambda p: p.grad))

    handle = engine.basic_optimizer.register_step_pre_hook(keep)
    # of the shape at the start: what a step has is shared out again where the shape changes
    replica, share = engine.grid.get_data_parallel_rank(), MICRO_BATCHES // engine.dp_world_size
    for step in data_of(training):
        mean = engine.train_batch(iter(step[replica * share :][:share]))
        losses.append(exact_loss(engine, float(mean)))
        shapes.append((getattr(engine, "frozen_layers", 0), engine.num_stages, engine.dp_world_size))
    handle.remove()
    weights = whole_tensors(engine.module)
    engine.destroy()
    return Result(losses, gradients, weights, shapes)


def exact_loss(engine: Any, mean: float) -> float:
    """DeepSpeed rounds a loss to fp32 on its way to the other stages."""
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = float(engine.total_loss) / engine.micro_batches if engine.is_last_stage() else None
    dist.all_gather_object(everyone, mine)
    losses = [loss for loss in everyone if loss is not None]
    exact = sum(losses) / len(losses)
    assert abs(exact - mean) <= 1e-6 * abs(exact)
    return exact


def refused(kind: str) -> list[str]:
    """What an engine says that is to cut its samples: before it is built, and after."""
    said, uncut = [], Training(Encoder(kind), OURS)
    for slices in (2, "auto"):
        with pytest.raises(ConfigError) as raised:
            engine_of(uncut, token_pipeline={"slices": slices})
        said.append(str(raised.value))
    with pytest.raises(ConfigError) as raised:
        engine_of(uncut).set_slices(2)
    return [*said, str(raised.value)]


def off_by(kind: str) -> float:
    """How far the layers, one behind the other, are from the reference: of the loss and of all gradients."""
    model = Encoder(kind, dtype=EXACT)
    wanted, pipeline = reference(model), build(model)
    hidden, labels = inputs, _ = next(batches(model))
    for layer in pipeline.forward_funcs:
        hidden = layer(hidden)
    loss, wanted_loss = pipeline.loss_fn(hidden, labels), wanted.loss(inputs, labels)
    loss.backward()
    wanted_loss.backward()
    found = [abs(loss.item() / wanted_loss.item() - 1)]
    for key, parameter in pipeline.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append(relative(*(without_key_bias(key, t.numpy()) for t in (gradient, wanted.parameters[key].grad))))
    return max(found)


def alone(rank: int, world: int) -> Any:
    return {name: train_alone(training) for name, training in TRAININGS.items()}, [refused(kind) for kind in KINDS]


def layers_alone(rank: int, world: int) -> dict[str, float]:
    return {kind: off_by(kind) for kind in KINDS}


def together(rank: int, world: int) -> dict[str, Result]:
    from ds_terapipe.megatron import destroy_parallel

    results, tensor = {}, 1
    for name, training in TRAININGS.items():
        if training.tensor != tensor:
            destroy_parallel()
        tensor, results[name] = training.tensor, train(training)
    return results if rank == 0 else {}


one, two, exact = launched(alone, 1, timeout=240), launched(together, 2, timeout=240), launched(layers_alone, 1)


def without_key_bias(name: str, value: np.ndarray) -> np.ndarray:
    """Attention key biases have a true gradient of zero; what is there, and what AdamW makes of it, is rounding noise."""
    return value.reshape(HEADS, 3, -1)[:, [0, 2]] if name.endswith("linear_qkv.bias") else value


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_one_process_does(one: Any, two: Any, name: str) -> None:
    """Losses, gradients of the first step and weights at the end, in the shapes that it was to have."""
    training, wanted, got = TRAININGS[name], one[0][0][name], two[0][name]
    limit, stages = LIMITS[training.model.dtype], 1 if training.tensor > 1 else 2
    assert got.losses == pytest.approx(wanted.losses, rel=limit) and len(set(got.losses)) == training.steps
    moves = [(0, 2, 1), (1, 2, 1), (1, 2, 1), (3, 1, 2), (3, 1, 2), (3, 1, 2)]
    assert got.shapes == (moves if training.engine == ELASTIC else [(0, stages, 1)] * 3)
    assert got.gradients.keys() == wanted.gradients.keys() == got.weights.keys()
    for what, values in (("gradients", wanted.gradients), ("weights", wanted.weights)):
        for key, value in values.items():
            other = getattr(got, what)[key]
            assert value.any(), f"{what} of {key} are zero"
            assert relative(without_key_bias(key, other), without_key_bias(key, value)) <= limit, f"{what} of {key}"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_exactly_what_the_reference_does(exact: Any, kind: str) -> None:
    assert exact[0][kind] <= LIMITS[EXACT]


def test_samples_are_not_cut(one: Any) -> None:
    rule = (
        "token_pipeline: layer 1.self_attention.core_attention (BidirectionalAttention) is attention that is not causal, "
        'must be causal where sequences are cut beside token_pipeline, use "slices": 1'
    )
    assert one[0][1] == [[rule] * 3] * len(KINDS)

"""Training of a Hugging Face model in one process, as transformers runs it, and in a pipeline of its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_terapipe import hf
from ds_terapipe.hf.record import names_of
from tests.hf.families import without_key_biases
from tests.pipeline.training import Trace, build_engine, train, worst

SGD = {"type": "SGD", "params": {"lr": 0.03}}
Steps = Sequence[Sequence[dict[str, Tensor]]]


def train_alone(
    model: Any,
    steps: Steps,
    *,
    mean_over_step: bool = False,
    lr: float = SGD["params"]["lr"],
    before_step: Callable[[int], Any] = lambda number: None,
) -> Trace:
    """Train this model by the loss of its own; a step is the mean over micro-batches, or over all labels of the step."""
    trace, stepper = Trace(), torch.optim.SGD(model.train().parameters(), lr=lr)
    for number, step in enumerate(steps):
        before_step(number)
        stepper.zero_grad()
        count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in step)
        total = 0.0
        for features in step:
            more = {"num_items_in_batch": torch.tensor(count)} if mean_over_step else {}
            loss = model(**features, use_cache=False, **more).loss / (1 if mean_over_step else len(step))
            loss.backward()
            total += float(loss)
        trace.losses.append(total)
        trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        stepper.step()
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def train_in_pipeline(
    model: Any, steps: Steps, block: dict[str, Any] | None, *, stages: int = 2, config: Any = None, **options: Any
) -> Trace:
    """The same steps in a pipeline of a copy of the model, under the names that it has there."""
    made = hf.pipeline(copy.deepcopy(model), num_stages=stages, **options)
    replicas = torch.distributed.get_world_size() // stages
    engine = build_engine(
        (), None, token_pipeline=block, micro_batches=len(steps[0]) // replicas, optimizer=SGD, config=config, made=made
    )
    trace = train(engine, [[hf.batch(one) for one in step] for step in steps])
    engine.destroy()
    return renamed(trace, made)


def renamed(trace: Trace, made: Any) -> Trace:
    """A trace of a pipeline under the names of the model's weights."""
    known = {
        own: name
        for entry, names in enumerate(names_of(made.source))
        for layer, name in names.items()
        for own in (f"{entry}.{layer}", *([f"tied_modules.embed.{layer}"] if entry == 0 else []))
    }

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        owns = {name: next(own for own in known if name.startswith(own)) for name in tensors}
        return {known[own] + name.removeprefix(own): tensors[name] for name, own in owns.items()}

    return Trace(trace.losses, [rename(one) for one in trace.gradients], trace.norms, rename(trace.weights))


def compared(got: Trace, expected: Trace, config: Any) -> float:
    """Largest relative difference of a loss, a gradient or a weight; this rank's part."""
    assert got.weights
    assert all(step.keys() == got.weights.keys() for step in got.gradients), "weights without a gradient"

    def known(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: without_key_biases(config, name, tensors[name]) for name in got.weights}

    pairs = [*zip(got.gradients, expected.gradients, strict=True), (got.weights, expected.weights)]
    losses = [abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True)]
    return max(*losses, *(worst(known(a), known(b)) for a, b in pairs))

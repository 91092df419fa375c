"""Policies that decide by themselves: as a single process would, the same on all ranks, and on after a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe.elastic.history import read_history
from tests.elastic.samples import Texts, in_order, micro_batch_of
from tests.elastic.training import Case, engine_of, grouped_adamw, prefixes
from tests.pipeline.models import Embedding, Plain, gpt, mean_loss
from tests.spawn import run_ranks

SAMPLES = 20  # an epoch is 2.5 steps
CASE = Case("texts", "adamw", 2, (), (), slices=None, steps=12)
SAVED = 4  # within an interval of three steps
ENTRIES, HEAD = 6, 5


class Steep(Embedding):
    """An embedding whose gradient is large, so that it is not the smallest from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.div_(20)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return 20 * super().forward(inputs)


def layers() -> list[Any]:
    return [LayerSpec(Steep), *gpt()[1:]]


@dataclass(frozen=True)
class Policy:
    """The blocks, and the frozen entries and stages of every step that they must come to; None: as one process finds."""

    freeze: dict[str, Any]
    resize: Any
    frozen: tuple[int, ...] | None = None
    stages: tuple[int, ...] | None = None


POLICIES = {
    # after T epochs 5 (1 - 0.7^T), rounded up: 2, 3, 4, 4; steps begin after 0, 0.4, 0.8, 1.2, ... epochs
    "alpha": Policy(
        {"policy": "alpha", "alpha": 0.3},
        "halve",
        (0, 0, 0, 2, 2, 3, 3, 3, 4, 4, 4, 4),
    ),
    "grad_norm": Policy({"policy": "grad_norm", "alpha": 0.5, "interval": 3}, [[5, 1], [8, 2], [10, 1]]),
}


def engine(policy: Policy, data: Texts, folder: str) -> Any:
    block = {"freeze": policy.freeze, "resize": {"policy": policy.resize}, "history_path": f"{folder}.jsonl"}
    return engine_of(CASE, specs=layers(), training_data=data, config={"elastic_pipeline": block})


def run(engine: Any, steps: int) -> list[tuple[Any, ...]]:
    """Frozen entries, stages and loss of each step, and the norms that the policy was given before it."""
    found, given, norms = [], [], engine._gradient_norms

    def noted() -> Any:
        given.append(norms())
        return given[-1]

    engine._gradient_norms = noted
    for _ in range(steps):
        loss = float(engine.train_batch())
        found.append((engine.frozen_layers, engine.num_stages, loss, tuple(given)))
        given.clear()
    del engine._gradient_norms
    return found


def decided(policy: Policy, folder: str) -> dict[str, Any]:
    first = engine(policy, Texts(SAMPLES), folder)
    begun = run(first, SAVED)
    first.save_checkpoint(folder)
    went_on = run(first, CASE.steps - SAVED)
    first.destroy()
    second = engine(policy, Texts(SAMPLES), folder)
    second.load_checkpoint(folder)
    resumed = run(second, CASE.steps - SAVED)
    second.destroy()
    written = {} if first.global_rank else {"history": read_history(f"{folder}.jsonl")}
    return {"run": begun + went_on, "resumed": begun + resumed, **written}


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: decided(policy, f"{folder}/{name}") for name, policy in POLICIES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(worker, 2, str(tmp_path_factory.mktemp("decisions")), timeout=200)


def alone(policy: Policy) -> tuple[list[int], list[float], dict[int, list[float]]]:
    """One process: PipeTransformer's rule, written down again; frozen entries and loss of each step, norms by step."""
    data, model, specs = Texts(SAMPLES), Plain(layers()), layers()
    optimizer = grouped_adamw(list(model.parameters()))
    entries = [getattr(model, str(entry)) for entry in range(ENTRIES)]
    frozen, losses, history, norms, given = 0, [], [], [], {}
    for step, indices in enumerate(in_order(CASE.steps, CASE.batch, SAMPLES)):
        if policy.frozen is not None:
            frozen = policy.frozen[step]
        elif step and step % policy.freeze["interval"] == 0:
            means = [sum(of_step[entry] for of_step in norms) / len(norms) for entry in range(ENTRIES)]
            given[step] = means
            left = means[frozen : HEAD + 1]
            bound = math.ceil(frozen + policy.freeze["alpha"] * (HEAD - frozen) - 1e-9)
            frozen, norms = max(frozen, min(bound, frozen + left.index(min(left)))), []
        history.append(frozen)
        for name, parameter in model.named_parameters():
            if frozen and name.startswith(prefixes(specs, frozen)):
                parameter.requires_grad_(False)
        optimizer.zero_grad()
        parts = [micro_batch_of(data, indices[at : at + CASE.size]) for at in range(0, CASE.batch, CASE.size)]
        loss = sum(mean_loss(model(inputs), targets) for inputs, targets in parts) / len(parts)
        loss.backward()
        losses.append(float(loss))
        norms.append([root_mean_square(layer) for layer in entries])
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CASE.clip)
        optimizer.step()
    return history, losses, given


def root_mean_square(layer: nn.Module) -> float:
    gradients = [parameter.grad.flatten() for parameter in layer.parameters() if parameter.grad is not None]
    return float(torch.cat(gradients).square().mean().sqrt()) if gradients else math.nan


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_and_losses_are_those_of_one_process(ranks, name):
    history, losses, given = alone(POLICIES[name])
    assert history[-1] > history[0] == 0 and len(set(history)) > 2, history
    for rank in ranks:
        for way in ("run", "resumed"):
            frozen, stages, got, norms = zip(*rank[name][way], strict=True)
            assert list(frozen) == history, way
            assert got == pytest.approx(losses, rel=1e-5)
            assert stages[-1] == 1 and stages[0] == 2
            assert {step: list(each[0]) for step, each in enumerate(norms) if each} == {
                step: pytest.approx(wanted, rel=1e-4, nan_ok=True) for step, wanted in given.items()
            }
    exactly = [[repr(rank[name][way]) for way in ("run", "resumed")] for rank in ranks]
    assert all(both == [exactly[0][0]] * 2 for both in exactly)


@pytest.mark.parametrize("name", POLICIES)
def test_the_history_has_the_steps_of_the_run_that_was_resumed(ranks, name):
    """Of the first run up to the checkpoint, of the second from there on."""
    first, second = (rank[name] for rank in ranks)
    periods = first["history"]
    steps = [(period, step) for period in periods for step in range(period.first, period.stop)]
    assert [step for _, step in steps] == list(range(CASE.steps))
    for (period, step), (frozen, stages, *_) in zip(steps, first["resumed"], strict=True):
        layout = period.layout
        assert (layout.frozen_layers, layout.stages, layout.replicas) == (frozen, stages, 2 // stages), step
        assert layout.replicas * layout.micro_batch * layout.micro_batches == CASE.batch
        assert period.ranks == (((0, 0), (1, 0)) if stages == 2 else ((0, 0), (0, 1)))
    begun = [period for period in periods if period.begins]
    assert [period.first for period in begun] == [0, SAVED]
    changes = [period for period in periods if not period.begins]
    assert changes and all(period.change_seconds > 0 for period in changes)
    assert periods[0].change_seconds == 0 and "history" not in second

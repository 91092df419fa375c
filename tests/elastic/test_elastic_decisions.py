"""Policies that decide by themselves: as a single process would, the same on all ranks, and on after a checkpoint."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.freezer import Freezer
from ds_terapipe.elastic.settings import FreezeSettings
from ds_terapipe.elastic.shapes.history import read_history
from ds_terapipe.model_chunks import ModelChunks
from tests.elastic.samples import Texts, in_order, micro_batch_of
from tests.elastic.training import Case, engine_of, grouped_adamw, prefixes
from tests.pipeline.models import Embedding, Plain, gpt, mean_loss
from tests.spawn import launched

SAMPLES = 10  # an epoch is 2.5 steps
CASE = Case("texts", "adamw", 2, (), (), slices=None, steps=12, batch=4)
SAVED = 4  # within an interval of three steps
ENTRIES = 6


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


class Policy(NamedTuple):
    """The blocks, and the frozen entries and stages of every step that they must come to; None: as the norms ask for.

    ``rates``: what every LR is multiplied with, step by step; ``placement``: two stages on a place.
    """

    freeze: dict[str, Any]
    resize: Any
    frozen: tuple[int, ...] | None = None
    stages: tuple[int, ...] | None = None
    rates: tuple[float, ...] = (1.0,) * CASE.steps
    placement: str | None = None

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rates[min(step, CASE.steps - 1)])


TO_ONE_AND_BACK = [[5, 1], [8, 2], [10, 1]]
POLICIES = {
    # after T epochs 5 (1 - 0.7^T), rounded up: 2, 3, 4, 4; steps begin after 0, 0.4, 0.8, 1.2, ... epochs
    "alpha": Policy({"policy": "alpha", "alpha": 0.3}, "halve", (0, 0, 0, 2, 2, 3, 3, 3, 4, 4, 4, 4)),
    "grad_norm": Policy({"policy": "grad_norm", "alpha": 0.5, "interval": 3}, TO_ONE_AND_BACK),
    "plateau": Policy({"policy": "plateau", "alpha": 0.5, "interval": 2, "tolerance": 0.4, "patience": 2}, TO_ONE_AND_BACK),
    # pairs of the schedule up to the restart have had their time; what trains again needs two stages
    "restart": Policy(
        {"policy": "schedule", "frozen_layers": [[1, 2], [3, 4], [9, 2], [11, 4]], "unfreeze": ["lr_restart"]}, "halve",
        (0, 2, 2, 4, 4, 4, 0, 0, 0, 2, 2, 4), (2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 1),
        (0.1, 1.0, 0.8, 0.6, 0.4, 0.2, 0.9, 0.7, 0.5, 0.4, 0.3, 0.2),
    ),
    # fewer entries than before: the two behind them train again, from moments of zero
    "back": Policy(
        {"policy": "schedule", "frozen_layers": [[1, 4], [5, 2], [9, 4]], "unfreeze": ["policy"]}, "halve",
        (0, 4, 4, 4, 4, 2, 2, 2, 2, 4, 4, 4), (2, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1), placement="v",
    ),
    # the LR is far too high once layers are frozen, so that the second interval's mean loss is above the first one's
    "loss": Policy(
        {"policy": "alpha", "alpha": 0.6, "interval": 3, "unfreeze": ["loss_rise", "lr_restart"]}, [[3, 1], [6, 2], [9, 1]],
        (0, 0, 0, 3, 3, 3, 0, 0, 0, 3, 3, 3), (2, 2, 2, 1, 1, 1, 2, 2, 2, 1, 1, 1),
        (1.0, 1.0, 1.0, 300.0, 300.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), "interleaved",
    ),
}  # fmt: skip


def engine(policy: Policy, folder: str) -> Any:
    block = {"freeze": policy.freeze, "resize": {"policy": policy.resize}, "history_path": f"{folder}.jsonl"}
    more: dict[str, Any] = {"config": {"elastic_pipeline": block}, "lr_scheduler": policy.scheduler}
    if policy.placement is not None:
        more["token_pipeline"] = {"slices": 2, "stages_per_place": 2, "placement": policy.placement}
    made = engine_of(CASE, specs=layers(), training_data=Texts(SAMPLES), **more)
    type(made._layer_times).costs = lambda self: None  # else stages are cut by times, which other work on the machine changes
    return made


def run(engine: Any, steps: int) -> list[tuple[Any, ...]]:
    """Frozen entries, stages and loss of each step, and the norms that the policy was given before it."""
    norms = engine._controller.freezing.norms
    found, given, take = [], [], norms.take

    def noted(consensus: Any) -> Any:
        given.append(take(consensus))
        return given[-1]

    norms.take = noted
    for _ in range(steps):
        loss = float(engine.train_batch())
        found.append((engine.frozen_layers, engine.num_stages, loss, tuple(given), ModelChunks(engine.module).places))
        given.clear()
    del norms.take
    return found


def decided(policy: Policy, folder: str) -> dict[str, Any]:
    first = engine(policy, folder)
    begun = run(first, SAVED)
    first.save_checkpoint(folder)
    first.destroy()
    second = engine(policy, folder)
    second.load_checkpoint(folder)
    resumed = run(second, CASE.steps - SAVED)
    second.destroy()
    return {"run": begun + resumed, "history": None if first.global_rank else read_history(f"{folder}.jsonl")}


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: decided(policy, f"{folder}/{name}") for name, policy in POLICIES.items()}


ranks = launched(worker, 2, timeout=200, folder=True)


def alone(policy: Policy) -> tuple[list[int], list[float], dict[int, list[float]]]:
    """One process: frozen entries and loss of each step, means of the norms over the intervals before a step."""
    data, model, specs, settings = Texts(SAMPLES), Plain(layers()), layers(), FreezeSettings(**policy.freeze)
    optimizer = grouped_adamw(list(model.parameters()))
    entries, scheduler = [getattr(model, str(entry)) for entry in range(ENTRIES)], policy.scheduler(optimizer)
    losses, history, norms, given = [], [], [], {}
    freezer = Freezer(settings, ModelLayers((True,) * ENTRIES), lambda step: step // settings.interval)
    for step, indices in enumerate(in_order(CASE.steps, CASE.batch, SAMPLES)):
        if policy.frozen is None and step and step % settings.interval == 0:
            given[step], norms = torch.tensor(norms).mean(0).tolist(), []
        frozen = freezer.decide(step, lambda at=step: given[at]) if policy.frozen is None else policy.frozen[step]
        history.append(frozen)
        for name, parameter in model.named_parameters():
            trains = not name.startswith(prefixes(specs, frozen))
            if not trains:
                optimizer.state.pop(parameter, None)  # moments begin at zero again
            parameter.requires_grad_(trains)
        optimizer.zero_grad()
        parts = [micro_batch_of(data, indices[at : at + CASE.size]) for at in range(0, CASE.batch, CASE.size)]
        loss = sum(mean_loss(model(inputs), targets) for inputs, targets in parts) / len(parts)
        loss.backward()
        losses.append(float(loss))
        norms.append([root_mean_square(layer) for layer in entries])
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CASE.clip)
        optimizer.step()
        scheduler.step()
    return history, losses, given


def root_mean_square(layer: nn.Module) -> float:
    gradients = [parameter.grad.flatten() for parameter in layer.parameters() if parameter.grad is not None]
    return float(torch.cat(gradients).square().mean().sqrt()) if gradients else math.nan


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_and_losses_are_those_of_one_process(ranks: Any, name: str) -> None:
    history, losses, given = alone(POLICIES[name])
    assert history[-1] > history[0] == 0 and len(set(history)) >= 2, history
    for rank in ranks:
        assert repr(rank[name]["run"]) == repr(ranks[0][name]["run"])
        frozen, stages, got, norms, places = zip(*rank[name]["run"], strict=True)
        on_two = {"v": (0, 1, 1, 0), "interleaved": (0, 1, 0, 1), None: (0, 1)}[POLICIES[name].placement]
        assert list(places) == [((0,), on_two)[number - 1] for number in stages]
        assert list(frozen) == history and got == pytest.approx(losses, rel=1e-5)
        assert (stages[0], stages[-1]) == (2, 1) and POLICIES[name].stages in (None, stages)
        assert {step: list(each[0]) for step, each in enumerate(norms) if each} == {
            step: pytest.approx(wanted, rel=1e-4, nan_ok=True) for step, wanted in given.items()
        }


def test_the_history_has_the_steps_of_the_run_that_was_resumed(ranks: Any) -> None:
    """Of the first run up to the checkpoint, of the second from there on."""
    periods, wanted = ranks[0]["loss"]["history"], ranks[0]["loss"]["run"]
    steps = [(each.ran_on.frozen_layers, each.ran_on.stages) for each in periods for _ in range(each.first, each.stop)]
    assert steps == [(frozen, stages) for frozen, stages, *_ in wanted]
    assert {each.ran_on.places for each in periods if each.ran_on.stages == 2} == {(0, 1, 0, 1)}
    assert all(each.ranks == (((0, 0), (1, 0)), ((0, 0), (0, 1)))[each.ran_on.replicas - 1] for each in periods)
    assert [each.first for each in periods if each.begins] == [0, SAVED]
    assert all(each.begins or each.change_seconds > 0 for each in periods) and periods[0].change_seconds == 0
    assert all(each.seconds > 0 for each in periods if each.seconds is not None), "a change takes part of the time"

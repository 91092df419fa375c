"""After a transition a training is, to the bit, the one that starts from the same state in the new shape."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.elastic.samples import Texts, in_order, micro_batch_of
from tests.elastic.training import Case, engine_of, weights
from tests.spawn import launched

SAMPLES, SAVED, STEPS = 20, 6, 8
FREEZE = ((2, 1), (4, 3))
CASES = {
    "shrunk": Case("texts", "adamw", 2, FREEZE, ((4, 1),), scheduler="lambda"),
    "grown": Case("texts", "lamb", 2, FREEZE, ((2, 1), (4, 2)), scheduler="warmup"),
    "fp16 ZeRO-1": Case("texts", "adamw", 2, FREEZE, ((4, 1),), precision="fp16 ZeRO-1"),
}


def bits(case: Case, folder: str) -> dict[str, Any]:
    """Train, save in the new shape and go on; the same from the checkpoint, and in an engine that has always had the shape."""
    data, found = Texts(SAMPLES), {}
    first = engine_of(case, training_data=data)
    found["losses"] = trained(first, SAVED)
    first.save_checkpoint(folder)
    state, _ = everything(first), data.take()
    found |= {"at the checkpoint": state["weights"], "shape": shape_of(first), "rate": state["rate"]}
    found["went on"] = trained(first, STEPS - SAVED), weights(first), data.take()
    first.destroy()
    resumed = engine_of(case, training_data=data)
    resumed.load_checkpoint(folder)
    found["restored"] = shape_of(resumed), resumed.global_steps, resumed.get_lr(), weights(resumed)
    found["resumed"] = trained(resumed, STEPS - SAVED), weights(resumed), data.take()
    resumed.destroy()
    if case == CASES["shrunk"]:
        engine = engine_of(case, training_data=data)  # a new training, which begins with the weights of the checkpoint
        engine.load_checkpoint(folder, load_module_only=True)
        found["only weights"] = tuple(engine.shape)[:2], engine.frozen_layers, engine.global_steps, weights(engine)
        engine.destroy()
        found["started"] = started_in(case, state)
    return found


def trained(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def shape_of(engine: Any) -> Any:
    return tuple(engine.shape), list(engine.module.parts), engine.frozen_layers


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def everything(engine: Any) -> dict[str, Any]:
    """The state of a training: weights, the optimiser's by name, rates and the schedule's position."""
    state, scheduler = engine.basic_optimizer.state, engine.lr_scheduler
    of_optimizer = {name: deepcopy(dict(state[p])) for name, p in engine.module.named_parameters() if p in state}
    position = None if scheduler is None else deepcopy(scheduler.state_dict())
    return {"weights": weights(engine), "optimizer": of_optimizer, "rate": engine.get_lr(), "scheduler": position}


def started_in(case: Case, state: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """An engine whose first step has one stage and the frozen layers, with the state put in by hand."""
    engine, data = engine_of(replace(case, stages=1, freeze=((0, case.frozen(SAVED)),), resize=())), Texts(SAMPLES)
    optimizer = engine.basic_optimizer
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(state["weights"][name])
            if name in state["optimizer"]:
                optimizer.state[parameter] = deepcopy(state["optimizer"][name])
    engine.lr_scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, state["rate"], strict=True):
        group["lr"] = rate
    losses, share, replica = [], case.batch // engine.dp_world_size, engine.grid.data_parallel_id
    for indices in in_order(STEPS, case.batch, SAMPLES)[SAVED:]:
        own = indices[replica * share :][:share]
        parts = [micro_batch_of(data, own[at : at + case.size]) for at in range(0, share, case.size)]
        losses.append(float(engine.train_batch(iter(parts))))
    found = losses, weights(engine)
    engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: bits(case, f"{folder}/{name}") for name, case in CASES.items()}


ranks = launched(worker, 2, timeout=200, folder=True)


@pytest.mark.parametrize("name", CASES)
def test_after_a_transition_it_is_the_training_that_starts_there(ranks: list[Any], name: str) -> None:
    case = CASES[name]
    stages = case.stages_at(SAVED)
    for found in (rank[name] for rank in ranks):
        shape, steps, rate, had = found["restored"]
        assert (shape, steps, rate) == (found["shape"], SAVED, found["rate"]) and same(had, found["at the checkpoint"])
        assert shape[0][:2] == (stages, 2 // stages) and shape[2] == case.frozen(SAVED)
        losses, after, samples = found["went on"]
        assert losses != found["losses"][-len(losses) :] and len(losses) == STEPS - SAVED
        assert found["resumed"][0] == losses and same(found["resumed"][1], after) and found["resumed"][2] == samples


def test_it_is_the_training_of_an_engine_that_has_always_had_the_shape(ranks: list[Any]) -> None:
    for found in (rank["shrunk"] for rank in ranks):
        assert found["started"][0] == found["went on"][0] and same(found["started"][1], found["went on"][1])


def test_load_module_only_begins_a_new_training_with_the_weights(ranks: list[Any]) -> None:
    everywhere = {name: tensor for rank in ranks for name, tensor in rank["shrunk"]["at the checkpoint"].items()}
    for *at, had in (rank["shrunk"]["only weights"] for rank in ranks):
        assert at == [(2, 1), 0, 0] and all(torch.equal(tensor, everywhere[name]) for name, tensor in had.items())

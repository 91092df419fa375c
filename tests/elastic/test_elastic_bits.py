"""After a transition a training is, to the bit, the one that starts from the same state in the new shape."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from tests.elastic.samples import Texts, in_order, micro_batch_of
from tests.elastic.training import Case, engine_of, weights
from tests.spawn import launched

SAMPLES, SAVED, STEPS = 20, 6, 8
FREEZE = ((2, 1), (4, 3))
V = {"slices": 2, "stages_per_place": 2, "placement": "v"}  # the shape at the start
CASE = Case("texts", "adamw", 2, FREEZE, ((4, 1),), scheduler="lambda")


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train, save in the new shape and go on; the same in an engine that has always had the shape."""
    first = engine_of(CASE, training_data=Texts(SAMPLES), token_pipeline=V)
    trained(first, SAVED)
    first.save_checkpoint(folder)
    state = everything(first)
    found = {"at the checkpoint": state["weights"], "went on": (trained(first, STEPS - SAVED), weights(first))}
    first.destroy()
    engine = engine_of(CASE, training_data=Texts(SAMPLES), token_pipeline=V)
    engine.load_checkpoint(folder, load_module_only=True)
    found["only weights"] = tuple(engine.shape)[:2], engine.frozen_layers, engine.global_steps, weights(engine)
    engine.destroy()
    return {**found, "started": started_in(CASE, state)}


def trained(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


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


ranks = launched(worker, 2, timeout=200, folder=True)


def test_it_is_the_training_of_an_engine_that_has_always_had_the_shape(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["started"][0] == found["went on"][0] and same(found["started"][1], found["went on"][1])


def test_load_module_only_begins_a_new_training_with_the_weights(ranks: list[Any]) -> None:
    everywhere = {name: tensor for rank in ranks for name, tensor in rank["at the checkpoint"].items()}
    for *at, had in (rank["only weights"] for rank in ranks):
        assert at == [(2, 1), 0, 0] and all(torch.equal(tensor, everywhere[name]) for name, tensor in had.items())

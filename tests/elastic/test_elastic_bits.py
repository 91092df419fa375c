"""After a transition a training is, to the bit, the one that starts from the same state in the new shape."""

from dataclasses import replace
from typing import Any

import torch

from tests.elastic.samples import Texts
from tests.elastic.training import Case, engine_of, weights
from tests.spawn import launched

SAMPLES, SAVED, STEPS = 20, 6, 8
FREEZE = ((2, 1), (4, 3))
V = {"slices": 2, "stages_per_place": 2, "placement": "v"}  # the shape at the start
CASE = Case("texts", "adamw", 2, FREEZE, ((4, 1),), scheduler="lambda")


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train, save in the new shape and go on; go on from there in an engine that has always had the shape."""
    first = engine_of(CASE, training_data=Texts(SAMPLES), token_pipeline=V)
    trained(first, SAVED)
    first.save_checkpoint(folder)
    found = {"at the checkpoint": weights(first), "went on": (trained(first, STEPS - SAVED), weights(first))}
    first.destroy()
    engine = engine_of(CASE, training_data=Texts(SAMPLES), token_pipeline=V)
    engine.load_checkpoint(folder, load_module_only=True)
    found["only weights"] = tuple(engine.shape)[:2], engine.frozen_layers, engine.global_steps, weights(engine)
    engine.destroy()
    always = replace(CASE, stages=1, freeze=((0, CASE.frozen(SAVED)),), resize=())
    engine = engine_of(always, training_data=Texts(SAMPLES))
    assert engine.num_stages == 1
    engine.load_checkpoint(folder)
    found["started"] = trained(engine, STEPS - SAVED), weights(engine)
    engine.destroy()
    return found


def trained(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


ranks = launched(worker, 2, timeout=200, folder=True)


def test_it_is_the_training_of_an_engine_that_has_always_had_the_shape(ranks: list[Any]) -> None:
    for (losses, trained), (others, wanted) in ((found["started"], found["went on"]) for found in ranks):
        assert losses == others and trained.keys() == wanted.keys()
        assert all(torch.equal(trained[name], weight) for name, weight in wanted.items())


def test_load_module_only_begins_a_new_training_with_the_weights(ranks: list[Any]) -> None:
    everywhere = {name: tensor for rank in ranks for name, tensor in rank["at the checkpoint"].items()}
    for *at, had in (rank["only weights"] for rank in ranks):
        assert at == [(2, 1), 0, 0] and all(torch.equal(tensor, everywhere[name]) for name, tensor in had.items())

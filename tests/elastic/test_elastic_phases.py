"""MixedBatch's phases beside freezes and reshapes: a reshape within a phase, at a switch and before one, and resumed runs."""

from itertools import accumulate
from typing import Any

import pytest

from ds_terapipe.elastic.sampler import SampleOrder
from tests.elastic.samples import Texts
from tests.elastic.training import are_the_same, objects_of, prefixes, weights
from tests.optim.phase_runs import LRS, PHASES, SAMPLES, STEPS, keys_of, reference
from tests.pipeline.models import gpt, mean_loss
from tests.pipeline.training import build_engine, difference
from tests.spawn import launched

SAVED, SEED, MOMENTUM, USUAL = 3, 5, 0.9, 1e-5
BEGINS = [0, *accumulate(step["batch_size"] for step in STEPS)]  # samples before each step
# Steps 2 and 5 are the first of a phase: a reshape within one, before a switch and at one.
FREEZE, RESIZE = [[1, 1], [3, 2]], [[1, 1], [4, 2], [5, 1]]
STAGES, FROZEN = [2, 1, 1, 1, 2, 1, 1], [0, 1, 1, 2, 2, 2, 2]


def engine_of(data: Any, block: dict[str, Any] | None = None) -> Any:
    block = block or {
        "freeze": {"policy": "schedule", "frozen_layers": FREEZE}, "resize": {"policy": RESIZE},
        "data": {"shuffle": True, "seed": SEED}, "cache": {"enabled": True},
    }  # fmt: skip
    config = {**keys_of(PHASES), "elastic_pipeline": block}
    optimizer = {"type": "SGD", "params": {"lr": 1.0, "momentum": MOMENTUM}}
    return build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2}, optimizer=optimizer, training_data=data, config=config)


def trained(engine: Any, steps: int) -> dict[str, Any]:
    """Losses and settings of every step, and weights at the end."""
    found: dict[str, Any] = {"losses": [], "steps": []}
    for _ in range(steps):
        rate, batch = engine.get_lr(), engine.train_batch_size()
        found["losses"].append(float(engine.train_batch()))
        found["steps"].append((rate, batch, engine.frozen_layers, engine.num_stages, engine.dp_world_size))
    return {**found, "weights": weights(engine), "counted": (engine.global_samples, engine.lr_scheduler.phase_index)}


def runs(folder: str) -> dict[str, Any]:
    """In one engine up to a checkpoint, and in another one from there on."""
    engine = engine_of(Texts(SAMPLES))
    objects = objects_of(engine)
    first = trained(engine, SAVED)
    engine.save_checkpoint(folder)
    same = are_the_same(objects, objects_of(engine))
    engine.destroy()
    engine = engine_of(Texts(SAMPLES))
    engine.load_checkpoint(folder)
    rest = trained(engine, len(STEPS) - SAVED)
    engine.destroy()
    return {**rest, **{key: first[key] + rest[key] for key in ("losses", "steps")}, "same": same}


def epochs() -> list[bool]:
    """Whether layers are frozen in each step, by a policy that decides at the end of an epoch."""
    engine, frozen = engine_of(Texts(SAMPLES), {"freeze": {"policy": "alpha", "interval": "epoch"}}), []
    for _ in STEPS:
        engine.train_batch()
        frozen.append(engine.frozen_layers > 0)
    engine.destroy()
    return frozen


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {**runs(folder), "epochs": epochs()}


ranks = launched(worker, 2, timeout=240, folder=True)


def test_phases_and_reshapes_are_the_training_in_one_process(ranks: Any) -> None:
    order = SampleOrder(SAMPLES, True, SEED).between(0, BEGINS[-1])
    trace = reference([order], momentum=MOMENTUM, frozen=lambda step: prefixes(gpt(2), FROZEN[step]))
    assert trace.weights.keys() == {key for rank in ranks for key in rank["weights"]}
    for found in ranks:
        assert found["counted"] == (BEGINS[-1], 2) and found["losses"] == pytest.approx(trace.losses, rel=USUAL)
        assert max(difference(tensor, trace.weights[key]) for key, tensor in found["weights"].items()) <= USUAL
        for step, (rate, *seen) in enumerate(found["steps"]):
            assert rate == pytest.approx([LRS[step]], rel=1e-12), step
            assert seen == [STEPS[step]["batch_size"], FROZEN[step], STAGES[step], 2 // STAGES[step]], step
        assert found["same"]


def test_an_epoch_is_counted_by_samples(ranks: Any) -> None:
    over = [samples // SAMPLES for samples in BEGINS[:-1]]
    assert over == [0, 0, 0, 0, 0, 1, 1]  # with as many samples in all steps as in the last phase, none
    assert all(rank["epochs"] == [epochs > 0 for epochs in over] for rank in ranks)

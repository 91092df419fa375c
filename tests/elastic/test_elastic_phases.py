"""MixedBatch's phases beside freezes and reshapes: a reshape within a phase, at a switch and before one, and resumed runs."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from ds_terapipe.elastic.sampler import SampleOrder
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
from tests.elastic.training import are_the_same, objects_of, prefixes, weights
from tests.optim.phase_runs import SAMPLES, Texts, stacked
from tests.pipeline.models import Plain, gpt, mean_loss
from tests.pipeline.training import SGD, Trace, build_engine, difference, train_module
from tests.spawn import launched

PHASES: list[dict[str, Any]] = [
    {"steps": 3, "batch_size": 4, "seq_length": 8, "lr": 0.2, "warmup_steps": 2},
    {"steps": 4, "batch_size": 6, "seq_length": 16, "lr": 0.3, "warmup_steps": 1},
    {"steps": 3, "batch_size": 2, "seq_length": 12, "lr": 0.1, "warmup_steps": 0},
]
BY_STEP = [number for number, phase in enumerate(PHASES) for _ in range(phase["steps"])]
ENDS = [sum(PHASES[phase]["batch_size"] for phase in BY_STEP[:step]) for step in range(len(BY_STEP) + 1)]
POSITIONS = list(pairwise(ENDS))  # first and last of every step
STEPS, SAVED, SEED, USUAL = len(BY_STEP), 5, 5, 1e-5
# Steps 3 and 7 are the first of a phase: a reshape within one, before a switch and at one.
FREEZE, RESIZE, MICRO = [[2, 1], [5, 2]], [[2, 1], [6, 2], [7, 1]], (2, 3, 1)
STAGES = [2, 2, 1, 1, 1, 1, 2, 1, 1, 1]
FROZEN = [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


def engine_of(data: Any, block: dict[str, Any] | None = None) -> Any:
    phases = [{**phase, "micro_batch_size": size} for phase, size in zip(PHASES, MICRO, strict=True)]
    block = block or {
        "freeze": {"policy": "schedule", "frozen_layers": FREEZE}, "resize": {"policy": RESIZE},
        "data": {"shuffle": True, "seed": SEED}, "cache": {"enabled": True},
    }  # fmt: skip
    optimizer = {"type": "SGD", "params": {**SGD["params"], "momentum": 0.9}}
    config = {"scheduler": {"type": "MixedBatch", "params": {"phases": phases}}, "elastic_pipeline": block}
    return build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2}, optimizer=optimizer, training_data=data, config=config)


def trained(engine: Any, steps: int) -> dict[str, Any]:
    """Losses and settings of every step, and weights at the end."""
    found: dict[str, Any] = {"losses": [], "steps": []}
    for _ in range(steps):
        phase, batch = engine.lr_scheduler.phase_index, engine.train_batch_size()
        rates = {group["lr"] for group in engine.basic_optimizer.param_groups}
        found["losses"].append(float(engine.train_batch()))
        found["steps"].append((phase, batch, rates, engine.frozen_layers, engine.num_stages, engine.dp_world_size))
    return {**found, "weights": weights(engine), "counted": (engine.global_samples, engine.lr_scheduler.phase_index)}


def runs(folder: str) -> dict[str, Any]:
    """In one go with a checkpoint on the way, and from the checkpoint."""
    engine = engine_of(Texts())
    objects = objects_of(engine)
    first = trained(engine, SAVED)
    engine.save_checkpoint(folder)
    rest = trained(engine, STEPS - SAVED)
    joined = {key: first[key] + rest[key] for key in ("losses", "steps")}
    found: dict[str, Any] = {"whole": {**rest, **joined}, "same": are_the_same(objects, objects_of(engine))}
    engine.destroy()
    engine = engine_of(Texts())
    engine.load_checkpoint(folder)
    found["resumed"] = trained(engine, STEPS - SAVED)
    engine.destroy()
    return found


def epochs() -> list[bool]:
    """Whether layers are frozen in each step, by a policy that decides at the end of an epoch."""
    engine, frozen = engine_of(Texts(), {"freeze": {"policy": "alpha", "interval": "epoch"}}), []
    for _ in range(STEPS):
        engine.train_batch()
        frozen.append(engine.frozen_layers > 0)
    engine.destroy()
    return frozen


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {**runs(folder), "epochs": epochs()}


ranks = launched(worker, 2, timeout=240, folder=True)


@pytest.fixture(scope="module")
def alone() -> tuple[Trace, list[float]]:
    """The training on the same samples with the same layers frozen in one process, and its rates."""
    model, order, rates = Plain(gpt(2)), SampleOrder(SAMPLES, True, SEED), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler, lengths = MixedBatch(optimizer, phases=PHASES), [PHASES[number]["seq_length"] for number in BY_STEP]
    steps = [[stacked(order.between(*at), length)] for at, length in zip(POSITIONS, lengths, strict=True)]

    def begin(step: int) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(not key.startswith(prefixes(gpt(2), FROZEN[step])))

    loss = lambda inputs, targets, step: mean_loss(model(inputs), targets)  # noqa: E731
    return train_module(model, optimizer, steps, loss, before_step=begin, after_step=lambda step: scheduler.step()), rates


@pytest.mark.parametrize("way", ["whole", "resumed"])
def test_phases_and_reshapes_are_the_training_in_one_process(ranks: Any, alone: Any, way: str) -> None:
    (trace, rates), begin = alone, SAVED if way == "resumed" else 0
    wanted = trace.weights
    everywhere = {key: tensor for rank in ranks for key, tensor in rank["whole"]["weights"].items()}
    assert wanted.keys() == {key for rank in ranks for key in rank[way]["weights"]}
    for found, first in ((rank[way], rank["whole"]) for rank in ranks):
        assert found["counted"] == (ENDS[-1], 2) and found["losses"] == pytest.approx(trace.losses[begin:], rel=USUAL)
        assert max(difference(tensor, wanted[key]) for key, tensor in found["weights"].items()) <= USUAL
        if way == "resumed":  # to the bit; by the times that were measured a layer may be on another stage
            assert found["losses"] == first["losses"][SAVED:]
            assert all(torch.equal(tensor, everywhere[key]) for key, tensor in found["weights"].items())
        for step, seen in enumerate(found["steps"], start=begin):
            phase, stages = BY_STEP[step], STAGES[step]
            settings = phase, PHASES[phase]["batch_size"], {rates[step]}, FROZEN[step], stages, 2 // stages
            assert seen == settings, step
    assert all(rank["same"] for rank in ranks)


def test_an_epoch_is_counted_by_samples(ranks: Any) -> None:
    over = [first // SAMPLES for first, _ in POSITIONS]
    assert over[SAVED] == 0 and over[SAVED + 1] == 1  # with as many samples in all steps as in this phase, one earlier
    assert all(rank["epochs"] == [epochs > 0 for epochs in over] for rank in ranks)

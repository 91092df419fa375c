"""MixedBatch's phases beside freezes and reshapes: a reshape within a phase, at a switch and before one, and resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from ds_terapipe.elastic.cache.shelf import Shelf
from ds_terapipe.elastic.sampler import SampleOrder
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
from tests.elastic.training import are_the_same, objects_of, prefixes, weights
from tests.optim.phase_runs import SAMPLES, Texts, error_of, stacked
from tests.pipeline.models import Plain, gpt, mean_loss
from tests.pipeline.training import SGD, build_engine, difference
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


def engine_of(data: Any = None, block: dict[str, Any] | None = None, odd: int = 2) -> Any:
    phases = [{**phase, "micro_batch_size": size} for phase, size in zip(PHASES, MICRO, strict=True)]
    phases[2]["batch_size"] = odd
    block = block or {
        "freeze": {"policy": "schedule", "frozen_layers": FREEZE},
        "resize": {"policy": RESIZE},
        "data": {"shuffle": True, "seed": SEED},
        "cache": {"enabled": True},
    }
    optimizer = {"type": "SGD", "params": {**SGD["params"], "momentum": 0.9}}
    config = {"scheduler": {"type": "MixedBatch", "params": {"phases": phases}}, "elastic_pipeline": block}
    return build_engine(
        gpt(2), mean_loss, token_pipeline={"slices": 2}, optimizer=optimizer, training_data=data, config=config
    )


class Own(Iterator[Any]):
    """A user's iterator, of the launch: this replica's part of every step, in micro-batches of the phase."""

    def __init__(self, engine: Any, data: Texts) -> None:
        self.engine, self.data = engine, data
        self.consumed = self.taken = 0

    def __next__(self) -> Any:
        size, batch = self.engine.start_shape.micro_batch, self.engine.train_batch_size()
        first = self.consumed + self.taken
        self.taken += size
        if self.taken == batch:
            self.consumed, self.taken = self.consumed + batch, 0
        return stacked(SampleOrder(SAMPLES, True, SEED).between(first, first + size), self.data.length)


def trained(engine: Any, data: Texts, steps: int, iterator: Any = None) -> dict[str, Any]:
    """Losses, settings and samples of every step, and weights at the end."""
    found: dict[str, Any] = {"losses": [], "steps": [], "read": []}
    cut: list[Any] = []  # micro-batches and their size: a switch comes right behind a step
    note = lambda *_: cut.append((engine.micro_batches, engine.micro_batch_size))  # noqa: E731
    hook = engine.basic_optimizer.register_step_pre_hook(note)
    data.asked.clear()
    for _ in range(steps):
        phase, batch = engine.lr_scheduler.phase_index, engine.train_batch_size()
        rates = {group["lr"] for group in engine.basic_optimizer.param_groups}
        found["losses"].append(float(engine.train_batch(*([] if iterator is None else [iterator]))))
        found["steps"].append((phase, batch, rates, engine.frozen_layers, engine.num_stages, engine.dp_world_size))
        found["read"].append((engine.stage_id, engine.grid.data_parallel_id, data.asked[:], cut[-1]))
        data.asked.clear()
    hook.remove()
    return {**found, "weights": weights(engine), "counted": (engine.global_samples, engine.lr_scheduler.phase_index)}


def runs(folder: str) -> dict[str, Any]:
    """In one go with a checkpoint on the way, from the checkpoint, and with iterators of one's own.

    And the steps behind which the cache makes room, for samples are others from there on.
    """
    data, forgotten, forget = Texts(), [], Shelf.forget
    engine = engine_of(data)
    objects = objects_of(engine)
    with mock.patch.object(Shelf, "forget", lambda shelf: (forgotten.append(engine.global_steps), forget(shelf))):
        first = trained(engine, data, SAVED)
        engine.save_checkpoint(folder)
        rest = trained(engine, data, STEPS - SAVED)
    joined = {key: first[key] + rest[key] for key in ("losses", "steps", "read")}
    found: dict[str, Any] = {
        "whole": {**rest, **joined},
        "same": are_the_same(objects, objects_of(engine)),
        "forgotten": forgotten,
    }
    engine.destroy()
    data = Texts()
    engine = engine_of(data)
    engine.load_checkpoint(folder)
    found["resumed"] = trained(engine, data, STEPS - SAVED)
    engine.destroy()
    engine, data = engine_of(), Texts()
    if engine.reads_data:
        engine.lr_scheduler.register_dataset(data)
    found["own"] = trained(engine, data, STEPS, Own(engine, data))
    engine.destroy()
    return found


def epochs(folder: str) -> dict[str, Any]:
    """Entries frozen in every step by a policy that decides at the end of an epoch; from a checkpoint on."""
    data, found = Texts(), {}
    for way in ("whole", "resumed"):
        engine, frozen = engine_of(data, {"freeze": {"policy": "alpha", "interval": "epoch"}}), []
        if way == "resumed":
            engine.load_checkpoint(folder)
        for step in range(engine.global_steps, STEPS):
            if way == "whole" and step == SAVED:
                engine.save_checkpoint(folder)
            engine.train_batch()
            frozen.append(engine.frozen_layers)
        found[way] = frozen
        engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    blocks = [{"resize": {"policy": policy}} for policy in ([[4, 1]], "halve")]
    refused = [error_of(lambda b=block: engine_of(None, b, odd=3)) for block in blocks]
    return {**runs(f"{folder}/runs"), "epochs": epochs(f"{folder}/epochs"), "refused": refused}


ranks = launched(worker, 2, timeout=240, folder=True)


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, weights and rates of the same samples with the same layers frozen, in one process."""
    model, order, losses, rates = Plain(gpt(2)), SampleOrder(SAMPLES, True, SEED), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = MixedBatch(optimizer, phases=PHASES)
    for step, position in enumerate(POSITIONS):
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(not key.startswith(prefixes(gpt(2), FROZEN[step])))
        rates.append(optimizer.param_groups[0]["lr"])
        inputs, targets = stacked(order.between(*position), scheduler.phase.seq_length)
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {key: p.detach() for key, p in model.named_parameters()}, rates


@pytest.mark.parametrize("way", ["whole", "resumed", "own"])
def test_phases_and_reshapes_are_the_training_in_one_process(ranks: Any, alone: Any, way: str) -> None:
    (losses, wanted, rates), begin = alone, SAVED if way == "resumed" else 0
    everywhere = {key: tensor for rank in ranks for key, tensor in rank["whole"]["weights"].items()}
    assert wanted.keys() == {key for rank in ranks for key in rank[way]["weights"]}
    for found, first in ((rank[way], rank["whole"]) for rank in ranks):
        assert found["counted"] == (ENDS[-1], 2) and found["losses"] == pytest.approx(losses[begin:], rel=USUAL)
        assert max(difference(tensor, wanted[key]) for key, tensor in found["weights"].items()) <= USUAL
        if way == "resumed":  # to the bit; by the times that were measured a layer may be on another stage
            assert found["losses"] == first["losses"][SAVED:]
            assert all(torch.equal(tensor, everywhere[key]) for key, tensor in found["weights"].items())
        for step, seen in enumerate(found["steps"], start=begin):
            phase, stages = BY_STEP[step], STAGES[step]
            settings = phase, PHASES[phase]["batch_size"], {rates[step]}, FROZEN[step], stages, 2 // stages
            assert seen == settings, step
    assert all(rank["same"] for rank in ranks)


@pytest.mark.parametrize("way", ["whole", "resumed"])
def test_a_step_reads_its_samples_once_as_long_as_its_phase_says(ranks: Any, way: str) -> None:
    order, begin = SampleOrder(SAMPLES, True, SEED), SAVED if way == "resumed" else 0
    for step, of_ranks in enumerate(zip(*(rank[way]["read"] for rank in ranks), strict=True), start=begin):
        (first, end), phase, stages = POSITIONS[step], BY_STEP[step], STAGES[step]
        for stage in {0, stages - 1}:
            parts = {replica: asked for at, replica, asked, _ in of_ranks if at == stage}
            got = [each for replica in sorted(parts) for each in parts[replica]]
            assert got == [(index, PHASES[phase]["seq_length"]) for index in order.between(first, end)], (step, stage)
        for *_, (pieces, size) in of_ranks:
            share, wanted = (end - first) * stages // 2, MICRO[phase]
            assert pieces * size == share and size <= wanted and (size == wanted or share % wanted)


def test_an_epoch_is_counted_by_samples(ranks: Any) -> None:
    over = [first // SAMPLES for first, _ in POSITIONS]
    assert over[SAVED] == 0 and over[SAVED + 1] == 1  # with as many samples in all steps as in this phase, one earlier
    for found in (rank["epochs"] for rank in ranks):
        assert [entries > 0 for entries in found["whole"]] == [epochs > 0 for epochs in over]
        assert found["resumed"] == found["whole"][SAVED:]


def test_every_phases_batch_has_to_be_divided(ranks: Any) -> None:
    for text in (text for rank in ranks for text in rank["refused"]):
        assert text.startswith("ConfigError: elastic_pipeline.resize.policy: got 1, must be a number of stages whose")
        assert "divide the batch of 3 samples" in text and text.endswith("use 2") and "\n" not in text


def test_the_cache_makes_room_where_a_phase_has_samples_of_another_length(ranks: Any) -> None:
    """From step 2 on a rank of the first stage has one; phases begin after steps 3 and 7."""
    found = [rank["forgotten"] for rank in ranks]
    assert [3, 7] in found and all(set(steps) <= {3, 7} for steps in found)

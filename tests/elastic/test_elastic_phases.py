"""MixedBatch's phases beside freezes and reshapes: a reshape within a phase, at a switch and before one, and resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ds_terapipe.elastic.cache.shelf import Shelf
from ds_terapipe.elastic.sampler import SampleOrder
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
from tests.elastic.training import Objects, prefixes
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


class Way(NamedTuple):
    """Stages at the start, freezes, reshapes, and the micro-batch of every phase; steps 3 and 7 are the first of a phase."""

    stages: int
    freeze: list[list[int]]
    resize: list[list[int]]
    micro: tuple[int, int, int] = (2, 2, 1)

    def stages_at(self, step: int) -> int:
        return next((stages for begin, stages in reversed(self.resize) if begin <= step), self.stages)

    def frozen_at(self, step: int) -> int:
        return max((entries for begin, entries in self.freeze if begin <= step), default=0)


WAYS = {
    "within, at a switch": Way(2, [[2, 1], [5, 2]], [[2, 1], [7, 2]]),
    "grown, before one": Way(1, [[2, 1]], [[2, 2], [6, 1]], (2, 3, 1)),
}
ANY = "within, at a switch"


def engine_of(name: str, data: Any = None, block: dict[str, Any] | None = None, phases: Any = None) -> Any:
    way = WAYS[name]
    phases = phases or [{**phase, "micro_batch_size": size} for phase, size in zip(PHASES, way.micro, strict=True)]
    block = block or {
        "freeze": {"policy": "schedule", "frozen_layers": way.freeze},
        "resize": {"policy": way.resize},
        "data": {"shuffle": True, "seed": SEED},
        "cache": {"enabled": True},
    }
    return build_engine(
        gpt(2),
        mean_loss,
        token_pipeline={"slices": 2},
        stages=way.stages,
        micro_batches=way.stages,  # in the first phase
        optimizer={"type": "SGD", "params": {**SGD["params"], "momentum": 0.9}},
        training_data=data,
        config={"scheduler": {"type": "MixedBatch", "params": {"phases": phases}}, "elastic_pipeline": block},
    )


class Own(Iterator[Any]):
    """A user's iterator, of the launch: this replica's part of every step, in micro-batches of the phase."""

    def __init__(self, engine: Any, data: Texts) -> None:
        self.engine, self.data = engine, data
        self.replica, self.replicas = engine.grid.data_parallel_id, engine.dp_world_size
        self.consumed = self.taken = 0

    def __next__(self) -> Any:
        size, batch = self.engine.start_shape.micro_batch, self.engine.train_batch_size()
        share = batch // self.replicas
        first = self.consumed + self.replica * share + self.taken
        self.taken += size
        if self.taken == share:
            self.consumed, self.taken = self.consumed + batch, 0
        return stacked(SampleOrder(SAMPLES, True, SEED).between(first, first + size), self.data.length)


def trained(engine: Any, data: Texts, steps: int, iterator: Any = None) -> dict[str, Any]:
    """Losses, settings and samples of every step, and weights at the end."""
    found: dict[str, Any] = {"losses": [], "steps": [], "read": []}
    cut: list[Any] = []  # micro-batches and their size: a switch comes right behind a step
    hook = engine.basic_optimizer.register_step_pre_hook(
        lambda *_: cut.append((engine.micro_batches, engine.micro_batch_size))
    )
    data.asked.clear()
    for _ in range(steps):
        phase, batch = engine.lr_scheduler.phase_index, engine.train_batch_size()
        rates = {group["lr"] for group in engine.basic_optimizer.param_groups}
        found["losses"].append(float(engine.train_batch(*([] if iterator is None else [iterator]))))
        found["steps"].append((phase, batch, rates, engine.frozen_layers, engine.num_stages, engine.dp_world_size))
        found["read"].append((engine.stage_id, engine.grid.data_parallel_id, data.asked[:], cut[-1]))
        data.asked.clear()
    hook.remove()
    found["weights"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return {**found, "counted": (engine.global_samples, engine.lr_scheduler.phase_index)}


def whole(name: str, folder: str) -> dict[str, Any]:
    """In one go with a checkpoint on the way, from the checkpoint, and with iterators of one's own.

    And the steps behind which the cache makes room, for samples are others from there on.
    """
    data, forgotten, forget = Texts(), [], Shelf.forget
    engine = engine_of(name, data)
    objects = Objects(engine)
    with mock.patch.object(Shelf, "forget", lambda shelf: (forgotten.append(engine.global_steps), forget(shelf))):
        first = trained(engine, data, SAVED)
        engine.save_checkpoint(folder)
        rest = trained(engine, data, STEPS - SAVED)
    joined = {key: first[key] + rest[key] for key in ("losses", "steps", "read")}
    found: dict[str, Any] = {"whole": {**rest, **joined}, "same": objects.same(), "forgotten": forgotten}
    engine.destroy()
    data = Texts()
    engine = engine_of(name, data)
    engine.load_checkpoint(folder)
    found["resumed"] = trained(engine, data, STEPS - SAVED)
    engine.destroy()
    engine, data = engine_of(name), Texts()
    if engine.reads_data:
        engine.lr_scheduler.register_dataset(data)
    found["own"] = trained(engine, data, STEPS, Own(engine, data))
    engine.destroy()
    return found


def epochs(folder: str) -> dict[str, Any]:
    """Entries frozen in every step by a policy that decides at the end of an epoch; from a checkpoint on."""
    data, found = Texts(), {}
    for way in ("whole", "resumed"):
        engine, frozen = engine_of(ANY, data, {"freeze": {"policy": "alpha", "interval": "epoch"}}), []
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
    found: dict[str, Any] = {name: whole(name, f"{folder}/{name}") for name in WAYS}
    odd = [*PHASES[:2], {**PHASES[2], "batch_size": 3, "micro_batch_size": 1}]
    blocks = [{"resize": {"policy": policy}} for policy in ([[4, 1]], "halve")]
    found["refused"] = [error_of(lambda b=block: engine_of(ANY, None, b, odd)) for block in blocks]
    return {**found, "epochs": epochs(f"{folder}/epochs")}


ranks = launched(worker, 2, timeout=240, folder=True)


@cache
def in_one_process(name: str) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, weights and rates of the same samples with the same layers frozen."""
    model, order, losses, rates = Plain(gpt(2)), SampleOrder(SAMPLES, True, SEED), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = MixedBatch(optimizer, phases=PHASES)
    for step, (first, end) in enumerate(POSITIONS):
        for key, parameter in model.named_parameters():
            if key.startswith(prefixes(gpt(2), WAYS[name].frozen_at(step)) or ("nothing",)):
                parameter.requires_grad_(False)
        rates.append(optimizer.param_groups[0]["lr"])
        inputs, targets = stacked(order.between(first, end), scheduler.phase.seq_length)
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {key: p.detach() for key, p in model.named_parameters()}, rates


@pytest.mark.parametrize("way", ["whole", "resumed", "own"])
@pytest.mark.parametrize("name", WAYS)
def test_phases_and_reshapes_are_the_training_in_one_process(ranks: Any, name: str, way: str) -> None:
    (losses, weights, rates), begin = in_one_process(name), SAVED if way == "resumed" else 0
    everywhere = {key: tensor for rank in ranks for key, tensor in rank[name]["whole"]["weights"].items()}
    assert weights.keys() == {key for rank in ranks for key in rank[name][way]["weights"]}
    for found, first in ((rank[name][way], rank[name]["whole"]) for rank in ranks):
        assert found["counted"] == (ENDS[-1], 2) and found["losses"] == pytest.approx(losses[begin:], rel=USUAL)
        assert max(difference(tensor, weights[key]) for key, tensor in found["weights"].items()) <= USUAL
        if way == "resumed":  # to the bit; by the times that were measured a layer may be on another stage
            assert found["losses"] == first["losses"][SAVED:]
            assert all(torch.equal(tensor, everywhere[key]) for key, tensor in found["weights"].items())
        for step, seen in enumerate(found["steps"], start=begin):
            phase, stages = BY_STEP[step], WAYS[name].stages_at(step)
            frozen = WAYS[name].frozen_at(step)
            assert seen == (phase, PHASES[phase]["batch_size"], {rates[step]}, frozen, stages, 2 // stages), step
    assert all(rank[name]["same"] for rank in ranks)


@pytest.mark.parametrize("way", ["whole", "resumed"])
@pytest.mark.parametrize("name", WAYS)
def test_a_step_reads_its_samples_once_as_long_as_its_phase_says(ranks: Any, name: str, way: str) -> None:
    order, begin = SampleOrder(SAMPLES, True, SEED), SAVED if way == "resumed" else 0
    for step, of_ranks in enumerate(zip(*(rank[name][way]["read"] for rank in ranks), strict=True), start=begin):
        (first, end), phase, stages = POSITIONS[step], BY_STEP[step], WAYS[name].stages_at(step)
        for stage in {0, stages - 1}:
            parts = {replica: asked for at, replica, asked, _ in of_ranks if at == stage}
            got = [each for replica in sorted(parts) for each in parts[replica]]
            assert got == [(index, PHASES[phase]["seq_length"]) for index in order.between(first, end)], (step, stage)
        for *_, (pieces, size) in of_ranks:
            share, wanted = (end - first) * stages // 2, WAYS[name].micro[phase]
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
    found = [rank[ANY]["forgotten"] for rank in ranks]
    assert [3, 7] in found and all(set(steps) <= {3, 7} for steps in found)

"""MixedBatch's phases beside freezes and reshapes: a reshape within a phase, at a switch and before one, and resumed runs."""

from __future__ import annotations

import tempfile
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
from tests.mutants.claims import holds
from tests.optim.phase_runs import SAMPLES, Texts, error_of, stacked
from tests.pipeline.models import Plain, gpt, mean_loss
from tests.pipeline.training import SGD, build_engine, difference
from tests.spawn import launched, run_ranks

PHASES: list[dict[str, Any]] = [
    {"steps": 3, "batch_size": 4, "seq_length": 8, "lr": 0.2, "warmup_steps": 2},
    {"steps": 4, "batch_size": 6, "seq_length": 16, "lr": 0.3, "warmup_steps": 1},
    {"steps": 3, "batch_size": 2, "seq_length": 12, "lr": 0.1, "warmup_steps": 0},
]
BY_STEP = [number for number, phase in enumerate(PHASES) for _ in range(phase["steps"])]
STEPS, SAVED, SEED = len(BY_STEP), 5, 5


class Way(NamedTuple):
    """Stages at the start, freezes, reshapes, and the micro-batch of every phase; steps 3 and 7 are the first of a phase."""

    stages: int
    freeze: list[list[int]]
    resize: list[list[int]]
    micro: tuple[int, int, int] = (2, 2, 1)

    @property
    def phases(self) -> list[dict[str, Any]]:
        return [{**phase, "micro_batch_size": size} for phase, size in zip(PHASES, self.micro, strict=True)]


CASES = {
    "within, at a switch": Way(2, [[2, 1], [5, 2]], [[2, 1], [7, 2]]),
    "at a switch, before one": Way(2, [[3, 1]], [[3, 1], [6, 2]]),
    "grown": Way(1, [[2, 1]], [[2, 2], [8, 1]], (2, 3, 1)),
}
ANY, USUAL = "within, at a switch", 1e-5


def blocks(name: str) -> dict[str, Any]:
    return {
        "freeze": {"policy": "schedule", "frozen_layers": CASES[name].freeze},
        "resize": {"policy": CASES[name].resize},
        "data": {"shuffle": True, "seed": SEED},
    }


def engine_of(name: str, data: Any = None, block: dict[str, Any] | None = None, phases: Any = None) -> Any:
    way, block = CASES[name], block or blocks(name)
    phases = phases or way.phases
    scheduler = {"type": "MixedBatch", "params": {"phases": phases}}
    return build_engine(
        gpt(2),
        mean_loss,
        token_pipeline={"slices": 2},
        stages=way.stages,
        micro_batches=way.stages,  # in the first phase
        optimizer={"type": "SGD", "params": {**SGD["params"], "momentum": 0.9}},
        training_data=data,
        config={"scheduler": scheduler, "elastic_pipeline": block},
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
        order = SampleOrder(SAMPLES, True, SEED)
        return stacked(order.between(first, first + size), self.data.length)


class Seen:
    """A training, step by step."""

    def __init__(self, engine: Any, data: Texts, iterator: Any = None) -> None:
        self.engine, self.data, self.iterator = engine, data, iterator
        self.losses: list[float] = []
        self.steps: list[Any] = []
        self.read: list[Any] = []
        self.cut: list[tuple[int, int]] = []  # micro-batches and their size: a switch comes right behind a step
        engine.basic_optimizer.register_step_pre_hook(
            lambda *_: self.cut.append((engine.micro_batches, engine.micro_batch_size))
        )

    def train(self, steps: int) -> None:
        engine = self.engine
        for _ in range(steps):
            phase, batch = engine.lr_scheduler.phase_index, engine.train_batch_size()
            rates = {group["lr"] for group in engine.basic_optimizer.param_groups}
            self.losses.append(float(engine.train_batch(*([] if self.iterator is None else [self.iterator]))))
            self.steps.append((phase, batch, rates, engine.frozen_layers, engine.num_stages, engine.dp_world_size))
            self.read.append((engine.stage_id, engine.grid.data_parallel_id, self.data.asked[:], self.cut[-1]))
            self.data.asked.clear()

    def found(self) -> dict[str, Any]:
        weights = {name: p.detach().clone() for name, p in self.engine.module.named_parameters()}
        counted = self.engine.global_samples, self.engine.lr_scheduler.phase_index
        return {"losses": self.losses, "steps": self.steps, "read": self.read, "weights": weights, "counted": counted}


def whole(name: str, folder: str) -> dict[str, Any]:
    """In one go with a checkpoint on the way, from the checkpoint, and with iterators of one's own."""
    data = Texts()
    engine = engine_of(name, data)
    objects, seen = Objects(engine), Seen(engine, data)
    seen.train(SAVED)
    engine.save_checkpoint(folder)
    seen.train(STEPS - SAVED)
    found = {"whole": seen.found(), "same": objects.same()}
    engine.destroy()
    data = Texts()
    engine = engine_of(name, data)
    engine.load_checkpoint(folder)
    seen = Seen(engine, data)
    seen.train(STEPS - SAVED)
    found["resumed"] = seen.found()
    engine.destroy()
    engine, data = engine_of(name), Texts()
    if engine.reads_data:
        engine.lr_scheduler.register_dataset(data)
    seen = Seen(engine, data, Own(engine, data))
    seen.train(STEPS)
    found["own"] = seen.found()
    engine.destroy()
    return found


def epochs(folder: str) -> dict[str, Any]:
    """Entries frozen in every step by a policy that decides at the end of an epoch; from a checkpoint on."""
    block = {"freeze": {"policy": "alpha", "interval": "epoch"}}
    data, found = Texts(), {}
    for way in ("whole", "resumed"):
        engine = engine_of(ANY, data, block)
        if way == "resumed":
            engine.load_checkpoint(folder)
        seen = Seen(engine, data)
        for _ in range(engine.global_steps, STEPS):
            if way == "whole" and engine.global_steps == SAVED:
                engine.save_checkpoint(folder)
            seen.train(1)
        found[way] = [frozen for _, _, _, frozen, *_ in seen.steps]
        engine.destroy()
    return found


def forgotten() -> list[int]:
    """The steps after which the cache makes room, for samples are others from there on."""
    data, found = Texts(), []
    engine = engine_of(ANY, data, {**blocks(ANY), "cache": {"enabled": True}})
    forget = Shelf.forget
    with mock.patch.object(Shelf, "forget", lambda shelf: (found.append(engine.global_steps), forget(shelf))):
        Seen(engine, data).train(STEPS)
    engine.destroy()
    return found


def refused() -> dict[str, str]:
    odd = [*PHASES[:2], {**PHASES[2], "batch_size": 3, "micro_batch_size": 1}]
    listed, halved = {"resize": {"policy": [[4, 1]]}}, {"resize": {"policy": "halve"}}
    return {str(block): error_of(lambda b=block: engine_of(ANY, None, b, odd)) for block in (listed, halved)}


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {name: whole(name, f"{folder}/{name}") for name in CASES}
    return {**found, "epochs": epochs(f"{folder}/epochs"), "refused": refused(), "forgotten": forgotten()}


ranks = launched(worker, 2, timeout=240, folder=True)


def positions() -> list[tuple[int, int]]:
    """First and last position of every step."""
    ends = [0]
    for phase in BY_STEP:
        ends.append(ends[-1] + PHASES[phase]["batch_size"])
    return list(pairwise(ends))


@cache
def in_one_process(name: str) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, weights and rates of the same samples with the same layers frozen."""
    model, order, losses, rates = Plain(gpt(2)), SampleOrder(SAMPLES, True, SEED), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = MixedBatch(optimizer, phases=PHASES)
    for step, (first, end) in enumerate(positions()):
        for key, parameter in model.named_parameters():
            if key.startswith(prefixes(gpt(2), frozen_at(name, step)) or ("nothing",)):
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


def frozen_at(name: str, step: int) -> int:
    return max((entries for begin, entries in CASES[name].freeze if begin <= step), default=0)


def stages_at(name: str, step: int) -> int:
    way = CASES[name]
    return next((stages for begin, stages in reversed(way.resize) if begin <= step), way.stages)


@pytest.mark.parametrize("name", CASES)
def test_phases_and_reshapes(ranks, name):
    check(name, [found[name] for found in ranks])


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    losses, weights, rates = in_one_process(name)
    everywhere = {key: tensor for found in ranks for key, tensor in found["whole"]["weights"].items()}
    assert everywhere.keys() == weights.keys() == {key for found in ranks for key in found["resumed"]["weights"]}
    for found in ranks:
        assert found["same"]
        for way in ("whole", "own"):
            assert found[way]["losses"] == pytest.approx(losses, rel=USUAL), way
            assert max(difference(tensor, weights[key]) for key, tensor in found[way]["weights"].items()) <= USUAL
            check_steps(name, found[way]["steps"], rates)
            assert found[way]["counted"] == (positions()[-1][1], 2)
        check_resumed(name, found, everywhere, rates)
    for way, begin in (("whole", 0), ("resumed", SAVED)):
        check_read(name, [found[way]["read"] for found in ranks], begin)


def check_steps(name: str, steps: list[Any], rates: list[float], begin: int = 0) -> None:
    for step, (phase, batch, got, frozen, stages, replicas) in enumerate(steps, start=begin):
        assert (phase, batch) == (BY_STEP[step], PHASES[BY_STEP[step]]["batch_size"])
        assert got == {rates[step]} and frozen == frozen_at(name, step)
        assert (stages, replicas) == (stages_at(name, step), 2 // stages_at(name, step))


def check_resumed(name: str, found: dict[str, Any], everywhere: dict[str, torch.Tensor], rates: list[float]) -> None:
    """To the bit."""
    resumed, first = found["resumed"], found["whole"]
    assert resumed["losses"] == first["losses"][SAVED:] and resumed["counted"] == first["counted"]
    check_steps(name, resumed["steps"], rates, SAVED)
    # by the times that were measured a layer may be on another stage
    assert all(torch.equal(tensor, everywhere[key]) for key, tensor in resumed["weights"].items())


def check_read(name: str, ranks: list[list[Any]], begin: int) -> None:
    """Every step read its positions once in all, each sample as long as its phase says, in micro-batches of the shape."""
    order = SampleOrder(SAMPLES, True, SEED)
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        step = begin + number
        first, end = positions()[step]
        phase, last, replicas = BY_STEP[step], stages_at(name, step) - 1, 2 // stages_at(name, step)
        for stage in {0, last}:
            parts = {replica: asked for at, replica, asked, _ in of_ranks if at == stage}
            got = [each for replica in sorted(parts) for each in parts[replica]]
            assert got == [(index, PHASES[phase]["seq_length"]) for index in order.between(first, end)], (step, stage)
        for *_, (pieces, size) in of_ranks:
            wanted = CASES[name].micro[phase]
            assert pieces * size * replicas == end - first and size <= wanted
            assert size == wanted or (end - first) // replicas % wanted


def test_an_epoch_is_counted_by_samples(ranks):
    over = [first // SAMPLES for first, _ in positions()]
    assert over[SAVED] == 0 and over[SAVED + 1] == 1  # with as many samples in all steps as in this phase, one earlier
    for found in ranks:
        frozen = found["epochs"]["whole"]
        assert [entries > 0 for entries in frozen] == [epochs > 0 for epochs in over]
        assert found["epochs"]["resumed"] == frozen[SAVED:]


def test_every_phase_has_to_divide(ranks):
    for found in ranks:
        for text in found["refused"].values():
            assert text.startswith(
                "ConfigError: elastic_pipeline.resize.policy: got 1, must be a number of stages whose"
            )
            assert "divide the batch of 3 samples" in text and text.endswith("use 2") and "\n" not in text


# for tests.mutants


def one(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return whole(ANY, folder)


def holds_for(mutant: str | None) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(one, 2, folder, mutant=mutant)
    return holds(check, ANY, ranks)


def test_the_cache_makes_room_where_a_phase_has_samples_of_another_length(ranks):
    """From step 2 on a rank of the first stage has one; phases begin after steps 3 and 7."""
    assert [3, 7] in [found["forgotten"] for found in ranks]
    assert all(set(found["forgotten"]) <= {3, 7} for found in ranks)

"""Which samples a step trains does not depend on the shape, whoever reads them; nor does what an evaluation counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ds_terapipe import ConfigError
from ds_terapipe.elastic.sampler import SampleOrder
from tests.elastic.samples import LENGTH, Texts, in_order, micro_batch_of
from tests.elastic.training import Case, engine_of, reference_on
from tests.mutants.claims import holds
from tests.pipeline.models import mean_loss, micro_batch
from tests.spawn import launched, run_ranks

SAMPLES, SEED = 20, 5
EVALUATED = (3, 11)  # sizes of datasets: less than a micro-batch for each replica, odd
ASKED = (None, 1, 3)  # num_micro_batches
LOSS = 1e-5  # relative; evaluations have no training before them that could add up

TWO = {
    "six": Case("texts", "adamw", 2, ((2, 2),), ((2, 1), (6, 2)), steps=8, batch=6),
}
FOUR = {
    "from four": Case("texts", "adamw", 4, ((2, 2),), ((2, 2), (4, 1), (7, 4)), steps=9),
    "from two": Case("texts", "sgd", 2, ((2, 2),), ((3, 1), (6, 4)), steps=9),
}
ENDS = Case("texts", "sgd", 2, ((1, 1),), ((1, 1),), steps=4)


def micro(seed: int, size: int = 2) -> Any:
    """A micro-batch ((tokens, positions), targets), each [2, 16]."""
    return micro_batch(seed, length=LENGTH, batch=size, masked=False)


def evaluations() -> list[tuple[Texts, float]]:
    return [(Texts(size, seed=90 + size), 0.0) for size in EVALUATED]


def shape_changes(case: Case) -> set[int]:
    """Steps after which evaluations are made: the first in each shape, and the one before."""
    return {0, *(step for step, _ in case.resize)}


# ------------------------------------------------------------------------------------------------------- training_data


def from_training_data(case: Case, shuffle: bool) -> dict[str, Any]:
    """Train on a dataset, evaluate others in every shape."""
    data = Texts(SAMPLES)
    block = case.elastic(data={"shuffle": shuffle, "seed": SEED})
    engine = engine_of(case, training_data=data, config={"elastic_pipeline": block})
    found: dict[str, Any] = {"losses": [], "read": [], "shapes": [], "evaluated": {}, "iterator": {}}
    reads, replica, each = (
        engine.stage_id in (0, engine.num_stages - 1),
        engine.grid.data_parallel_id,
        engine.micro_batches,
    )
    for step in range(case.steps):
        found["losses"].append(float(engine.train_batch()))
        found["shapes"].append(tuple(engine.shape))
        found["read"].append((engine.stage_id, engine.grid.data_parallel_id, data.take()))
        if step in shape_changes(case):
            sets = [texts for texts, _ in evaluations()]
            losses = [engine.evaluate(texts) for texts in sets]
            found["evaluated"][step] = losses, [texts.take() for texts in sets], tuple(engine.shape)
            own = iter([micro(7000 + replica * each + n) for n in range(each)]) if reads else None
            found["iterator"][step] = float(engine.eval_batch(own))
    with pytest.raises(ConfigError, match=r"^evaluate: got 0, must be a dataset of one sample or more, use another"):
        engine.evaluate([])
    engine.destroy()
    return found


def expected_order(case: Case, shuffle: bool) -> list[list[int]]:
    """The samples of every step."""
    if not shuffle:
        return in_order(case.steps, case.batch, SAMPLES)
    order = SampleOrder(SAMPLES, True, SEED)
    return [order.between(step * case.batch, (step + 1) * case.batch) for step in range(case.steps)]


def check_training_data(case: Case, shuffle: bool, ranks: Sequence[dict[str, Any]]) -> None:
    steps, read = expected_order(case, shuffle), []
    for number, wanted in enumerate(steps):
        stages, replicas, _, _ = ranks[0]["shapes"][number]
        assert stages == case.stages_at(number)
        for stage in range(stages):
            by_replica = {r: asked for s, r, asked in (found["read"][number] for found in ranks) if s == stage}
            together = [index for replica in range(replicas) for index in by_replica[replica]]
            assert together == (wanted if stage in (0, stages - 1) else []), (number, stage)
            assert len({len(asked) for asked in by_replica.values()}) == 1
        read += together
    for epoch in range(len(read) // SAMPLES):
        assert sorted(read[epoch * SAMPLES :][:SAMPLES]) == list(range(SAMPLES)), "each sample once"
    if shuffle:
        assert read[:SAMPLES] != read[SAMPLES : 2 * SAMPLES]
    data, evaluated = Texts(SAMPLES), {}

    def evaluate(number: int, model: Any) -> None:
        if number in shape_changes(case):
            with torch.no_grad():
                losses = [mean_loss(model(x), y) for x, y in map(micro, range(7000, 7000 + case.batch // case.size))]
                evaluated[number] = [alone(model, texts) for texts, _ in evaluations()], mean_of(losses)

    batches = [
        [micro_batch_of(data, indices[at : at + case.size]) for at in range(0, case.batch, case.size)]
        for indices in steps
    ]
    losses = reference_on(case, batches, evaluate).losses
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, rel=LOSS)
        for number, wanted in evaluated.items():
            assert found["evaluated"][number][0] == pytest.approx(wanted[0], rel=LOSS), number
            assert found["iterator"][number] == pytest.approx(wanted[1], rel=LOSS), number
    check_evaluated(case, ranks)


def alone(model: Any, texts: Texts) -> float:
    """The mean over a dataset, each sample by itself."""
    losses = [float(mean_loss(model(x), y)) for x, y in (micro_batch_of(texts, [i]) for i in range(len(texts)))]
    return sum(losses) / len(losses)


def check_evaluated(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """Every replica read its own samples, none twice; the rest, less than one micro-batch each, was read by all alike."""
    for step in shape_changes(case):
        _, _, (_, replicas, size, _) = ranks[0]["evaluated"][step]
        for number, total in enumerate(EVALUATED):
            apart = total // (size * replicas) * size * replicas
            first = [found for found in ranks if found["read"][step][0] == 0]
            reads = [found["evaluated"][step][1][number] for found in first]
            assert sorted(index for read in reads for index in read if index < apart) == list(range(apart))
            assert all([index for index in read if index >= apart] == list(range(apart, total)) for read in reads)


# ----------------------------------------------------------------------------------------------------- plain iterators


def from_iterators(case: Case, batch_fn: bool) -> dict[str, Any]:
    """Train from iterators that the ranks of the start have, evaluate from such in every shape."""
    engine = engine_of(case)
    start, replicas, replica = engine.stage_id, engine.dp_world_size, engine.grid.data_parallel_id
    reads = start in (0, engine.num_stages - 1)
    calls: list[int] = []
    if batch_fn:
        engine.set_batch_fn(lambda raw: calls.append(1) or unpacked(raw))
    share = case.batch // case.size // replicas
    found: dict[str, Any] = {"losses": [], "shapes": [], "evaluated": {}}

    def own(seeds: Sequence[int]) -> Iterator[Any] | None:
        return iter([packed(seed) if batch_fn else micro(seed) for seed in seeds]) if reads else None

    for step in range(case.steps):
        seeds = [1000 * step + n for n in range(case.batch // case.size)]
        found["losses"].append(float(engine.train_batch(own(seeds[replica * share :][:share]))))
        found["shapes"].append(tuple(engine.shape))
        if step in shape_changes(case):
            found["evaluated"][step] = []
            for asked in ASKED:
                each = asked or share
                mine = [7000 + replica * each + n for n in range(each)]
                found["evaluated"][step].append(float(engine.eval_batch(own(mine), num_micro_batches=asked)))
    found["calls"] = len(calls), reads, engine.module.training
    engine.destroy()
    return found


def packed(seed: int) -> dict[str, torch.Tensor]:
    (tokens, positions), targets = micro(seed)
    return {"text": tokens, "positions": positions, "labels": targets}


def unpacked(raw: dict[str, torch.Tensor]) -> Any:
    return (raw["text"], raw["positions"]), raw["labels"]


def check_iterators(case: Case, batch_fn: bool, ranks: Sequence[dict[str, Any]]) -> None:
    replicas, evaluated = len(ranks) // case.stages, {}
    share = case.batch // case.size // replicas

    def evaluate(number: int, model: Any) -> None:
        if number in shape_changes(case):
            with torch.no_grad():
                evaluated[number] = [
                    mean_of([mean_loss(model(x), y) for x, y in (micro(7000 + n) for n in range(replicas * each))])
                    for each in (asked or share for asked in ASKED)
                ]

    steps = [[micro(1000 * s + n) for n in range(case.batch // case.size)] for s in range(case.steps)]
    losses = reference_on(case, steps, evaluate).losses
    for found in ranks:
        assert [shape[0] for shape in found["shapes"]] == [case.stages_at(step) for step in range(case.steps)]
        assert found["losses"] == pytest.approx(losses, rel=LOSS)
        for number, wanted in evaluated.items():
            assert found["evaluated"][number] == pytest.approx(wanted, rel=LOSS), number
        calls, reads, _ = found["calls"]
        each = case.steps * share + len(evaluated) * sum(asked or share for asked in ASKED)
        assert calls == (each if reads and batch_fn else 0)


def mean_of(values: Sequence[torch.Tensor]) -> float:
    return float(sum(values)) / len(values)


def ends(rank: int) -> dict[str, Any]:
    """One reader's data ends, or is no micro-batch, in a step of each shape; then there is more."""
    engine = engine_of(ENDS)
    share, replica = ENDS.batch // ENDS.size // engine.dp_world_size, engine.grid.data_parallel_id
    found: dict[str, Any] = {"raised": [], "losses": []}
    for step in range(3):
        seeds = [1000 * step + replica * share + n for n in range(share)]
        found["losses"].append(float(engine.train_batch(iter([micro(seed) for seed in seeds]))))
        bad = [
            [micro(0)] * (share - (rank == 0)),
            [*[micro(0)] * (share - 1), {"text": 1} if rank == 0 else micro(0)],
        ]
        for data in bad:
            for call in (engine.train_batch, engine.eval_batch):
                try:
                    call(iter(data))
                except BaseException as error:
                    found["raised"].append((type(error).__name__, str(error)))
    engine.destroy()
    return found


# --------------------------------------------------------------------------------------------------------------- tests


def worker(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in cases.items():
        found[name, "training_data"] = from_training_data(case, shuffle=name != "from two")
        found[name, "iterators"] = from_iterators(case, batch_fn=name != "from four")
    found["ends"] = ends(rank)
    return found


two = launched(worker, 2, TWO, timeout=200)


four = launched(worker, 4, FOUR, timeout=200)


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_training_data_in_order_and_every_evaluated_sample_once(request, name):
    ranks = request.getfixturevalue("two" if name in TWO else "four")
    case = {**TWO, **FOUR}[name]
    check_training_data(case, name != "from two", [found[name, "training_data"] for found in ranks])


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_iterators_of_the_first_shape_feed_all_shapes(request, name):
    ranks = request.getfixturevalue("two" if name in TWO else "four")
    case = {**TWO, **FOUR}[name]
    check_iterators(case, name != "from four", [found[name, "iterators"] for found in ranks])


def test_micro_batches_become_the_largest_that_fit(two):
    """Of six samples and micro-batches of two, two replicas get three each: single ones; on one replica they are two again."""
    for found in two:
        shapes = found["six", "training_data"]["shapes"]
        assert shapes == found["six", "iterators"]["shapes"]
        assert [shapes[0], shapes[2], shapes[6]] == [(2, 1, 2, 3), (1, 2, 1, 3), (2, 1, 2, 3)]


@pytest.mark.parametrize("processes", ["two", "four"])
def test_data_that_end_or_are_wrong_on_one_rank_are_so_on_all_and_training_goes_on(request, processes):
    ranks = request.getfixturevalue(processes)
    for found in ranks:
        kinds = [kind for kind, _ in found["ends"]["raised"]]
        assert kinds == ["StopIteration", "StopIteration", "ConfigError", "ConfigError"] * 3
        assert all("\n" not in text for _, text in found["ends"]["raised"])
        text = "the data iterator: got dict, must yield (inputs, labels), use "
        assert all(said.startswith(text) for kind, said in found["ends"]["raised"] if kind == "ConfigError")
        assert found["ends"]["losses"] == ranks[0]["ends"]["losses"] and len(found["ends"]["losses"]) == 3


# measures of these tests for tests.mutants


def one_of(rank: int, world_size: int, function: str) -> Any:
    case = TWO["six"]
    return from_training_data(case, True) if function == "training_data" else from_iterators(case, True)


def training_data_holds(mutant: str | None) -> bool:
    return holds(check_training_data, TWO["six"], True, run_ranks(one_of, 2, "training_data", mutant=mutant))


def iterators_hold(mutant: str | None) -> bool:
    return holds(check_iterators, TWO["six"], True, run_ranks(one_of, 2, "iterators", mutant=mutant))

"""The samples of a step, and of an evaluation, do not depend on the shape or on the ranks that read them."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map

from ds_terapipe import ConfigError
from ds_terapipe.elastic.sampler import SampleOrder
from tests.elastic.samples import LENGTH, Texts, micro_batch_of
from tests.elastic.training import Case, engine_of, reference_on
from tests.pipeline.models import mean_loss, micro_batch
from tests.pipeline.training import raised
from tests.spawn import launched

SAMPLES, SEED, RANKS = 20, 5, 4
SIZES = (3, 11)  # of datasets: less than a micro-batch for each replica, odd
ASKED = (None, 1, 3)  # num_micro_batches
LOSS = 1e-5  # relative; evaluations have no training before them that could add up
CASE = Case("texts", "adamw", 2, ((1, 2),), ((2, 1), (4, 4)), steps=7, batch=12)
# of 3 samples, micro-batches of 2 become single ones
SHAPES = [(2, 2, 2, 3)] * 2 + [(1, 4, 1, 3), (1, 4, 2, 3)] + [(4, 1, 2, 6)] * 2 + [(4, 1, 4, 6)]
BATCHES = [12] * 3 + [24, 12, 12, 24]  # of each step, as `set_train_batch_size` sets them
STARTS = [sum(BATCHES[:step]) for step in range(CASE.steps)]
CHANGES = (0, 2, 4)  # the first step in each shape, behind which evaluations are made
ENDS = Case("texts", "sgd", 2, ((1, 1),), ((1, 1),), steps=4)


def micro(seed: int) -> Any:
    return micro_batch(seed, length=LENGTH, batch=2, masked=False)


def datasets() -> list[Texts]:
    return [Texts(size, seed=90 + size) for size in SIZES]


def resize(engine: Any, step: int) -> None:
    if step == CASE.steps - 1:
        engine.set_train_micro_batch_size(4)
    elif engine.train_batch_size() != BATCHES[step]:
        with pytest.raises(ConfigError, match=r"^set_train_batch_size: got 30, must be a multiple of 2 replicas x micro"):
            engine.set_train_batch_size(30)
        engine.set_train_batch_size(BATCHES[step])


def from_training_data() -> dict[str, Any]:
    data, block = Texts(SAMPLES), CASE.elastic(data={"shuffle": True, "seed": SEED})
    engine = engine_of(CASE, training_data=data, config={"elastic_pipeline": block})
    found: dict[str, Any] = {"losses": [], "read": [], "shapes": [], "evaluated": {}}
    for step in range(CASE.steps):
        resize(engine, step)
        with mock.patch.object(data, "length", None if engine.global_rank == 0 else LENGTH):  # a read that one rank fails in
            assert "TypeError" in raised(engine.train_batch)
        data.take()
        found["losses"].append(float(engine.train_batch()))
        found["shapes"].append(tuple(engine.shape))
        found["read"].append((engine.stage_id, engine.grid.data_parallel_id, data.take(), tuple(data.drawn[-1:])))
        if step in CHANGES:
            sets = datasets()
            found["evaluated"][step] = [engine.evaluate(each) for each in sets], [each.take() for each in sets]
    with pytest.raises(ConfigError, match=r"^evaluate: got 0, must be a dataset of one sample or more, use another"):
        engine.evaluate([])
    engine.destroy()
    return found


def from_iterators() -> dict[str, Any]:
    """Train from iterators that the ranks of the start have, in a form of their own, and evaluate from such in every shape."""
    engine = engine_of(CASE)
    replicas, replica = engine.dp_world_size, engine.grid.data_parallel_id
    share, reads = CASE.batch // CASE.size // replicas, engine.reads_data

    def own(seeds: Sequence[int]) -> Iterator[Any] | None:
        each = engine.start_shape.micro_batch // CASE.size
        parts = [map(micro, seeds[at : at + each]) for at in range(0, len(seeds), each)]
        batches = [tree_map(lambda *rows: torch.cat(rows), *several) for several in parts]
        return iter([{"text": t, "positions": p, "labels": labels} for (t, p), labels in batches]) if reads else None

    engine.set_batch_fn(lambda raw: ((raw["text"], raw["positions"]), raw["labels"]))
    found: dict[str, Any] = {"losses": [], "shapes": [], "evaluated": {}}
    for step in range(CASE.steps):
        resize(engine, step)
        mine = BATCHES[step] // CASE.size // replicas
        first = 1000 * step + replica * mine
        found["losses"].append(float(engine.train_batch(own(range(first, first + mine)))))
        found["shapes"].append(tuple(engine.shape))
        if step in CHANGES:
            sizes = [(asked, 7000 + replica * (asked or share), asked or share) for asked in ASKED]
            found["evaluated"][step] = [
                float(engine.eval_batch(own(range(first, first + each)), num_micro_batches=asked)) for asked, first, each in sizes
            ]
    engine.destroy()
    return found


def ends(rank: int) -> dict[str, Any]:
    """One reader's data ends, or is no micro-batch, in a step of each shape; then there is more."""
    engine = engine_of(ENDS)
    share = ENDS.batch // ENDS.size // engine.dp_world_size
    first = engine.grid.data_parallel_id * share
    found: dict[str, Any] = {"raised": [], "losses": []}
    for step in range(3):
        batches = [micro(1000 * step + first + n) for n in range(share)]
        found["losses"].append(float(engine.train_batch(iter(batches))))
        wrong = [*[micro(0)] * (share - 1), {"text": 1} if rank == 0 else micro(0)]
        for data in ([micro(0)] * (share - (rank == 0)), wrong):
            for call in (engine.train_batch, engine.eval_batch):
                with pytest.raises((StopIteration, ConfigError)) as caught:
                    call(iter(data))
                found["raised"].append((caught.type.__name__, str(caught.value)))
    with mock.patch.object(engine, "optimizer", engine.optimizer if rank else None):  # they read for each other first
        assert "ConfigError: optimizer: got none on a rank" in raised(lambda: engine.train_batch(iter([micro(0)] * share)))
    engine.destroy()
    return found


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {"training_data": from_training_data(), "iterators": from_iterators(), "ends": ends(rank)}


ranks = launched(worker, RANKS, timeout=200)


def test_training_data_comes_in_order_and_every_evaluated_sample_once(ranks: Any) -> None:
    ranks, order = [rank["training_data"] for rank in ranks], SampleOrder(SAMPLES, True, SEED)
    steps, seen = [order.between(start, start + batch) for start, batch in zip(STARTS, BATCHES, strict=True)], set[Any]()
    for number, (wanted, (stages, replicas, *_)) in enumerate(zip(steps, SHAPES, strict=True)):
        for stage in range(stages):
            parts = {r: asked for s, r, asked, _ in (found["read"][number] for found in ranks) if s == stage}
            together = [index for replica in range(replicas) for index in parts[replica]]
            assert together == (wanted if stage in (0, stages - 1) else []), (number, stage)
            assert len({len(asked) for asked in parts.values()}) == 1
        # both ends of a pipeline draw alike, e.g. which tokens are masked, and no other pipeline or step does
        drawn = {(r, each) for s, r, _, each in (found["read"][number] for found in ranks) if s in (0, stages - 1)}
        assert len(drawn) == len({each for _, each in drawn}) == replicas and not drawn & seen
        seen |= drawn
    epochs = [index for step in steps for index in step]
    assert sorted(epochs[:SAMPLES]) == list(range(SAMPLES)) and epochs[:SAMPLES] != epochs[SAMPLES : 2 * SAMPLES]
    data, size = Texts(SAMPLES), CASE.size
    batches = [[micro_batch_of(data, step[at : at + size]) for at in range(0, len(step), size)] for step in steps]
    singles = [[micro_batch_of(texts, [index]) for index in range(len(texts))] for texts in datasets()]
    losses, evaluated = alone(batches, singles)
    for found in ranks:
        assert found["shapes"] == SHAPES and found["losses"] == pytest.approx(losses, rel=LOSS)
        assert {number: means for number, (means, _) in found["evaluated"].items()} == evaluated
    for step in CHANGES:  # the rest, less than one micro-batch for each replica, is read by all alike
        _, replicas, size, _ = SHAPES[step]
        for number, total in enumerate(SIZES):
            apart = total // (size * replicas) * size * replicas
            reads = [found["evaluated"][step][1][number] for found in ranks if found["read"][step][0] == 0]
            assert sorted(index for read in reads for index in read if index < apart) == list(range(apart))
            assert all([index for index in read if index >= apart] == list(range(apart, total)) for read in reads)


def alone(batches: list[list[Any]], samples: list[list[Any]]) -> tuple[list[float], dict[int, Any]]:
    """In one process: losses, and behind the first step in each shape the mean losses of the lists of samples."""
    evaluated = {}

    def evaluate(number: int, model: Any) -> None:
        with torch.no_grad():
            if number in CHANGES:
                means = [float(sum(mean_loss(model(x), y) for x, y in each)) / len(each) for each in samples]
                evaluated[number] = pytest.approx(means, rel=LOSS)

    return reference_on(CASE, batches, evaluate).losses, evaluated


def test_iterators_of_the_first_shape_feed_all_shapes(ranks: Any) -> None:
    replicas = RANKS // CASE.stages
    share = CASE.batch // CASE.size // replicas
    steps = [[micro(1000 * s + n) for n in range(batch // CASE.size)] for s, batch in enumerate(BATCHES)]
    losses, evaluated = alone(steps, [[*map(micro, range(7000, 7000 + replicas * (asked or share)))] for asked in ASKED])
    for found in (rank["iterators"] for rank in ranks):
        assert found["shapes"] == SHAPES and found["losses"] == pytest.approx(losses, rel=LOSS)
        assert found["evaluated"] == evaluated


def test_data_that_end_or_are_wrong_on_one_rank_are_so_on_all_and_training_goes_on(ranks: Any) -> None:
    for found in (rank["ends"] for rank in ranks):
        assert [kind for kind, _ in found["raised"]] == [*["StopIteration"] * 2, *["ConfigError"] * 2] * 3
        assert all("\n" not in text for _, text in found["raised"])
        text = "the data iterator: got dict, must yield (inputs, labels), use "
        assert all(said.startswith(text) for kind, said in found["raised"] if kind == "ConfigError")
        assert found["losses"] == ranks[0]["ends"]["losses"] and len(found["losses"]) == 3

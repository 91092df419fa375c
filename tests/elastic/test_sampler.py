"""The order of samples: exactly once per epoch in any sequence of shapes, from one integer; loaders; evaluation."""

import itertools
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from ds_terapipe.elastic.sampler import ElasticBatchSampler, ElasticLoader, SampleOrder
from ds_terapipe.errors import ConfigError

BATCH = 12
Shape = tuple[int, int]  # samples of a micro-batch, and replicas
SHAPES: list[Shape] = [(m, r) for m in (1, 2, 3, 4, 6, 12) for r in (1, 2, 3, 4, 6) if BATCH % (m * r) == 0]
RUNS = st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(1, 4)), min_size=1, max_size=6)


def taken(micro_batches: Iterator[Any], count: int) -> list[int]:
    return [int(sample) for micro in itertools.islice(micro_batches, count) for sample in micro]


@given(st.integers(1, 40), st.booleans(), st.integers(0, 2**63), st.lists(st.integers(0, 99), min_size=1))
def test_every_epoch_has_every_sample_once_and_a_position_its_sample(samples, shuffle, seed, positions):
    order = SampleOrder(samples, shuffle, seed)
    for epoch in range(4):
        assert sorted(order.between(epoch * samples, (epoch + 1) * samples)) == list(range(samples))
    for position in positions:  # whatever was asked before
        assert order[position] == SampleOrder(samples, shuffle, seed)[position] and len(order._permutations) <= 2


def test_epochs_and_seeds_have_orders_of_their_own_which_stay_what_they_were() -> None:
    """A checkpoint has the position only."""
    orders = [SampleOrder(50, True, seed) for seed in (0, 1)]
    epochs = {tuple(order.between(epoch * 50, (epoch + 1) * 50)) for order in orders for epoch in range(3)}
    assert len(epochs) == 6  # seed 0 does not have in epoch 1 what seed 1 has in epoch 0
    assert SampleOrder(5, False, 3).between(3, 12) == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    drawn = [7, 8, 6, 9, 5, 2, 4, 1, 3, 0, 8, 4, 1, 6, 9, 2, 7, 3, 0, 5]
    assert SampleOrder(10, True, 1234).between(0, 20) == drawn
    with pytest.raises(ConfigError, match="training_data: got 0, must be a dataset of one sample or more"):
        SampleOrder(0, False, 0)


def make(samples: int, shape: Shape, consumed: int = 0, **more: Any) -> list[ElasticBatchSampler]:
    given = {"micro_batch": shape[0], "replicas": shape[1], "consumed": consumed, **more}
    return [ElasticBatchSampler(samples, BATCH, replica=replica, **given) for replica in range(shape[1])]


@given(st.integers(1, 40), st.booleans(), st.integers(0, 9), RUNS)
def test_every_step_has_its_positions_through_any_sequence_of_shapes(samples, shuffle, seed, runs):
    """Every sample comes exactly once per epoch. A shape is that of a live loader, or of new samplers: a resumed run."""
    order, consumed, seen = SampleOrder(samples, shuffle, seed), 0, Counter[int]()
    state, live = torch.get_rng_state(), ElasticLoader(range(samples), make(samples, (12, 1), shuffle=shuffle, seed=seed)[0])
    same = iter(live)
    for (micro, replicas), steps in runs:
        resumed = make(samples, (micro, replicas), consumed, shuffle=shuffle, seed=seed)
        live.reshape(micro, replicas, replicas - 1, consumed)
        iterators = [*map(iter, resumed[:-1]), same]
        for _ in range(steps):
            found = [sample for each in iterators for sample in taken(each, BATCH // micro // replicas)]
            assert found == order.between(consumed, consumed + BATCH)
            consumed += BATCH
            seen.update(found)
    assert same is live and torch.equal(torch.get_rng_state(), state)  # draws nothing from the global one
    epochs, more = divmod(consumed, samples)
    assert {seen[sample] - epochs for sample in range(samples)} <= ({0, 1} if more else {0})


def test_another_batch_goes_on_behind_the_last_sample_and_another_length_begins_an_epoch() -> None:
    sampler = ElasticBatchSampler(10, 4, micro_batch=2, shuffle=True)
    assert len(sampler) == 5  # micro-batches of an epoch
    first = taken(iter(sampler), 2)
    sampler.reshape(3, 1, 0, 4, batch=6)
    assert sorted(first + taken(iter(sampler), 2)) == list(range(10))
    # 16 samples from position 14 on, in the middle of the second epoch, of another length
    sampler.reshape(2, 1, 0, 14, batch=4, samples=16)
    resumed = ElasticBatchSampler(16, 4, micro_batch=2, shuffle=True, consumed=14)
    resumed.resume(0, 0, 10)
    for each in (sampler, resumed):
        assert sorted(taken(iter(each), 8)) == list(range(16)) and each.order.epochs_before(14) == 2


def test_an_iterator_of_the_shape_before_refuses_to_go_on_and_a_shape_that_leaves_something_over_changes_nothing() -> None:
    sampler = ElasticBatchSampler(100, BATCH, micro_batch=2)
    old = iter(DataLoader(range(100), batch_sampler=sampler))
    assert next(old).tolist() == [0, 1]
    sampler.reshape(3, 2, 1, BATCH)
    with pytest.raises(RuntimeError, match=r"use a new iter\(\) of the loader"):
        next(old)
    assert next(iter(DataLoader(range(100), batch_sampler=sampler))).tolist() == [18, 19, 20]
    with pytest.raises(ConfigError, match="train_batch_size: got 12, must be a multiple of 1 replicas x micro-batch 5"):
        sampler.reshape(5, 1, 0, 0)
    assert next(iter(sampler)) == [18, 19, 20] and sampler.batch == BATCH


class Augmented(list[int]):
    own: Any = None  # made by the first sample

    def __getitem__(self, index: Any) -> float:
        several = [torch.Generator(), {"": np.random.default_rng(1)}, random.SystemRandom()]  # the last one has no state
        self.own = self.own or [random.Random(1), several, np.random.RandomState(1)]
        python, (of_torch, numpy, _), legacy = self.own
        drawn = python.random(), torch.rand((), generator=of_torch).item(), numpy[""].random(), legacy.randn() % 1
        return index + (torch.rand(()).item() + random.random() + np.random.rand() + sum(drawn)) / 7


def loader_of(shape: Shape = (3, 2), replica: int = 1, workers: int = 0, dataset: Any = range(30), **more: Any) -> Any:
    sampler = ElasticBatchSampler(30, BATCH, micro_batch=shape[0], replicas=shape[1], replica=replica, **more)
    return ElasticLoader(dataset, sampler, num_workers=workers)


def test_a_reshape_ends_workers_and_drops_what_they_have_read() -> None:
    before, loader = set(multiprocessing.active_children()), loader_of(workers=2)
    assert [next(loader).tolist() for _ in range(2)] == [[6, 7, 8], [9, 10, 11]]
    first = set(multiprocessing.active_children()) - before
    assert len(first) == 2
    loader.reshape(4, 1, 0, BATCH)
    assert not any(worker.is_alive() for worker in first)
    assert [next(loader).tolist() for _ in range(2)] == [[12, 13, 14, 15], [16, 17, 18, 19]]
    loader.close()
    assert set(multiprocessing.active_children()) == before


def test_what_is_drawn_follows_from_the_position_whoever_reads_and_whatever_was_drawn_before() -> None:
    def drawn(consumed: int, reshaped: bool, replica: int = 0, workers: int = 1) -> list[float]:
        loader = loader_of((6, 2), replica, workers, Augmented(range(30)), consumed=0 if reshaped else consumed)
        if reshaped:
            next(loader)
            loader.reshape(6, 2, replica, consumed)
        states = random.random(), np.random.rand(), torch.rand(()), torch.get_rng_state(), random.getstate()
        found = next(loader).tolist()
        assert torch.equal(states[3], torch.get_rng_state()) and states[4] == random.getstate()
        loader.close()
        return found

    assert drawn(24, True) == drawn(24, True, workers=0) == drawn(24, False) == drawn(24, False, workers=0)
    fractions = [[value % 1 for value in drawn(*which)] for which in ((0, False), (24, False), (0, False, 1))]
    assert fractions[0] != fractions[1] and fractions[0] != fractions[2]

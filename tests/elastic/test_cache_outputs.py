"""Levels of the cache: what is read and computed, what is not to be kept, and when it is not used."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn

from ds_terapipe.elastic.cache import outputs
from ds_terapipe.elastic.cache.outputs import Compute, Counts, OutputCache, level_of
from ds_terapipe.elastic.cache.shelf import Shelf
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.settings import CacheSettings


class Slow(nn.Module):
    """[b, s, 4] with a pass that takes longer than a file."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden):
        time.sleep(0.01)
        return self.linear(hidden)


class Turned(nn.Module):
    """[b, s, 4] to [s, b, 4], beside a mask for all samples."""

    def forward(self, hidden):
        return hidden.transpose(0, 1).contiguous(), torch.tril(torch.ones(hidden.shape[1], hidden.shape[1]))


class Stage:
    """Runs layers, and knows from which one on it did."""

    def __init__(self, *layers):
        self.layers, self.starts = layers, []
        self.compute = Compute(self.run, True)

    def run(self, inputs, start):
        self.starts.append((start, len(inputs)))
        with torch.no_grad():
            for layer in self.layers[start:]:
                inputs = layer(inputs)
        return inputs

    def level(self, count=None):
        return level_of(self.layers[:count], "")


@pytest.fixture
def said():
    return []


@pytest.fixture
def cache(tmp_path, said):
    made = OutputCache([Tier(tmp_path, "one", None)], False, torch.device("cpu"), int, said.append)
    yield made
    made.close(keep=False)


def step(cache, stage, *micro_batches):
    """Outputs of a step; what it keeps has been written when it returns."""
    cache.see(micro_batches)
    found = [
        cache.outputs(n, each, stage.compute) if cache.active else stage.run(each, 0)
        for n, each in enumerate(micro_batches)
    ]
    cache.end()
    for job in cache._writing:
        job.result()
    return found


def batch(seed, rows=3):
    return torch.randn(rows, 5, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("last", [Slow, Turned])
def test_a_micro_batch_is_computed_once(cache, last):
    stage = Stage(Slow(), last())
    cache.begin(stage.level(), None)
    first = step(cache, stage, batch(0), batch(1))
    assert cache.counts == Counts(computed=6, kept=6) and stage.starts == [(0, 3), (0, 1), (0, 3)]
    again = [step(cache, stage, batch(0), batch(1)) for _ in range(3)]
    assert stage.starts[3:] == [(0, 3)]  # the first one that is read, to see whether that is right
    assert cache.counts == Counts(read=15, computed=9, kept=6)
    for found in again:
        for a, b in zip(first, found, strict=True):
            for one, other in zip(a if isinstance(a, tuple) else [a], b if isinstance(b, tuple) else [b], strict=True):
                assert torch.equal(one, other)


def test_samples_come_in_other_micro_batches(cache):
    stage = Stage(Slow(), Turned())
    cache.begin(stage.level(), None)
    step(cache, stage, batch(0), batch(1))
    mixed = torch.cat([batch(0)[1:], batch(1)[:1]])[[2, 0]]
    (found,) = step(cache, stage, mixed)
    (found,) = step(cache, stage, mixed)
    assert cache.counts.read == 2
    torch.testing.assert_close(found, stage.run(mixed, 0))


def test_one_sample_at_a_time(cache):
    stage = Stage(Slow())
    cache.begin(stage.level(), None)
    step(cache, stage, batch(0, rows=1))
    assert stage.starts == [(0, 1), (0, 2)]
    step(cache, stage, batch(1, rows=1))
    for _ in range(2):
        (found,) = step(cache, stage, torch.cat([batch(0, rows=1), batch(1, rows=1)]))
    assert cache.counts.read == 2 and found.shape == (2, 5, 4)


def test_a_deeper_level_starts_from_the_last_one(cache, tmp_path):
    stage = Stage(Slow(), Slow(), Slow())
    short = Stage(*stage.layers[:2])
    cache.begin(short.level(), None)
    step(cache, short, batch(0), batch(1))
    stage.starts.clear()
    cache.begin(stage.level(), stage.level(2))
    (found,) = step(cache, stage, batch(0))
    assert stage.starts == [(2, 3), (0, 1)] and cache.counts == Counts(continued=3, kept=3)
    torch.testing.assert_close(found, stage.run(batch(0), 0))
    entries = sorted(
        path.parent.parent.name for path in tmp_path.rglob("*") if len(path.name) == 32 and path.parent.name != "one"
    )
    assert entries == sorted([stage.level().folder] * 3 + [stage.level(2).folder] * 3)  # what was replaced is gone
    step(cache, stage, batch(0))
    step(cache, stage, batch(0))
    assert cache.counts.read == 3
    cache.begin(short.level(), None)
    cache._writers.submit(int).result()
    assert not any(path.parent.parent.name == stage.level().folder for path in tmp_path.rglob("*"))


def test_other_weights_are_another_level():
    stage = Stage(Slow(), nn.BatchNorm1d(5))
    before = stage.level()
    assert before == stage.level()
    for tensor in (stage.layers[0].linear.weight, stage.layers[1].running_mean):
        with torch.no_grad():
            tensor.view(-1)[0] += 1e-6
        assert stage.level() != before
        before = stage.level()
    with torch.no_grad():  # the same numbers in another order
        weight = stage.layers[0].linear.weight
        weight.copy_(weight.flip(0))
    assert stage.level() != before
    assert level_of(stage.layers, "bf16").folder != stage.level().folder


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Flatten(0, 1)])
def test_outputs_that_are_not_of_their_samples_alone_are_not_kept(cache, layer, said):
    stage = Stage(Slow(), layer.train())
    cache.begin(stage.level(), None)
    for _ in range(3):
        step(cache, stage, batch(0))
    assert cache.counts.read == cache.counts.kept == 0 and not cache.active
    assert len([line for line in said if "not used for 2 layers" in line and "do not follow the samples" in line]) == 1


def test_entries_of_who_knows_what_are_found_out(cache, said, tmp_path):
    stage = Stage(Slow())
    cache.begin(stage.level(), None)
    step(cache, stage, batch(0))
    other = OutputCache([Tier(tmp_path, "one", None)], False, torch.device("cpu"), int, said.append)
    other.begin(stage.level(), None)
    with torch.no_grad():
        stage.layers[0].linear.bias += 1  # behind the back of the level
    (found,) = step(other, stage, batch(0))
    assert torch.equal(found, stage.run(batch(0), 0)) and other.counts.read == 0
    step(other, stage, batch(0))
    assert not other.active and any("entries that are not what the layers put out" in line for line in said)
    other.close(keep=True)


def test_reading_that_takes_longer_than_computing(cache, said, monkeypatch):
    stage = Stage(nn.Linear(4, 4))
    read = Tier.read
    monkeypatch.setattr(Tier, "read", lambda *args: [time.sleep(0.01), read(*args)][1])
    cache.begin(stage.level(), None)
    for _ in range(8):
        step(cache, stage, batch(0))
    assert not cache.active and cache.counts.read > 0
    assert any("not used for 1 layers: got that reading a micro-batch takes" in line for line in said)
    more = Stage(*stage.layers, Slow())
    cache.begin(more.level(), None)  # of more layers it may be worth it
    step(cache, more, batch(0))
    assert cache.active


def test_a_damaged_entry_is_computed(cache, tmp_path):
    stage = Stage(Slow())
    cache.begin(stage.level(), None)
    (first,) = step(cache, stage, batch(0))
    step(cache, stage, batch(0))
    path = next(path for path in tmp_path.rglob("*") if len(path.name) == 32 and path.is_file())
    data = bytearray(path.read_bytes())
    data[-3] ^= 8
    path.write_bytes(data)
    before = cache.counts.computed
    (found,) = step(cache, stage, batch(0))
    assert cache.counts.computed == before + 3 and torch.equal(first, found)
    step(cache, stage, batch(0))
    assert cache.counts.computed == before + 3 and path.read_bytes() != data  # and written anew


def test_what_does_not_fit_is_computed_with_one_warning(tmp_path, said):
    small = OutputCache([Tier(tmp_path, "one", 700)], False, torch.device("cpu"), int, said.append)
    stage = Stage(Slow())
    small.begin(stage.level(), None)
    for _ in range(3):
        step(small, stage, batch(0), batch(1))
    assert small.tiers[0].used_bytes <= 700 and 0 < small.counts.kept < 6
    assert len([line for line in said if "no more room" in line]) == 1
    small.close(keep=False)


def test_the_disk_has_what_memory_does_not_hold(tmp_path, said):
    tiers = [Tier(tmp_path / "memory", "one", 700), Tier(tmp_path / "disk", "one", None)]
    both = OutputCache(tiers, False, torch.device("cpu"), int, said.append)
    stage = Stage(Slow())
    both.begin(stage.level(), None)
    for _ in range(3):
        step(both, stage, batch(0), batch(1))
    assert both.counts.kept == 6 and both.counts.read >= 9 and all(tier.used_bytes for tier in tiers)
    assert said == []
    both.close(keep=False)


def test_all_tensor_parallel_ranks_read_of_one_level_or_none(tmp_path, said):
    """What another one says, by hand: what it lacks both compute, from the inputs where it has it of an earlier level."""
    stage, others = Stage(Slow(), Slow()), []
    one = OutputCache(
        [Tier(tmp_path, "one", None)],
        False,
        torch.device("cpu"),
        lambda mine: min(mine, others.pop(0)) if others else mine,
        said.append,
    )
    one.begin(stage.level(), stage.level(1))
    for _ in range(3):
        (read,) = step(one, stage, batch(0))
    assert one.counts.read == 3
    one.see([batch(0)])
    assert one.active
    stage.starts.clear()
    others[:] = [0, 1]  # the other one has not this level, and has the earlier one
    assert torch.equal(one.outputs(0, batch(0), stage.compute), read)
    assert one.counts == Counts(read=3, computed=9, kept=one.counts.kept) and stage.starts == [(0, 3)]
    others[:] = [0]
    one.see([batch(0)])
    assert not one.active
    one.close(keep=False)


def test_entries_of_another_type_are_another_level():
    """A run that goes on may keep its entries in another precision."""
    layers, device = [Slow()], torch.device("cpu")
    shelves = [
        Shelf(CacheSettings(enabled=True, dtype=dtype), "one", device, "", int, print) for dtype in ("exact", "bf16")
    ]
    assert shelves[0]._level(layers) != shelves[1]._level(layers)


def test_epochs_longer_than_an_hour_and_half_the_room(tmp_path, said, monkeypatch):
    """What fits serves its share of every epoch, however long one takes and whatever is in it twice."""
    hours = [0.0]
    monkeypatch.setattr(time, "time", lambda: 1e9 + 3600 * hours[0])
    stage, samples = Stage(Slow()), [batch(n) for n in (*range(8), 0)]
    (tmp_path / "size").mkdir()
    one = OutputCache([Tier(tmp_path / "size", "one", None)], False, torch.device("cpu"), int, said.append)
    one.begin(stage.level(), None)
    step(one, stage, samples[0])
    half = 4 * one.tiers[0].used_bytes
    one.close(keep=False)
    one = OutputCache([Tier(tmp_path, "one", half)], False, torch.device("cpu"), int, said.append)
    one.begin(stage.level(), None)
    read = []
    for _ in range(4):
        before = one.counts.read
        for each in samples:
            hours[0] += 1
            for path in tmp_path.rglob("*"):
                os.utime(path, (0, 0))  # as long ago as can be
            step(one, stage, each)
        read.append((one.counts.read - before) / len(each))
    one.close(keep=False)
    assert read[1:] == [5.0] * 3, read  # of nine micro-batches those four that fit, one of which comes twice


def test_room_is_made_for_other_samples(tmp_path, said):
    stage = Stage(Slow())
    (tmp_path / "size").mkdir()
    one = OutputCache([Tier(tmp_path / "size", "one", None)], False, torch.device("cpu"), int, said.append)
    one.begin(stage.level(), None)
    step(one, stage, batch(0))
    size = one.tiers[0].used_bytes
    one.close(keep=False)
    one = OutputCache([Tier(tmp_path, "one", size)], False, torch.device("cpu"), int, said.append)
    one.begin(stage.level(), None)
    for number in (0, 1, 1):
        step(one, stage, batch(number))
    assert one.counts.kept == 3 and one.counts.read == 0  # those of the first micro-batch
    one.forget()
    for number in (1, 1, 1):
        step(one, stage, batch(number))
    assert one.counts.kept == 3 and one.counts.read == 6 - 3, one.counts  # the first that is read is computed, too
    one.close(keep=False)


def test_threads_that_copy_are_on_the_stages_device(tmp_path, monkeypatch):
    """CUDA is told by each thread; this machine's stands in for it with a note of who has."""
    told: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(outputs, "new_clock", lambda device: None)
    device = torch.device("cuda", 3)
    one = OutputCache([Tier(tmp_path, "one", None)], False, device, int, print)
    for pool in (one._readers, one._writers):
        pool.submit(int).result()
    one.close(keep=False)
    assert told == [("cache-read_0", device), ("cache-write_0", device)]

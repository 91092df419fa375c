"""The cache keeps outputs of frozen layers, reads them where that is right and pays, and is not used elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from ds_terapipe.elastic.cache import outputs
from ds_terapipe.elastic.cache.outputs import Compute, Counts, OutputCache, level_of, versions_of
from ds_terapipe.elastic.cache.samples import decode, encode, names
from ds_terapipe.elastic.cache.session import CacheSession
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.settings import CacheSettings
from ds_terapipe.pipeline.documents import Documents

CPU = torch.device("cpu")
UNBOUND = type("Unbound", (nn.Module,), {"forward": lambda self, hidden: hidden.unbind()})()  # as many outputs as samples


class Clock(threading.local):
    """Stands in for ``time.perf_counter``; only what says so takes time in its thread."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", CLOCK)


class Slow(nn.Module):
    """[b, s, 4] with a pass that takes longer than a file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        CLOCK.spend(1.0)
        return self.linear(hidden)


class Stage:
    """Runs layers, and notes from which one on it did and for how many samples."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers, self.starts = layers, []
        self.compute = Compute(self.run, True, lambda: versions_of(layers))

    def run(self, inputs: Any, start: int, rows: Any = None) -> Any:
        self.starts.append((start, len(inputs)))
        with torch.no_grad():
            for layer in self.layers[start:]:
                inputs = layer(inputs)
        return inputs

    def level(self, count: int | None = None) -> Any:
        return level_of(self.layers[:count], "")


Made = Callable[..., OutputCache]


def begun(cache: OutputCache, *layers: nn.Module) -> tuple[OutputCache, Stage]:
    stage = Stage(*layers)
    cache.begin(stage.level(), None)
    return cache, stage


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Iterator[Made]:
    """Make a cache in a folder of its own, with these limits of its tiers; ``agree``: what all tensor-parallel ranks have."""
    made = []

    def new(*limits: int | None, agree: Any = int) -> OutputCache:
        tiers = [Tier(tmp_path / str(len(made)) / str(n), "one", limit) for n, limit in enumerate(limits or (None,))]
        made.append(OutputCache(tiers, False, CPU, agree, said.append))
        return made[-1]

    yield new
    for cache in made:
        cache.close(keep=False)


def step(cache: OutputCache, stage: Stage, *micro_batches: Tensor) -> list[Any]:
    """Outputs of a step; what it keeps has been written when it returns."""
    cache.see(micro_batches)
    found = [
        cache.outputs(n, each, stage.compute) if cache.active else stage.run(each, 0) for n, each in enumerate(micro_batches)
    ]
    cache.end()
    for job in cache._writing:
        job.result()
    return found


def batch(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 5, 4, generator=torch.Generator().manual_seed(seed))


def test_layers_that_train_again_end_their_level(make: Made) -> None:
    cache, stage = make(), Stage(Slow(), Slow())
    cache.begin(stage.level(), stage.level(1))
    step(cache, stage, batch(0))
    cache.begin(stage.level(1), None)
    cache._writers.submit(int).result()
    assert not [*(cache.tiers[0].path / stage.level().folder).rglob("*")]


@pytest.mark.parametrize("chunk", [outputs.CHUNK, 16])  # of a matrix a chunk has all rows, or one of them
def test_other_weights_or_numbers_are_another_level(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(outputs, "CHUNK", chunk)
    stage = Stage(Slow(), nn.BatchNorm1d(5))
    weight, mean = stage.layers[0].linear.weight, stage.layers[1].running_mean
    seen = [stage.level(), stage.level()]
    assert seen.pop() == seen[0]
    for change in (
        lambda: weight.view(-1)[0].add_(1e-6),
        lambda: mean[0].add_(1e-6),
        lambda: weight.copy_(weight.flip(0)),  # the same numbers in another order
    ):
        with torch.no_grad():
            change()
        assert stage.level() not in seen
        seen.append(stage.level())
    assert level_of(stage.layers, "bf16").folder != stage.level().folder
    blocks = [CacheSettings(enabled=True, dtype=dtype) for dtype in ("exact", "bf16")]  # of a run that goes on
    assert len({CacheSession(block)._level(stage.layers) for block in blocks}) == 2


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Flatten(0), UNBOUND, nn.BatchNorm1d(5)], ids=repr)
def test_outputs_that_are_not_of_their_samples_alone_are_not_kept(make, layer, said):
    why = "write into" if isinstance(layer, nn.BatchNorm1d) else "do not follow the samples"
    cache, stage = begun(make(), Slow(), layer.train())
    for _ in range(5):
        step(cache, stage, batch(0))
    assert cache.counts.read == cache.counts.kept == 0 and not cache.active and cache.is_out(2) == (why == "write into")
    assert sum("for 2 layers" in line and why in line for line in said) == 1 and getattr(layer, "num_batches_tracked", 5) == 5


def test_a_mask_of_infinities_is_kept_as_any_other_output(make: Made) -> None:
    hide = type("Hide", (nn.Module,), {"forward": lambda self, hidden: hidden.masked_fill(hidden > 0.5, -torch.inf)})()
    cache, stage = begun(make(), Slow(), hide)
    assert all(step(cache, stage, batch(0))[0].isinf().any() for _ in range(3)) and cache.counts.read > 0


@pytest.mark.parametrize(("more", "factor"), [((), 1), ((Slow(),), 1), ((), 0)], ids=["their level", "the next level", "zeros"])
def test_entries_that_are_not_what_the_layers_put_out_are_found_out(more: Any, factor: int, make: Made, said: list[str]) -> None:
    torch._foreach_mul_([*(layer := Slow().requires_grad_(False)).parameters()], factor)
    cache, first = begun(make(), layer)
    step(cache, first, batch(0), batch(1))
    other = OutputCache([Tier(cache.tiers[0].root, "one", None)], False, CPU, int, said.append)
    stage = Stage(*first.layers, *more)
    other.begin(stage.level(), first.level() if more else None)
    layer.linear.bias += 1  # behind the back of the level
    found = step(other, stage, batch(0), batch(1))
    assert all(torch.equal(one, stage.run(batch(n), 0)) for n, one in enumerate(found)) and other.counts.read == 0
    step(other, stage, batch(0))
    why = "do not follow the samples" if more else "entries that are not what the layers put out"
    assert not other.active and any(why in line for line in said)
    other.close(keep=True)


def test_reading_that_takes_longer_than_computing_is_given_up(make: Made, said: list[str], monkeypatch: Any) -> None:
    cache, stage, read = make(), Stage(nn.Linear(4, 4)), Tier.read
    monkeypatch.setattr(Tier, "read", lambda *args: [CLOCK.spend(0.1), read(*args)][1])
    cache.begin(stage.level(), None)
    for _ in range(8):
        step(cache, stage, batch(0))
    assert not cache.active and cache.counts.read > 0
    assert any("not used for 1 layers: got that reading a micro-batch takes" in line for line in said)


def test_outputs_that_cannot_be_written_end_no_step(make: Made, said: list[str], monkeypatch: Any) -> None:
    cache, stage = begun(make(), Slow())
    step(cache, stage, batch(0))
    monkeypatch.setattr(Tier, "write", Mock(side_effect=ValueError("out of handles")))
    cache.see([batch(1), batch(2)])
    found = [cache.outputs(n, batch(n + 1), stage.compute) for n in range(2)]
    cache._writers.submit(int).result()
    assert all(torch.equal(one, stage.run(batch(n + 1), 0)) for n, one in enumerate(found))
    for _ in range(2):
        cache.see([batch(4)])
        if cache.active:
            cache.outputs(0, batch(4), stage.compute)
    assert not cache.active and sum("ValueError while outputs were written: out of" in line for line in said) == 1


def test_tensor_parallel_ranks_read_of_one_level_or_none(make: Made) -> None:
    """The other rank is played by hand: both compute a sample that it lacks, from the inputs."""
    stage, others = Stage(Slow(), Slow()), []
    one = make(agree=lambda mine: min(mine, others.pop(0)) if others else mine)
    one.begin(stage.level(), stage.level(1))
    for _ in range(3):
        (read,) = step(one, stage, batch(0))
    one.see([batch(0)])
    assert one.active and one.counts.read == 3
    stage.starts.clear()
    others[:] = [0, 1]  # the other one has not this level, and has the earlier one
    assert torch.equal(one.outputs(0, batch(0), stage.compute), read)
    assert one.counts == Counts(read=3, computed=9, kept=one.counts.kept) and stage.starts == [(0, 3)]
    others[:] = [0]
    one.see([batch(0)])
    assert not one.active


def test_what_does_not_fit_is_computed_with_one_warning_or_goes_to_the_disk(make: Made, said: list[str]) -> None:
    stage, both, small = Stage(Slow()), make(700, None), make(700)
    for cache in (both, small):
        assert said == []
        cache.begin(stage.level(), None)
        for _ in range(3):
            step(cache, stage, batch(0), batch(1))
    assert both.counts.kept == 6 and both.counts.read >= 9 and all(tier.used_bytes for tier in both.tiers)
    assert small.tiers[0].used_bytes <= 700 and 0 < small.counts.kept < 6
    assert len([line for line in said if "no more room" in line]) == 1


def test_a_name_is_of_all_that_the_model_gets_of_a_sample_and_not_of_strides() -> None:
    tokens, mask, everywhere = torch.arange(12).view(3, 4), torch.ones(3, 1, 1, 4, dtype=torch.bool), torch.ones(4, 4)
    before = names((tokens, mask, everywhere))
    assert len({*before}) == 3 and names((tokens[[2, 0]], mask[[2, 0]], everywhere)) == [before[2], before[0]]  # elsewhere
    for index, change in ((0, (1, 2)), (1, (1, 0, 0, 3))):
        inputs = [tokens.clone(), mask.clone(), everywhere]
        inputs[index][change] = 0
        assert [a == b for a, b in zip(before, names(tuple(inputs)), strict=True)] == [True, False, True]
    packed = [names(tokens, Documents.of(torch.tensor([[1, 1, 1, 2], [1] * 4, s]))) for s in ([1] * 4, [1, 1, 2, 2])]
    assert [a == b for a, b in zip(*packed, strict=True)] == [True, True, False], "documents are of the sample"
    padded = torch.cat([tokens, torch.zeros(3, 1, dtype=torch.long)], 1)
    for other in ((tokens, mask, everywhere * 2), (tokens.float(), mask, everywhere), (padded, mask, everywhere), tokens,
                  (tokens, mask, everywhere, torch.ones(()))):  # fmt: skip
        assert not set(before) & set(names(other))
    images = torch.randn(2, 3, 5, 5)
    assert names(images) == names(images.to(memory_format=torch.channels_last))
    assert names(images[:, :, ::2]) == names(images[:, :, ::2].clone())


@settings(max_examples=60)
@given(st.data())
def test_outputs_become_bytes_and_back(data: Any) -> None:
    rows, dims, tensors = data.draw(st.integers(1, 4)), [], []
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        dims.append(data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))))
        if dims[-1] is not None:
            shape[dims[-1]] = rows
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        tensors.append((100 * values).to(data.draw(st.sampled_from(dtypes))))
    smaller, order = data.draw(st.booleans()), data.draw(st.permutations(range(rows)))
    encoded = [b"".join(map(bytes, encode(tuple(tensors), dims, row, smaller))) for row in order]
    for one, other, dim in zip(tensors, decode([memoryview(each) for each in encoded]), dims, strict=True):
        expected = one if dim is None else one.index_select(dim, torch.tensor(order))
        if smaller and one.is_floating_point():
            expected = expected.to(torch.bfloat16).to(one.dtype)
        assert other.dtype == one.dtype and torch.equal(expected, other)
    alone = decode([memoryview(b"".join(map(bytes, encode(tensors[0], dims[:1], row, False)))) for row in order])
    assert isinstance(alone, Tensor)

"""What ranks agree on before a step, and by how many messages: threads in place of ranks."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.transport import consensus as consensus
from ds_terapipe.pipeline.transport.consensus import Consensus, Header
from ds_terapipe.schedule import Placement
from tests.threads import Threads

PIPELINES = [[0, 1, 2], [3, 4, 5]]
WORLD, FIRSTS, LASTS = 6, (0, 3), (2, 5)


class Quiet:
    """A watchdog that watches nothing."""

    timeout_s = 10.0

    def waiting(self, what: str) -> Any:
        return nullcontext()


class Rank(NamedTuple):
    """What a rank comes with."""

    header: Header | None = None
    micro_batches: int = 2
    config_hash: int = 4_000_000_000
    error: BaseException | None = None


def header(*lengths: int, signature: int = 77) -> Header:
    return Header(lengths, (signature,) * len(lengths))


def ranks(**others: Rank) -> list[Rank]:
    """First stages know lengths and shapes, last ones lengths; ``r3=...`` is another rank 3."""
    usual = [Rank()] * WORLD
    for rank in FIRSTS:
        usual[rank] = Rank(header(24, 24))
    for rank in LASTS:
        usual[rank] = Rank(header(24, 24, signature=0))
    return [others.get(f"r{rank}", one) for rank, one in enumerate(usual)]


def announced(given: list[Rank], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Counter[str]]:
    """What every rank gets, or its error, and how many collectives each took part in."""
    threads, local, calls = Threads(WORLD), threading.local(), Counter[str]()

    def everybodys(name: str, value: Any) -> list[Any]:
        calls[name] += 1
        return threads.gather(local.rank, value)

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(torch.stack([t.clone() for t in everybodys("reduce", tensor.clone())]).max(0).values)

    def all_gather(table: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        for row, said in zip(table, everybodys("gather", mine), strict=True):
            row.copy_(said)

    def all_gather_object(table: list[Any], mine: Any, group: Any) -> None:
        table[:] = everybodys("objects", mine)

    for function in (all_reduce, all_gather, all_gather_object):
        monkeypatch.setattr(torch.distributed, function.__name__, function)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: local.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: WORLD)
    monkeypatch.setattr(consensus, "bounded_group", lambda *_, **__: None)

    def run(rank: int, _: Any) -> Header:
        local.rank, mine = rank, given[rank]
        agreed = Consensus(Quiet(), PIPELINES, mine.config_hash)  # type: ignore[arg-type]
        return agreed.announce(Placement.plain(3), mine.header, mine.micro_batches, mine.error)

    found = threads.run(run)
    return found, Counter({name: count // WORLD for name, count in calls.items()})


def test_ranks_that_are_alike_reduce_a_few_words_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = announced(ranks(), monkeypatch)
    assert found == [Header((24, 24), (77, 77), (24,))] * WORLD
    assert calls == {"reduce": 1}


def test_lengths_that_differ_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"r3": Rank(header(16, 30)), "r5": Rank(header(16, 30, signature=0))}
    found, calls = announced(ranks(**other), monkeypatch)
    assert found[:3] == [Header((24, 24), (77, 77), (16, 24, 30))] * 3
    assert found[3:] == [Header((16, 30), (77, 77), (16, 24, 30))] * 3
    assert calls == {"reduce": 1, "gather": 1}


def test_replicas_of_one_length_each_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"r3": Rank(header(16, 16)), "r5": Rank(header(16, 16, signature=0))}
    found, _ = announced(ranks(**other), monkeypatch)
    assert [one.lengths for one in found] == [(24, 24)] * 3 + [(16, 16)] * 3


def test_shapes_that_differ_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = announced(ranks(r3=Rank(header(24, 24, signature=5))), monkeypatch)
    assert [one.signatures for one in found] == [(77, 77)] * 3 + [(5, 5)] * 3


def test_labels_need_not_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = announced(ranks(r2=Rank(), r5=Rank()), monkeypatch)
    assert found == [Header((24, 24), (77, 77), (24,))] * WORLD and calls == {"reduce": 1}


ERRORS = {
    "an error": (ranks(r4=Rank(error=ConfigError("the data iterator: bad"))), "the data iterator: bad", {"objects": 1}),
    "other settings": (ranks(r4=Rank(config_hash=1)), "other settings on rank 4 than on rank 0", {"gather": 1}),
    "other micro-batches": (ranks(r1=Rank(micro_batches=3)), "3 micro-batches on rank 1 and 2 on rank 0", {"gather": 1}),
    "labels": (ranks(r5=Rank(header(23, 23, signature=0))), "got labels of [23] tokens for inputs of [24]", {"gather": 1}),
    "an error beside others": (
        ranks(r0=Rank(None, error=ConfigError("first")), r3=Rank(header(16, 30)), r4=Rank(config_hash=1)), "first", {"objects": 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_on_one_rank_is_raised_on_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, said, after = ERRORS[name]
    found, calls = announced(given, monkeypatch)
    assert all(isinstance(one, ConfigError) and said in str(one) for one in found), found
    assert calls == {"reduce": 1, **after}

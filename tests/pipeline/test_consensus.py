"""Ranks agree before a step, by few messages: threads in place of ranks."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.transport import consensus
from ds_terapipe.pipeline.transport.consensus import Consensus, Header
from ds_terapipe.schedule import Placement
from tests.threads import Threads

PIPELINES = [[0, 1, 2], [3, 4, 5]]
WORLD = 6
QUIET: Any = SimpleNamespace(timeout_s=10.0, waiting=lambda what: nullcontext())  # a watchdog that watches nothing


class Rank(NamedTuple):
    """A rank's own part of an announcement."""

    header: Header | None = None
    micro_batches: int = 2
    config_hash: int = 4_000_000_000
    error: BaseException | None = None


def header(*lengths: int, signature: int = 77) -> Header:
    return Header(lengths, (signature,) * len(lengths))


# first stages know lengths and shapes, last ones lengths
USUAL = [Rank(header(24, 24)), Rank(), Rank(header(24, 24, signature=0))] * 2


def announced(monkeypatch: Any, others: dict[int, Rank]) -> tuple[list[Any], Counter[str]]:
    """The header that every rank gets, or its error, and how many collectives it took; ``others`` are not as usual."""
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
        local.rank, mine = rank, others.get(rank, USUAL[rank])
        agreed = Consensus(QUIET, PIPELINES, mine.config_hash)
        return agreed.announce(Placement.plain(3), mine.header, mine.micro_batches, mine.error)

    found = threads.run(run)
    return found, Counter({name: count // WORLD for name, count in calls.items()})


def other(*lengths: int) -> dict[int, Rank]:
    """The second pipeline has other lengths."""
    return {3: Rank(header(*lengths)), 5: Rank(header(*lengths, signature=0))}


ALIKE = ((24, 24), (77, 77))
# other ranks, lengths and signatures in the second pipeline, lengths everywhere, further collectives
AGREED: dict[str, Any] = {
    "alike": ({}, ALIKE, (24,), {}),
    "labels that are not known": ({2: Rank(), 5: Rank()}, ALIKE, (24,), {}),
    "other lengths": (other(16, 30), ((16, 30), (77, 77)), (16, 24, 30), {"gather": 1}),
    "one other length": (other(16, 16), ((16, 16), (77, 77)), (16, 24), {"gather": 1}),
    "other shapes": ({3: Rank(header(24, 24, signature=5))}, ((24, 24), (5, 5)), (24,), {"gather": 1}),
}


@pytest.mark.parametrize(("others", "second", "everywhere", "collectives"), AGREED.values(), ids=AGREED)
def test_ranks_agree_on_lengths_and_shapes_by_a_few_words(monkeypatch, others, second, everywhere, collectives):
    wanted = [Header(*ALIKE, everywhere)] * 3 + [Header(*second, everywhere)] * 3
    assert announced(monkeypatch, others) == (wanted, {"reduce": 1, **collectives})


BAD, FIRST = (Rank(error=ConfigError(text)) for text in ("the data iterator: bad", "first"))
ERRORS: dict[str, Any] = {
    "an error": ({4: BAD}, "the data iterator: bad", "objects"),
    "other settings": ({4: Rank(config_hash=1)}, "other settings on rank 4 than on rank 0", "gather"),
    "other micro-batches": ({1: Rank(micro_batches=3)}, "3 micro-batches on rank 1 and 2 on rank 0", "gather"),
    "labels": ({5: Rank(header(23, 23, signature=0))}, "got labels of [23] tokens for inputs of [24]", "gather"),
    "an error beside others": ({0: FIRST, 3: Rank(header(16, 30)), 4: Rank(config_hash=1)}, "first", "objects"),
}


@pytest.mark.parametrize(("others", "said", "after"), ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_on_one_rank_is_raised_on_all(monkeypatch, others, said, after):
    found, calls = announced(monkeypatch, others)
    assert all(isinstance(one, ConfigError) and said in str(one) for one in found), found
    assert calls == {"reduce": 1, after: 1}

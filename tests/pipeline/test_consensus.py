"""What ranks agree on before a step, and by how many messages: threads in place of ranks."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
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


# first stages know lengths and shapes, last ones lengths
FIRST, LAST = Rank(header(24, 24)), Rank(header(24, 24, signature=0))
USUAL = [FIRST, Rank(), LAST] * 2


def announced(monkeypatch: Any, **others: Rank) -> tuple[list[Any], Counter[str]]:
    """What every rank gets, or its error, and how many collectives each took part in; ``r3=...`` is another rank 3."""
    given = [others.get(f"r{rank}", usual) for rank, usual in enumerate(USUAL)]
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


def of(first: Any, rest: Any, everywhere: tuple[int, ...]) -> list[Header]:
    """What the ranks of both pipelines know of lengths and signatures."""
    return [Header(*first, everywhere)] * 3 + [Header(*rest, everywhere)] * 3


ALIKE, OTHER = ((24, 24), (77, 77)), ((16, 30), (77, 77))
# other ranks, what all of them get, the collectives that it takes
AGREED: dict[str, Any] = {
    "alike": ({}, of(ALIKE, ALIKE, (24,)), {"reduce": 1}),
    "labels that are not known": ({"r2": Rank(), "r5": Rank()}, of(ALIKE, ALIKE, (24,)), {"reduce": 1}),
    "other lengths": (
        {"r3": Rank(header(16, 30)), "r5": Rank(header(16, 30, signature=0))},
        of(ALIKE, OTHER, (16, 24, 30)), {"reduce": 1, "gather": 1},
    ),
    "one other length": (
        {"r3": Rank(header(16, 16)), "r5": Rank(header(16, 16, signature=0))},
        of(ALIKE, ((16, 16), (77, 77)), (16, 24)), {"reduce": 1, "gather": 1},
    ),
    "other shapes": (
        {"r3": Rank(header(24, 24, signature=5))}, of(ALIKE, ((24, 24), (5, 5)), (24,)), {"reduce": 1, "gather": 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("others", "headers", "collectives"), AGREED.values(), ids=AGREED)
def test_ranks_agree_on_lengths_and_shapes_by_a_few_words(monkeypatch, others, headers, collectives):
    assert announced(monkeypatch, **others) == (headers, collectives)


ERRORS: dict[str, Any] = {
    "an error": ({"r4": Rank(error=ConfigError("the data iterator: bad"))}, "the data iterator: bad", "objects"),
    "other settings": ({"r4": Rank(config_hash=1)}, "other settings on rank 4 than on rank 0", "gather"),
    "other micro-batches": ({"r1": Rank(micro_batches=3)}, "3 micro-batches on rank 1 and 2 on rank 0", "gather"),
    "labels": (
        {"r5": Rank(header(23, 23, signature=0))}, "got labels of [23] tokens for inputs of [24]", "gather"
    ),
    "an error beside others": (
        {"r0": Rank(error=ConfigError("first")), "r3": Rank(header(16, 30)), "r4": Rank(config_hash=1)}, "first", "objects"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("others", "said", "after"), ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_on_one_rank_is_raised_on_all(monkeypatch, others, said, after):
    found, calls = announced(monkeypatch, **others)
    assert all(isinstance(one, ConfigError) and said in str(one) for one in found), found
    assert calls == {"reduce": 1, after: 1}

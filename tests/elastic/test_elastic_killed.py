"""A run that is killed at any point goes on from its last checkpoint, to the bit.

At three points; tests/benchmarks/elastic_killed.py has any number.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.killed import EVERY, Kill, Row, Undisturbed, differences, run_killed, run_whole, saves_after, tag_at
from tests.elastic.training import Case, data_of, engine_of
from tests.spawn import Exit, in_background, mark, run_to_exit


def while_the_latest_has_no_name(whole: Undisturbed) -> Kill:
    """Between the two renames of a save that replaces the latest checkpoint by one of the same name."""
    places = saves_after(whole, 0, Kill(0, 0.0, "rename"))
    for number, (first, second) in enumerate(itertools.pairwise(places)):
        replaces = tag_at(first.step) == tag_at(first.step - EVERY)
        if replaces and first.step == second.step and second.operation == first.operation + 1:
            return Kill(0, (number + 1.5) / len(places), "rename")
    raise AssertionError("no save has two renames")


def killed_three_times() -> tuple[list[Row], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        whole = run_whole(Path(folder, "whole"))
        kills = [while_the_latest_has_no_name(whole), Kill(1, 0.3, "save", halfway=True), Kill(0, 0.5, "step")]
        return run_killed(kills, whole, Path(folder, "killed"))


killed = in_background(f"{__name__}:killed", 2, killed_three_times)


def test_three_kills_of_one_run(killed: tuple[list[Row], list[str]]) -> None:
    rows, wrong = killed
    assert not wrong and [row.wrong for row in rows] == [()] * 3, (wrong, rows)
    assert all(row.died for row in rows), rows
    assert rows[0].resumed == 0 and all(row.resumed for row in rows[1:]), rows


def test_differences_are_told() -> None:
    ones = torch.ones(2)
    for found, told in (
        ({"a": [ones, 1.0]}, []),
        ({"a": [ones.bfloat16(), 1.0]}, ["/a/0 differs"]),
        ({"a": [ones + 1e-7, 1.0]}, ["/a/0 differs"]),
        ({"a": [ones, 2.0]}, ["/a/1: 2.0, must be 1.0"]),
        ({"a": [ones]}, ["/a has another length"]),
        ({"b": 1}, [" has other entries: ['b'], must be ['a']"]),
    ):
        assert differences(found, {"a": [torch.ones(2), 1.0]}) == told


CHANGE = Case("texts", "adamw", 2, ((1, 2),), ((1, 1), (2, 2)), slices=1, steps=3)


def dies_before_a_group(rank: int, world_size: int, victim: int, number: int) -> None:
    """Changes to one stage and back, in which a rank dies before it makes its ``number``-th group; 0: none does."""
    engine = engine_of(CHANGE, token_pipeline={"slices": 1, "timeout_s": 3.0})
    real, made = torch.distributed.new_group, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if (rank, made) == (victim, number):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    for number_of_step, step in enumerate(data_of(CHANGE)):
        torch.distributed.new_group = counted if number_of_step else real
        engine.train_batch(iter(step))
    mark(f"made_{made}")


def died(number: int) -> list[Exit]:
    return run_to_exit(dies_before_a_group, 2, 1, number, timeout=120)


first_group = in_background(f"{__name__}:first_group", 2, lambda: died(1))


def check(survivor: Exit) -> None:
    assert survivor.code in (1, 70) and "for all ranks to make their groups" in survivor.output, survivor.output


def test_a_rank_that_dies_before_a_group_of_a_change_is_not_waited_for_without_end(first_group: list[Exit]) -> None:
    """Torch would wait for half an hour; this is the first group, of DeepSpeed's grid."""
    check(first_group[0])


@pytest.mark.full
def test_a_rank_that_dies_before_the_last_group_is_not_waited_for_without_end() -> None:
    """Of a channel of ours."""
    whole = died(0)
    number = int(re.findall(r"MARK made_(\d+)", whole[0].output)[0])
    assert [end.code for end in whole] == [0, 0] and number >= 4
    check(died(number)[0])

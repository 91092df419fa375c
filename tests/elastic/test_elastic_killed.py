"""A run that is killed at any point goes on from its last checkpoint, to the bit.

At three points; tests/benchmarks/elastic_killed.py has any number.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.elastic.killed import (
    EVERY,
    Kill,
    Undisturbed,
    differences,
    moment,
    run_killed,
    run_whole,
    saves_after,
    tag_at,
)


def while_the_latest_has_no_name(whole: Undisturbed) -> Kill:
    """Between the two renames of a save that replaces the latest checkpoint by one of the same name."""
    kill = Kill(0, 0.0, "rename")
    places = saves_after(whole, 0, kill)
    for number, (first, second) in enumerate(itertools.pairwise(places)):
        replaces = tag_at(first.step) == tag_at(first.step - EVERY)
        if replaces and first.step == second.step and second.operation == first.operation + 1:
            return Kill(0, (number + 1.5) / len(places), "rename")
    raise AssertionError("no save has two renames")


def test_three_kills_of_one_run(tmp_path: Path) -> None:
    whole = run_whole(tmp_path / "whole")
    kills = [while_the_latest_has_no_name(whole), Kill(1, 0.3, "save", halfway=True), Kill(0, 0.5)]
    rows, wrong = run_killed(kills, whole, tmp_path / "killed")
    assert not wrong and [row.wrong for row in rows] == [()] * 3, (wrong, rows)
    assert all(row.died for row in rows), rows
    assert rows[0].resumed == 0 and all(row.resumed for row in rows[1:]), rows


def test_a_moment_is_a_share_of_what_is_left() -> None:
    whole = Undisturbed(Path(), "fp32", {}, [], [4.0, 1.0, 1.0, 1.0, 1.0], [])
    assert moment(whole, 0, 0.25) == (0, 2.0)
    assert moment(whole, 0, 0.75) == (3, 0.0)
    assert moment(whole, 2, 0.5) == (2, 3.0)
    assert moment(whole, 2, 0.75) == (3, 0.5)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"a": [torch.ones(2), 1.0]}, None),
        ({"a": [torch.ones(2).bfloat16(), 1.0]}, "/a/0 differs"),
        ({"a": [torch.ones(2) + 1e-7, 1.0]}, "/a/0 differs"),
        ({"a": [torch.ones(2), 2.0]}, "/a/1: 2.0, must be 1.0"),
        ({"a": [torch.ones(2)]}, "/a has another length"),
        ({"b": 1}, " has other entries: ['b'], must be ['a']"),
    ],
)
def test_differences_are_told(found: object, text: str | None) -> None:
    assert differences(found, {"a": [torch.ones(2), 1.0]}) == ([] if text is None else [text])

"""A run that is killed at three points goes on from its last checkpoint, to the bit.

tests/benchmarks/elastic_killed.py has any number of points."""

import itertools
import os
import signal
import tempfile
from pathlib import Path

import torch

from tests.elastic.killed import EVERY, STEPS, Kill, Row, Undisturbed, run_killed, run_whole, tag_at
from tests.elastic.training import Case, data_of, engine_of
from tests.spawn import Exit, in_background, run_to_exit


def while_the_latest_has_no_name(whole: Undisturbed) -> Kill:
    """Between the two renames of a save that replaces the latest checkpoint by one of the same name."""
    step = next(step for step in whole.operations[0] if tag_at(step) == tag_at(step - EVERY))
    first = [*itertools.pairwise(whole.operations[0][step])].index(("rename", "rename"))
    return Kill(0, (step - 1) / STEPS, first + 1)


def killed_three_times() -> tuple[list[Row], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        whole = run_whole(Path(folder, "whole"))
        in_a_file = Kill(1, 0.3, whole.operations[1][EVERY].index("save"), halfway=True)
        kills = [while_the_latest_has_no_name(whole), in_a_file, Kill(0, 0.5)]
        return run_killed(kills, whole, Path(folder, "killed"))


killed = in_background(f"{__name__}:killed", 2, killed_three_times)


def test_three_kills_of_one_run(killed: tuple[list[Row], list[str]]) -> None:
    rows, wrong = killed
    assert not wrong and [row.wrong for row in rows] == [()] * 3, f"{wrong}, {rows}"
    assert all(row.died for row in rows), rows
    assert rows[0].resumed == 0 and all(row.resumed for row in rows[1:]), rows


CHANGE = Case("texts", "adamw", 2, ((1, 2),), ((1, 1),), slices=1, steps=2)


def dies_at_a_group(rank: int, world_size: int) -> None:
    """Change to one stage, where rank 1 dies before it makes a group."""
    engine, data = engine_of(CHANGE, token_pipeline={"slices": 1, "timeout_s": 10.0}), data_of(CHANGE)
    engine.train_batch(iter(data[0]))
    if rank == 1:
        torch.distributed.new_group = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
    engine.train_batch(iter(data[1]))


first_group = in_background(f"{__name__}:first_group", 2, lambda: run_to_exit(dies_at_a_group, 2, timeout=120))


def test_a_rank_that_dies_before_a_group_of_a_change_is_not_waited_for_without_end(first_group: list[Exit]) -> None:
    """Torch would wait for half an hour; this is the first group, of DeepSpeed's grid."""
    survivor = first_group[0]
    assert survivor.code in (1, 70) and "for all ranks to make their groups" in survivor.output, survivor.output

"""What a run says: the log line, the monitor's events, learning rates; the same as DeepSpeed's where DeepSpeed has it."""

from __future__ import annotations

import csv
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.models import gpt, masked_loss, micro_batch, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import launched

SLICED = {"slices": 4}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 4}}}


def lines(every: int | None, micro_batches: int) -> list[str]:
    """Our log lines of four steps."""
    config, out = {"steps_per_print": every}, io.StringIO()
    engine = build_engine(gpt(), masked_loss, token_pipeline=SLICED, micro_batches=micro_batches, config=config)
    with redirect_stdout(out):
        train(engine, steps_of(4, micro_batches))
    engine.destroy()
    return [line for line in out.getvalue().splitlines() if "tokens/s" in line]


def watched(keys: dict[str, Any] | None, folder: str) -> tuple[Any, ...]:
    """Losses and rates of steps and an evaluation, what a CSV monitor wrote of them, rates of a client's scheduler."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = build_engine(gpt(), masked_loss, token_pipeline=keys, config={**monitor, **WARMUP})
    rates: list[list[float]] = [[], []]
    losses = train(engine, steps_of(5, 2), after_step=lambda: rates[0].append(engine.get_lr()[0])).losses
    engine.total_loss = None
    engine.eval_batch(iter([micro_batch(m) for m in range(2)]))
    engine.destroy()
    written = {path.name: list(csv.reader(path.open())) for path in Path(folder).rglob("*.csv")}
    engine = build_engine(
        gpt(),
        masked_loss,
        token_pipeline=keys,
        lr_scheduler=lambda given: torch.optim.lr_scheduler.StepLR(given, 2, 0.5),
    )
    train(engine, steps_of(5, 2), after_step=lambda: rates[1].append(engine.get_lr()[0]))
    engine.destroy()
    return losses, rates, written


def worker(rank: int, world_size: int, folder: str) -> tuple[Any, ...]:
    said = [lines(2, 2), lines(None, 2), lines(4, 16)]
    return said, [watched(keys, f"{folder}/{rank}/{name}") for name, keys in (("own", None), ("ours", SLICED))]


ranks = launched(worker, 2, folder=True, timeout=180)


def test_the_first_rank_prints_a_line_as_often_as_asked(ranks: list[Any]) -> None:
    (first, second), never, (many,) = ranks[0][0]
    assert ranks[1][0] == [[], [], []] and never == []
    form = r"step (\d+): loss \d\.\d{4}, [\d,]+ tokens/s, .* waited \d+% \d+% .*4 slices, 1f1b"
    assert [re.search(form, line)[1] for line in (first, second)] == ["2", "4"]  # type: ignore[index]
    assert "does not pay" not in first
    assert "slicing does not pay here" in many, "with many micro-batches"


def test_the_monitor_and_learning_rates_are_deepspeeds(ranks: list[Any]) -> None:
    for rank, (_, (theirs, ours)) in enumerate(ranks):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == theirs[1] and all(len(set(rates)) > 2 for rates in ours[1])
        assert ours[2].keys() == theirs[2].keys() and len(ours[2]) == (3 if rank == 0 else 0)
        for file, (head, *rows) in theirs[2].items():
            assert ours[2][file][0] == head and len(ours[2][file]) == len(rows) + 1 > 1, file
            for a, b in zip(ours[2][file][1:], rows, strict=True):
                assert [float(x) for x in a] == pytest.approx([float(x) for x in b], rel=1e-5), file

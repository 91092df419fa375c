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
from tests.spawn import run_ranks

SLICED = {"slices": 4}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 4}}}


def said(every: int | None, micro_batches: int) -> list[str]:
    """Our log lines of four steps."""
    engine = build_engine(
        gpt(), masked_loss, token_pipeline=SLICED, micro_batches=micro_batches, config={"steps_per_print": every}
    )
    out = io.StringIO()
    with redirect_stdout(out):
        train(engine, steps_of(4, micro_batches))
    engine.destroy()
    return [line for line in out.getvalue().splitlines() if "tokens/s" in line]


def watched(keys: dict[str, Any] | None, folder: str) -> list[float]:
    """Three steps and an evaluation with a CSV monitor."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = build_engine(gpt(), masked_loss, token_pipeline=keys, config={**monitor, **WARMUP})
    losses = train(engine, steps_of(3, 2)).losses
    engine.total_loss = None
    engine.eval_batch(iter([micro_batch(m) for m in range(2)]))
    engine.destroy()
    return losses


def rates(keys: dict[str, Any] | None, client: bool) -> list[float]:
    """The learning rate after each of five steps, with a scheduler from the JSON or one of the client's."""
    options: dict[str, Any] = {"config": WARMUP}
    if client:
        options = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}
    engine = build_engine(gpt(), masked_loss, token_pipeline=keys, **options)
    found: list[float] = []
    train(engine, steps_of(5, 2), after_step=lambda: found.append(engine.get_lr()[0]))
    engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {
        "every two": said(2, 2),
        "never": said(None, 2),
        "many": said(4, 16),
    }
    for name, keys in (("own", None), ("ours", SLICED)):
        results[f"losses {name}"] = watched(keys, str(Path(folder) / name))
        results[f"rates {name}"] = [rates(keys, client) for client in (False, True)]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitor")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(worker, 2, str(folder), timeout=180)


def test_the_line(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["every two"]
    assert ranks[1]["every two"] == []
    form = r"step (\d+): loss \d\.\d{4}, [\d,]+ tokens/s, .* waited \d+% \d+% .*4 slices, 1f1b"
    assert [re.search(form, line)[1] for line in (first, second)] == ["2", "4"]  # type: ignore[index]
    assert "does not pay" not in first


def test_null_prints_nothing(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["never"] == []


def test_many_micro_batches_are_told_that_slicing_does_not_pay(ranks: list[dict[str, Any]]) -> None:
    (line,) = ranks[0]["many"]
    assert "slicing does not pay here" in line


def test_monitor_writes_deepspeeds_events(ranks: list[dict[str, Any]], folder: Path) -> None:
    assert ranks[0]["losses ours"] == pytest.approx(ranks[0]["losses own"], rel=1e-5)
    files = {name: sorted(p.name for p in (folder / name).rglob("*.csv")) for name in ("own", "ours")}
    assert files["own"] == files["ours"] and len(files["own"]) == 3, files
    for file in files["own"]:
        own, ours = (list(csv.reader(next((folder / name).rglob(file)).open())) for name in ("own", "ours"))
        assert own[0] == ours[0] and len(own) == len(ours), file
        for a, b in zip(own[1:], ours[1:], strict=True):
            assert [float(x) for x in a] == pytest.approx([float(x) for x in b], rel=1e-5), file


def test_learning_rates(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["rates ours"] == results["rates own"]
        assert len(set(results["rates ours"][0])) > 2 and len(set(results["rates ours"][1])) > 2

"""Sources and shapes of batches, evaluation between steps, and the lines that a run prints of them: as in DeepSpeed."""

import csv
import io
import re
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime import dataloader
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ds_terapipe.pipeline.transport.p2p import Announcements
from tests.pipeline.models import masked_loss, micro_batch, steps_of, tied_gpt
from tests.pipeline.training import build_engine, raised, train, train_plain, worst
from tests.spawn import launched

SLICED = {"slices": 5}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 4}}}
QUESTIONS: dict[str, dict[str, Any]] = {
    "mean": {}, "three micro-batches": {"num_micro_batches": 3},
    "not reduced": {"reduce_output": None, "bcast_loss": False}, "logits": {"return_logits": True},
    "no loss, logits": {"compute_loss": False, "reduce_output": None, "return_logits": True},
}  # fmt: skip


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda tensor: tensor[0], micro_batch(index, batch=1))


def loading_here() -> Any:
    """DeepSpeed starts two processes that load: none here, a test's process may not have children."""
    return mock.patch.object(dataloader, "DataLoader", lambda *a, **k: DataLoader(*a, **{**k, "num_workers": 0}))


def evaluated(engine: Any) -> dict[str, Any]:
    """Results of eval_batch for every combination of its arguments that changes them."""
    answers = {}
    for question, arguments in QUESTIONS.items():
        engine.total_loss = None  # DeepSpeed's eval_batch (0.19.8) adds to what the last one left, whatever its shape
        answers[question] = engine.eval_batch(iter([micro_batch(7 + m) for m in range(3)]), **arguments)
    engine.total_loss = None
    return answers


def watched(keys: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """Losses, rates, lines, what a CSV monitor wrote; evaluations, losses, rates with a dataset and a client's scheduler."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline=keys, config={**monitor, **WARMUP, "steps_per_print": 2})
    rates, out = list[float](), io.StringIO()
    with redirect_stdout(out):
        losses = train(engine, steps_of(5, 2), after_step=lambda: rates.append(engine.get_lr()[0])).losses
    engine.total_loss = None
    engine.eval_batch(iter(steps_of(1, 2)[0]))
    engine.destroy()
    written = {path.name: list(csv.reader(path.open())) for path in Path(folder).rglob("*.csv")}
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    with loading_here():
        engine = build_engine(tied_gpt(), masked_loss, token_pipeline=keys, training_data=Texts(), lr_scheduler=halved)
        answers = evaluated(engine)
        steps = [(float(engine.train_batch()), engine.get_lr()[0]) for _ in range(5)]
    engine.destroy()
    dataset = tuple(zip(*steps, strict=True))
    lines = [line for line in out.getvalue().splitlines() if "tokens/s" in line]
    return {"trained": (losses, rates), "lines": lines, "written": written, "evaluated": answers, "dataset": dataset}


def changing_shapes() -> tuple[float, str]:
    """By how much numbers are off at most while lengths and batches change; what is said of lists that fit no more."""
    shapes = [[(24, 2), (24, 2)], [(17, 2), (40, 2)], [(24, 3), (24, 1)], [(24, 2), (24, 2)]]
    steps = [
        [micro_batch(10 * s + m, length=length, batch=batch) for m, (length, batch) in enumerate(step)]
        for s, step in enumerate(shapes)
    ]
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline={**SLICED, "schedule": "terapipe"})
    losses = train(engine, steps).losses
    engine.set_slices(5, "1f1b")
    torch.set_default_dtype(torch.float64)  # DeepSpeed's stages receive the loss in it
    trace = train(engine, steps)
    torch.set_default_dtype(torch.float32)
    engine.set_slices([4, 20])
    engine.train_batch(iter(steps[0]))
    said = raised(lambda: engine.train_batch(iter(steps[1])))
    engine.train_batch(iter(steps[3]))
    engine.destroy()
    plain = train_plain(tied_gpt(), masked_loss, steps * 2)
    off = [abs(a - b) / b for a, b in zip(losses + trace.losses, plain.losses, strict=True)]
    return max(*off, worst(trace.weights, plain.weights)), said


def new_lengths() -> list[tuple[int, int]]:
    """Messages and collectives, and announced shapes, of seven steps, whose micro-batches all have lengths of their own."""
    engine, counts = build_engine(tied_gpt(), masked_loss, token_pipeline=SLICED), []
    names = ("isend", "irecv", "all_reduce", "all_gather", "all_gather_object", "broadcast")
    calls = {name: mock.Mock(wraps=getattr(torch.distributed, name)) for name in names}
    announced = mock.patch.object(Announcements, "send", autospec=True, side_effect=Announcements.send)
    for length in range(8, 47, 6):
        with mock.patch.multiple(torch.distributed, **calls), announced as sent:
            engine.train_batch(iter([micro_batch(m, length=length + m) for m in range(2)]))
        counts.append((sum(call.call_count for call in calls.values()), sent.call_count))
        for call in calls.values():
            call.reset_mock()
    engine.destroy()
    return counts


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "own": watched(None, f"{folder}/{rank}/own"), "ours": watched(SLICED, f"{folder}/{rank}/ours"),
        "shapes": changing_shapes(), "new lengths": new_lengths(),
    }  # fmt: skip


ranks = launched(worker, 2, folder=True, timeout=240)


@pytest.mark.parametrize("question", QUESTIONS)
def test_evaluation_equals_deepspeeds(ranks: list[dict[str, Any]], question: str) -> None:
    for rank, found in enumerate(ranks):
        theirs = found["own"]["evaluated"][question]
        torch.testing.assert_close(found["ours"]["evaluated"][question], theirs, rtol=1e-5, atol=1e-6)
        if question == "not reduced":
            assert (theirs is not None) == (rank == 1)


def test_datasets_schedulers_and_monitors_are_used_as_by_deepspeed(ranks: list[dict[str, Any]]) -> None:
    for rank, (theirs, ours) in enumerate((found["own"], found["ours"]) for found in ranks):
        for what in ("trained", "dataset"):
            (losses, rates), (own_losses, own_rates) = ours[what], theirs[what]
            assert losses == pytest.approx(own_losses, rel=1e-5)
            assert rates == own_rates and len(set(rates)) > 2
        assert ours["written"].keys() == theirs["written"].keys() and len(ours["written"]) == (3 if rank == 0 else 0)
        for file, (head, *rows) in theirs["written"].items():
            own_head, *own_rows = ours["written"][file]
            assert own_head == head and len(own_rows) == len(rows) > 0, file
            for a, b in zip(own_rows, rows, strict=True):
                assert [float(x) for x in a] == pytest.approx([float(x) for x in b], rel=1e-5), file


def test_lengths_and_batches_may_change_and_a_list_fits_one_length(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        off, said = rank["shapes"]
        assert off <= 1e-5
        assert "ConfigError: token_pipeline.slices: got [4, 20], which add up to 24 tokens" in said


def test_steps_of_new_lengths_take_no_more_messages_than_any_others(ranks: list[dict[str, Any]]) -> None:
    for counts in (rank["new lengths"] for rank in ranks):
        calls, announced = zip(*counts, strict=True)
        assert set(calls[1:]) == {calls[-1]} and 2 * SLICED["slices"] < calls[-1] < calls[0] and not any(announced[1:])
    assert ranks[0]["new lengths"][0][1] > 0


def test_the_first_rank_prints_a_line_as_often_as_asked(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["ours"]["lines"] for found in ranks)
    form = r"step (\d+): loss \d\.\d{4}, [\d,]+ tokens/s, .* waited \d+% \d+% .*5 slices, 1f1b"
    assert [re.search(form, line)[1] for line in first] == ["2", "4"] and second == []  # type: ignore[index]

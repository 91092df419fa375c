"""Where batches come from, what shapes they have, and evaluation between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime import dataloader
from torch.utils.data import DataLoader

from ds_terapipe import ConfigError
from tests.pipeline.models import MaskedTokenLoss, gpt, masked_loss, mean_loss, micro_batch, steps_of, tied_gpt
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

SLICED = {"slices": 5}
sgd = partial(torch.optim.SGD, lr=0.2)


class Texts(torch.utils.data.Dataset):
    """Nine samples of ((tokens, positions), targets)."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        (tokens, positions), targets = micro_batch(index, batch=1, masked=False)
        return (tokens[0], positions[0]), targets[0]


def evaluation() -> dict[str, Any]:
    """What eval_batch gives beside DeepSpeed's, for every combination of its arguments that changes the result."""
    questions: dict[str, dict[str, Any]] = {
        "mean": {},
        "three micro-batches": {"num_micro_batches": 3},
        "not reduced": {"reduce_output": None, "bcast_loss": False},
        "logits": {"return_logits": True},
        "no loss": {"compute_loss": False, "reduce_output": None},
        "no loss, logits": {"compute_loss": False, "reduce_output": None, "return_logits": True},
    }
    answers: dict[str, dict[str, Any]] = {}
    for name, loss in (("own", masked_loss), ("ours", masked_loss), ("per token", MaskedTokenLoss())):
        engine = build_engine(tied_gpt(), loss, token_pipeline=None if name == "own" else SLICED)
        answers[name] = {}
        for q, arguments in questions.items():
            engine.total_loss = (
                None  # DeepSpeed's eval_batch (0.19.8) adds to what the last one left, whatever its shape
            )
            answers[name][q] = engine.eval_batch(iter([micro_batch(7 + m) for m in range(3)]), **arguments)
        engine.destroy()
    last = answers["own"]["not reduced"] is not None
    return {
        f"{name}, {q}": flat(answers[name][q], answers["own"][q]) for name in ("ours", "per token") for q in questions
    } | {"last": last}


def flat(got: Any, expected: Any) -> float:
    """Largest difference of two results of the same form, relative to the largest value."""
    if isinstance(expected, torch.Tensor):
        assert got.shape == expected.shape, f"{got.shape} {expected.shape}"
        return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        return max((flat(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)
    assert got is None and expected is None, f"{got} {expected}"
    return 0.0


def evaluation_between_steps() -> bool:
    """Losses of training are bit for bit the same with and without evaluations in between."""
    losses = []
    for evaluates in (False, True):
        engine = build_engine(tied_gpt(), masked_loss, token_pipeline=SLICED)
        between = (lambda engine=engine: engine.eval_batch(iter(steps_of(1, 2)[0]))) if evaluates else None
        if evaluates:
            engine.eval_batch(iter(steps_of(1, 3)[0]), num_micro_batches=3)
        losses.append(train(engine, steps_of(3, 2), after_step=between).losses)
        engine.destroy()
    return losses[0] == losses[1]


def dataset() -> dict[str, list[float]]:
    """``training_data``: nine samples in batches of two, over and over; the last one of a round is smaller."""
    losses = {}
    for name, keys in (("own", None), ("ours", SLICED)):
        # DeepSpeed starts two processes that load: none here, a test's process may not have children
        with mock.patch.object(dataloader, "DataLoader", lambda *a, **k: DataLoader(*a, **{**k, "num_workers": 0})):
            engine = build_engine(gpt(), mean_loss, token_pipeline=keys, micro_batches=1, training_data=Texts())
            losses[name] = [float(engine.train_batch()) for _ in range(7)]
        engine.destroy()
    return losses


def end_of_data() -> list[str]:
    """A step with too few micro-batches ends in StopIteration everywhere, and the next one with enough runs."""
    engine = build_engine(gpt(), masked_loss, token_pipeline=SLICED)
    seen = []
    for count in (2, 1, 2):
        try:
            engine.train_batch(iter([micro_batch(m) for m in range(count)]))
            seen.append("trained")
        except StopIteration:
            seen.append("end")
    engine.destroy()
    return seen


def changing_shapes() -> dict[str, Any]:
    """Lengths that change between and within steps, batches of other sizes, and lists that fit no more."""
    shapes = [[(24, 2), (24, 2)], [(17, 2), (40, 2)], [(24, 3), (24, 1)], [(24, 2), (24, 2)]]
    steps = [
        [micro_batch(10 * s + m, length=length, batch=batch) for m, (length, batch) in enumerate(step)]
        for s, step in enumerate(shapes)
    ]
    plain = train_plain(tied_gpt(), masked_loss, steps, sgd)
    report = {}
    for schedule in ("terapipe", "1f1b"):
        engine = build_engine(tied_gpt(), masked_loss, token_pipeline={**SLICED, "schedule": schedule})
        trace = train(engine, steps)
        report[schedule] = max(
            *(abs(a - b) / b for a, b in zip(trace.losses, plain.losses, strict=True)),
            worst(trace.weights, plain.weights),
        )
        engine.destroy()
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline={"slices": [4, 20]})
    engine.train_batch(iter(steps[0]))
    try:
        engine.train_batch(iter(steps[1]))
    except ConfigError as error:
        report["list"] = str(error)
    engine.train_batch(iter(steps[3]))
    engine.destroy()
    return report


def batch_size() -> float:
    """set_train_batch_size between steps: two micro-batches, then three, then one."""
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline=SLICED)
    steps = [steps_of(1, 2)[0], steps_of(1, 3)[0], steps_of(1, 1)[0]]
    losses = []
    for step in steps:
        engine.set_train_batch_size(2 * len(step))
        losses.append(float(engine.train_batch(iter(step))))
    engine.destroy()
    plain = train_plain(tied_gpt(), masked_loss, steps, sgd)
    return max(abs(a - b) / b for a, b in zip(losses, plain.losses, strict=True))


def no_loss_fn() -> str:
    """A model without loss_fn runs whole and is refused when cut."""
    told = []
    for slices in (1, 5):
        engine = build_engine([*gpt(), output_as_loss], None, token_pipeline={"slices": slices})
        try:
            told.append(f"{float(engine.train_batch(iter(steps_of(1, 2)[0]))):.2f}")
        except ConfigError as error:
            told.append(str(error))
        engine.destroy()
    return told[1] if float(told[0]) > 0 else told[0]


def output_as_loss(logits: torch.Tensor) -> torch.Tensor:
    return logits.square().mean()


CASES: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        evaluation, evaluation_between_steps, dataset, end_of_data, changing_shapes, batch_size, no_loss_fn,
    )
}  # fmt: skip


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {name: case() for name, case in CASES.items()}


ranks = launched(worker, 2, timeout=180)


def test_evaluation_equals_deepspeeds(ranks: list[dict[str, Any]]) -> None:
    assert [rank["evaluation"].pop("last") for rank in ranks] == [False, True]
    for rank in ranks:
        assert len(rank["evaluation"]) == 12
        for question, error in rank["evaluation"].items():
            assert error <= 1e-5, f"{question}: {error}"


def test_evaluation_leaves_training_alone(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["evaluation_between_steps"] for rank in ranks)


def test_dataset_given_to_initialize(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["dataset"]["ours"] == pytest.approx(rank["dataset"]["own"], rel=1e-5)


def test_end_of_data_is_seen_by_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert [rank["end_of_data"] for rank in ranks] == [["trained", "end", "trained"]] * 2


def test_lengths_and_batches_may_change(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["changing_shapes"]["terapipe"] <= 1e-5
        assert rank["changing_shapes"]["1f1b"] <= 1e-5


def test_a_list_fits_one_length_only(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "token_pipeline.slices: got [4, 20], which add up to 24 tokens" in rank["changing_shapes"]["list"]


def test_train_batch_size_may_change(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["batch_size"] <= 1e-5 for rank in ranks)


def test_a_model_without_loss_fn_is_refused_when_cut(ranks: list[dict[str, Any]]) -> None:
    assert all("PipelineModule without loss_fn" in rank["no_loss_fn"] for rank in ranks)

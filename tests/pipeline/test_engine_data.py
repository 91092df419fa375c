"""Where batches come from, what shapes they have, and evaluation between steps."""

from __future__ import annotations

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


QUESTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "three micro-batches": {"num_micro_batches": 3},
    "not reduced": {"reduce_output": None, "bcast_loss": False},
    "logits": {"return_logits": True},
    "no loss": {"compute_loss": False, "reduce_output": None},
    "no loss, logits": {"compute_loss": False, "reduce_output": None, "return_logits": True},
}


def evaluated(loss: Any, keys: dict[str, Any] | None) -> dict[str, Any]:
    """What eval_batch gives for every combination of its arguments that changes the result."""
    engine, answers = build_engine(tied_gpt(), loss, token_pipeline=keys), {}
    for question, arguments in QUESTIONS.items():
        engine.total_loss = None  # DeepSpeed's eval_batch (0.19.8) adds to what the last one left, whatever its shape
        answers[question] = engine.eval_batch(iter([micro_batch(7 + m) for m in range(3)]), **arguments)
    engine.destroy()
    return answers


def evaluation_between_steps() -> bool:
    """Whether losses of training are bit for bit the same with and without evaluations in between."""
    losses = []
    for evaluates in (False, True):
        engine = build_engine(tied_gpt(), masked_loss, token_pipeline=SLICED)
        between = (lambda engine=engine: engine.eval_batch(iter(steps_of(1, 2)[0]))) if evaluates else None
        if evaluates:
            engine.eval_batch(iter(steps_of(1, 3)[0]), num_micro_batches=3)
        losses.append(train(engine, steps_of(3, 2), after_step=between).losses)
        engine.destroy()
    return losses[0] == losses[1]


def dataset(keys: dict[str, Any] | None) -> list[float]:
    """``training_data``: nine samples in batches of two, over and over; the last one of a round is smaller."""
    # DeepSpeed starts two processes that load: none here, a test's process may not have children
    with mock.patch.object(dataloader, "DataLoader", lambda *a, **k: DataLoader(*a, **{**k, "num_workers": 0})):
        engine = build_engine(gpt(), mean_loss, token_pipeline=keys, micro_batches=1, training_data=Texts())
        losses = [float(engine.train_batch()) for _ in range(7)]
    engine.destroy()
    return losses


def end_of_data() -> list[str]:
    """A step with too few micro-batches, and the next one with enough."""
    engine, seen = build_engine(gpt(), masked_loss, token_pipeline=SLICED), []
    for count in (2, 1, 2):
        try:
            engine.train_batch(iter([micro_batch(m) for m in range(count)]))
            seen.append("trained")
        except StopIteration:
            seen.append("end")
    engine.destroy()
    return seen


def changing_shapes() -> tuple[float, str]:
    """Lengths that change between and within steps, batches of other sizes; what is said of lists that fit no more."""
    shapes = [[(24, 2), (24, 2)], [(17, 2), (40, 2)], [(24, 3), (24, 1)], [(24, 2), (24, 2)]]
    steps = [
        [micro_batch(10 * s + m, length=length, batch=batch) for m, (length, batch) in enumerate(step)]
        for s, step in enumerate(shapes)
    ]
    plain, found, said = train_plain(tied_gpt(), masked_loss, steps, sgd), [], ""
    for schedule in ("terapipe", "1f1b"):
        engine = build_engine(tied_gpt(), masked_loss, token_pipeline={**SLICED, "schedule": schedule})
        trace = train(engine, steps)
        found += [abs(a - b) / b for a, b in zip(trace.losses, plain.losses, strict=True)]
        found.append(worst(trace.weights, plain.weights))
        engine.destroy()
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline={"slices": [4, 20]})
    engine.train_batch(iter(steps[0]))
    try:
        engine.train_batch(iter(steps[1]))
    except ConfigError as error:
        said = str(error)
    engine.train_batch(iter(steps[3]))
    engine.destroy()
    return max(found), said


def batch_size() -> float:
    """set_train_batch_size between steps: two micro-batches, then three, then one."""
    engine, losses = build_engine(tied_gpt(), masked_loss, token_pipeline=SLICED), []
    steps = [steps_of(1, count)[0] for count in (2, 3, 1)]
    for step in steps:
        engine.set_train_batch_size(2 * len(step))
        losses.append(float(engine.train_batch(iter(step))))
    engine.destroy()
    plain = train_plain(tied_gpt(), masked_loss, steps, sgd)
    return max(abs(a - b) / b for a, b in zip(losses, plain.losses, strict=True))


def no_loss_fn(slices: int) -> str:
    specs = [*gpt(), lambda logits: logits.square().mean()]
    engine = build_engine(specs, None, token_pipeline={"slices": slices})
    try:
        return f"{float(engine.train_batch(iter(steps_of(1, 2)[0]))):.2f}"
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "evaluated": [evaluated(*way) for way in ((masked_loss, None), (masked_loss, SLICED), (MaskedTokenLoss(), SLICED))],
        "between": evaluation_between_steps(),
        "dataset": [dataset(keys) for keys in (None, SLICED)],
        "end": end_of_data(),
        "shapes": changing_shapes(),
        "batch size": batch_size(),
        "no loss": [no_loss_fn(slices) for slices in (1, 5)],
    }  # fmt: skip


ranks = launched(worker, 2, timeout=180)


@pytest.mark.parametrize("question", QUESTIONS)
def test_evaluation_equals_deepspeeds(ranks: list[dict[str, Any]], question: str) -> None:
    for rank, found in enumerate(ranks):
        theirs, *ours = (answers[question] for answers in found["evaluated"])
        for answer in ours:
            torch.testing.assert_close(answer, theirs, rtol=1e-5, atol=1e-6)
        if question == "not reduced":
            assert (theirs is not None) == (rank == 1)


def test_evaluation_leaves_training_alone(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["between"] for rank in ranks)


def test_a_dataset_given_to_initialize_trains_as_deepspeeds(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["dataset"][1] == pytest.approx(rank["dataset"][0], rel=1e-5)


def test_the_end_of_data_is_seen_by_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert [rank["end"] for rank in ranks] == [["trained", "end", "trained"]] * 2


def test_lengths_and_batches_may_change_and_a_list_fits_one_length(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        off, said = rank["shapes"]
        assert max(off, rank["batch size"]) <= 1e-5
        assert "token_pipeline.slices: got [4, 20], which add up to 24 tokens" in said


def test_a_model_without_loss_fn_is_refused_when_cut(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert float(rank["no loss"][0]) > 0 and "PipelineModule without loss_fn" in rank["no loss"][1]

"""The large-batch rules against the published tables, and LambWarmup as DeepSpeed drives it."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.schedules.lr_rules import Ramp, linear_epoch_ratio, square_root_lr, whole_steps
from ds_terapipe.optim.schedules.lr_schedules import LambWarmup, build_scheduler, validate

# BERT-Large without tuning, arXiv 1904.00962 table 4: batch, LR as printed, share of warm-up, steps. The shape of the table
# (square root, doubling share) is in the paper's text; the numbers were recalled, not read again: 5 / (2^x 10^3), 1/320 .. 1/5.
BERT = [(512 * 2**i, 5 / (2 ** (3 - i / 2) * 1e3), Fraction(2**i, 320), 1_000_000 // 2**i) for i in range(7)]
PARAMS = {"reference_lr": 1e-3, "reference_batch_size": 64, "total_steps": 20, "warmup_steps": 5}


def sgd(*lrs: float, default: float = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (default,)]
    return torch.optim.SGD(groups, lr=default)


def lrs_used(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    """The LR that the optimizer has at each of its steps, with the schedule stepped behind it as DeepSpeed does."""
    used = []
    for _ in range(steps):
        used.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step()
    return used


def close(value: Any, rel: float = 1e-12) -> Any:
    return pytest.approx(value, rel=rel, abs=0)


# ---------------------------------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(("batch", "lr", "share", "steps"), BERT)
def test_bert_table_from_either_end_and_from_json(batch: int, lr: float, share: Fraction, steps: int) -> None:
    for reference, reference_lr, reference_share, _ in (BERT[0], BERT[-1]):
        assert square_root_lr(reference_lr, reference, batch) == close(lr)
        ratio = linear_epoch_ratio(float(reference_share), reference, batch)
        assert ratio == close(float(share)) and whole_steps(ratio, steps) == 3125  # the same in every column
    params = {"reference_lr": 6.25e-4, "reference_batch_size": 512, "total_steps": steps, "warmup_ratio": 1 / 320}
    optimizer = sgd()
    schedule = build_scheduler("LambWarmup", params, {"train_batch_size": batch})(optimizer)
    assert schedule.lr_at(0) == close(lr / 3125) == optimizer.param_groups[0]["lr"]
    assert schedule.lr_at(3124) == schedule.lr_at(3125) == close(lr)
    assert schedule.lr_at(3126) < schedule.lr_at(3125)
    assert 0 < schedule.lr_at(steps - 1) < lr / (steps - 3125) * 1.001 and schedule.lr_at(steps) == 0.0


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        (Ramp(8.0, 8, 4), [2, 4, 6, 8, 8, 6, 4, 2, 0, 0]),
        (Ramp(8.0, 8, 4, decay_from="start"), [2, 4, 6, 8, 4, 3, 2, 1, 0, 0]),
        (Ramp(8.0, 8, 4, power=2.0), [2, 4, 6, 8, 8, 4.5, 2, 0.5, 0, 0]),
        (Ramp(8.0, 8, 4, end_lr=4.0), [2, 4, 6, 8, 8, 7, 6, 5, 4, 4]),
        (Ramp(8.0, 4, 0), [8, 6, 4, 2, 0]),
        (Ramp(8.0, 2, 2, end_lr=1.0), [4, 8, 1, 1]),
    ],
)
def test_ramp_by_hand(ramp: Ramp, expected: list[float]) -> None:
    assert [ramp.lr(k) for k in range(len(expected))] == expected


# -------------------------------------------------------------------------------------------------------------- LambWarmup


def test_lr_used_at_every_step() -> None:
    optimizer = sgd()
    schedule = LambWarmup(optimizer, batch_size=256, **PARAMS)
    peak = 2e-3
    expected = [peak * (k + 1) / 5 for k in range(5)] + [peak * (20 - k) / 15 for k in range(5, 20)] + [0.0] * 3
    assert lrs_used(optimizer, schedule, 23) == close(expected)
    assert schedule.get_last_lr() == [0.0]


def test_the_engine_has_the_last_word_on_the_batch_size() -> None:
    optimizer = sgd()
    schedule = build_scheduler("LambWarmup", PARAMS, {"train_micro_batch_size_per_gpu": 4})(optimizer)
    with pytest.raises(RuntimeError, match="attach"):
        schedule.get_lr()
    schedule.attach(SimpleNamespace(train_batch_size=lambda: 256))
    assert optimizer.param_groups[0]["lr"] == close(2e-3 / 5)
    share = {key: value for key, value in PARAMS.items() if key != "warmup_steps"} | {"warmup_ratio": 0.05}
    with pytest.raises(ConfigError, match=r"scheduler.params.warmup_ratio: got 0.05, must be such that the 25 steps"):
        LambWarmup(sgd(), **share).attach(SimpleNamespace(train_batch_size=lambda: 64 * 25))


def test_groups_keep_their_proportion_and_a_tensor_its_place() -> None:
    """An LR of zero in the optimizer sets no proportion."""
    optimizer = sgd(0.1, 0.01, 0.0, default=0.1)
    held = optimizer.param_groups[1]["lr"] = torch.tensor(0.01, dtype=torch.float64)
    schedule = LambWarmup(optimizer, batch_size=64, **PARAMS)
    for _ in range(4):
        schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == close([1e-3, 1e-4, 0.0]) == schedule.get_lr()
    assert optimizer.param_groups[1]["lr"] is held
    optimizer = sgd(0.0, default=0.0)
    LambWarmup(optimizer, batch_size=64, **PARAMS)
    assert optimizer.param_groups[0]["lr"] == close(2e-4)


def test_resumed_in_an_optimizer_that_was_loaded() -> None:
    for after in (0, 3, 5, 12, 20):
        optimizers = [sgd(0.1, 0.02) for _ in range(3)]
        whole, saved, resumed = (LambWarmup(optimizer, batch_size=64, **PARAMS) for optimizer in optimizers)
        expected = lrs_used(optimizers[0], whole, 24)
        lrs_used(optimizers[1], saved, after)
        # new groups in the place of those that the schedule was built with
        optimizers[2].load_state_dict(optimizers[1].state_dict())
        resumed.load_state_dict(saved.state_dict())
        assert lrs_used(optimizers[2], resumed, 24 - after) == expected[after:]
        assert optimizers[2].param_groups[1]["lr"] == optimizers[0].param_groups[1]["lr"]


def test_another_schedulers_state_is_refused() -> None:
    schedule, two = LambWarmup(sgd(), batch_size=64, **PARAMS), LambWarmup(sgd(0.1, 0.2), batch_size=64, **PARAMS)
    for state in (None, {"last_batch_iteration": 3}, {"schedule": "MixedBatch", "steps_taken": 3}, two.state_dict()):
        message = "2 parameter groups" if state == two.state_dict() else "load_lr_scheduler_states=False"
        with pytest.raises(ValueError, match=message):
            schedule.load_state_dict(state)
        assert schedule.steps_taken == 0


GONE = object()
BAD: list[tuple[dict[str, Any], str]] = [
    ({"reference_lr": 0}, ".reference_lr: got 0, must be a number above 0, use e.g. 1e-3"),
    ({"reference_batch_size": True}, ".reference_batch_size: got true, must be a whole number of at least 1"),
    ({"warmup_steps": 21}, ".warmup_steps: got 21, must be such that the 21 steps of warm-up at batch 64"),
    ({"warmup_ratio": 0.1}, ": got warmup_ratio and warmup_steps, must have one of"),
    ({"warmup_steps": GONE}, ": got neither"),
    ({"end_lr": 2e-3}, ".end_lr: got 0.002, must be a number of at least 0 and at most 0.001"),
    ({"decay_from": "end"}, '.decay_from: got "end", must be one of peak, start'),
    ({"total_step": 3}, ".total_step: unknown key"),
    ({"total_steps": GONE}, ".total_steps: missing"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_wrong_values_name_their_key(change: dict[str, Any], message: str) -> None:
    params = {key: value for key, value in {**PARAMS, **change}.items() if value is not GONE}
    with pytest.raises(ConfigError) as caught:
        validate("LambWarmup", params, {"train_batch_size": 64})
    assert f"scheduler.params{message}" in str(caught.value) and "\n" not in str(caught.value)

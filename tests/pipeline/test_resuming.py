"""What the log says of settings and samples when a training is resumed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_terapipe.optim.schedules.lr_schedules import LambWarmup
from ds_terapipe.pipeline.resuming import resuming

SAVED = {"lr": 0.25, "initial_lr": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95)}
OTHERS = "betas [0.9, 0.95], not [0.9, 0.99]; {}weight_decay 0.1, not 0.3"
WARMUP = {"batch_size": 8, "reference_lr": 0.4, "reference_batch_size": 8, "total_steps": 4, "warmup_steps": 2}


def torchs(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def ours(optimizer: Any) -> Any:
    return LambWarmup(optimizer, **WARMUP, decay_from="peak")


def resumed(scheduler: Any, saved: dict[str, Any], steps: int = 3, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=2.0, betas=(0.9, 0.99), weight_decay=0.3)
    engine = SimpleNamespace(
        basic_optimizer=optimizer, lr_scheduler=scheduler and scheduler(optimizer), global_steps=0, global_samples=24,
        global_rank=0, training_dataloader=None, continues_data=False,
    )  # fmt: skip
    vars(engine).update(more)

    @resuming
    def inner(engine: Any) -> str:
        optimizer.param_groups[0].update(saved)
        engine.global_steps = steps
        return "found"

    assert resuming(lambda engine: inner(engine))(engine) == "found"
    return engine


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        (None, OTHERS.format("lr 0.25, not 2.0; ")),
        (torchs, OTHERS.format("lr 0.5, not 2.0; ")),
        (ours, OTHERS.format("") + "; the LR is that of LambWarmup as configured now"),
    ],
)
def test_settings_that_are_not_those_of_the_configuration_are_one_line(caplog, scheduler, settings):
    engine = resumed(scheduler, SAVED)
    said = "load_checkpoint: the settings of the checkpoint's optimizer count, not those of this engine's: "
    assert caplog.messages == [said + settings]
    if scheduler is ours:  # from the next step on, whatever the checkpoint's was
        assert engine.basic_optimizer.param_groups[0]["lr"] == engine.lr_scheduler.get_lr()[0]


def test_other_ranks_weights_alone_and_the_same_settings_are_no_line(caplog):
    for more in ({"global_rank": 1}, {"steps": 0}, {"saved": {}}):
        resumed(None, **{"saved": SAVED, **more})
    assert caplog.messages == []


def test_training_data_that_begins_again_is_one_line(caplog):
    caplog.set_level(logging.WARNING)
    resumed(None, {}, training_dataloader=[])
    (line,) = caplog.messages
    said = "load_checkpoint: training_data begins at its first sample again, as in DeepSpeed, not behind the 24 "
    assert line.startswith(said)
    caplog.clear()
    resumed(None, {}, training_dataloader=[], continues_data=True)
    resumed(lambda optimizer: SimpleNamespace(seek=None), {}, training_dataloader=[])  # MixedBatch goes on by itself
    assert caplog.messages == []

"""Arguments of train.py that can't be: one line each, on every process, before any waits for another."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from ds_terapipe.errors import ConfigError
from tests.megatron.test_train import train_module

GPT = ["--seq-length", "32", "--vocab-size", "257", "--data-path", "none"]


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """What train.py reads; where a word is given twice, the later one."""
    run = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--train-iters", "1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *run, *GPT, "--deepspeed_config", "none.json", *words])
    return train_module().parse_arguments()


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_phase_that_is_longer_than_the_samples_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = parsed(monkeypatch, "--model", model).task
    message = "--seq-length: got 32, must be that of the longest phase (64) or more, use 64"
    with pytest.raises(ConfigError) as refused:
        task.datasets({16: 8, 64: 8}, 0, lambda: True)
    assert str(refused.value) == message

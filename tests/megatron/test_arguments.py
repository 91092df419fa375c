"""Arguments of train.py that can't be: one line each, on every process, before any waits for another."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from ds_terapipe.errors import ConfigError
from tests.megatron.test_train import train_module

RUN = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--train-iters", "1"]
GPT = [*RUN, "--seq-length", "32", "--vocab-size", "257", "--data-path", "none"]
HEADS = (
    "--num-query-groups: got {}, must be a divisor of --num-attention-heads (4) and a multiple of "
    "--tensor-model-parallel-size ({}), use e.g. 4"
)
STAGES = '--stage-layers: got "{}", must be one positive number for each of 2 stages, 4 together, use e.g. 2,2'
COUNTS = [
    *((name, value) for name in ("--log-interval", "--save-interval", "--eval-interval") for value in ("0", "-1")),
    *((name, "0") for name in ("--train-iters", "--exit-interval", "--num-layers", "--hidden-size", "--vocab-size")),
    *((name, "0") for name in ("--num-attention-heads", "--num-query-groups", "--seq-length", "--max-position-embeddings")),
    *((name, "-2") for name in ("--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--eval-iters")),
    *((name, "0") for name in ("--img-h", "--img-w", "--patch-dim")),
    ("--log-interval", "ten"),
]  # fmt: skip
REFUSED: list[tuple[list[str], str]] = [
    *(([*GPT, name, value], f"argument {name}: got {value}, must be an integer of {int('eval-iters' not in name)} or more, use")
      for name, value in COUNTS),
    ([*GPT, "--num-query-groups", "3"], HEADS.format(3, 1)),
    ([*GPT, "--num-query-groups", "2", "--tensor-model-parallel-size", "4"], HEADS.format(2, 4)),
    ([*GPT, "--tensor-model-parallel-size", "3"],
     "--num-attention-heads: got 4, must be a multiple of --tensor-model-parallel-size (3), use e.g. 6"),
    *(([*GPT, "--pipeline-model-parallel-size", "2", "--stage-layers", layers], STAGES.format(layers))
      for layers in ("3,2", "4", "4,0", "two")),
    ([*RUN, "--model", "gpt"], "the following arguments are required: --seq-length, --vocab-size, --data-path"),
    ([*RUN, "--model", "bert", "--seq-length", "8"], "the following arguments are required: --data-path"),
    ([*RUN, "--model", "vit"], "the following arguments are required: --data"),
]  # fmt: skip


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """What train.py reads; where a word is given twice, the later one."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--deepspeed_config", "none.json"])
    return train_module().parse_arguments()


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_arguments_that_can_not_be_end_with_a_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(monkeypatch, *words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"error: {message}" in last
    assert last.endswith(message) or message.startswith("argument ")


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_phase_that_is_longer_than_the_samples_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = parsed(monkeypatch, *GPT, "--model", model).task
    with pytest.raises(ConfigError) as refused:
        task.datasets({16: 8, 64: 8}, 0, lambda: True)
    assert str(refused.value) == "--seq-length: got 32, must be that of the longest phase (64) or more, use 64"


def test_heads_are_shared_evenly_in_a_configuration_of_megatron_core() -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ds_terapipe.megatron.common import check_config

    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=3)
    message = "num_query_groups: got 3, must be a divisor of num_attention_heads (4), use e.g. 4"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(config, PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1))

"""Log lines of a run, of steps and of a checkpoint that it resumes; the loading of micro-batches."""

import logging
import re
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_terapipe.config import parse
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.batch import StepBatch, read_step
from ds_terapipe.pipeline.recording import report
from ds_terapipe.pipeline.recording.report import StepReport, log_step
from ds_terapipe.pipeline.resuming import resuming
from ds_terapipe.pipeline.slicing import as_tuple, spans
from ds_terapipe.pipeline.transport.stream import Loader


def step_of(slices: Any, pulled: Any, load: Any = None, labels: bool = False) -> Any:
    config = parse({"token_pipeline": {"slices": slices}})
    return read_step(pulled, config, load or Loader(torch.device("cpu")), inputs=True, labels=labels, cut_labels=labels)


@pytest.mark.parametrize(("lengths", "count", "text"), [
    ((24,), 12, "1 slice, 1f1b"), ((20, 4), 11, "2 slices, 1f1b"),
    ((20, 4), 12, "2 slices, 1f1b; slicing does not pay here: without it the bubble is 8% (12 micro-batches, 2 stages)"),
])  # fmt: skip
def test_a_line_counts_all_tokens_and_what_the_device_had_still_to_do(monkeypatch, capsys, lengths, count, text) -> None:
    """Of three steps that the host has issued in no time; the reading of the clock waits for all of them."""
    now = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def take_s() -> float:
        now[0] += 6.0
        return 1.2

    engine: Any = SimpleNamespace(
        _watchdog=SimpleNamespace(waited_s=0.0), steps_per_print=lambda: 3, num_stages=2, dp_world_size=2,
        train_micro_batch_size_per_gpu=lambda: 4,
        _runtime=SimpleNamespace(links=SimpleNamespace(waits=SimpleNamespace(take_s=take_s))),
        _consensus=SimpleNamespace(gather=lambda value: [value, 0.4]), grid=SimpleNamespace(stage_to_global=int), global_rank=0,
        global_steps=0, agg_train_loss=torch.tensor(2.5), monitor=SimpleNamespace(enabled=False),
    )  # fmt: skip
    batch, sums = StepBatch(lengths=[24] * count, spans=[spans(lengths)] * count), StepReport(2)
    for engine.global_steps in (1, 2, 3):
        log_step(engine, sums, batch, "1f1b", 0.0)
    line = f"step 3: loss 2.5000, {96 * count:,} tokens/s, 2.000 s per step, waited 20% 40% (stages 0 to 1), {text}\n"
    assert line in capsys.readouterr().out
    assert not logging.getLogger("DeepSpeed").isEnabledFor(logging.INFO), "the line is there at any level"


def test_labels_are_as_long_as_the_inputs_where_one_stage_has_both() -> None:
    with pytest.raises(ConfigError, match=re.escape("cut: got labels of [25] tokens for inputs of [24]")):
        step_of(2, [(torch.ones(2, 24, dtype=torch.long), torch.ones(2, 25, dtype=torch.long))], labels=True)


def test_one_micro_batch_is_loaded_at_a_time():
    loaded: list[weakref.ref[Any]] = []

    def load(value: Any) -> Any:
        assert not any(ref() is not None for ref in loaded), "the inputs of another micro-batch are still there"
        copies = tuple(tensor.clone() for tensor in as_tuple(value))
        loaded.extend(weakref.ref(copy.untyped_storage()) for copy in copies)
        return copies

    tokens, mask = torch.arange(24).expand(2, -1), torch.ones(2, 1, 24, 24)
    batch = step_of(3, [((tokens + m, mask), tokens) for m in range(4)], load)
    batch.cut(3)
    for micro_batch in range(4):
        for span in batch.spans[micro_batch]:
            cut, rows = batch.cut_inputs(micro_batch, span)
            assert torch.equal(cut, tokens[:, span.start : span.stop] + micro_batch)
            assert rows.shape == (2, 1, span.length, span.stop)
            del cut, rows
        assert len(loaded) == 2 * (micro_batch + 1), "once for all slices"


SAVED = {"lr": 0.25, "initial_lr": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95)}
TORCHS = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
OTHERS = "betas [0.9, 0.95], not [0.9, 0.99]; {}weight_decay 0.1, not 0.3"


def resumed(scheduler: Any, saved: dict[str, Any], steps: int = 3, lost: str | None = None, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=2.0, betas=(0.9, 0.99), weight_decay=0.3)
    facts = {"global_steps": 0, "global_samples": 24, "global_rank": 0, "training_dataloader": None, "continues_data": False}
    engine = SimpleNamespace(basic_optimizer=optimizer, lr_scheduler=scheduler and scheduler(optimizer), **{**facts, **more})
    with resuming(engine):
        optimizer.param_groups[0].update(saved)
        optimizer.param_groups[0].pop(lost, None)
        engine.global_steps = steps
    return engine


SAID = "load_checkpoint: the settings of the checkpoint's optimizer count, not those of this engine's: " + OTHERS
AGAIN = (
    "load_checkpoint: training_data {}, as in DeepSpeed, not behind the 24 samples that were read; "
    'to go on there, use "elastic_pipeline": {{"resize": {{"policy": "off"}}}}'
)
MIXED_BATCH = SimpleNamespace(seek=None)  # goes on by itself


@pytest.mark.parametrize(("scheduler", "saved", "more", "said"), [
    (None, SAVED, {}, SAID.format("lr 0.25, not 2.0; ")), (TORCHS, SAVED, {}, SAID.format("lr 0.5, not 2.0; ")),
    (None, SAVED, {"global_rank": 1}, ""), (None, SAVED, {"steps": 0}, ""), (None, {}, {}, ""),
    (None, {}, {"training_dataloader": []}, AGAIN.format("begins at its first sample again")),
    (None, {}, {"training_dataloader": [], "global_steps": 2}, AGAIN.format("goes on where it is")),
    (None, {}, {"training_dataloader": [], "continues_data": True}, ""),
    (lambda optimizer: MIXED_BATCH, {}, {"training_dataloader": []}, ""),
])  # fmt: skip
def test_other_settings_and_data_that_begin_again_are_one_line(caplog, scheduler, saved, more, said):
    caplog.set_level(logging.WARNING)
    resumed(scheduler, saved, **more)
    assert caplog.messages == ([said] if said else [])


def test_the_state_of_another_optimizer_is_refused():
    with pytest.raises(ConfigError, match=r"^load_checkpoint: got the state of an optimizer without betas, must be"):
        resumed(None, {}, lost="betas")

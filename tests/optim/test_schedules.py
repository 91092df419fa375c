"""The LR rules against published tables, LambWarmup and MixedBatch without an engine, and a loader whose batches change."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from hypothesis import given, strategies as st
from torch import nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.schedules.keys import WarmupKeys
from ds_terapipe.optim.schedules.lr_rules import Ramp
from ds_terapipe.optim.schedules.lr_schedules import LambWarmup, read
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
from ds_terapipe.optim.schedules.training_loader import TrainingLoader

# BERT-Large without tuning, arXiv 1904.00962 table 4: batch, LR as printed, share of warm-up, steps. The shape of the table
# (square root, doubling share) is in the paper's text; the numbers were recalled, not read again: 5 / (2^x 10^3), 1/320 .. 1/5.
BERT = [(512 * 2**i, 5 / (2 ** (3 - i / 2) * 1e3), Fraction(2**i, 320), 1_000_000 // 2**i) for i in range(7)]
PARAMS = {"reference_lr": 1e-3, "reference_batch_size": 64, "total_steps": 20.0, "warmup_steps": 5}  # JSON has 2e1, too


def sgd(*lrs: float, default: float = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (default,)]
    return torch.optim.SGD(groups, lr=default)


def made(kind: str, params: dict[str, Any], **config: Any) -> Any:
    """Return the function that makes a scheduler for an optimizer."""
    return read({**config, "scheduler": {"type": kind, "params": params}})[1]


def close(value: Any, rel: float = 1e-12) -> Any:
    return pytest.approx(value, rel=rel, abs=0)


@pytest.mark.parametrize(("batch", "lr", "share", "steps"), BERT)
def test_bert_table_from_either_end_and_from_json(batch: int, lr: float, share: Fraction, steps: int) -> None:
    for reference, reference_lr, reference_share, _ in (BERT[0], BERT[-1]):
        params = {"reference_lr": reference_lr, "reference_batch_size": reference, "total_steps": steps}
        ramp = WarmupKeys(**params, warmup_ratio=float(reference_share)).ramp_at(batch)
        assert ramp.peak == close(lr) and ramp.warmup_steps == round(share * steps) == 3125  # the same in every column
    params = {"reference_lr": 6.25e-4, "reference_batch_size": 512, "total_steps": steps, "warmup_ratio": 1 / 320}
    optimizer = sgd()
    schedule = made("LambWarmup", params, train_batch_size=batch)(optimizer)
    assert schedule.lr_at(0) == close(lr / 3125) == optimizer.param_groups[0]["lr"]
    assert schedule.lr_at(3124) == schedule.lr_at(3125) == close(lr)
    assert schedule.lr_at(3126) < schedule.lr_at(3125)
    assert 0 < schedule.lr_at(steps - 1) < lr / (steps - 3125) * 1.001 and schedule.lr_at(steps) == 0.0


@pytest.mark.parametrize(("ramp", "expected"), [
    (Ramp(8.0, 8, 4), [2, 4, 6, 8, 8, 6, 4, 2, 0, 0]), (Ramp(8.0, 8, 4, decay_from="start"), [2, 4, 6, 8, 4, 3, 2, 1, 0, 0]),
    (Ramp(8.0, 8, 4, power=2.0), [2, 4, 6, 8, 8, 4.5, 2, 0.5, 0, 0]),
    (Ramp(8.0, 8, 4, end_lr=4.0), [2, 4, 6, 8, 8, 7, 6, 5, 4, 4]), (Ramp(8.0, 4, 0), [8, 6, 4, 2, 0]),
    (Ramp(8.0, 2, 2, end_lr=1.0), [4, 8, 1, 1]),
])  # fmt: skip
def test_ramp_by_hand(ramp: Ramp, expected: list[float]) -> None:
    assert [ramp.lr(k) for k in range(len(expected))] == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_the_engine_has_the_last_word_on_the_batch_size(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first rank alone says that the schedule has come to its end."""
    caplog.set_level("INFO")
    optimizer = sgd()
    schedule = made("LambWarmup", PARAMS, train_micro_batch_size_per_gpu=4)(optimizer)
    with pytest.raises(RuntimeError, match="attach"):
        schedule.get_lr()
    load = {"load_checkpoint": lambda _: optimizer.param_groups[0].update(lr=0.5)}  # as with ZeRO, behind the scheduler
    engine = type("Engine", (), {"train_batch_size": lambda _: 256, "global_rank": rank, **load})()
    for take in (lambda: schedule.attach(engine), lambda: engine.load_checkpoint()):
        take()
        assert optimizer.param_groups[0]["lr"] == close(2e-3 / 5)
    for _ in range(int(PARAMS["total_steps"]) + 1):
        schedule.step()
    assert ["steps are done" in message for message in caplog.messages] == [True] * (rank == 0)


def test_groups_keep_their_proportion_and_a_tensor_its_place() -> None:
    optimizer = sgd(0.1, 0.01, 0.0, default=0.1)
    held = optimizer.param_groups[1]["lr"] = torch.tensor(0.01, dtype=torch.float64)
    schedule = LambWarmup(optimizer, batch_size=64, **PARAMS)
    for _ in range(4):
        schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == close([1e-3, 1e-4, 0.0]) == schedule.get_lr()
    assert optimizer.param_groups[1]["lr"] is held
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.05})
    for _ in range(20):
        schedule.step()
    loaded = sgd(0.1, 0.01, 0.0, 0.05, default=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    for ended in (optimizer, loaded):  # at an LR of zero: a second training begins at the first one's start
        assert LambWarmup(ended, batch_size=64, **PARAMS).get_lr() == close([2e-4, 2e-5, 0.0, 1e-4])
        assert torch.optim.lr_scheduler.LinearLR(ended).base_lrs == close([0.1, 0.01, 0.0, 0.05])


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
    ({"reference_batch_size": True}, ".reference_batch_size: got true, must be a positive whole number"),
    ({"warmup_steps": 21}, ".warmup_steps: got 21, must be such that the 21 steps of warm-up at batch 64"),
    ({"warmup_ratio": 0.1}, ": got warmup_ratio and warmup_steps, must have one of"),
    ({"warmup_steps": GONE}, ": got neither"),
    ({"end_lr": 2e-3}, ".end_lr: got 0.002, must be at most the peak LR, 0.001"),
    ({"decay_from": "end"}, '.decay_from: got "end", must be "peak" or "start"'),
    ({"total_step": 3}, ': unknown key "total_step", must be one of'),
    ({"total_steps": GONE}, ".total_steps: missing"),
    *(({name: 10**400}, f".{name}: got 1000") for name in (*WarmupKeys.model_fields,) if name in PARAMS),  # JSON has no limit
]
SMALL: list[dict[str, Any]] = [
    {"steps": 4, "batch_size": 8, "seq_length": 16, "lr": 0.8, "warmup_steps": 2},
    {"steps": 5, "batch_size": 4, "seq_length": 32, "lr": 0.4, "warmup_ratio": 0.4, "end_lr": 0.1, "micro_batch_size": 1},
    {"steps": 2, "batch_size": 4, "seq_length": 32, "lr": 0.2, "warmup_steps": 0},
]  # fmt: skip
# 0.8 over 2 steps and down to 0 in 2; again from zero: 0.4 over 2 steps and down to 0.1 in 3; 0.2 down in 2; the end.
SMALL_LRS = [0.4, 0.8, 0.8, 0.4, 0.2, 0.4, 0.4, 0.3, 0.2, 0.2, 0.1, 0.0, 0.0]


def scheduler(phases: list[dict[str, Any]]) -> dict[str, Any]:
    return {"scheduler": {"type": "MixedBatch", "params": {"phases": phases}}}


def changed(index: int, **keys: Any) -> list[dict[str, Any]]:
    return [{**phase, **keys} if number == index else phase for number, phase in enumerate(SMALL)]


def test_the_lr_of_every_step_and_resumed_anywhere_and_with_a_warning_in_other_phases(caplog: pytest.LogCaptureFixture) -> None:
    first = sgd(0.1, 0.02)
    schedule = made("MixedBatch", {"phases": SMALL})(first)
    phases = [(0, 8, 16)] * 4 + [(1, 4, 32)] * 5 + [(2, 4, 32)] * 4
    with caplog.at_level("WARNING", "ds_terapipe"):
        for lr, phase in zip(SMALL_LRS, phases, strict=True):
            optimizer = sgd(0.1, 0.02)
            resumed = MixedBatch(optimizer, phases=SMALL)
            optimizer.load_state_dict(first.state_dict())  # new groups in the place of those that it was built with
            resumed.load_state_dict(schedule.state_dict())
            lrs = [[group["lr"] for group in each.param_groups] for each in (first, optimizer)]
            assert lrs == [schedule.get_lr()] * 2 and lrs[0] == pytest.approx([lr, lr / 5], rel=1e-12)
            assert (resumed.phase_index, resumed.phase.batch_size, resumed.phase.seq_length) == phase
            schedule.step()
        assert not caplog.records and schedule.total_steps == 11
        MixedBatch(sgd(0.1, 0.02), phases=SMALL[1:]).load_state_dict(schedule.state_dict())
    assert "other phases" in caplog.text


BAD_PHASES: list[tuple[dict[str, Any], str]] = [
    ({}, ".phases: missing, must be a list of one or more phases, use e.g. "),
    ({"phases": []}, ".phases: got [], must be a list of one or more phases, use e.g. [{"),
    ({"phases": [{"steps": 4, "seq_length": 16, "lr": 1e-3}]}, ".phases[0].batch_size: missing, must be a positive whole number"),
    ({"phases": changed(1, step=3)}, '.phases[1]: unknown key "step"'),
    ({"phases": changed(0, warmup_steps=5)}, ".phases[0].warmup_steps: got 5, must be such that the 5 steps of warm-up"),
    ({"phases": changed(1, warmup_ratio=1.1)}, "[1].warmup_ratio: got 1.1, must be a share of the steps, 0 or more, at most 1"),
    ({"phases": changed(1, batch_size=0)}, ".phases[1].batch_size: got 0, must be a positive whole number"),
]


@pytest.mark.parametrize(("kind", "params", "message"), [
    *(("LambWarmup", {**PARAMS, **change}, said) for change, said in BAD), *(("MixedBatch", *row) for row in BAD_PHASES),
])  # fmt: skip
def test_wrong_values_name_phase_and_key(kind: str, params: dict[str, Any], message: str) -> None:
    given = {key: value for key, value in params.items() if value is not GONE}
    with pytest.raises(ConfigError) as caught:
        made(kind, given, **({"train_batch_size": 64} if kind == "LambWarmup" else {}))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("scheduler.params")


ALONE = "scheduler.params.phases[0]"


@pytest.mark.parametrize(("phases", "config", "replicas", "message"), [
    (SMALL, {"train_batch_size": 4}, None, f"train_batch_size: got 4, must be {ALONE}.batch_size (8) or absent"),
    (SMALL, {"elasticity": {"enabled": True}}, None, "elasticity.enabled: got true, must be false beside MixedBatch"),
    (SMALL, {"token_pipeline": {"slices": [8, 8]}}, None,
     "[8, 8], which add up to 16 tokens, must add up to scheduler.params.phases[1]"),
    (SMALL, {"token_pipeline": {"slices": 17}}, None, f"token_pipeline.slices: got 17, must be at most {ALONE}.seq_length"),
    (changed(0, micro_batch_size=4), {"train_micro_batch_size_per_gpu": 2}, None,
     f"train_micro_batch_size_per_gpu: got 2, must be {ALONE}"),
    (SMALL[:1], {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}, 2,
     "= 8 / 1 / 2 = 4 or absent beside MixedBatch, use 4"),
    (SMALL[:1], {"train_micro_batch_size_per_gpu": 3}, 2, f"{ALONE}.batch_size: got 8, must be a multiple of"),
    (SMALL[:1], {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}, 2, None),
    (SMALL, {"train_micro_batch_size_per_gpu": 2, "token_pipeline": {"slices": 16}}, None, None),
    (SMALL, {"token_pipeline": {"enabled": False, "slices": 17}}, None, None),
])  # fmt: skip
def test_other_keys_agree_with_the_phases(phases: Any, config: Any, replicas: Any, message: str | None) -> None:
    whole = {**config, **scheduler(phases)}
    if message is None:
        assert read(whole, replicas)[0] == {**whole, "train_batch_size": 8} and "train_batch_size" not in whole
        return
    with pytest.raises(ConfigError) as caught:
        read(whole, replicas)
    assert message in str(caught.value) and "\n" not in str(caught.value)


class Counted(torch.utils.data.Dataset):
    """Samples that are their own index, as often as the sequence is long."""

    def __init__(self, samples: int, tokens: int | None = None) -> None:
        self.samples, self.tokens, self.length = samples, tokens, 3

    def set_seq_length(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.samples if self.tokens is None else self.tokens // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index < len(self)
        return torch.full((self.length,), index)


def loader_of(dataset: Any, batch: int, replica: int = 0, replicas: int = 1, workers: int = 0) -> DeepSpeedDataLoader:
    ranks = {"data_parallel_world_size": replicas, "data_parallel_rank": replica}
    return DeepSpeedDataLoader(dataset, batch, False, 0, None, num_local_io_workers=workers, **ranks)


CUTS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=5)


@given(st.integers(1, 40), st.integers(1, 3), CUTS)
def test_nothing_is_lost_or_repeated(samples: int, replicas: int, cuts: list[tuple[int, int]]) -> None:
    """Two epochs of every replica are the sampler's, whatever batch sizes come one after the other."""
    for replica in range(replicas):
        inner = loader_of(Counted(samples), 2, replica, replicas)
        order = list(inner.data_sampler)
        plain = RepeatingLoader(inner)  # as PipelineEngine does: it has begun to iterate
        control, seen = TrainingLoader(plain), []
        for size, batches in cuts:
            control.recut(size)
            assert len(inner) == -(-len(order) // size)
            for _ in range(batches):
                batch = next(plain)
                assert len(batch) == min(size, len(order) - len(seen) % len(order))
                seen += batch[:, 0].tolist()
        assert seen == (order * (1 + len(seen) // len(order)))[: len(seen)]
        assert control.delivered == (len(seen) % len(order) or (len(order) if seen else 0))


def test_batches_read_ahead_by_workers_are_dropped() -> None:
    """Worker processes hold a copy of the data set and have batches ready: none of them is seen after a switch."""
    dataset = Counted(20)
    loader = loader_of(dataset, 2, workers=2)
    order = list(loader.data_sampler)
    control, seen = TrainingLoader(loader), []
    for number, batch in enumerate(loader):
        seen.append((tuple(batch.shape), batch[:, 0].tolist()))
        if number == 1:
            dataset.set_seq_length(7)
            control.recut(4)
    loader.data = None
    assert [shape for shape, _ in seen] == [(2, 3)] * 2 + [(4, 7)] * 4
    assert [index for _, batch in seen for index in batch] == order


def test_a_data_set_of_another_size_starts_its_epoch() -> None:
    dataset = Counted(0, tokens=36)
    loader = loader_of(dataset, 2, replica=1, replicas=2)
    repeating = RepeatingLoader(loader)
    control = TrainingLoader(repeating)
    assert len(next(repeating)) == 2
    dataset.set_seq_length(9)
    control.recut(1)
    expected = list(loader_of(dataset, 1, replica=1, replicas=2).data_sampler)
    assert len(loader) == len(expected) == 2
    assert [int(next(repeating)[0, 0]) for _ in range(4)] == expected * 2


def test_registered_data_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_length \[16, 32, 32\] with data of type list, must have a method set_seq_length"):
        MixedBatch(sgd(), phases=SMALL).register_dataset([1, 2])
    MixedBatch(sgd(), phases=SMALL[1:]).register_dataset([1, 2])

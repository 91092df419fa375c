"""Ways in which a training in phases, or any of our LR schedules, can be a step off or forget something at a switch."""

from __future__ import annotations

from typing import Any

from tests.mutants.harness import Check, Hit, Mutant


def _late(original: Any, hit: Hit) -> Any:
    def position(phases: Any, step: int) -> tuple[int, int]:
        found = original(phases, max(step - 1, 0))
        if found[0] != original(phases, step)[0]:
            hit()
        return found

    return position


def _lr_before(original: Any, hit: Hit) -> Any:
    def lr(self: Any, step: int) -> float:
        found = original(self, max(step - 1, 0))
        if found != original(self, step):
            hit()
        return found

    return lr


def _batch_stays(original: Any, hit: Hit) -> Any:
    def set_batch(engine: Any, batch_size: int, micro_batch_size: int) -> None:
        kept = engine.__dict__.setdefault("_first_batch", batch_size)
        kept = max(kept // micro_batch_size, 1) * micro_batch_size  # whole micro-batches
        if kept != batch_size:
            hit()
        original(engine, kept, micro_batch_size)

    return set_batch


def _length_stays(original: Any, hit: Hit) -> Any:
    def set_length(self: Any, dataset: Any) -> None:
        if self.phase.seq_length != self.phases[0].seq_length:
            hit()
        dataset.set_seq_length(self.phases[0].seq_length)

    return set_length


def _epoch_anew(original: Any, hit: Hit) -> Any:
    def recut(self: Any, micro_batch_size: int) -> None:
        if self._delivered:
            hit()
        self._delivered, self._order = 0, None
        original(self, micro_batch_size)

    return recut


def _schedule_anew(original: Any, hit: Hit) -> Any:
    def load_state_dict(self: Any, state: Any) -> None:
        if state["steps_taken"]:
            hit()
        original(self, {**state, "steps_taken": 0})

    return load_state_dict


LATE = "a phase begins a step late"
BEFORE = "the LR is that of the step before"
BATCH = "the first phase's batch stays"
LENGTH = "the first phase's sequence length stays"
EPOCH = "a switch begins the epoch anew"
ANEW = "a resumed run begins its schedule anew"

_MIXED = "ds_terapipe.optim.schedules.mixed_batch:"

MUTANTS = (
    Mutant(
        LATE, "LR, batch and length of a phase come with its second step.", (_MIXED + "position",), _late, "phases, LR"
    ),
    Mutant(
        BEFORE,
        "Every step but the first uses the LR of the one before.",
        ("ds_terapipe.optim.schedules.lr_rules:Ramp.lr",),
        _lr_before,
        "phases, LR",
    ),
    Mutant(
        BATCH,
        "All phases have the batch of the first one.",
        (_MIXED + "set_batch",),
        _batch_stays,
        "phases, pipeline engine",
    ),
    Mutant(
        LENGTH,
        "All phases have sequences as long as in the first one.",
        (_MIXED + "MixedBatch._set_length",),
        _length_stays,
        "phases, pipeline engine",
    ),
    Mutant(
        EPOCH,
        "At a switch the samples of the epoch come again from the first on.",
        ("ds_terapipe.optim.schedules.training_loader:TrainingLoader.recut",),
        _epoch_anew,
        "phases, loader",
    ),
    Mutant(
        ANEW,
        "A run that goes on from a checkpoint has the LR of a first step.",
        ("ds_terapipe.optim.schedules.lr_rules:Schedule.load_state_dict",),
        _schedule_anew,
        "phases, resumed",
    ),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)


def _check(name: str, measure: str, args: tuple[Any, ...], catches: tuple[str, ...], why: str) -> Check:
    return Check(name, measure, args, catches, {other: why for other in _NAMES if other not in catches})


_PASSES = "tests.mutants.claims:passes"

CHECKS = (
    _check(
        "phases, LR",
        _PASSES,
        ("tests.optim.test_mixed_batch:test_lr_used_at_every_step_of_every_phase",),
        (LATE, BEFORE),
        "has no engine, no data and no checkpoint",
    ),
    _check(
        "LambWarmup, LR",
        _PASSES,
        ("tests.optim.test_lr_schedules:test_lr_used_at_every_step",),
        (BEFORE,),
        "has no phases, no engine and no checkpoint",
    ),
    _check(
        "phases, resumed",
        _PASSES,
        ("tests.optim.test_mixed_batch:test_resumed_anywhere", 8),
        (LATE, BEFORE, ANEW),
        "has no engine and no data",
    ),
    _check(
        "phases, loader",
        _PASSES,
        ("tests.optim.test_mixed_batch:test_batches_read_ahead_by_workers_are_dropped",),
        (EPOCH,),
        "has a loader alone",
    ),
    _check(
        "LambWarmup, resumed",
        _PASSES,
        ("tests.optim.test_lr_schedules:test_resumed_in_an_optimizer_that_was_loaded", 3),
        (ANEW,),
        "compares two schedules without phases that have the same defect",
    ),
    _check(
        "phases, pipeline engine",
        "tests.optim.test_mixed_batch_engine:phases_are_run",
        ("ours",),
        (LATE, BEFORE, BATCH, LENGTH, EPOCH, ANEW),
        "",
    ),
    _check(
        "phases, DeepSpeed's engine",
        "tests.optim.test_mixed_batch_engine:phases_are_run",
        ("DeepSpeed's",),
        (LATE, BEFORE, BATCH, LENGTH, EPOCH, ANEW),
        "",
    ),
)

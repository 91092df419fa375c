"""Phases of a ``MixedBatch`` training: the phase of a step, and rules of their batches and lengths beside other keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_terapipe.config import parse
from ds_terapipe.errors import ConfigError, bad_value, shown
from ds_terapipe.optim.schedules.keys import Phase, phase_path


def position(phases: Sequence[Phase], step: int) -> tuple[int, int]:
    """Phase that the step after ``step`` others lies in, and the steps taken in it; past the end, the last one's."""
    for index, phase in enumerate(phases[:-1]):
        if step < phase.steps:
            return index, step
        step -= phase.steps
    return len(phases) - 1, step


def micro_batch_sizes(phases: Sequence[Phase], first: int) -> tuple[int, ...]:
    """Micro-batch size of every phase, where the configuration's is ``first``."""
    sizes: list[int] = []
    for phase in phases:
        before = sizes[-1] if sizes else first
        sizes.append(before if phase.micro_batch_size is None else phase.micro_batch_size)
    return tuple(sizes)


def check_division(phases: Sequence[Phase], micro_batch_size: int, replicas: int) -> None:
    """Raise for the first phase whose batch is not made of whole micro-batches of all replicas.

    Raises:
        ConfigError: naming the phase and the nearest sizes that are.
    """
    for index, (phase, micro) in enumerate(zip(phases, micro_batch_sizes(phases, micro_batch_size), strict=True)):
        piece = micro * replicas
        if phase.batch_size % piece:
            lower = phase.batch_size // piece * piece
            use = f"{lower} or {lower + piece}" if lower else str(piece)
            rule = f"a multiple of micro-batch size x data-parallel replicas = {micro} x {replicas} = {piece}"
            raise bad_value(f"{phase_path(index)}.batch_size", phase.batch_size, rule, use)


def check_config(phases: Sequence[Phase], config: Mapping[str, Any], replicas: int | None = None) -> None:
    """Refuse keys of the DeepSpeed configuration that do not go with these phases.

    Args:
        phases: of ``scheduler.params``.
        config: the whole configuration.
        replicas: data-parallel ones; None where they are not known yet, and batches are not divided.

    Raises:
        ConfigError: naming the key.
    """
    first = phases[0]
    for name, ours in (("train_batch_size", "batch_size"), ("train_micro_batch_size_per_gpu", "micro_batch_size")):
        got, wanted = config.get(name), getattr(first, ours)
        if None not in (got, wanted) and got != wanted:
            rule = f"{phase_path(0)}.{ours} ({wanted}) or absent beside MixedBatch"
            raise bad_value(name, got, rule, str(wanted))
    for name in ("elasticity", "curriculum_learning", "data_efficiency"):
        block = config.get(name)
        if isinstance(block, Mapping) and block.get("enabled") is True:
            rule = "false beside MixedBatch (each would set batch size or sequence length on its own)"
            raise bad_value(f"{name}.enabled", True, rule, "false")
    _check_slices(phases, config)
    if replicas is not None:
        _check_batch(phases, config, replicas)


def _check_batch(phases: Sequence[Phase], config: Mapping[str, Any], replicas: int) -> None:
    """Raise where DeepSpeed, which gets the first phase's batch, would find that the three batch keys contradict each other."""
    first, micro = phases[0], phases[0].micro_batch_size or config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps")
    if not all(value is None or (isinstance(value, int) and value > 0) for value in (micro, steps)):
        return  # DeepSpeed's keys have rules of their own
    if micro is None:  # DeepSpeed's rule for it
        micro = max(1, first.batch_size // (replicas * (steps or 1)))
    check_division(phases, micro, replicas)
    wanted = first.batch_size // (micro * replicas)
    if steps not in (None, wanted):
        rule = f"{phase_path(0)}.batch_size / micro-batch size / data-parallel replicas"
        rule += f" = {first.batch_size} / {micro} / {replicas} = {wanted} or absent beside MixedBatch"
        raise bad_value("gradient_accumulation_steps", steps, rule, str(wanted))


def _check_slices(phases: Sequence[Phase], config: Mapping[str, Any]) -> None:
    settings = parse(config)
    slices = "auto" if settings is None else settings.slices
    for index, phase in enumerate(phases):
        key, length = f"{phase_path(index)}.seq_length", phase.seq_length
        if isinstance(slices, list) and sum(slices) != length:
            raise ConfigError(
                f"token_pipeline.slices: got {shown(slices)}, which add up to {sum(slices)} tokens, must add up to {key} "
                f"({length}), use a number of slices, e.g. {len(slices)}"
            )
        if isinstance(slices, int) and slices > length:
            raise bad_value("token_pipeline.slices", slices, f"at most {key} ({length})", f"e.g. {min(8, length)}")

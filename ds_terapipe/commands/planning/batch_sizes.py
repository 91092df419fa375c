"""Sequences of a step: from arguments, DeepSpeed's three batch sizes, a plan, or measurements."""

from __future__ import annotations

import argparse

from ds_terapipe.commands.planning.cost_sources import Measured, Source, Units
from ds_terapipe.errors import bad_value
from ds_terapipe.json_files import Fields
from ds_terapipe.plan.result import Plan

_AUTO = "auto"


def batch(options: argparse.Namespace, data: Fields | None, source: Source, plan: Plan | None) -> tuple[int, int]:
    """Sequences in a micro-batch, and micro-batches of a replica in a step."""
    total, micro, steps = _sizes(data) if data is not None else (None, None, None)
    if data is not None and total is not None:
        micro, steps = _completed(options, data, total, micro, steps)
    if isinstance(source, Measured):
        if micro is not None and options.micro_batches is None:
            source.cost(micro)
        micro = source.measured.sequences
    elif plan is not None:
        micro = plan.sequences
    micro = micro or 1
    if options.sequences is None:
        by_default = source.stages if isinstance(source, Units) else 1
        return micro, options.micro_batches or (plan.micro_batches if plan else steps or by_default)
    parts = options.micro_batches or micro
    if options.sequences % parts:
        what = f"{parts} micro-batches" if options.micro_batches else f"micro-batches of {micro}"
        raise bad_value(
            "--sequences",
            options.sequences,
            f"a multiple of {parts}, for {what}",
            str(-(-options.sequences // parts) * parts),
        )
    if options.micro_batches:
        return options.sequences // options.micro_batches, options.micro_batches
    return micro, options.sequences // micro


def data_parallel(options: argparse.Namespace, data: Fields | None) -> int:
    """Return ``--data-parallel``, or the quotient of train_batch_size if all three sizes are configured; else 1."""
    if options.data_parallel is not None or data is None:
        return options.data_parallel or 1
    total, micro, steps = _sizes(data)
    return max(total // (micro * steps), 1) if total and micro and steps else 1


def _sizes(data: Fields) -> tuple[int | None, int | None, int | None]:
    """train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps; None for missing or ``auto``."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (None if data.value(n) in (None, _AUTO) else data.count(n, "e.g. 8") for n in names)
    return total, micro, steps


def _completed(
    options: argparse.Namespace, data: Fields, total: int, micro: int | None, steps: int | None
) -> tuple[int, int]:
    """DeepSpeed's rule: train_batch_size = micro-batch size x accumulation steps x replicas."""
    replicas = data_parallel(options, data)
    if micro is None:
        steps = steps or 1
        micro = max(total // (steps * replicas), 1)
    steps = steps or total // (micro * replicas)
    if micro * steps * replicas != total:
        raise data.fail(
            "train_batch_size",
            f"micro-batch size x accumulation steps x replicas, here {micro} x {steps} x {replicas}",
            "--data-parallel for the number of replicas, or sizes that agree",
        )
    return micro, steps

"""Shape of the pipeline at each step, and the layers of its stages. Pure: no process groups, no tensors.

A shape is stages x replicas x tensor-parallel size on the given processes. Only the stages are chosen: the
tensor-parallel size and the global batch stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ds_terapipe.elastic.policies.freeze import ModelLayers, policy_class
from ds_terapipe.elastic.policies.freezer import LOSS_RISE
from ds_terapipe.elastic.settings import EPOCH, ElasticPipelineConfig, FreezeSettings, ResizeSettings
from ds_terapipe.errors import bad_value, shown
from ds_terapipe.plan.stages import gain, partition

POLICY = f"{ResizeSettings.PATH}.policy"
_WORTH_MOVING = 0.05  # of the slowest stage's time


class Shape(NamedTuple):
    """A shape of the pipeline.

    Attributes:
        stages: stages of each pipeline.
        replicas: number of pipelines; each trains its share of a batch.
        micro_batch: samples in a micro-batch of one replica.
        micro_batches: of one replica in a step; the global batch is replicas x micro_batch x micro_batches.
    """

    stages: int
    replicas: int
    micro_batch: int
    micro_batches: int


def wanted_stages(
    settings: ResizeSettings, step: int, present: int, start: int, sizes: Sequence[int], frozen: int
) -> int:
    """Return the number of stages for the step with this 0-based ``global_steps``.

    Args:
        settings: the block ``elastic_pipeline.resize``.
        step: number of completed steps.
        present: stages now.
        start: stages at the beginning of the training, with nothing frozen.
        sizes: trained parameters of each entry of the layer list at the beginning.
        frozen: entries that are frozen from this step on.
    """
    if not isinstance(settings.policy, str):
        return next((stages for begin, stages in reversed(settings.policy) if begin <= step), present)
    if settings.policy == "halve" and frozen:
        return _halved(present, start, sizes, frozen)
    return present


def _halved(present: int, start: int, sizes: Sequence[int], frozen: int) -> int:
    """Apply PipeTransformer's compression test: halve the stages while none exceeds the largest of the start.

    Frozen entries count as zero, as in its code; the printed algorithm discounts them instead.
    """
    largest = partition(sizes, start).slowest
    left = [0] * frozen + list(sizes[frozen:])
    while present % 2 == 0 and partition(left, present // 2).slowest <= largest:
        present //= 2
    return present


def shape_of(
    stages: int, processes: int, tensor_size: int, batch: int, micro_batch: int, batches: Sequence[int] = ()
) -> Shape:
    """Return the shape with so many stages on all processes.

    The global batch stays. So does the micro-batch, unless it does not divide a replica's share of a batch: then it is
    the largest smaller divisor of the share.

    Args:
        stages: of each pipeline.
        processes: in the job.
        tensor_size: ranks that a layer is divided among.
        batch: samples of a step, over all replicas.
        micro_batch: samples in a micro-batch of one replica, as configured.
        batches: other batches of the training, for the shapes that the error names.

    Raises:
        ConfigError: there are processes or samples left over.
    """
    if not _divides(stages, processes, tensor_size, batch):
        # at least one shape is valid: that of the launch
        choices = [str(shape.stages) for shape in shapes(processes, tensor_size, batch, micro_batch, batches)]
        if processes % (stages * tensor_size):
            by_tensor = f" times the tensor-parallel size ({tensor_size})" if tensor_size > 1 else ""
            rule = f"a number of stages that{by_tensor} divides the {processes} processes"
        else:
            replicas = processes // (stages * tensor_size)
            rule = f"a number of stages whose replicas, here {replicas}, divide the batch of {batch} samples"
        raise bad_value(POLICY, stages, rule, " or ".join(choices) or "another batch")
    replicas = processes // (stages * tensor_size)
    share = batch // replicas
    size = next(size for size in range(min(micro_batch, share), 0, -1) if share % size == 0)
    return Shape(stages, replicas, size, share // size)


def shapes(processes: int, tensor_size: int, batch: int, micro_batch: int, batches: Sequence[int] = ()) -> list[Shape]:
    """Return all shapes of `shape_of`, fewest stages first; they also divide the other ``batches``."""
    return [
        shape_of(stages, processes, tensor_size, batch, micro_batch)
        for stages in range(1, processes + 1)
        if all(_divides(stages, processes, tensor_size, each) for each in (batch, *batches))
    ]


def _divides(stages: int, processes: int, tensor_size: int, batch: int) -> bool:
    used = stages * tensor_size
    return processes % used == 0 and batch % (processes // used) == 0


def balanced(
    costs_forward: Sequence[float],
    costs_backward: Sequence[float],
    frozen: int,
    stages: int,
    present: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return DeepSpeed's ``parts`` with the fastest slowest stage: first entry of each stage, number of entries.

    Args:
        costs_forward: seconds of each entry of the layer list.
        costs_backward: likewise; ignored for the first ``frozen`` entries.
        frozen: entries that go forward only.
        stages: each has one entry or more.
        present: present parts, which stay unless the slowest stage would be faster by ``_WORTH_MOVING``.

    Raises:
        ConfigError: more stages than entries.
    """
    _check_entries(stages, len(costs_forward))
    backward = [0.0] * frozen + list(costs_backward[frozen:])
    seconds = [a + b for a, b in zip(costs_forward, backward, strict=True)]
    if present is not None and gain(seconds, [b - a for a, b in pairwise(present)]) < _WORTH_MOVING:
        return tuple(present)
    return partition(seconds, stages).boundaries


def check(
    settings: ElasticPipelineConfig,
    layers: ModelLayers,
    stages: int,
    processes: int,
    tensor_size: int,
    batch: int,
    micro_batch: int,
    has_training_data: bool,
    batches: Sequence[tuple[int, int]] = (),
) -> None:
    """Refuse settings that this model, launch and batch do not allow, before the first step.

    Args:
        settings: the block ``elastic_pipeline``.
        layers: the entries of the layer list.
        stages: at the beginning.
        processes, tensor_size, batch, micro_batch: as in `shape_of`.
        has_training_data: whether ``initialize`` got any.
        batches: batch and micro-batch of phases to come.

    Raises:
        ConfigError: for the first violation.
    """
    _check_freeze(settings.freeze, layers, has_training_data)
    for number in _stages_that_may_come(settings.resize, stages):
        _check_entries(number, len(layers.trainable))
        for size, micro in ((batch, micro_batch), *batches):
            shape_of(number, processes, tensor_size, size, micro, [batch, *(each for each, _ in batches)])


def _check_freeze(freeze: FreezeSettings, layers: ModelLayers, has_training_data: bool) -> None:
    for _, entries in freeze.frozen_layers or ():
        if entries > layers.head:
            rule = f"at most {layers.head} entries (the head, the last entry with trained parameters, is never frozen)"
            use = f"at most {layers.head}" if layers.head else '"policy": "static"'
            raise bad_value(f"{freeze.PATH}.frozen_layers", entries, rule, use)
    counts = policy_class(freeze.policy).decides_at_intervals or LOSS_RISE in freeze.unfreeze
    if counts and freeze.interval == EPOCH and not has_training_data:
        rule = "a number of steps where there is no training_data"
        raise bad_value(f"{freeze.PATH}.interval", freeze.interval, rule, 'e.g. "interval": 1000')


def _stages_that_may_come(resize: ResizeSettings, stages: int) -> list[int]:
    """Return the stages of a list, or all results of halving, so that none stops a training in the middle."""
    if not isinstance(resize.policy, str):
        return [number for _, number in resize.policy]
    if resize.policy != "halve":  # measured shapes always divide
        return []
    return [stages >> halvings for halvings in range(1, stages.bit_length()) if stages % (1 << halvings) == 0]


def _check_entries(stages: int, entries: int) -> None:
    if stages > entries:
        raise bad_value(POLICY, stages, f"at most the entries of the layer list, {entries}", shown(entries))

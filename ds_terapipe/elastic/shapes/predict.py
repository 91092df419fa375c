"""Prediction of a step's time and peak memory in a shape; ``"resize": {"policy": "measured"}`` chooses by it.

Pure: no process groups, no tensors. Times and bytes come from the running pipeline (``measured.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ds_terapipe.elastic.policies.resize import Shape, balanced

WORTH = 0.05  # share of a step's time; smaller gains are noise


@dataclass(frozen=True)
class LayerCosts:
    """Costs of every entry of the layer list, on one tensor-parallel rank.

    Attributes:
        micro_batch: samples of the micro-batch that was measured.
        forward, backward: seconds.
        weights: bytes of parameters.
        state: bytes of gradients and optimiser state while the entry trains.
        trained: bytes of gradients in the all-reduce over replicas.
        activations: bytes that a micro-batch keeps between its forward and its backward pass.
        same: the first entry with the same parameters: the entry's own number, except for tied layers.
    """

    micro_batch: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    state: tuple[float, ...]
    trained: tuple[float, ...]
    activations: tuple[float, ...]
    same: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """Costs of a step that do not depend on the layers.

    Attributes:
        reduce_seconds: seconds of an all-reduce per byte that each rank sends.
        reduce_latency: seconds of the smallest all-reduce.
        update_seconds: seconds of the optimiser per byte of trained parameters.
    """

    reduce_seconds: float
    reduce_latency: float
    update_seconds: float


class Prediction(NamedTuple):
    """Predicted step in a shape.

    Attributes:
        shape: the shape.
        parts: first entry of each stage and, last, the number of entries.
        seconds: seconds of the step.
        peak_bytes: bytes of weights, gradients, optimiser state and activations on the fullest rank.
    """

    shape: Shape
    parts: tuple[int, ...]
    seconds: float
    peak_bytes: float


def predict(
    shape: Shape,
    costs: LayerCosts,
    machine: Machine,
    frozen: int,
    slices: int = 1,
    parts: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
) -> Prediction:
    """Predict a step's time and peak memory in a shape.

    A pipeline of K stages takes the time of one unit on all stages, and that of the slowest stage for each further
    unit. Units are micro-batches, or their slices. With V stages on each place, filling and draining the pipeline takes
    the V-th part. Then a ring all-reduce sums the gradients of the replicas, and each rank updates its weights.

    Args:
        shape: the shape to predict.
        costs: of the layers.
        machine: costs of the rest of a step.
        frozen: entries that go forward only.
        slices: slices of a micro-batch if there are several stages.
        parts: first entry of each stage, then the number of entries; None: balanced.
        places: place of each stage; None: one stage on each.
    """
    places = range(shape.stages) if places is None else places
    parts = balanced(costs.forward, costs.backward, frozen, len(places)) if parts is None else tuple(parts)
    entries, stages = range(len(costs.forward)), [range(a, b) for a, b in pairwise(parts)]
    of_places = [[s for s, place in enumerate(places) if place == at] for at in range(shape.stages)]
    larger = shape.micro_batch / costs.micro_batch
    trains = [entry >= frozen for entry in entries]
    seconds = [larger * (costs.forward[e] + costs.backward[e] * trains[e]) for e in entries]
    slowest = max(sum(seconds[e] for s in here for e in stages[s]) for here in of_places)
    cut, each = slices if shape.stages > 1 else 1, len(stages) / shape.stages
    pipeline = (sum(seconds) / each + (shape.micro_batches * cut - 1 / each) * slowest) / cut
    kept = [{costs.same[e] for s in here for e in stages[s]} for here in of_places]
    gradients = max(sum(costs.trained[e] * trains[e] for e in tensors) for tensors in kept)
    reduction = 0.0
    if shape.replicas > 1 and gradients:
        sent = 2 * (shape.replicas - 1) / shape.replicas * gradients
        reduction = machine.reduce_latency + machine.reduce_seconds * sent
    held = []
    for here, tensors in zip(of_places, kept, strict=True):
        live = {s: min(shape.micro_batches, len(stages) - s) * larger for s in here}
        held.append(
            sum(costs.weights[e] + trains[e] * costs.state[e] for e in tensors)
            + sum(live[s] * costs.activations[e] for s in here for e in stages[s] if trains[e])
        )
    return Prediction(shape, parts, pipeline + reduction + machine.update_seconds * gradients, max(held))


class Choice(NamedTuple):
    """The prediction that is taken, and the shapes that do not fit."""

    taken: Prediction
    too_large: tuple[Prediction, ...]


def choose(
    present: Prediction,
    others: Sequence[Prediction],
    most_bytes: float | None,
    steps_left: float,
    change_seconds: float,
) -> Choice:
    """Choose the fastest shape that fits, if the change pays.

    Args:
        present: the present shape and parts.
        others: other possible shapes.
        most_bytes: memory limit of a rank; None: no limit. The present shape always fits.
        steps_left: steps left in the training; infinity if unknown.
        change_seconds: seconds of the change.
    """
    fits = [each for each in others if most_bytes is None or each.peak_bytes <= most_bytes]
    too_large = tuple(each for each in others if each not in fits)
    best = min([present, *fits], key=lambda each: each.seconds)
    gain = present.seconds - best.seconds
    pays = gain >= WORTH * present.seconds and gain * steps_left > change_seconds
    return Choice(best if pays else present, too_large)

"""Alternatives to slices: interleaved chunks of the model, or more tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ds_terapipe.commands.planning.cost_sources import Analytic, Measured
from ds_terapipe.commands.planning.inputs import Inputs
from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.costs.memory import GIGABYTE, memory_use
from ds_terapipe.plan.stages import even_layers
from ds_terapipe.schedule import Action, Op, Placement, Simulation, order, simulate

_CHUNKS = (2, 3, 4, 5, 6, 8)
_UNKNOWN_LAYERS = (2,)  # for an unknown number of layers in a stage, and unknown costs of small chunks
UNSLICED = "1f1b"


@dataclass(frozen=True)
class Alternative:
    """A step without slices.

    Attributes:
        kind: ``interleaved`` or ``tensor_parallel``.
        name: for a table.
        step_s: predicted seconds of a step.
        bubble: share of the devices' time in which they compute nothing.
        live_sequences: the most whose activations are held at once on a device, as sequences on all the device's layers.
        peak_bytes: of the fullest device, None where memory is not known; messages of interleaving are not in it.
        fits: whether that is within the limit.
        run: the timed schedule of an interleaved one, ``placement`` its stages.
    """

    kind: str
    name: str
    step_s: float
    bubble: float
    live_sequences: float
    peak_bytes: float | None
    fits: bool
    run: Simulation | None = None
    placement: Placement | None = None

    def as_json(self, plan_s: float) -> dict[str, Any]:
        """Its figures, and whether it beats a plan of ``plan_s`` seconds."""
        return {
            "kind": self.kind,
            "name": self.name,
            "predicted_step_s": self.step_s,
            "bubble": self.bubble,
            "live_sequences": self.live_sequences,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "beats_slices": self.beats(plan_s),
        }

    def beats(self, plan_s: float) -> bool:
        """Whether it fits and is faster than a plan of ``plan_s`` seconds."""
        return self.fits and self.step_s < plan_s * (1 - 1e-9)


def interleaved(inputs: Inputs) -> Alternative | str:
    """Return the fastest interleaved 1F1B that fits, else the fastest; or the reason why there is none."""
    request = inputs.request
    if request.placement is not None:
        return "interleaving: not known, these stages were measured on places of their own choice"
    if request.stages == 1:
        return "interleaving: not on a single stage"
    if not whole_sequences(inputs):
        return "interleaving: not known, no unsliced sequence was measured"
    if request.micro_batches % request.stages:
        return f"interleaving: not possible, {request.micro_batches} micro-batches are no multiple of the {request.stages} stages"
    found = []
    for chunks in _CHUNKS if isinstance(inputs.source, Analytic) else _UNKNOWN_LAYERS:
        try:
            cost = inputs.source.chunked(inputs.sequences, chunks)
        except ConfigError:
            continue
        found.append(_interleaved(inputs, cost, chunks))
    if not found:
        return "interleaving: not possible, no number of chunks divides every stage's layers"
    return min(found, key=lambda each: (not each.fits, each.step_s))


def more_tensor_parallel(inputs: Inputs) -> list[Alternative] | str:
    """Return plans with more devices per layer and fewer stages, within a node, unsliced; or why there is none."""
    source = inputs.source
    if not isinstance(source, Analytic):
        return "tensor parallelism: not known from these costs, use --model"
    devices, node = source.stages * source.tensor_parallel, source.cluster.devices_per_node
    if source.tensor_parallel >= node:
        return f"tensor parallelism: it takes a whole node's {node} devices already"
    found = []
    for tensor in (source.tensor_parallel * factor for factor in range(2, node // source.tensor_parallel + 1)):
        if devices % tensor or source.model.num_attention_heads % tensor:
            continue
        layers = even_layers(source.model.num_layers, devices // tensor)
        other = source.with_layout(layers, tensor)
        request = replace(
            inputs.request, stages=len(layers), memory=other.memory(inputs.sequences), overhead_s=other.overhead_s
        )
        name = f"{tensor} tensor-parallel x {len(layers)} stages, unsliced"
        found.append(_unsliced(replace(inputs, source=other, request=request), name))
    return found or (
        f"tensor parallelism: no other number up to a node's {node} devices divides the {devices} devices and the model's heads"
    )


def alternatives_to(inputs: Inputs) -> tuple[list[Alternative], list[str]]:
    """Return all alternatives, and the reasons against others."""
    found, why_not = [], []
    for each in (interleaved(inputs), more_tensor_parallel(inputs)):
        if isinstance(each, str):
            why_not.append(each)
        else:
            found += each if isinstance(each, list) else [each]
    return found, why_not


def verdicts(inputs: Inputs, plan_s: float, sliced: bool, found: list[Alternative], why_not: list[str]) -> list[str]:
    """Plain sentences about which of them beats a plan of ``plan_s`` seconds."""
    lines = []
    rival = "slices" if sliced else "this plan, which has no slices,"
    for each in found:
        ratio = plan_s / each.step_s if each.step_s else 1.0
        what = "interleaving" if each.kind == "interleaved" else "tensor parallelism"
        if each.beats(plan_s):
            lines.append(f"{what} beats {rival} here: {each.name}, {ratio:.2f}x as fast")
        elif not each.fits:
            lines.append(f"{what}: {each.name} does not fit into memory")
        else:
            lines.append(f"{what} does not beat {rival} here: {each.name}, {ratio:.2f}x as fast")
    if isinstance(inputs.source, Measured) and any(each.kind == "interleaved" for each in found):
        lines.append("  (a chunk is taken as its part of the measured stage)")
    return lines + why_not


def whole_sequences(inputs: Inputs) -> bool:
    """Whether the costs know about sequences that are not cut."""
    longest = inputs.request.max_slice
    return longest is None or inputs.request.seq_length <= longest


def peak_bytes(inputs: Inputs, schedule: str, lengths: tuple[int, ...]) -> float | None:
    """Memory of the fullest stage, None where it is not known."""
    request = inputs.request
    if request.memory is None:
        return None
    uses = memory_use(request.memory, schedule, lengths, request.micro_batches, request.weights_once, request.placement)
    return max(use.total for use in uses)


def fits(inputs: Inputs, bytes_: float | None) -> bool:
    """Whether that is within the limit, where there is one."""
    limit = inputs.request.memory_gb
    return bytes_ is None or limit is None or bytes_ <= limit * GIGABYTE


def _unsliced(inputs: Inputs, name: str) -> Alternative:
    request = inputs.request
    whole = (request.seq_length,)
    times = request.times(inputs.source.cost(inputs.sequences))
    found = times.simulate(UNSLICED, whole)
    bytes_ = peak_bytes(inputs, UNSLICED, whole)
    live = max(place.peak_units for place in found.places) * inputs.sequences
    return Alternative(
        "tensor_parallel", name, found.makespan + request.overhead_s, found.bubble, live, bytes_, fits(inputs, bytes_)
    )


def _interleaved(inputs: Inputs, cost: Cost, chunks: int) -> Alternative:
    request = inputs.request
    placement = Placement.interleaved(request.stages, chunks)
    compute, message = _unsliced_times(cost, request.seq_length, len(placement.stages))
    grid = order("interleaved", placement, [1] * request.micro_batches)
    run = simulate(grid, compute, message, placement=placement)
    units = [place.peak_units for place in run.places]
    bytes_ = None
    if request.memory is not None:
        bytes_ = max(
            stage.fixed + stage.activations * request.seq_length * live / chunks
            for stage, live in zip(request.memory.stages, units, strict=True)
        )
    return Alternative(
        "interleaved",
        f"interleaved 1F1B, {chunks} chunks per stage",
        run.makespan + request.overhead_s,
        run.bubble,
        max(units) / chunks * inputs.sequences,
        bytes_,
        fits(inputs, bytes_),
        run,
        placement,
    )


def _unsliced_times(
    cost: Cost, length: int, stages: int
) -> tuple[Callable[[Action], float], Callable[[Action], float]]:
    """Seconds of computations and of messages of whole sequences."""
    tokens = float(length)
    forward = [float(cost.forward(stage, tokens, 0.0)) for stage in range(stages)]
    backward = [float(cost.backward(stage, tokens, 0.0) + cost.weights(stage, tokens)) for stage in range(stages)]
    messages = [float(cost.message(boundary, tokens)) for boundary in range(stages - 1)]

    def compute(action: Action) -> float:
        return (forward if action.op is Op.FORWARD else backward)[action.stage]

    def message(action: Action) -> float:
        return messages[action.stage if action.op is Op.SEND_FORWARD else action.stage - 1]

    return compute, message

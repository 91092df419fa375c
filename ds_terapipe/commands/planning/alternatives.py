"""Steps under other schedules, and alternatives to slices: interleaved chunks of the model, or more tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ds_terapipe.commands.planning.cost_sources import Analytic, Measured
from ds_terapipe.commands.planning.inputs import Inputs
from ds_terapipe.commands.planning.several import placed
from ds_terapipe.plan.stages import even_layers
from ds_terapipe.schedule import Interval, Panel, Placement, Schedule, Simulation

_CHUNKS = (2, 3, 4, 5, 6, 8)
_UNKNOWN_LAYERS = (2,)  # for an unknown number of layers in a stage, and unknown costs of small chunks
UNSLICED = "1f1b"


@dataclass(frozen=True)
class Row:
    """A simulated step: a line of a comparison.

    Attributes:
        kind: its schedule, or ``tensor_parallel`` for an unsliced step with more of it.
        name: for a table.
        slices: tokens of each slice.
        run: the timed schedule.
        step_s: predicted seconds of a step.
        live_sequences: the most whose activations are held at once on a device, as sequences on all the device's layers.
        peak_bytes: of the fullest device, None where memory is not known.
        fits: whether the peak is within the limit, as far as both are known.
        placement: of the stages.
    """

    kind: str
    name: str
    slices: tuple[int, ...]
    run: Simulation
    step_s: float
    live_sequences: float
    peak_bytes: float | None
    fits: bool
    placement: Placement

    def figures(self) -> dict[str, Any]:
        """Its figures for JSON."""
        return {
            "predicted_step_s": self.step_s,
            "bubble": self.run.bubble,
            "live_sequences": self.live_sequences,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }

    def as_alternative(self, plan_s: float) -> dict[str, Any]:
        """Return `figures` with the row's name, and whether it beats a plan of ``plan_s`` seconds."""
        return {"kind": self.kind, "name": self.name, **self.figures(), "beats_slices": self.beats(plan_s)}

    def beats(self, plan_s: float) -> bool:
        """Whether it fits and is faster than a plan of ``plan_s`` seconds."""
        return self.fits and self.step_s < plan_s * (1 - 1e-9)


def row(inputs: Inputs, name: str, schedule: str | Schedule, slices: tuple[int, ...], kind: str | None = None) -> Row:
    """Simulate a step in these slices."""
    request = inputs.request
    run = request.times(inputs.cost).simulate(schedule, slices)
    peak = max((use.total for use in request.memory_of(schedule, slices)), default=None)
    live = max(place.peak_tokens for place in run.places) / request.seq_length / request.placement.stages_per_place
    return Row(
        kind or str(schedule), name, slices, run, run.makespan + request.overhead_s, live * inputs.sequences, peak,
        request.fits(schedule, slices), request.placement,
    )  # fmt: skip


def interleaved(inputs: Inputs) -> Row | str:
    """Return the fastest interleaved 1F1B that fits, else the fastest; or the reason why there is none."""
    request = inputs.request
    if not request.placement.is_usual:
        return "interleaving: not known, these stages were measured on places of their own choice"
    places = request.placement.places
    if places == 1:
        return "interleaving: not on a single stage"
    if not request.allows((request.seq_length,)):
        return "interleaving: not known, no unsliced sequence was measured"
    if request.micro_batches % places:
        return f"interleaving: needs a multiple of the {places} stages as micro-batches, not {request.micro_batches}"
    found = []
    for chunks in _CHUNKS if isinstance(inputs.source, Analytic) else _UNKNOWN_LAYERS:
        there = placed(inputs, Placement.interleaved(places, chunks))
        if there is not None:
            name = f"interleaved 1F1B, {chunks} chunks per stage"
            found.append(row(there, name, "interleaved", (request.seq_length,)))
    if not found:
        return "interleaving: not possible, the stages' layers cannot be cut into as many chunks"
    return min(found, key=lambda each: (not each.fits, each.step_s))


def more_tensor_parallel(inputs: Inputs) -> list[Row] | str:
    """Return plans with more devices per layer and fewer stages, within a node, unsliced; or why there is none."""
    source = inputs.source
    if not isinstance(source, Analytic) or inputs.parts is not None:
        return "tensor parallelism: not known from these costs, use --model"
    devices, node = source.stages * source.tensor_parallel, source.cluster.devices_per_node
    if source.tensor_parallel >= node:
        return f"tensor parallelism: it takes a whole node's {node} devices already"
    found = []
    for tensor in (source.tensor_parallel * factor for factor in range(2, node // source.tensor_parallel + 1)):
        if devices % tensor or not source.model.divides_by(tensor):
            continue
        layers = even_layers(source.model.num_layers, devices // tensor)
        other = source.with_layout(layers, tensor)
        request = replace(
            inputs.request, stages=len(layers), memory=other.memory(inputs.sequences), overhead_s=other.overhead_s,
            multiple=other.multiple,
        )  # fmt: skip
        name, whole = f"{tensor} tensor-parallel x {len(layers)} stages, unsliced", (request.seq_length,)
        found.append(row(replace(inputs, source=other, request=request), name, UNSLICED, whole, "tensor_parallel"))
    return found or (
        f"tensor parallelism: no other number up to a node's {node} devices divides the {devices} devices and the model's heads"
    )


def alternatives_to(inputs: Inputs) -> tuple[list[Row], list[str]]:
    """Return all alternatives, and the reasons against others."""
    one, several = interleaved(inputs), more_tensor_parallel(inputs)
    found = [*([one] if isinstance(one, Row) else []), *(several if isinstance(several, list) else [])]
    return found, [each for each in (one, several) if isinstance(each, str)]


def verdicts(inputs: Inputs, plan_s: float, sliced: bool, found: list[Row], why_not: list[str]) -> list[str]:
    """Plain sentences about which of them beats a plan of ``plan_s`` seconds."""
    lines = []
    rival = "slices" if sliced else "this plan, which has no slices,"
    for each in found:
        ratio = plan_s / each.step_s if each.step_s else 1.0
        what = "interleaving" if each.kind == "interleaved" else "tensor parallelism"
        if not each.fits:
            lines.append(f"{what}: {each.name} does not fit into memory")
        else:
            verb = "beats" if each.beats(plan_s) else "does not beat"
            lines.append(f"{what} {verb} {rival} here: {each.name}, {ratio:.2f}x as fast")
    if isinstance(inputs.source, Measured) and any(each.kind == "interleaved" for each in found):
        lines.append("  (a chunk is taken as its part of the measured stage)")
    return lines + why_not


def panel(inputs: Inputs, title: str, run: Simulation, placement: Placement) -> Panel:
    """Return the picture of a step, in milliseconds where costs are seconds."""
    scale = 1.0 if inputs.units else 1e3
    intervals = [[Interval(scale * each.start, scale * each.end) for each in places] for places in run.intervals]
    return Panel(title if inputs.units else f"{title}, ms", run.grid, intervals, placement)

"""The memory model and the plan of a checked launch, from the reports of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_terapipe.commands.checking.rank import Report
from ds_terapipe.commands.checking.stage import SCHEDULE, counted_micro_batches
from ds_terapipe.commands.planning.cost_sources import Analytic
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.pipeline.autotune.run_info import RunInfo, given_plan
from ds_terapipe.pipeline.autotune.slice_plan import configured_slices, named_schedule
from ds_terapipe.pipeline.placing import placement_of_parts
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.pipeline.token_shares import check_length
from ds_terapipe.plan.choose import choose
from ds_terapipe.plan.costs.analytic_memory import analytic_memory
from ds_terapipe.plan.costs.hardware import Cluster
from ds_terapipe.plan.costs.memory import MemoryModel, MemoryUse, Peaks, StageMemory, calibrated, memory_use
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Plan, compact
from ds_terapipe.schedule import Placement, Schedule
from ds_terapipe.schedule.placement import row_word

_LAYERS = ("GPTLayer", "Decoder")  # of the models whose sizes are known


@dataclass(frozen=True)
class Outcome:
    """Steps of a launch: slices, schedule, memory and plan.

    Attributes:
        lengths, schedule: slices of a micro-batch in tokens, and the order; empty where the length is not known.
        uses: memory of each place at its peak, with what it keeps from step to step; empty likewise.
        row: the name of a line of the table: a stage, or a place with several.
        plan: with costs; None where slices are given, or nothing is known of costs.
        lines: about the plan.
    """

    lengths: tuple[int, ...]
    schedule: str
    uses: tuple[MemoryUse, ...]
    plan: Plan | None
    lines: tuple[str, ...]
    row: str


def outcome_of(reports: Sequence[Report], cluster: Cluster) -> Outcome:
    """Return the outcome of a launch.

    Raises:
        ConfigError: the launch's errors that show when all stages are known: a tied weight that is trained on one stage
            and not on another, slices that do not add up, a plan for another run, none that fits.
    """
    first = reports[0]
    where = placement_of_parts(report.part for report in reports)
    # a frozen and a trained part of a stage count as one that goes backward, which is more
    placement = where if len(where.stages) == first.stages else Placement.of(first.places)
    settings = TokenPipelineConfig(**first.settings)
    if first.length is None:
        lines = ["plan: the sequence length is not known, use --seq-length"]
        return Outcome((), "", (), None, tuple(lines), row_word(placement))
    check_length(first.length, first.multiple)
    model, slices = memory_model(reports), configured_slices(settings, first.stages)
    plan: Plan | None = None
    schedule: str | Schedule = named_schedule(settings)
    lengths = slice_lengths(first.length, 1 if isinstance(slices, str) else slices, first.multiple)
    if not isinstance(slices, str):
        given = f"given: {schedule}, {compact(lengths)} tokens" if first.cut else "no token_pipeline, one slice"
        lines = [f"plan: {given}"]
    elif settings.plan_path is not None:
        sizes = first.sequences, first.micro_batches
        run = RunInfo(where, *sizes, first.weights_once, False, multiple=first.multiple)
        plan = given_plan(settings, run)
        lines = [f"plan: {compact(plan.slices)} tokens, {plan.schedule}, from {settings.plan_path}"]
    elif first.sizes is None:
        lines = ["plan: chosen in the launch by its measurements; memory is that of its uncut steps, which take most"]
    else:
        plan = _chosen(reports, placement, settings, model, cluster)
        costs = f"costs: {first.sizes.name} on {cluster.name}, estimated from datasheets; the launch measures its own"
        lines = [costs, *plan.lines()]
    if plan is not None:
        lengths, schedule = plan.slices, plan.runs
    uses = memory_use(model, schedule, lengths, first.micro_batches, first.weights_once, placement)
    return Outcome(lengths, str(schedule), uses, plan, tuple(lines), row_word(placement))


def memory_model(reports: Sequence[Report]) -> MemoryModel:
    """Return the memory of all stages, as a live engine knows it after its trials; by rule where it was not counted."""
    counted = [report.counted for report in reports]
    memories = [each.memory if each is not None else _by_rule(reports, n) for n, each in enumerate(counted)]
    # a place keeps all of its stages
    kept = [sum(report.kept) / report.places.count(report.place) for report in reports]
    stages = tuple(replace(each, fixed=fixed) for each, fixed in zip(memories, kept, strict=True))
    model = MemoryModel(stages)
    steps = [{} if each is None else dict(each.peaks) for each in counted]
    shared = [lengths for lengths in steps[0] if all(lengths in step for step in steps)]
    if not shared:
        return model
    # a stage that is counted alone has no message of a neighbour's, and none posted ahead
    alone = replace(model, posted_ahead=0, sent_kept=0, stages=tuple(replace(stage, fixed=0.0) for stage in stages))
    peaks = [Peaks(lengths, tuple(step[lengths] for step in steps)) for lengths in shared]
    micro_batches = counted_micro_batches(reports[0].micro_batches)
    known = calibrated(alone, peaks, SCHEDULE, micro_batches, any(each is not None and each.defers for each in counted))
    both = zip(stages, known.stages, strict=True)
    return replace(model, stages=tuple(replace(s, working=k.working, joined=k.joined) for s, k in both))


def _by_rule(reports: Sequence[Report], stage: int) -> StageMemory:
    """Return the analytic memory of a stage; nothing where the model's sizes are not known."""
    sizes = reports[0].sizes
    if sizes is None:
        return StageMemory()
    report = reports[stage]
    layers = [sum(name in _LAYERS for name in each.layers) for each in reports]
    return analytic_memory(sizes, layers, report.tensor, report.sequences).stages[stage]


def _chosen(
    reports: Sequence[Report], placement: Placement, settings: TokenPipelineConfig, model: MemoryModel, cluster: Cluster
) -> Plan:
    first = reports[0]
    layers = tuple(sum(name in _LAYERS for name in report.layers) for report in reports)
    assert first.sizes is not None and first.length is not None
    once = first.weights_once
    source = Analytic(first.sizes, cluster, layers, first.tensor, first.replicas, weights_once=once)
    given = settings.memory_gb
    if given is not None:  # of activations and buffers alone
        model = replace(model, stages=tuple(replace(stage, fixed=0.0) for stage in model.stages))
    request = Request(
        seq_length=first.length, stages=placement, micro_batches=first.micro_batches, schedule=settings.schedule,
        granularity=math.lcm(settings.granularity, first.multiple), multiple=first.multiple,
        memory=model, memory_gb=cluster.memory_gb if given is None else given,
        limit_name=f"{cluster.name}: memory_gb" if given is None else "token_pipeline.memory_gb",
        weights_once=once, overhead_s=source.overhead_s,
    )  # fmt: skip
    return choose(source.cost(first.sequences), request)

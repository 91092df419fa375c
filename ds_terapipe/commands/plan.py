"""Choose the fastest slices and schedule for a model, a cluster and a batch.

Choose slices and schedule by simulation, within the memory of a device. Print the plan above the alternatives that are
slower: other slices, stages and micro-batches, interleaving, tensor parallelism.

example:
  ds_terapipe plan --model gpt3-13b --cluster p3.16xlarge --stages 40 --tensor-parallel 8 --sequences 8
  ds_terapipe plan --ds-config ds_config.json --measured costs.json --output plan.json
  ds_terapipe plan --ds-config ds_config.json --model model.json --stages 8 --memory-gb 12 --json -
  ds_terapipe plan --model gpt3-1b --stages 8 --sequences 8 --frozen 8,16      shapes of an elastic_pipeline

A training runs by the file of --output with "token_pipeline": {"slices": "auto", "plan_path": "plan.json"}.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ds_terapipe.commands.output import show
from ds_terapipe.commands.planning.alternatives import alternatives_to, verdicts
from ds_terapipe.commands.planning.cost_sources import Analytic, Measured
from ds_terapipe.commands.planning.frozen import plan_frozen
from ds_terapipe.commands.planning.inputs import Inputs, add_inputs, plan_if_fits
from ds_terapipe.commands.planning.several import choose_placed, placed, read_placed, unplaced
from ds_terapipe.commands.progress import progress
from ds_terapipe.plan.result import Plan, compact, seconds_text

_SIZES = 6  # of micro-batches that are compared with the given one
_WORTH = 0.001  # a gain that is worth a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_inputs(parser)
    parser.add_argument(
        "--frozen",
        metavar="F,F",
        help="print the shapes of an elastic_pipeline whose first F entries are frozen, in place of a plan. F counts entries of "
        "the layer list, the embedding included. Each F has a table. --memory-gb limits the whole memory of a rank here",
    )
    parser.add_argument("--output", metavar="FILE", help="write the plan, as token_pipeline.plan_path reads it")


@progress("planning")
def run(options: argparse.Namespace) -> None:
    """Print the plan and advice; write it where asked. With ``--frozen`` print the shapes of an elastic pipeline instead."""
    if options.frozen is not None:
        plan_frozen(options)
        return
    inputs = read_placed(options)
    found = choose_placed(inputs, options.search)
    if options.output:
        found.save(options.output)
    stage_lines, stages = _stage_advice(inputs, found)
    batch_lines, batches = _batch_advice(inputs, found)
    alternatives, why_not = alternatives_to(unplaced(inputs) or inputs)
    said = verdicts(inputs, found.step_s, len(found.slices) > 1, alternatives, why_not)
    written = [f"written to {options.output}"] if options.output else []
    lines = [*inputs.lines, *found.lines(), *stage_lines, *batch_lines, *said, *written]
    data = {
        **found.to_dict(),
        "stage_layers": stages,
        "micro_batch_advice": batches,
        "alternatives": [each.as_alternative(found.step_s) for each in alternatives],
        "verdicts": said,
    }
    show(options, "\n".join(lines), data)


def _stage_advice(inputs: Inputs, found: Plan) -> tuple[list[str], dict[str, Any] | None]:
    """Return the best boundaries between stages for the plan's slices, and their gain."""
    source, step_s = inputs.source, None
    layers = source.layer_seconds(inputs.sequences, found.slices) if isinstance(source, Analytic) else None
    if isinstance(source, Measured):  # no prediction: curves hold for the present stages
        layers = source.measured.layers
    if layers is None:
        return ["stages: the costs do not know single layers, use --model for the best boundaries"], None
    present, best, advice = layers.present, layers.best, layers.advice(_WORTH)
    if isinstance(source, Analytic):
        layout, step_s = source.with_layout(best.layers), found.step_s
        other = placed(replace(inputs, source=layout), found.placement)
        if other is not None and other.request.fits(found.runs, found.slices):
            times = other.request.times(other.cost)
            step_s = times.seconds(found.runs, found.slices) + other.request.overhead_s
        gained = 1 - step_s / found.step_s
        advice = (
            f"--stage-layers {best.text} in place of {present.text}: step {seconds_text(step_s)} in place of "
            f"{seconds_text(found.step_s)} ({gained:.1%} less), the slowest stage {layers.gain:.1%} less"
        )
        advice = advice if gained >= _WORTH else ""
    return [f"stages: {advice or f'--stage-layers {present.text} is as good as any'}"], {
        "present": list(present.layers),
        "best": list(best.layers),
        "slowest_stage_gain": layers.gain,
        "predicted_step_s": step_s,
    }


def _batch_advice(inputs: Inputs, found: Plan) -> tuple[list[str], list[dict[str, Any]]]:
    """Plans for other sizes of micro-batches of the same sequences."""
    total = inputs.sequences * inputs.request.micro_batches
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    if isinstance(inputs.source, Measured) or len(sizes) == 1:
        return [], []
    others = [size for size in sizes if size != inputs.sequences]
    kept = sorted(others, key=lambda size: (abs(size.bit_length() - inputs.sequences.bit_length()), size))[:_SIZES]
    plans = [found]
    for size in sorted(kept):
        request = replace(inputs.request, micro_batches=total // size)
        other = placed(replace(inputs, sequences=size, request=request), request.placement)
        plan = None if other is None else plan_if_fits(other)
        plans += [] if plan is None else [plan]
    plans.sort(key=lambda each: each.step_s)
    lines = [f"micro-batches for {total} sequences in a step, fastest first:"]
    for each in plans:
        mark = "  (the plan)" if each.sequences == found.sequences else ""
        lines.append(
            f"  {each.micro_batches:>4} of {each.sequences:<4}{seconds_text(each.step_s):>12}  {each.schedule}, "
            f"{compact(each.slices)}{mark}"
        )
    return lines, [
        {
            "sequences": each.sequences,
            "micro_batches": each.micro_batches,
            "predicted_step_s": each.step_s,
            "schedule": each.schedule,
            "slices": list(each.slices),
        }
        for each in plans
    ]

"""``ds_terapipe plan --frozen F``: the shapes that an elastic pipeline could take with F entries frozen, and which it takes.

``elastic/shapes/predict.py`` predicts the steps, as ``"resize": {"policy": "measured"}`` does in the running training,
and chooses the shape.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ds_terapipe.commands.output import show
from ds_terapipe.commands.planning.entry_costs import Entries, entries_of
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, check_numbers, choose_plan, read_inputs
from ds_terapipe.commands.planning.several import asked_placement, on_placement
from ds_terapipe.commands.simulate import named_lengths
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.elastic.policies.resize import Shape, shape_of, shapes
from ds_terapipe.elastic.settings import ELASTIC_PIPELINE, parse
from ds_terapipe.elastic.shapes.history import shape_text
from ds_terapipe.elastic.shapes.predict import Prediction, choose, predict
from ds_terapipe.errors import bad_value, named
from ds_terapipe.json_files import read_json
from ds_terapipe.plan.costs.memory import GIGABYTE, gigabytes
from ds_terapipe.plan.result import compact, seconds_text


def plan_frozen(options: argparse.Namespace) -> None:
    """Print a table for each number of ``--frozen``.

    Raises:
        ConfigError: a file, an argument or their combination; costs that do not know single layers; a file of ``--json``
            that cannot be written.
    """
    numbers = _numbers(options.frozen)
    if options.output is not None:
        raise bad_value("--output", options.output, "absent beside --frozen, which makes no plan", "one of the two")
    check_numbers(options)
    given = options.memory_gb
    options.memory_gb = None  # of a plan it is what activations take; here weights, gradients and optimiser count, too
    inputs = read_inputs(options)
    limit = _limit_gb(given, options.ds_config, inputs)
    placement = asked_placement(inputs)
    lengths = _lengths(inputs if placement == inputs.request.placement else on_placement(inputs, placement))
    entries = entries_of(inputs.source, lengths, options.data_parallel, placement)
    most = None if limit is None or not entries.knows_bytes else limit * GIGABYTE
    tables = [_table(inputs, entries, len(lengths), number, most) for number in numbers]
    lines = [*inputs.lines, f"layer list: {entries.text}; slices: {compact(lengths)}"]
    if not entries.knows_bytes:
        unknown = "not known from these costs: what replicas add up, and memory"
        lines.append(unknown if limit is None else f"{unknown}, so memory_gb is no limit")
    elif limit is not None:
        lines.append(f"a rank may hold {limit:g} GB")
    for table in tables:
        lines += _lines(table, entries.count, not placement.is_plain)
    lines.append("launched, frozen: how many times as fast as the first and the second line of a table")
    show(options, "\n".join(lines), {
        "slices": list(lengths),
        "layers": entries.count,
        "memory_limit_bytes": most,
        "frozen": tables,
    })  # fmt: skip


def _table(inputs: Inputs, entries: Entries, slices: int, frozen: int, most: float | None) -> dict[str, Any]:
    """Compare all shapes with so many entries frozen, and that of the launch with nothing frozen.

    Args:
        inputs: the batch.
        entries: costs of the entries, and the launch.
        slices: of a micro-batch.
        frozen: entries.
        most: bytes that a rank may hold; None: no limit.

    Raises:
        ConfigError: the head, the last entry, would be frozen.
    """
    from ds_terapipe.elastic.moves.start import places_of  # which takes DeepSpeed with it, and seconds

    if frozen >= entries.count:
        rule = f"at most {entries.count - 1} entries: {entries.text} (the last one is never frozen)"
        raise bad_value("--frozen", frozen, rule, f"at most {entries.count - 1}")
    batch = entries.replicas * inputs.sequences * inputs.request.micro_batches
    launch = (entries.processes, entries.tensor_parallel, batch, inputs.sequences)
    now = shape_of(len(set(entries.places)), *launch)
    config = inputs.config or TokenPipelineConfig()
    most_stages = max(config.stages_per_place, len(entries.places) // now.stages)
    settings = config.model_copy(update={"stages_per_place": most_stages})
    possible = [shape for shape in shapes(*launch) if shape.stages <= entries.count]

    def predicted(shape: Any, first: int, parts: Sequence[int] | None = None) -> Prediction:
        places = places_of(shape.stages, settings, entries.count)
        found = predict(shape, entries.costs(shape), entries.machine(shape), first, slices, parts, places)
        return found._replace(seconds=found.seconds + entries.overhead_s)

    launched, present = (predicted(now, first, entries.parts) for first in (0, frozen))
    others = [predicted(shape, frozen) for shape in possible]
    others = [each for each in others if (each.shape, each.parts) != (now, entries.parts)]
    taken = choose(present, others, most, steps_left=math.inf, change_seconds=0.0).taken

    def figures(each: Prediction) -> dict[str, Any]:
        return {
            **each.shape._asdict(),
            "layers": [b - a for a, b in pairwise(each.parts)],
            "predicted_step_s": each.seconds,
            "peak_bytes": each.peak_bytes if entries.knows_bytes else None,
            "fits": (most is None or each.peak_bytes <= most) if entries.knows_bytes else None,
            "speed_against_launched": launched.seconds / each.seconds,
            "speed_against_launched_frozen": present.seconds / each.seconds,
        }

    return {
        "frozen_layers": frozen,
        "launched": figures(launched),
        "launched_frozen": figures(present),
        "shapes": [figures(each) for each in others],
        "taken": figures(taken),
    }


def _lines(table: dict[str, Any], entries: int, several: bool) -> list[str]:
    """Return the lines of a table; ``several``: stages on a place."""
    rows = [("as launched, nothing frozen", table["launched"]), ("as launched, frozen", table["launched_frozen"])]
    rows += [(shape_text(Shape(*(each[name] for name in Shape._fields)), several), each) for each in table["shapes"]]
    cells = ["-".join(map(str, each["layers"])) for _, each in rows]
    width, layers = max(len(name) for name, _ in rows), max(6, *map(len, cells))
    out = [
        f"{table['frozen_layers']} of {entries} layers frozen:",
        f"  {'':<{width}}  {'layers':<{layers}}  {'step':>10}  {'launched':>8}  {'frozen':>7}  {'peak':>9}",
    ]
    for number, ((name, each), cell) in enumerate(zip(rows, cells, strict=True)):
        peak = "?" if each["peak_bytes"] is None else f"{gigabytes(each['peak_bytes']):.3f} GB"
        remark = "  does not fit" if each["fits"] is False else ""
        remark += "  (taken)" if number and each == table["taken"] else ""
        out.append(
            f"  {name:<{width}}  {cell:<{layers}}  {seconds_text(each['predicted_step_s']):>10}  "
            f"{each['speed_against_launched']:>7.2f}x  {each['speed_against_launched_frozen']:>6.2f}x  {peak:>9}{remark}"
        )
    return out


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise bad_value("--frozen", text, "a positive number of entries of the layer list, or several", "e.g. 4,8,12")
    return found


def _lengths(inputs: Inputs) -> tuple[int, ...]:
    """Return the slices of the launch: named ones, those of the fastest plan, or one without ``token_pipeline``."""
    if not inputs.cuts:
        return (inputs.request.seq_length,)
    if inputs.slices != AUTO:
        return named_lengths(inputs, None) or (inputs.request.seq_length,)
    # what fits is said shape by shape
    return choose_plan(replace(inputs, request=replace(inputs.request, memory_gb=None))).slices


def _limit_gb(given: float | None, ds_config: str | None, inputs: Inputs) -> float | None:
    """Return the memory limit of a rank in 1e9 bytes: from the argument, the configuration or the cluster."""
    if given is not None:
        return given
    if ds_config is not None:
        block = read_json(ds_config, "a DeepSpeed configuration").value(ELASTIC_PIPELINE)
        with named(ds_config):
            settings = None if block is None else parse({ELASTIC_PIPELINE: block})
        if settings is not None and settings.resize.memory_gb is not None:
            return settings.resize.memory_gb
    return inputs.source.device_gb if inputs.request.memory is not None else None

"""``ds_terapipe plan --frozen F``: the shapes that an elastic pipeline could take with F entries frozen, and which it takes.

``elastic/shapes/predict.py`` predicts the steps, as ``"resize": {"policy": "measured"}`` does in the running training,
and chooses the shape. It imports DeepSpeed, which no other plan needs; hence the late imports.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ds_terapipe.commands.output import show
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, check_numbers, choose_plan, read_inputs
from ds_terapipe.commands.progress import progress
from ds_terapipe.commands.simulate import named_lengths
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.memory import GIGABYTE, gigabytes
from ds_terapipe.plan.files import read_json
from ds_terapipe.plan.result import compact, seconds_text

if TYPE_CHECKING:
    from ds_terapipe.commands.planning.entry_costs import Entries
    from ds_terapipe.elastic.shapes.predict import Prediction

_LAUNCHED, _FROZEN = "as launched, nothing frozen", "as launched, frozen"


@dataclass(frozen=True)
class FrozenTable:
    """The possible shapes with so many entries frozen.

    Attributes:
        frozen: entries.
        launched: the shape of the launch and its layers, nothing frozen.
        present: the same, frozen.
        others: every other shape, and that of the launch where other layers on its stages would be faster.
        taken: of ``present`` and ``others``.
        most_bytes: that a rank may hold; None: anything.
        knows_bytes: whether ``peak_bytes`` of a prediction are known.
    """

    frozen: int
    launched: Prediction
    present: Prediction
    others: tuple[Prediction, ...]
    taken: Prediction
    most_bytes: float | None
    knows_bytes: bool

    def fits(self, each: Prediction) -> bool | None:
        """Whether a prediction fits into a rank's memory; None if that is unknown."""
        if not self.knows_bytes:
            return None
        return self.most_bytes is None or each.peak_bytes <= self.most_bytes

    def as_json(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        return {
            "frozen_layers": self.frozen,
            "launched": self._figures(self.launched),
            "launched_frozen": self._figures(self.present),
            "shapes": [self._figures(each) for each in self.others],
            "taken": self._figures(self.taken),
        }

    def lines(self, entries: int) -> list[str]:
        """Return the lines of the table."""
        from ds_terapipe.elastic.shapes.shape_text import shape_text

        named = [(_LAUNCHED, self.launched), (_FROZEN, self.present)]
        named += [(shape_text(each.shape), each) for each in self.others]
        width = max(len(name) for name, _ in named)
        layers = max(6, *(len(_layers_text(each)) for _, each in named))
        head = f"  {'':<{width}}  {'layers':<{layers}}  {'step':>10}  {'launched':>8}  {'frozen':>7}  {'peak':>9}"
        out = [f"{self.frozen} of {entries} layers frozen:", head]
        for name, each in named:
            peak = f"{gigabytes(each.peak_bytes):.3f} GB" if self.knows_bytes else "?"
            remark = "  does not fit" if self.fits(each) is False else ""
            remark += "  (taken)" if each == self.taken and name != _LAUNCHED else ""
            out.append(
                f"  {name:<{width}}  {_layers_text(each):<{layers}}  {seconds_text(each.seconds):>10}  "
                f"{self.launched.seconds / each.seconds:>7.2f}x  {self.present.seconds / each.seconds:>6.2f}x  {peak:>9}{remark}"
            )
        return out

    def _figures(self, each: Prediction) -> dict[str, Any]:
        return {
            **each.shape._asdict(),
            "layers": [b - a for a, b in pairwise(each.parts)],
            "predicted_step_s": each.seconds,
            "peak_bytes": each.peak_bytes if self.knows_bytes else None,
            "fits": self.fits(each),
            "speed_against_launched": self.launched.seconds / each.seconds,
            "speed_against_launched_frozen": self.present.seconds / each.seconds,
        }


def add_frozen(parser: argparse.ArgumentParser) -> None:
    """Add ``--frozen F,F``."""
    parser.add_argument(
        "--frozen",
        metavar="F,F",
        help="in place of a plan the shapes that an elastic_pipeline could take with the first F entries of the layer list "
        "frozen, counted as elastic_pipeline.freeze.frozen_layers (the embedding is one); several: a table for each. "
        "--memory-gb then is all that a rank may hold, as elastic_pipeline.resize.memory_gb",
    )


def plan_frozen(options: argparse.Namespace) -> None:
    """Print a table for each number of ``--frozen``.

    Raises:
        ConfigError: a file, an argument or their combination; costs that do not know single layers. CommandError: the file of
            ``--json`` cannot be written.
    """
    numbers = _numbers(options.frozen)
    if options.output is not None:
        raise bad_value("--output", options.output, "absent beside --frozen, which makes no plan", "one of the two")
    check_numbers(options)
    given = options.memory_gb
    options.memory_gb = None  # of a plan it is what activations take; here weights, gradients and optimiser count, too
    with progress("reading"):
        inputs = read_inputs(options)
        limit = _limit_gb(given, options.ds_config, inputs)
    with progress("planning"):
        lengths = _lengths(inputs)
        from ds_terapipe.commands.planning.entry_costs import entries_of

        entries = entries_of(inputs.source, lengths, options.data_parallel)
        tables = [frozen_table(inputs, entries, len(lengths), number, limit) for number in numbers]
    show(options, "\n".join(_lines(inputs, entries, lengths, tables, limit)), {
        "slices": list(lengths),
        "layers": entries.count,
        "memory_limit_bytes": tables[0].most_bytes,
        "frozen": [table.as_json() for table in tables],
    })  # fmt: skip


def frozen_table(inputs: Inputs, entries: Entries, slices: int, frozen: int, limit_gb: float | None) -> FrozenTable:
    """Compare all shapes with so many entries frozen.

    Args:
        inputs: the batch.
        entries: costs of the entries, and the launch.
        slices: of a micro-batch.
        frozen: entries.
        limit_gb: memory limit of a rank in 1e9 bytes; None: no limit.

    Raises:
        ConfigError: the head, the last entry, would be frozen.
    """
    from ds_terapipe.elastic.policies.resize import shape_of, shapes
    from ds_terapipe.elastic.shapes.predict import choose, predict

    if frozen >= entries.count:
        rule = f"at most {entries.count - 1} entries: {entries.text} (the last one is never frozen)"
        raise bad_value("--frozen", frozen, rule, f"at most {entries.count - 1}")
    batch = entries.replicas * inputs.sequences * inputs.request.micro_batches
    launch = (entries.processes, entries.tensor_parallel, batch, inputs.sequences)
    now = shape_of(len(entries.parts) - 1, *launch)
    possible = [shape for shape in shapes(*launch) if shape.stages <= entries.count]

    def predicted(shape: Any, first: int, parts: Sequence[int] | None = None) -> Prediction:
        found = predict(shape, entries.costs(shape), entries.machine(shape), first, slices, parts)
        return found._replace(seconds=found.seconds + entries.overhead_s)

    launched, present = (predicted(now, first, entries.parts) for first in (0, frozen))
    others = [predicted(shape, frozen) for shape in possible]
    others = [each for each in others if (each.shape, each.parts) != (now, entries.parts)]
    most = None if limit_gb is None or not entries.knows_bytes else limit_gb * GIGABYTE
    taken = choose(present, others, most, steps_left=math.inf, change_seconds=0.0).taken
    return FrozenTable(frozen, launched, present, tuple(others), taken, most, entries.knows_bytes)


def _lines(
    inputs: Inputs, entries: Entries, lengths: Sequence[int], tables: Sequence[FrozenTable], limit_gb: float | None
) -> list[str]:
    out = [*inputs.lines, f"layer list: {entries.text}; slices: {compact(lengths)}"]
    if not entries.knows_bytes:
        unknown = "not known from these costs: what replicas add up, and memory"
        out.append(unknown if limit_gb is None else f"{unknown}, so memory_gb is no limit")
    elif limit_gb is not None:
        out.append(f"a rank may hold {limit_gb:g} GB")
    for table in tables:
        out += table.lines(entries.count)
    return [*out, "launched, frozen: how many times as fast as the first and the second line of a table"]


def _layers_text(each: Prediction) -> str:
    return "-".join(str(b - a) for a, b in pairwise(each.parts))


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
        from ds_terapipe.elastic.settings import ELASTIC_PIPELINE, parse

        block = read_json(ds_config, "a DeepSpeed configuration").value(ELASTIC_PIPELINE)
        try:
            settings = None if block is None else parse({ELASTIC_PIPELINE: block})
        except ConfigError as error:
            raise ConfigError(f"{ds_config}: {error}") from error
        if settings is not None and settings.resize.memory_gb is not None:
            return settings.resize.memory_gb
    return inputs.source.device_gb if inputs.request.memory is not None else None

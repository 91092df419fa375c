"""A plan: the slices and schedule of a step, their predicted time and memory, and the options that lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ds_terapipe.errors import ConfigError
from ds_terapipe.json_files import Fields, read_json, write_json
from ds_terapipe.plan.costs.memory import MemoryUse, as_dict, gigabytes, memory_use_from
from ds_terapipe.plan.placed import placement_field, placement_from
from ds_terapipe.schedule import NAMES, SEARCHED, Placement, Schedule, check_text, choices, given
from ds_terapipe.schedule.placement import row_word

FORMAT = "ds_terapipe plan 1"
_SHOWN = 10
_BUBBLE = ("total", "fill", "imbalance", "messages")


class Option(NamedTuple):
    """A candidate: schedule, tokens of each slice, predicted seconds of a step, whether it fits into memory."""

    schedule: str
    slices: tuple[int, ...]
    step_s: float
    fits: bool = True


def option_name(schedule: str | Schedule, slices: Sequence[int]) -> str:
    """Return the name of a schedule in these slices for a table: ``1f1b, 4 slices``."""
    return f"{schedule}, {'unsliced' if len(slices) == 1 else f'{len(slices)} slices'}"


@dataclass(frozen=True)
class Plan:
    """Plan of a step.

    Attributes:
        schedule: name of a schedule, or ``searched``.
        slices: tokens of each slice; they add up to ``seq_length``.
        placement: of the stages.
        micro_batches, sequences: sizes that it was made for; ``sequences`` of a micro-batch.
        weights_once: weight gradients are made once per micro-batch.
        step_s: predicted seconds of a step, including ``overhead_s``, the part after its last action.
        bubble: share of the stages' time in which they compute nothing: ``total``, and its parts ``fill``, ``imbalance`` and
            ``messages``; of the schedule, without the overhead.
        memory: bytes of each place by line; empty where memory is not known.
        memory_limit: bytes that each stage may take, None where there is no limit.
        options: the best of each schedule and number of slices, fastest first.
        about: origin of the costs, for readers of the file.
        order: of a searched schedule, a line for each place.
        note: why no order was searched; empty where one was, or none was asked for.
    """

    schedule: str
    slices: tuple[int, ...]
    seq_length: int
    placement: Placement
    micro_batches: int
    sequences: int
    weights_once: bool
    step_s: float
    overhead_s: float = 0.0
    bubble: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()
    memory_limit: float | None = None
    options: tuple[Option, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    note: str = ""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement.stages)

    @property
    def runs(self) -> str | Schedule:
        """The schedule, as `schedule.order` takes it."""
        return self.schedule if self.order is None else given(self.order)

    @property
    def losing(self) -> tuple[Option, ...]:
        """The options but the chosen one, and those that are its order by another name."""
        chosen = {o[1:] for o in self.options if (o.schedule, o.slices) == (self.schedule, self.slices)}
        return tuple(o for o in self.options if o[1:] not in chosen)

    def lines(self) -> list[str]:
        """Return the plan as text, the chosen option first."""
        chosen, made_for, step = self._said()
        notes = [f"  {self.note}"] if self.note else []
        out = [chosen, step, *notes, f"  {made_for}", *memory_lines(self.memory, self.memory_limit, self._row_word)]
        if self.losing:
            out.append("  other options:")
        for option in self.losing[:_SHOWN]:
            note = "" if option.fits else "  does not fit into memory"
            seconds, ratio = seconds_text(option.step_s), self._ratio(option)
            out.append(
                f"    {option_name(option.schedule, option.slices):<24}{seconds:>12}  {ratio}  {compact(option.slices)}{note}"
            )
        return out

    def summary(self) -> list[str]:
        """Return the plan's lines for the log of a run: what was chosen and lost, what for, and memory if known."""
        chosen, made_for, step = self._said()
        shown: dict[Any, Option] = {}  # an order by its first name
        for place, option in enumerate(self.losing):
            if place == 0 or len(option.slices) == 1:
                shown.setdefault(option[1:], option)
        others = [
            f"; {option_name(o.schedule, o.slices)} {seconds_text(o.step_s)}, {self._ratio(o)}{'' if o.fits else ' (too large)'}"
            for o in [*shown.values()][:2]
        ]
        out = [f"{chosen}, {step.strip()}{''.join(others)}", f"  {made_for}{f'; {self.note}' if self.note else ''}"]
        if self.memory:
            first, *parts = memory_lines(self.memory, self.memory_limit, self._row_word)
            out.append(first + "".join(f", {' '.join(part.split()[:-1])}" for part in parts))
        return out

    def _said(self) -> tuple[str, str, str]:
        """The choice, its pipeline, and the time of a step."""
        on = "" if self.placement.is_plain else f" on {self.placement.places} places"
        parts = ", ".join(f"{name} {self.bubble[name]:.1%}" for name in _BUBBLE[1:])
        bubble = f"bubble {self.bubble['total']:.1%} ({parts})"
        return (
            f"plan: {option_name(self.schedule, self.slices)}: {compact(self.slices)} tokens",
            f"for {quantity(self.stages, 'stage')}{on}, {quantity(self.micro_batches, 'micro-batch')} of {self.sequences} x "
            f"{self.seq_length} tokens",
            f"  step {seconds_text(self.step_s)} predicted, {bubble}",
        )

    def _ratio(self, option: Option) -> str:
        """The option's predicted time as a multiple of the chosen option's."""
        return f"{option.step_s / self.step_s if self.step_s else 1.0:.2f}x"

    @property
    def _row_word(self) -> str:
        return row_word(self.placement)

    def to_dict(self) -> dict[str, Any]:
        """Return the file's content; ``--json`` prints the same keys."""
        return {
            "format": FORMAT,
            "schedule": self.schedule,
            **({} if self.order is None else {"order": list(self.order)}),
            "slices": list(self.slices),
            "seq_length": self.seq_length,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "sequences": self.sequences,
            "weights_once": self.weights_once,
            "predicted_step_s": self.step_s,
            "overhead_s": self.overhead_s,
            "bubble": dict(self.bubble),
            "memory_bytes": [{self._row_word: row, **as_dict(use)} for row, use in enumerate(self.memory)],
            "memory_limit_bytes": self.memory_limit,
            "options": [
                {"schedule": o.schedule, "slices": list(o.slices), "predicted_step_s": o.step_s, "fits": o.fits}
                for o in self.options
            ],
            "about": dict(self.about),
            **({"note": self.note} if self.note else {}),
            **placement_field(self.placement),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan, whole or not at all. Raises ConfigError when the file cannot be written."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of `save`. Raises ConfigError, one line with file, field and expectation."""
        return cls._from(read_json(path, "a plan", FORMAT))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "plan") -> Plan:
        """The inverse of `to_dict`, checked like a file; ``where`` is its name in errors."""
        if data.get("format") != FORMAT:
            raise ConfigError(f'{where}: format: got {data.get("format")!r}, must be "{FORMAT}", plan again')
        return cls._from(Fields(data, where))

    @classmethod
    def _from(cls, fields: Fields) -> Plan:
        slices, seq_length = fields.counts("slices"), fields.count("seq_length")
        if sum(slices) != seq_length:
            raise fields.fail(
                "slices", f"lengths that add up to seq_length, {seq_length}, not {sum(slices)}", "another"
            )
        placement, limit = placement_from(fields, fields.count("stages")), fields.value("memory_limit_bytes")
        uses = fields.blocks("memory_bytes", least=0)
        if uses and len(uses) != placement.places:
            rule = f"one block for each of the {placement.places} {row_word(placement)}s"
            raise fields.fail("memory_bytes", rule, "a new plan")
        micro_batches, schedule = fields.count("micro_batches"), fields.one_of("schedule", (*choices(), SEARCHED))
        return cls(
            schedule=schedule,
            order=_order(fields, placement, [len(slices)] * micro_batches) if schedule == SEARCHED else None,
            slices=slices,
            seq_length=seq_length,
            placement=placement,
            micro_batches=micro_batches,
            sequences=fields.count("sequences"),
            weights_once=fields.flag("weights_once"),
            step_s=fields.number("predicted_step_s"),
            overhead_s=fields.number("overhead_s", default=0.0),
            bubble=_bubble(fields),
            memory=tuple(memory_use_from(use) for use in uses),
            memory_limit=None if limit is None else fields.number("memory_limit_bytes"),
            options=tuple(_option(block, seq_length) for block in fields.blocks("options", least=0)),
            about=fields.block("about"),
            note=fields.text("note", ""),
        )


def compact(lengths: Sequence[int]) -> str:
    """Lengths as text, repeats counted: ``512x3, 496, 16``."""
    groups = [(length, len([*group])) for length, group in groupby(lengths)]
    return ", ".join(f"{length}x{count}" if count > 1 else str(length) for length, count in groups)


def quantity(count: int, noun: str) -> str:
    """A number and its noun: ``1 stage``, ``2 stages``, ``2 micro-batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural * (count != 1)}"


def seconds_text(seconds: float) -> str:
    """Seconds as a person reads them: ``1.234 s``, ``56.7 ms``."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def memory_lines(memory: Sequence[MemoryUse], limit: float | None, word: str) -> list[str]:
    """Return the peak of the fullest place and its parts, nothing if unknown; ``limit`` in bytes, ``word`` for a place."""
    if not memory:
        return []
    worst = max(range(len(memory)), key=lambda place: memory[place].total)
    of = "" if limit is None else f" of {gigabytes(limit):.3f}"
    out = [f"  memory of {word} {worst}, the fullest: {gigabytes(memory[worst].total):.3f}{of} GB"]
    for name, value in memory[worst]._asdict().items():
        if value:
            out.append(f"    {name.replace('_', ' '):<24}{gigabytes(value):>9.3f} GB")
    return out


def _order(fields: Fields, placement: Placement, slices: Sequence[int]) -> tuple[str, ...]:
    """Return the order of a plan, which can run."""
    lines = fields.value("order")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise fields.fail("order", "a line of actions for each place", f'"schedule": "{NAMES[-1]}" without one')
    try:
        check_text(lines, placement, slices)
    except ValueError as error:
        raise ConfigError(f"{fields.path('order')}: {error}, use an order that can run, or another schedule") from error
    return tuple(lines)


def _bubble(fields: Fields) -> dict[str, float]:
    shares = Fields(fields.block("bubble"), fields.path("bubble"))
    return {name: shares.number(name, "a share from 0 to 1") for name in _BUBBLE}


def _option(block: Fields, seq_length: int) -> Option:
    slices = block.counts("slices")
    if sum(slices) != seq_length:
        raise block.fail("slices", f"lengths that add up to seq_length, {seq_length}", "a new plan")
    return Option(
        block.one_of("schedule", (*choices(), SEARCHED)), slices, block.number("predicted_step_s"), block.flag("fits")
    )

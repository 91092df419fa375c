"""The best plan for a step: schedules, numbers of slices and lengths compared by simulation, memory as a hard limit.

Candidates are TeraPipe's optimum, the most even cut by cost for each number of slices, and equal lengths for 1 to 16
slices, each under every schedule that may be used. All are timed by the simulator, for no closed form holds for unequal
stages or for 1F1B with unequal slices. The candidates do not depend on the memory, which only excludes some: more memory
never gives a slower plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.costs.memory import GIGABYTE, gigabytes
from ds_terapipe.plan.evaluate import Candidate, StepTimes
from ds_terapipe.plan.improve import improve, other_cuts, why_not
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Option, Plan, compact, option_name
from ds_terapipe.plan.slices import Cuts, best_cut, even_cuts, slice_times
from ds_terapipe.plan.stages import even
from ds_terapipe.schedule import names_on
from ds_terapipe.schedule.placement import row_word

_EQUAL = 16  # equal lengths are tried for 1 to this many slices
_EVEN = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)
_QUANTA = 1024  # of a sequence at most: a choice takes seconds and memory that grow with their square
_NEAR = 3  # of the cuts that were timed, so many are searched in
_SHOWN = (1, 2, 4, 8, 16)  # numbers of slices that are always timed, for comparisons


def choose(cost: Cost, request: Request) -> Plan:
    """The fastest plan that fits.

    Args:
        cost: of micro-batches of the size that is planned for.
        request: the request.

    Raises:
        ConfigError: a sequence that the costs do not know, or no plan fits into the memory: the message says what would.
    """
    if request.seq_length > cost.max_length:
        raise bad_value(
            "sequence length", request.seq_length, f"within what was measured, {cost.max_length} tokens",
            "a measurement of this length",
        )  # fmt: skip
    times = request.times(cost)
    slicings = sorted(set(_candidates(cost, request)), key=lambda lengths: (times.bound(lengths), lengths))
    if not slicings:
        raise bad_value(
            "sequence length", request.seq_length,
            f"one that can be cut into slices of {request.least} to {request.max_slice} tokens, which is what was measured",
            "a measurement of this length, or a smaller granularity",
        )  # fmt: skip
    schedules = names_on(request.placement)[::-1] if request.schedule == "auto" else (request.schedule,)
    timed: list[Candidate] = []
    best: Candidate | None = None
    for lengths in slicings:
        if best and times.bound(lengths) > best.seconds and len(lengths) not in _SHOWN:
            continue  # it cannot win
        for schedule in schedules:
            found = Candidate(times.seconds(schedule, lengths), schedule, lengths)
            timed.append(found)
            if (best is None or found.seconds < best.seconds) and request.fits(schedule, lengths):
                best = found
    if best is None:
        raise _too_large(request, timed)
    if not request.search_s or request.schedule != "auto":
        return _plan(times, request, best, timed)
    note = why_not(times, best.schedule, best.lengths)
    searched = None if note else _searched(times, request, best, timed)
    return replace(_plan(times, request, searched or best, timed), note=note and f"no order is searched: {note}")


def _searched(times: StepTimes, request: Request, best: Candidate, timed: Sequence[Candidate]) -> Candidate | None:
    """Return a searched order that is worth it, in the best named one's slices or others."""
    near = [each.lengths for each in sorted(timed)]
    cuts = [*dict.fromkeys([best.lengths, *near])][:_NEAR]
    return improve(times, request, best.schedule, [*cuts, *other_cuts(times, request, best.lengths)])


def can_choose(cost: Cost, request: Request) -> bool:
    """Whether there is any cut of such a sequence whose slices the costs know."""
    return next(_candidates(cost, request), None) is not None


def plan_of(cost: Cost, request: Request, schedule: str, lengths: tuple[int, ...]) -> Plan:
    """The plan that is this cut under this schedule, whatever else there is.

    Raises:
        ConfigError: it does not fit into the memory.
    """
    times = request.times(cost)
    only = Candidate(times.seconds(schedule, lengths), schedule, lengths)
    if not request.fits(schedule, lengths):
        raise _too_large(request, [only])
    return _plan(times, request, only, [only])


def _candidates(cost: Cost, request: Request) -> Iterator[tuple[int, ...]]:
    """Lengths of slices to try, whatever the schedule."""
    total, least = request.seq_length, request.least
    quantum = request.granularity * math.ceil(total / (request.granularity * _QUANTA))
    cuts = Cuts(total, quantum, least, request.max_slice)
    for count in range(1, min(_EQUAL, total // least) + 1):
        lengths = tuple(request.multiple * each for each in even(total // request.multiple, count))
        if request.allows(lengths):
            yield lengths
    table = slice_times(cost, request.placement, cuts)
    found = even_cuts(table, max(_EVEN))
    if not found:  # the range that was measured has no cut on these quanta
        return
    yield cuts.lengths(best_cut(table, (request.placement.places - 1) / request.micro_batches).counts)
    yield from (cuts.lengths(found[count]) for count in _EVEN if count in found)


def _plan(times: StepTimes, request: Request, best: Candidate, timed: Sequence[Candidate]) -> Plan:
    """Return the plan, with the fastest candidate of each schedule and number of slices."""
    simulation = times.simulate(best.runs, best.lengths)
    listed: dict[tuple[str, int], Candidate] = {}
    for each in sorted(timed):
        listed.setdefault((each.schedule, len(each.lengths)), each)
    options = [
        Option(each.schedule, each.lengths, each.seconds + request.overhead_s, request.fits(each.runs, each.lengths))
        for each in dict.fromkeys([best, *listed.values()])
    ]
    return Plan(
        schedule=best.schedule,
        order=best.order,
        slices=best.lengths,
        seq_length=request.seq_length,
        placement=request.placement,
        micro_batches=request.micro_batches,
        sequences=times.cost.sequences,
        weights_once=request.weights_once,
        step_s=simulation.makespan + request.overhead_s,
        overhead_s=request.overhead_s,
        bubble={"total": simulation.bubble, **simulation.bubble_shares},
        memory=request.memory_of(best.runs, best.lengths),
        memory_limit=None if request.memory_gb is None else request.memory_gb * GIGABYTE,
        options=tuple(sorted(options, key=lambda option: option.step_s)),
        about=request.about,
    )


def _too_large(request: Request, timed: Sequence[Candidate]) -> ConfigError:
    """The error where nothing fits: what the thriftiest candidate takes."""
    uses, schedule, lengths = min(
        ((request.memory_of(each.schedule, each.lengths), each.schedule, each.lengths) for each in timed),
        key=lambda found: (max(use.total for use in found[0]), found[1:]),
    )
    fullest = max(range(len(uses)), key=lambda place: uses[place].total)
    # rounded up: what is named here fits
    need = math.ceil(gigabytes(uses[fullest].total) * 1000) / 1000
    return ConfigError(
        f"{request.limit_name}: got {request.memory_gb:g}, must be at least {need:g}: that is what "
        f"{row_word(request.placement)} {fullest} takes with the thriftiest plan, {option_name(schedule, lengths)} "
        f"({compact(lengths)} tokens), use {need:g}, a smaller micro-batch or more stages"
    )

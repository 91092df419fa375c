"""The best plan for a step: schedules, numbers of slices and lengths compared by simulation, memory as a hard limit.

Candidates are TeraPipe's optimum, the most even cut by cost for each number of slices, and equal lengths for 1 to 16
slices, each under every schedule that may be used. All are timed by the simulator, for no closed form holds for unequal
stages or for 1F1B with unequal slices; the best few are then refined, a few tokens at a time, while the simulated step
gets shorter. The candidates do not depend on the memory, which only excludes some: more memory never gives a slower
plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel, MemoryUse, check_stages, gigabytes, memory_use
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.placed import unlike_plain
from ds_terapipe.plan.result import Option, Plan, compact
from ds_terapipe.plan.slices import Cuts, best_cut, even_cuts, slice_times
from ds_terapipe.schedule import NAMES, Placement
from ds_terapipe.schedule.placement import row_word

_EQUAL = 16  # equal lengths are tried for 1 to this many slices
_EVEN = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)
_SHOWN = (1, 2, 4, 8, 16)  # numbers of slices that are always timed, for comparisons
_COMPOSITIONS = 128  # so few cuts are all tried
_CLOSE, _REFINED = 1.03, 3  # the best few families of candidates are refined, if they come this close to the best
_REFINE_RUNS, _REFINE_NODES = 150, 1_000_000  # simulations of a refinement, and the work in them
_Candidate = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Request:
    """A request for a plan.

    Attributes:
        seq_length: tokens of a sequence.
        stages: pipeline stages.
        micro_batches: in a step.
        schedule: ``auto``, or the only one that may be used.
        granularity: unequal slices are multiples of so many tokens, and the last one takes the remainder; equal lengths are
            tried as they are.
        min_length: shortest slice in tokens; by default the granularity.
        max_slice: longest slice in tokens, None without limit: measurements may reach no further.
        multiple_of: every slice is a multiple of it (tensor parallelism that splits sequences).
        memory: memory model; None: memory is no limit.
        memory_gb: memory limit of each stage in 1e9 bytes; None: no limit.
        limit_name: name of that limit in errors.
        weights_once: weight gradients are made once per micro-batch where it is cut.
        placement: of the stages; None: one on each place.
        overhead_s: seconds of a step after its last action: gradient reduction, optimiser.
        about: origin of the costs.
    """

    seq_length: int
    stages: int
    micro_batches: int
    schedule: str = "auto"
    granularity: int = 8
    min_length: int | None = None
    max_slice: int | None = None
    multiple_of: int = 1
    memory: MemoryModel | None = None
    memory_gb: float | None = None
    limit_name: str = "memory_gb"
    weights_once: bool = False
    placement: Placement | None = None
    overhead_s: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def allows(self, lengths: Sequence[int]) -> bool:
        """Whether no slice is too short or too long."""
        return min(lengths) >= self.least and (self.max_slice is None or max(lengths) <= self.max_slice)

    @property
    def where(self) -> Placement:
        """The stages on their places."""
        return Placement.plain(self.stages) if self.placement is None else self.placement

    def times(self, cost: Cost) -> StepTimes:
        """Return the step times with these costs."""
        return StepTimes(cost, self.stages, self.micro_batches, self.weights_once, self.placement)

    @property
    def least(self) -> int:
        """Shortest slice in tokens."""
        return min(self.seq_length, self.granularity if self.min_length is None else self.min_length)


def choose(cost: Cost, request: Request) -> Plan:
    """The fastest plan that fits.

    Args:
        cost: of micro-batches of the size that is planned for.
        request: the request.

    Raises:
        ConfigError: a value that breaks its rule, a sequence longer than the costs reach, or no plan fits into the memory: the
            message says what would.
    """
    _check(cost, request)
    search = _Search(request.times(cost), request)
    candidates = list(_candidates(cost, request))
    if not candidates:
        raise bad_value(
            "sequence length", request.seq_length,
            f"one that can be cut into slices of {request.least} to {request.max_slice} tokens, which is what was measured",
            "a measurement of this length, or a smaller granularity",
        )  # fmt: skip
    for schedule, lengths in search.ordered(candidates):
        search.add(schedule, lengths)
    for schedule, lengths in search.families():
        search.refine(schedule, lengths)
    return search.plan()


def can_choose(cost: Cost, request: Request) -> bool:
    """Whether there is any cut of such a sequence whose slices the costs know."""
    return next(_candidates(cost, request), None) is not None


def plan_of(cost: Cost, request: Request, schedule: str, lengths: tuple[int, ...]) -> Plan:
    """The plan that is this cut under this schedule, whatever else there is.

    Raises:
        ConfigError: it does not fit into the memory.
    """
    search = _Search(request.times(cost), request)
    search.take((schedule, lengths))
    return search.plan()


def advise_micro_batch(costs: Mapping[int, Cost], request: Request, sequences: int) -> list[Plan]:
    """Plans for each number of sequences at once, fastest first: advice on the micro-batch size.

    Args:
        costs: by sequences in a micro-batch; only those that divide ``sequences`` are planned.
        request: as for `choose`, its micro-batches aside; ``memory`` is that of one sequence.
        sequences: of a replica in a step.

    Raises:
        ConfigError: as `choose`, where no size fits, or none divides.
    """
    plans: list[Plan] = []
    refused: ConfigError | None = None
    for size in sorted(size for size in costs if sequences % size == 0):
        memory = None if request.memory is None else _scaled(request.memory, size)
        try:
            plans.append(choose(costs[size], replace(request, micro_batches=sequences // size, memory=memory)))
        except ConfigError as error:
            refused = refused or error
    if not plans:
        raise refused or bad_value("sequences", sequences, f"a multiple of one of {sorted(costs)}", "other costs")
    return sorted(plans, key=lambda plan: plan.step_s)


def _candidates(cost: Cost, request: Request) -> Iterator[tuple[int, ...]]:
    """Lengths of slices to try, whatever the schedule."""
    total, least = request.seq_length, request.least
    cuts = Cuts.of(total, request.granularity, least, request.multiple_of, request.max_slice)
    for count in range(1, min(_EQUAL, total // least) + 1):
        length, longer = divmod(total, count)
        lengths = tuple(length + (i < longer) for i in range(count))
        if request.allows(lengths) and all(each % request.multiple_of == 0 for each in lengths):
            yield lengths
    table = slice_times(cost, request.where, cuts)
    even = even_cuts(table, max(_EVEN))
    if not even:  # the range that was measured has no cut on these quanta
        return
    yield cuts.lengths(best_cut(table, (request.where.places - 1) / request.micro_batches).counts)
    yield from (cuts.lengths(even[count]) for count in _EVEN if count in even)
    if 2 ** (cuts.quanta - 1) <= _COMPOSITIONS:
        every = (cuts.lengths(counts) for counts in _compositions(cuts.quanta, cuts.least))
        yield from (lengths for lengths in every if request.allows(lengths))


def _compositions(quanta: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all cuts of so many quanta into slices of at least ``least``."""
    yield (quanta,)
    for first in range(least, quanta - least + 1):
        yield from ((first, *rest) for rest in _compositions(quanta - first, least))


class _Search:
    """Search over candidates: the times so far, and the fastest candidate that fits."""

    def __init__(self, times: StepTimes, request: Request) -> None:
        self._times, self._request = times, request
        self._seconds: dict[_Candidate, float] = {}
        self._memory: dict[_Candidate, tuple[MemoryUse, ...]] = {}
        self._best: _Candidate | None = None
        self._fastest = math.inf  # with any memory

    def ordered(self, slicings: list[tuple[int, ...]]) -> list[_Candidate]:
        """The candidates, those that may be fastest first, each once."""
        unique = sorted(set(slicings), key=lambda lengths: (self._times.bound(lengths), lengths))
        schedules = NAMES if self._request.schedule == "auto" else (self._request.schedule,)
        return [(schedule, lengths) for lengths in unique for schedule in reversed(schedules)]

    def add(self, schedule: str, lengths: tuple[int, ...]) -> None:
        """Times a candidate, unless it can neither win nor belong to a family that is refined."""
        worth = max(self._seconds[self._best] if self._best else math.inf, _CLOSE * self._fastest)
        if len(lengths) not in _SHOWN and self._times.bound(lengths) > worth:
            return
        self.take((schedule, lengths))

    def take(self, candidate: _Candidate, seconds: float | None = None) -> None:
        """Considers a candidate; ``seconds`` where it was timed already."""
        seconds = self._times.seconds(*candidate) if seconds is None else seconds
        self._seconds[candidate] = seconds
        self._fastest = min(self._fastest, seconds)
        if (self._best is None or seconds < self._seconds[self._best]) and self._fits(candidate):
            self._best = candidate

    def families(self) -> list[_Candidate]:
        """The fastest candidate of the best few pairs of schedule and number of slices."""
        close = [c for c in self._by_family() if self._seconds[c] <= _CLOSE * self._fastest and len(c[1]) > 1]
        return close[:_REFINED]

    def _by_family(self) -> list[_Candidate]:
        best: dict[tuple[str, int], _Candidate] = {}
        for candidate in sorted(self._seconds, key=lambda c: (self._seconds[c], c)):
            best.setdefault((candidate[0], len(candidate[1])), candidate)
        return list(best.values())

    def refine(self, schedule: str, lengths: tuple[int, ...]) -> None:
        """Moves tokens between neighbours while the simulated step gets shorter."""
        quantum = math.lcm(self._request.granularity, self._request.multiple_of)
        left = min(_REFINE_RUNS, _REFINE_NODES // self._times.nodes(schedule, len(lengths)))
        lengths = _on_quanta(lengths, quantum)
        if not self._request.allows(lengths) or left <= 0:
            return
        best, step = self._times.seconds(schedule, lengths), 4 * quantum
        while step >= quantum:
            improved = False
            for index in range(2 * (len(lengths) - 1)):
                trial = _moved(lengths, index // 2, step if index % 2 else -step)
                if not self._request.allows(trial) or left <= 0:
                    continue
                seconds, left = self._times.seconds(schedule, trial), left - 1
                if seconds < best * (1 - 1e-9):
                    best, lengths, improved = seconds, trial, True
            step = step if improved else step // 2
        self.take((schedule, lengths), best)

    def plan(self) -> Plan:
        """Return the fastest plan that fits, with the candidates that lost."""
        request = self._request
        if self._best is None:
            raise self._infeasible()
        schedule, lengths = self._best
        simulation = self._times.simulate(schedule, lengths)
        options = [
            Option(name, cut, self._seconds[name, cut] + request.overhead_s, self._fits((name, cut)))
            for name, cut in {self._best: None, **dict.fromkeys(self._by_family())}
        ]
        return Plan(
            schedule=schedule,
            slices=lengths,
            seq_length=request.seq_length,
            stages=request.stages,
            micro_batches=request.micro_batches,
            sequences=self._times.cost.sequences,
            weights_once=request.weights_once,
            placement=unlike_plain(request.placement),
            step_s=simulation.makespan + request.overhead_s,
            overhead_s=request.overhead_s,
            bubble={"total": simulation.bubble, **simulation.bubble_shares},
            memory=self._use(self._best) if request.memory else (),
            memory_limit=None if request.memory_gb is None else request.memory_gb * GIGABYTE,
            options=tuple(sorted(options, key=lambda option: option.step_s)),
            about=request.about,
        )

    def _use(self, candidate: _Candidate) -> tuple[MemoryUse, ...]:
        if candidate not in self._memory:
            schedule, lengths = candidate
            request = self._request
            assert request.memory is not None
            self._memory[candidate] = memory_use(
                request.memory, schedule, lengths, request.micro_batches, request.weights_once, request.placement
            )
        return self._memory[candidate]

    def _fits(self, candidate: _Candidate) -> bool:
        if self._request.memory is None or self._request.memory_gb is None:
            return True
        return max(use.total for use in self._use(candidate)) <= self._request.memory_gb * GIGABYTE

    def _infeasible(self) -> ConfigError:
        least, candidate = min((max(use.total for use in self._use(c)), c) for c in self._seconds)
        places = self._use(candidate)
        fullest = max(range(len(places)), key=lambda place: places[place].total)
        # rounded up: what is named here fits
        need = math.ceil(gigabytes(least) * 1000) / 1000
        return ConfigError(
            f"{self._request.limit_name}: got {self._request.memory_gb:g}, must be at least {need:g}: that is what "
            f"{row_word(self._request.where)} {fullest} takes with the thriftiest plan, {Option(*candidate, 0.0).name} "
            f"({compact(candidate[1])} tokens), use {need:g}, a smaller micro-batch or more stages"
        )


def _on_quanta(lengths: tuple[int, ...], quantum: int) -> tuple[int, ...]:
    """The same cut with each boundary at the nearest multiple of the quantum."""
    inner = [round(end / quantum) * quantum for end in accumulate(lengths[:-1])]
    return tuple(b - a for a, b in pairwise([0, *inner, sum(lengths)]))


def _moved(lengths: tuple[int, ...], index: int, tokens: int) -> tuple[int, ...]:
    moved = list(lengths)
    moved[index] += tokens
    moved[index + 1] -= tokens
    return tuple(moved)


def _scaled(model: MemoryModel, sequences: int) -> MemoryModel:
    """Return the memory of a micro-batch of so many sequences, from that of one."""
    stages = (
        replace(
            stage,
            activations=stage.activations * sequences,
            keys_values=stage.keys_values * sequences,
            key_value_gradients=stage.key_value_gradients * sequences,
            weight_gradients=stage.weight_gradients * sequences,
            received=stage.received * sequences,
            sent=stage.sent * sequences,
            working=stage.working * sequences,
            joined=stage.joined * sequences,
            packed=stage.packed * sequences,
            losses=stage.losses * sequences,
        )
        for stage in model.stages
    )
    return replace(model, stages=tuple(stages))


def _check(cost: Cost, request: Request) -> None:
    for key in ("seq_length", "stages", "micro_batches", "granularity", "multiple_of"):
        if getattr(request, key) < 1:
            raise bad_value(key, getattr(request, key), "a positive integer", "e.g. 1")
    if request.schedule not in ("auto", *NAMES):
        raise bad_value("schedule", request.schedule, " or ".join(f'"{name}"' for name in ("auto", *NAMES)), '"auto"')
    if request.seq_length > cost.max_length:
        raise bad_value(
            "sequence length", request.seq_length, f"within what was measured, {cost.max_length} tokens",
            "a measurement of this length",
        )  # fmt: skip
    if request.memory_gb is not None and not (request.memory_gb > 0 and math.isfinite(request.memory_gb)):
        raise bad_value(request.limit_name, request.memory_gb, "a positive number", "e.g. 16")
    if request.memory is not None:
        check_stages(request.memory, request.stages)

"""How a step is cut: as the configuration says, as a plan says, or, with ``"slices": "auto"``, as the first steps show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_terapipe.config import AUTO, TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.runoff import Cutting, Runoff
from ds_terapipe.pipeline.situation import (
    Agreement,
    MemoryMeter,
    Situation,
    check_plan,
    differences,
    mismatch,
)
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.choose import Request, can_choose, choose, plan_of
from ds_terapipe.plan.cost import MeasuredCost
from ds_terapipe.plan.layers import LayerSeconds
from ds_terapipe.plan.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.memory import GIGABYTE, MemoryModel, Peaks, calibrated, memory_use
from ds_terapipe.plan.result import Plan, compact, seconds_text
from ds_terapipe.tracing.chrome import Event

DEFAULT_SCHEDULE = "1f1b"
TRIALS = (16, 8, 4, 2, 1)  # numbers of equal slices that are measured
ROUNDS = 2
SHORTEST = 8  # tokens of a slice that is tried
PATIENCE = 20  # steps of other lengths until a measurement is given up
RIVALS = 2  # other trials that are compared with a plan,
NEAR = 1.15  # if they took at most so much longer than the fastest
WORSE = 1.01  # a plan that takes so much longer than a trial in the same steps is given up for it
_SHOWN = 3  # differences to another run that a line names
_Shape = tuple[int, int]  # of a step: the length of its sequences in tokens, and its micro-batches


class FixedCutting:
    """``slices`` is a number or a list of lengths."""

    def __init__(self, slices: int | Sequence[int], schedule: str) -> None:
        self._cutting = Cutting(slices if isinstance(slices, int) else tuple(slices), schedule)

    def cutting(self, lengths: Sequence[int], everywhere: Sequence[int]) -> Cutting:
        """For micro-batches of these lengths."""
        return self._cutting

    def now(self, lengths: Sequence[int]) -> Cutting:
        """As :meth:`cutting`, for an evaluation, which is neither measured nor planned for."""
        return self._cutting

    @property
    def wants_events(self) -> bool:
        """Whether the step is to be recorded for the choice."""
        return False

    @property
    def wants_layers(self) -> bool:
        """Whether the step's single layers are to be timed for the choice."""
        return False

    def took(self, events: Sequence[Event], seconds: float) -> None:
        """What the step took."""

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps."""
        return None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint."""


class AutoCutting:
    """Measures in the first steps, plans, and compares the plan with the best of what was measured in the steps after it.

    The first step warms up: buffers are made and the model is inspected. The next ones are the trials, each cut in its own way
    and recorded. From what they took rank 0 makes the plan, which all ranks adopt, and which then has to hold against the best of
    the trials. A sequence that is longer than what was measured starts anew; another number of micro-batches, or shorter
    sequences, are planned from what is known.

    Args:
        config: the block ``token_pipeline``.
        situation: of this run.
        agree: brings rank 0's decisions to all ranks.
        memory: measures what a step takes.
        say: writes a line into the log, on rank 0.
        layers: what single layers took in the steps that ``wants_layers``; collective.
    """

    def __init__(
        self,
        config: TokenPipelineConfig,
        situation: Situation,
        agree: Agreement,
        memory: MemoryMeter,
        say: Callable[[str], None],
        layers: Callable[[], LayerSeconds | None] = lambda: None,
    ) -> None:
        self._config, self._situation, self._agree, self._memory, self._say = config, situation, agree, memory, say
        self._layers, self._advised = layers, False
        self._schedule = DEFAULT_SCHEDULE if config.schedule == AUTO else config.schedule
        self._plans: dict[_Shape, Plan] = {}
        self._runoffs: dict[_Shape, Runoff] = {}  # the unsettled ones
        self._rivals_of: dict[_Shape, tuple[Plan, ...]] = {}  # what else runs in them
        self._cost: MeasuredCost | None = None
        self._overhead_s = 0.0
        self._trials: list[int] = []
        self._bare: MemoryModel | None = None  # as it was counted, without what peaks have taught
        self._peaks: dict[tuple[int, ...], Peaks] = {}  # of trials, by their slices
        self._trials_of: _Shape | None = None  # what is being measured
        self._steps: list[RecordedStep] = []
        self._model: MemoryModel | None = None
        self._limit: float | None = None
        self._limit_from: str | None = None  # the file that it was read from
        self._trial: Cutting | None = None
        self._turn: _Shape | None = None  # the runoff that the step that was cut last belongs to
        self._warm, self._missed = False, 0
        self._given: Plan | None = None
        if config.plan_path is not None:
            plan = self._given = self._agree(self._load_plan)
            self._adopt(plan)
            self._say(f"plan: {compact(plan.slices)} tokens, {plan.schedule}, from {config.plan_path}")
        if config.measurements_path is not None:
            self._load_measurements(config.measurements_path)

    def _load_plan(self) -> Plan:
        config, path = self._config, self._config.plan_path
        assert path is not None
        plan = Plan.load(path)
        check_plan(plan, self._situation, config.schedule, config.memory_gb, path)
        return plan

    def cutting(self, lengths: Sequence[int], everywhere: Sequence[int]) -> Cutting:
        """For micro-batches of these lengths, of those in all pipelines; collective where a plan has to be made."""
        longest, self._trial, self._turn = max(everywhere), None, None
        shape, alike = (longest, len(lengths)), min(everywhere) == longest
        if shape not in self._plans and self._can_plan(shape):
            self._say_why(shape)
            self._adopt(self._new_plan(shape))
        plan = self._plans.get(shape)
        if plan is not None:
            if alike and shape in self._runoffs:
                self._turn = shape
                return self._runoffs[shape].cutting
            return Cutting(plan.slices if min(lengths) == longest else len(plan.slices), plan.schedule)
        if not alike:  # nothing that another step could be compared with
            return self._unmeasured(lengths)
        if shape != self._trials_of:
            # Where lengths change from step to step, one is measured whenever it comes, the others run meanwhile; what never
            # comes again is given up after a while.
            self._missed += 1
            if self._trials and self._missed <= PATIENCE:
                return self._unmeasured(lengths)
            self._trials_of, self._steps, self._warm = shape, [], False
            least = max(SHORTEST, self._config.granularity)
            self._trials = [n for _ in range(ROUNDS) for n in TRIALS if n == 1 or longest // n >= least]
            self._say_why(shape)
            if self._cost is not None:
                known = (
                    f"slices of {self._cost.min_length} to {self._cost.max_slice} tokens, up to {self._cost.max_length}"
                )
                self._say(f"plan: measured were {known}, not sequences of {longest}: measured again")
            self._memory.begin()
        self._missed = 0
        self._trial = Cutting(self._trials[0], self._schedule)
        self._memory.watch()
        return self._trial

    def now(self, lengths: Sequence[int]) -> Cutting:
        """For an evaluation, which is neither measured nor planned for: what the training does with such sequences."""
        longest = max(lengths)
        plan = next((plan for (length, _), plan in self._plans.items() if length == longest), None)
        if plan is None:
            return self._unmeasured(lengths)
        return Cutting(plan.slices if min(lengths) == longest else len(plan.slices), plan.schedule)

    def _unmeasured(self, lengths: Sequence[int]) -> Cutting:
        """For steps that nothing is known of."""
        return Cutting(min(TRIALS[1], max(min(lengths) // SHORTEST, 1)), self._schedule)

    @property
    def wants_events(self) -> bool:
        """Whether the step that was cut last is to be recorded."""
        return self._trial is not None and self._warm

    @property
    def wants_layers(self) -> bool:
        """Whether single layers are to be timed in the step that was cut last: an uncut trial, if there is memory for one."""
        return self.wants_events and self._trials[0] == 1

    def took(self, events: Sequence[Event], seconds: float) -> None:
        """The step is over: its events, on rank 0, and its wall time; collective where that decides something."""
        if self._trial is not None:
            self._took_trial(events, seconds)
        elif self._turn is not None and self._runoffs[self._turn].took(seconds):
            self._settle(self._turn, self._runoffs.pop(self._turn))

    def _took_trial(self, events: Sequence[Event], seconds: float) -> None:
        assert self._trials_of is not None and self._trial is not None
        if not self._warm:
            self._warm = True
            self._bare, self._limit = self._memory.end()
            self._model, self._limit_from = self._bare, None
            self._peaks.clear()
            self._learn_memory(self._trial.slices)
            cuts = {n: slice_lengths(self._trials_of[0], n) for n in self._trials}
            self._leave_out()
            if not self._trials:  # the thriftiest: planning refuses it and says what it takes
                self._trials = [min(cuts, key=lambda n: self._bytes(cuts[n]))]
            return
        count = self._trials.pop(0)
        self._learn_memory(count)
        self._leave_out()
        self._steps.append(RecordedStep(slice_lengths(self._trials_of[0], count), events, seconds))
        if self._trials:
            return
        shape, layers = self._trials_of, self._layers()
        self._cost, self._overhead_s = self._agree(lambda: self._costs(layers))
        plan = self._new_plan(shape)
        self._adopt(plan, self._agree(lambda: self._rivals(plan)))
        self._advise()

    def _adopt(self, plan: Plan, rivals: Sequence[Plan] = ()) -> None:
        """Use a plan, and compare the next steps with what it predicts and with its rivals."""
        shape = plan.seq_length, plan.micro_batches
        self._plans[shape], self._rivals_of[shape] = plan, tuple(rivals)
        self._runoffs[shape] = Runoff(_cutting(plan), [_cutting(rival) for rival in rivals])

    def _say_why(self, shape: _Shape) -> None:
        """Say that the plan of ``plan_path`` is not used where other sequences come than it is for."""
        given = self._given
        if given is not None and (given.seq_length, given.micro_batches) != shape:
            self._say(
                f"plan: {self._config.plan_path} is for {given.micro_batches} micro-batches of {given.seq_length} tokens, not "
                f"for these {shape[1]} of {shape[0]}"
            )

    def _advise(self) -> None:
        """Say once what other stages would gain: they cannot be changed in a run."""
        if self._advised or self._cost is None or self._cost.layers is None:
            return
        self._advised = True
        advice = self._cost.layers.advice()
        if advice:
            self._say(f"plan: stages of {advice}")

    def _costs(self, layers: LayerSeconds | None) -> tuple[MeasuredCost, float]:
        situation = self._situation
        cost = measured_cost(
            self._steps,
            situation.stages,
            situation.sequences,
            situation.weights_once,
            situation.loss_of_whole,
            {**situation.measured_on, "overhead_s": overhead(self._steps), "memory_limit_bytes": self._free_bytes},
            self._model,
            layers,
        )
        if self._config.measurements_path is not None:
            cost.save(self._config.measurements_path)
        return cost, overhead(self._steps)

    def _load_measurements(self, path: str) -> None:
        def load() -> MeasuredCost | None:
            try:
                cost = MeasuredCost.load(path)
            except ConfigError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return None
                raise
            other = differences(cost.holds_for, self._situation.measured_on)
            if other:
                more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
                self._say(
                    f"plan: {path} was measured on another run: {'; '.join(other[:_SHOWN])}{more}: measured again"
                )
            return None if other else cost

        self._cost = self._agree(load)
        if self._cost is not None:
            self._model = self._cost.memory
            self._overhead_s = self._cost.overhead_s
            self._limit, self._limit_from = self._cost.memory_limit, path
            self._advise()

    @property
    def _free_bytes(self) -> float | None:
        """What was free when it was measured; None where the configuration sets the limit, or nothing does."""
        return self._limit if self._config.memory_gb is None else None

    def _can_plan(self, shape: _Shape) -> bool:
        cost = self._cost
        if cost is None or not cost.min_length <= shape[0] <= cost.max_length:
            return False
        return can_choose(cost, self._request(cost, shape))

    def _new_plan(self, shape: _Shape) -> Plan:
        plan: Plan = self._agree(lambda: self._choose(shape))
        for line in plan.lines():
            self._say(line)
        return plan

    def _choose(self, shape: _Shape) -> Plan:
        assert self._cost is not None
        return choose(self._cost, self._request(self._cost, shape))

    @property
    def _limit_gb(self) -> float | None:
        """What a plan may take: the configuration's limit, else what was free."""
        given = self._config.memory_gb
        return self._limit / GIGABYTE if given is None and self._limit is not None else given

    @property
    def _limit_name(self) -> str:
        """Where that limit is from, for errors."""
        if self._config.memory_gb is None and self._limit_from is not None:
            return f"{self._limit_from}: measured_on.memory_limit_bytes, in GB"
        return "token_pipeline.memory_gb"

    def _request(self, cost: MeasuredCost, shape: _Shape) -> Request:
        config, situation = self._config, self._situation
        return Request(
            seq_length=shape[0],
            stages=situation.stages,
            micro_batches=shape[1],
            schedule=config.schedule,
            granularity=config.granularity,
            min_length=max(cost.min_length, config.granularity),
            max_slice=cost.max_slice,
            memory=self._model,
            memory_gb=self._limit_gb if self._model is not None else None,
            limit_name=self._limit_name,
            weights_once=situation.weights_once,
            placement=situation.placement,
            overhead_s=self._overhead_s,
            about=dict(situation.measured_on),
        )

    def _learn_memory(self, slices: int | Sequence[int]) -> None:
        """Of a trial in so many slices; what longer ones take is known the better for it."""
        assert self._trials_of is not None
        longest, micro_batches = self._trials_of
        taken = self._memory.peaks()
        if taken is None or self._bare is None:
            return
        lengths, bare = slice_lengths(longest, slices), self._bare
        self._peaks[lengths] = Peaks(
            lengths, taken
        )  # a trial in place of the warm-up, in which the model was inspected
        once, placement, measured = self._situation.weights_once, self._situation.placement, [*self._peaks.values()]
        # of one rank: what the others would come to may differ in a last digit, and their trials with it
        self._model = self._agree(lambda: calibrated(bare, measured, self._schedule, micro_batches, once, placement))

    def _leave_out(self) -> None:
        """The trials that come next and would take more memory than there is."""
        assert self._trials_of is not None
        while self._trials and not self._fits(slice_lengths(self._trials_of[0], self._trials[0])):
            self._trials.pop(0)

    def _fits(self, lengths: Sequence[int]) -> bool:
        """Whether a trial may be run: an uncut step can take more memory than there is."""
        limit = self._limit_gb
        return limit is None or self._bytes(lengths) <= limit * GIGABYTE

    def _bytes(self, lengths: Sequence[int]) -> float:
        """What a trial takes on the fullest stage, 0 where that is not known."""
        if self._model is None or self._trials_of is None:
            return 0.0
        once, placement = self._situation.weights_once, self._situation.placement
        uses = memory_use(self._model, self._schedule, lengths, self._trials_of[1], once, placement)
        return max(use.total for use in uses)

    def _rivals(self, planned: Plan) -> list[Plan]:
        """The fastest trials that are not what is planned, as plans of their own."""
        assert self._cost is not None
        seconds: dict[tuple[int, ...], float] = {}
        for step in self._steps:
            if self._fits(step.slices):
                seconds[step.slices] = min(step.seconds, seconds.get(step.slices, step.seconds))
        seconds.pop(planned.slices if planned.schedule == self._schedule else (), None)
        near = [slices for slices, taken in seconds.items() if taken <= NEAR * min(s.seconds for s in self._steps)]
        request = self._request(self._cost, (planned.seq_length, planned.micro_batches))
        return [
            plan_of(self._cost, request, self._schedule, slices)
            for slices in sorted(near, key=seconds.__getitem__)[:RIVALS]
        ]

    def _settle(self, shape: _Shape, runoff: Runoff) -> None:
        """Compare the plan with its prediction, and with the trials: one that is faster after all takes its place."""
        plan, rivals = self._plans[shape], self._rivals_of.pop(shape)

        def decide() -> Plan:
            taken, winner = runoff.fastest(_cutting(plan)), runoff.winner(WORSE)
            error = f" ({taken / plan.step_s - 1:+.1%})" if plan.step_s else ""
            self._say(f"plan: step {seconds_text(plan.step_s)} predicted, {seconds_text(taken)} taken{error}")
            faster = [rival for rival in rivals if _cutting(rival) == winner]
            if not faster:
                return plan
            return dataclasses.replace(faster[0], step_s=runoff.fastest(winner), options=plan.options)

        settled: Plan = self._agree(decide)
        self._plans[shape] = settled
        if _cutting(settled) != _cutting(plan):
            what = f"{compact(settled.slices)} tokens in {settled.schedule}"
            self._say(f"plan: {what} took {seconds_text(settled.step_s)}, used instead")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the plans."""
        return {"plans": [plan.to_dict() for plan in self._plans.values()]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take the plans of a checkpoint where they were made for a run like this one; an explicit plan goes first."""
        for data in (state or {}).get("plans", ()):
            plan = Plan.from_dict(data, "checkpoint")
            shape = plan.seq_length, plan.micro_batches
            # a run may change its number of micro-batches, and has a plan for each
            alike = dataclasses.replace(self._situation, micro_batches=plan.micro_batches)
            other = mismatch(plan, alike, self._config.schedule, self._config.memory_gb)
            what = f"{compact(plan.slices)} tokens, {plan.schedule}, from the checkpoint"
            if other is not None:
                self._say(f"plan: {what}, is for {other.theirs} and not for {other.ours}: not used")
            elif shape in self._plans:
                self._say(f"plan: {what}, is not used: there is another one")
            else:
                self._adopt(plan)
                self._say(f"plan: {what}, for {plan.micro_batches} micro-batches of {plan.seq_length} tokens")


def _cutting(plan: Plan) -> Cutting:
    return Cutting(plan.slices, plan.schedule)

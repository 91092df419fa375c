"""How a step is cut: as the configuration says, as a plan says, or, with ``"slices": "auto"``, as the first steps show."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_terapipe.config import AUTO, TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.runoff import Cutting, Runoff
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.choose import Request, choose
from ds_terapipe.plan.cost import MeasuredCost
from ds_terapipe.plan.layers import LayerSeconds
from ds_terapipe.plan.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.memory import MemoryModel, memory_use
from ds_terapipe.plan.result import Plan, compact, seconds_text
from ds_terapipe.tracing.chrome import Event

logger = logging.getLogger(__name__)

DEFAULT_SCHEDULE = "1f1b"
TRIALS = (16, 8, 4, 2, 1)  # numbers of equal slices that are measured
ROUNDS = 2
SHORTEST = 8  # tokens of a slice that is tried
PATIENCE = 20  # steps of other lengths until a measurement is given up
RIVALS = 2  # other trials that are compared with a plan,
NEAR = 1.15  # if they took at most so much longer than the fastest
WORSE = 1.01  # a plan that takes so much longer than a trial in the same steps is given up for it


@dataclass(frozen=True)
class Situation:
    """What a plan is made for and what is known about the run: the same on all ranks.

    Attributes:
        stages: pipeline stages.
        sequences: in a micro-batch.
        weights_once: weight gradients are made once per micro-batch where it is cut.
        loss_of_whole: the loss is made of a micro-batch's whole outputs.
        measured_on: model, types, devices, versions, ...: measurements hold where this is the same.
    """

    stages: int
    sequences: int
    weights_once: bool
    loss_of_whole: bool
    measured_on: Mapping[str, Any] = field(default_factory=dict)


class Agreement(Protocol):
    """Brings what rank 0 decided to all ranks; collective."""

    def __call__(self, decide: Callable[[], Any]) -> Any:
        """``decide()`` of rank 0, or its error, on every rank."""


class MemoryMeter(Protocol):
    """Measures one step."""

    def begin(self) -> None:
        """The step that begins is to be measured."""

    def end(self) -> tuple[MemoryModel | None, float | None]:
        """What it took on every stage, and the bytes that a stage may take, None without limit; collective."""


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
        self._plans: dict[tuple[int, int], Plan] = {}  # by sequence length and micro-batches
        self._runoffs: dict[tuple[int, int], Runoff] = {}  # the unsettled ones, by the same
        self._cost: MeasuredCost | None = None
        self._overhead_s = 0.0
        self._trials: list[int] = []
        self._trials_of: tuple[int, int] | None = None  # the sequence length and micro-batches that are being measured
        self._steps: list[RecordedStep] = []
        self._model: MemoryModel | None = None
        self._limit: float | None = None
        self._trial: Cutting | None = None
        self._turn: tuple[int, int] | None = None  # the runoff that the step that was cut last belongs to
        self._warm, self._missed = False, 0
        if config.plan_path is not None:
            plan = Plan.load(config.plan_path)
            _check_plan(plan, situation, config.schedule, config.plan_path)
            self._plans[plan.seq_length, plan.micro_batches] = plan
        if config.measurements_path is not None:
            self._load_measurements(config.measurements_path)

    def cutting(self, lengths: Sequence[int], everywhere: Sequence[int]) -> Cutting:
        """For micro-batches of these lengths, of those in all pipelines; collective where a plan has to be made."""
        longest, self._trial, self._turn = max(everywhere), None, None
        shape, alike = (longest, len(lengths)), min(everywhere) == longest
        if shape not in self._plans and self._can_plan(longest):
            self._plans[shape] = self._new_plan(shape)
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
            self._trials = [n for _ in range(ROUNDS) for n in TRIALS if n == 1 or longest // n >= SHORTEST]
            self._memory.begin()
        self._missed = 0
        self._trial = Cutting(self._trials[0], self._schedule)
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
        assert self._trials_of is not None
        if not self._warm:
            self._warm = True
            self._model, self._limit = self._memory.end()
            self._trials = [n for n in self._trials if self._fits(n)] or self._trials[:1]
            return
        count = self._trials.pop(0)
        self._steps.append(RecordedStep(slice_lengths(self._trials_of[0], count), events, seconds))
        if self._trials:
            return
        shape, layers = self._trials_of, self._layers()
        self._cost, self._overhead_s = self._agree(lambda: self._costs(layers))
        self._plans[shape] = self._new_plan(shape)
        plan = self._plans[shape]
        planned = Cutting(plan.slices, plan.schedule)
        self._runoffs[shape] = Runoff(planned, self._agree(lambda: self._rivals(planned)))
        self._advise()

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
            {**situation.measured_on, "overhead_s": overhead(self._steps)},
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
            found = {name: value for name, value in cost.measured_on.items() if name != "overhead_s"}
            return cost if found == dict(self._situation.measured_on) else None

        self._cost = self._agree(load)
        if self._cost is not None:
            self._model = self._cost.memory
            self._overhead_s = float(self._cost.measured_on.get("overhead_s", 0.0))
            self._advise()

    def _can_plan(self, length: int) -> bool:
        cost = self._cost
        return cost is not None and cost.min_length <= length <= cost.max_length

    def _new_plan(self, shape: tuple[int, int]) -> Plan:
        plan: Plan = self._agree(lambda: self._choose(shape))
        for line in plan.lines():
            self._say(line)
        return plan

    def _choose(self, shape: tuple[int, int]) -> Plan:
        assert self._cost is not None
        config, situation = self._config, self._situation
        limit = config.memory_gb if self._limit is None else self._limit / 1e9
        return choose(
            self._cost,
            Request(
                seq_length=shape[0],
                stages=situation.stages,
                micro_batches=shape[1],
                schedule=config.schedule,
                granularity=config.granularity,
                min_length=max(self._cost.min_length, config.granularity),
                max_slice=self._cost.max_slice,
                memory=self._model,
                memory_gb=limit if self._model is not None else None,
                weights_once=situation.weights_once,
                overhead_s=self._overhead_s,
                about=dict(situation.measured_on),
            ),
        )

    def _fits(self, count: int) -> bool:
        """Whether a trial may be run: an uncut step can take more memory than there is."""
        if self._model is None or self._limit is None or self._trials_of is None:
            return True
        length, micro_batches = self._trials_of
        uses = memory_use(
            self._model, self._schedule, slice_lengths(length, count), micro_batches, self._situation.weights_once
        )
        return max(use.total for use in uses) <= self._limit

    def _rivals(self, planned: Cutting) -> list[Cutting]:
        """The fastest trials that are not what is planned."""
        seconds: dict[Cutting, float] = {}
        for step in self._steps:
            cutting = Cutting(tuple(step.slices), self._schedule)
            seconds[cutting] = min(step.seconds, seconds.get(cutting, step.seconds))
        near = [c for c, taken in seconds.items() if c != planned and taken <= NEAR * min(seconds.values())]
        return sorted(near, key=seconds.__getitem__)[:RIVALS]

    def _settle(self, shape: tuple[int, int], runoff: Runoff) -> None:
        """Compare the plan with its prediction, and with the trials: one that is faster after all takes its place."""
        plan, planned = self._plans[shape], runoff.cuttings[0]

        def decide() -> tuple[Cutting, float]:
            taken, winner = runoff.fastest(planned), runoff.winner(WORSE)
            error = taken / plan.step_s - 1
            self._say(f"plan: step {seconds_text(plan.step_s)} predicted, {seconds_text(taken)} taken ({error:+.1%})")
            return winner, runoff.fastest(winner)

        winner, seconds = self._agree(decide)
        if winner != planned:
            self._plans[shape] = _instead(plan, winner.schedule, winner.slices, seconds)
            self._say(
                f"plan: {compact(winner.slices)} tokens in {winner.schedule} took {seconds_text(seconds)}, used instead"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the plans."""
        return {"plans": [plan.to_dict() for plan in self._plans.values()]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take the plans of a checkpoint where they were made for a run like this one; an explicit plan goes first."""
        for data in (state or {}).get("plans", ()):
            plan = Plan.from_dict(data, "checkpoint")
            shape = plan.seq_length, plan.micro_batches
            fits = plan.stages == self._situation.stages and plan.sequences == self._situation.sequences
            allowed = self._config.schedule in (AUTO, plan.schedule)
            if fits and allowed and shape not in self._plans:
                self._plans[shape] = plan
                self._say(f"plan: {compact(plan.slices)} tokens, {plan.schedule}, from the checkpoint")


def _check_plan(plan: Plan, situation: Situation, schedule: str, path: str) -> None:
    if schedule not in (AUTO, plan.schedule):
        raise ConfigError(
            f'token_pipeline.plan_path: {path} is for the schedule "{plan.schedule}", must be for the given one, use '
            f'"schedule": "{plan.schedule}" or another plan'
        )
    for name in ("stages", "sequences"):
        if getattr(plan, name) != getattr(situation, name):
            raise ConfigError(
                f"token_pipeline.plan_path: {path} is for {getattr(plan, name)} {name}, must be for this run's "
                f"{getattr(situation, name)}, use a plan made for it or leave plan_path out"
            )


def _instead(plan: Plan, schedule: str, slices: tuple[int, ...], seconds: float) -> Plan:
    return dataclasses.replace(plan, schedule=schedule, slices=slices, step_s=seconds, memory=(), bubble=plan.bubble)

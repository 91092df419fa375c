"""Plans from measurements: the cost of slices, read or made from trials, and the fastest plan by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError, named
from ds_terapipe.pipeline.autotune.memory_limit import MemoryLimit, StepMeter
from ds_terapipe.pipeline.autotune.run_info import Agreement, RunInfo, differences
from ds_terapipe.pipeline.autotune.slice_plan import named_schedule
from ds_terapipe.plan.choose import can_choose, choose, plan_of
from ds_terapipe.plan.costs.cost import MeasuredCost
from ds_terapipe.plan.costs.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.parts import advice_on_two_stages
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Plan
from ds_terapipe.plan.stages import LayerSeconds

SEARCH_S = 10.0  # of an order, on rank 0, while the others wait;
OF_TIMEOUT = 0.1  # at most this share of the time for which they may
RIVALS = 2  # number of other trials that are compared with a plan,
NEAR = 1.15  # if they took at most this factor of the fastest
_SHOWN = 3  # number of differences to another run in a line
Shape = tuple[int, int]  # of a step: sequence length in tokens, number of micro-batches


class Planner:
    """Knows the costs of slices, and plans by them.

    Args:
        config: the block ``token_pipeline``.
        run: facts of the run.
        agree: brings rank 0's decisions to all ranks.
        meter: measures the memory of a step.
        say: writes a line into the log, on rank 0.
        layers: returns the times of single layers in trials that timed them; collective.
    """

    def __init__(
        self,
        config: TokenPipelineConfig,
        run: RunInfo,
        agree: Agreement,
        meter: StepMeter,
        say: Callable[[str], None],
        layers: Callable[[], LayerSeconds | None] = lambda: None,
    ) -> None:
        self.config, self.run, self.schedule = config, run, named_schedule(config)
        self.limit = MemoryLimit(config, run, self.schedule, agree, meter)
        self.agree, self.say, self._layers, self._advised = agree, say, layers, False
        self.granularity = math.lcm(config.granularity, run.multiple)
        self.cost: MeasuredCost | None = None
        if config.measurements_path is not None:
            self._load_measurements(config.measurements_path)

    def learn(self, steps: Sequence[RecordedStep]) -> None:
        """Learn the costs of these trials, and write them to the configured file; collective."""
        run, layers, path = self.run, self._layers(), self.config.measurements_path

        def costs() -> MeasuredCost:
            values = {"overhead_s": overhead(steps), "memory_limit_bytes": self.limit.free_bytes}
            about = {**run.measured_on, **values}
            once, whole = run.weights_once, run.loss_of_whole
            cost = measured_cost(steps, run.stages, run.sequences, once, whole, about, self.limit.model, layers)
            if path is not None:
                with named("token_pipeline.measurements_path"):
                    cost.save(path)
            return cost

        self.cost = self.agree(costs)

    def can_plan(self, shape: Shape) -> bool:
        """Whether such steps are within the measurements."""
        cost = self.cost
        if cost is None or not cost.min_length <= shape[0] <= cost.max_length:
            return False
        return can_choose(cost, self._request(cost, shape))

    def plan(self, shape: Shape) -> Plan:
        """Return the fastest plan for such steps, and log it; collective."""
        assert self.cost is not None
        cost = self.cost.of_length(shape[0])
        request = self._request(cost, shape)

        def chosen() -> tuple[Plan, str]:
            plan = choose(cost, request)
            return plan, advice_on_two_stages(cost, request, plan)

        decided: tuple[Plan, str] = self.agree(chosen)
        plan, advice = decided
        for line in (*plan.summary(), *([advice] if advice else [])):
            self.say(line)
        return plan

    def rivals(self, planned: Plan, steps: Sequence[RecordedStep]) -> list[Plan]:
        """Return the fastest trials other than the plan, as plans; collective."""
        assert self.cost is not None
        cost = self.cost.of_length(planned.seq_length)
        request = self._request(cost, (planned.seq_length, planned.micro_batches))
        seconds: dict[tuple[int, ...], float] = {}
        for step in steps:
            if self.limit.fits(step.slices, planned.micro_batches):
                seconds[step.slices] = min(step.seconds, seconds.get(step.slices, step.seconds))
        times, count = request.times(cost), len(planned.slices)
        if times.grid(planned.runs, count) == times.grid(self.schedule, count):  # by another name perhaps
            seconds.pop(planned.slices, None)
        most = NEAR * min(step.seconds for step in steps)
        near = sorted((slices for slices, taken in seconds.items() if taken <= most), key=seconds.__getitem__)
        found: list[Plan] = self.agree(lambda: [plan_of(cost, request, self.schedule, cut) for cut in near[:RIVALS]])
        return found

    def advise(self) -> None:
        """Log once the gain of other stages, which cannot be changed in a run."""
        if self._advised or self.cost is None or self.cost.layers is None:
            return
        self._advised = True
        advice = self.cost.layers.advice()
        if advice:
            self.say(f"plan: stages of {advice}")

    def _load_measurements(self, path: str) -> None:
        def load() -> MeasuredCost | None:
            try:
                with named("token_pipeline.measurements_path"):
                    cost = MeasuredCost.load(path)
            except ConfigError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return None
                raise
            other = differences(cost.holds_for, self.run.measured_on)
            if other:
                more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
                self.say(f"plan: {path} was measured on another run: {'; '.join(other[:_SHOWN])}{more}: measured again")
            return None if other else cost

        self.cost = self.agree(load)
        if self.cost is not None:
            self.limit.load(self.cost, path)
            self.advise()

    def _request(self, cost: MeasuredCost, shape: Shape) -> Request:
        config, run, limit = self.config, self.run, self.limit
        return Request(
            seq_length=shape[0],
            stages=run.placement,
            micro_batches=shape[1],
            schedule=config.schedule,
            granularity=self.granularity,
            multiple=run.multiple,
            min_length=max(cost.min_length, self.granularity),
            max_slice=cost.max_slice,
            memory=limit.model,
            memory_gb=limit.limit_gb if limit.model is not None else None,
            limit_name=limit.limit_name,
            weights_once=run.weights_once,
            overhead_s=cost.overhead_s,
            about=dict(run.measured_on),
            search_s=min(SEARCH_S, OF_TIMEOUT * config.timeout_s),
        )

"""Ways in which ``"slices": "auto"`` can do without the plan that it says it has, or make one that is not the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.autotune.cutting import DEFAULT_SCHEDULE
from ds_terapipe.pipeline.slicing import slice_lengths
from tests.mutants.harness import Check, Hit, Mutant


def _cuts_equally(original: Any, hit: Hit) -> Any:
    def cutting(self: Any, lengths: Sequence[int], everywhere: Sequence[int]) -> Any:
        found = original(self, lengths, everywhere)
        if isinstance(found.slices, int) or found.slices == slice_lengths(max(lengths), len(found.slices)):
            return found
        hit()
        return found._replace(slices=len(found.slices))

    return cutting


def _runs_the_default(original: Any, hit: Hit) -> Any:
    def cutting(self: Any, lengths: Sequence[int], everywhere: Sequence[int]) -> Any:
        found = original(self, lengths, everywhere)
        if found.schedule != DEFAULT_SCHEDULE:
            hit()
        return found._replace(schedule=DEFAULT_SCHEDULE)

    return cutting


def _reads_no_plan(original: Any, hit: Hit) -> Any:
    def init(self: Any, config: Any, *args: Any) -> None:
        if config.plan_path is not None:
            hit()
        original(self, config.model_copy(update={"plan_path": None}), *args)

    return init


def _takes_no_plan(original: Any, hit: Hit) -> Any:
    def load(self: Any, state: Any) -> None:
        if (state or {}).get("plans"):
            hit()

    return load


def _reads_no_measurements(original: Any, hit: Hit) -> Any:
    def load_measurements(self: Any, path: str) -> None:
        original(self, path)
        if self.cost is not None:
            hit()
            self.cost = None

    return load_measurements


def _finds_no_difference(original: Any, hit: Hit) -> Any:
    def differences(there: Any, here: Any) -> list[str]:
        if original(there, here):
            hit()
        return []

    return differences


def _no_mismatch(original: Any, hit: Hit) -> Any:
    def mismatch(*args: Any) -> None:
        try:
            found = original(*args)
        except ConfigError as refused:
            found = refused
        if found is not None:
            hit()

    return mismatch


def _no_limit(original: Any, hit: Hit) -> Any:
    def limit(self: Any) -> None:
        if original(self) is not None:
            hit()

    return limit


def _cuts_by_number(original: Any, hit: Hit) -> Any:
    def cut(self: Any, slices: Any) -> None:
        if not isinstance(slices, int):
            hit()
            slices = len(slices)
        original(self, slices)

    return cut


def _plans_the_default(original: Any, hit: Hit) -> Any:
    def grid_of_step(name: str, *args: Any) -> Any:
        if name == "terapipe":
            hit()
            name = DEFAULT_SCHEDULE
        return original(name, *args)

    return grid_of_step


def _everything_fits(original: Any, hit: Hit) -> Any:
    def fits(self: Any, candidate: Any) -> bool:
        if not original(self, candidate):
            hit()
        return True

    return fits


def _plan_stays(original: Any, hit: Hit) -> Any:
    def winner(self: Any, worse: float) -> Any:
        if original(self, worse) != self.cuttings[0]:
            hit()
        return self.cuttings[0]

    return winner


def _rival_wins(original: Any, hit: Hit) -> Any:
    def winner(self: Any, worse: float) -> Any:
        if original(self, worse) != self.cuttings[-1]:
            hit()
        return self.cuttings[-1]

    return winner


EQUAL = "a plan's slices are made equal"
DEFAULT = "a plan's schedule is not used"
ENGINE_EQUAL = "the engine cuts equally"
ENGINE_DEFAULT = "the engine runs its default schedule"
NO_PATH = "plan_path is not read"
NO_CHECKPOINT = "a checkpoint's plan is not used"
NO_MEASUREMENTS = "measurements of this run are not used"
ANY_MEASUREMENTS = "measurements of another run are used"
ANY_PLAN = "a plan for another run is used"
NO_LIMIT = "memory_gb is no limit"
ALL_FIT = "plans that do not fit are chosen"
STAYS = "a plan that disappoints stays"
GIVES_WAY = "a plan gives way to a slower trial"

_AUTOTUNE = "ds_terapipe.pipeline.autotune."
_MODULE, _PLANNER = _AUTOTUNE + "auto:", _AUTOTUNE + "planner:"
_AUTO, _WINNER = _MODULE + "AutoCutting.", _AUTOTUNE + "comparison:Comparison.winner"

MUTANTS = (
    Mutant(
        EQUAL,
        "The step runs as many slices as the plan has, of equal lengths.",
        (_AUTO + "cutting",),
        _cuts_equally,
        "plan, chosen step: measurements",
    ),
    Mutant(
        DEFAULT,
        "The step runs the plan's slices in 1F1B, whatever its schedule is.",
        (_AUTO + "cutting",),
        _runs_the_default,
        "plan, chosen step: plan_path",
    ),
    Mutant(
        ENGINE_EQUAL,
        "The engine cuts into equal slices where lengths were chosen.",
        ("ds_terapipe.pipeline.batch:StepBatch.cut",),
        _cuts_by_number,
        "plan, engine",
    ),
    Mutant(
        ENGINE_DEFAULT,
        "The engine runs 1F1B where another schedule was chosen.",
        ("ds_terapipe.pipeline.engine:grid_of_step",),
        _plans_the_default,
        "plan, engine",
    ),
    Mutant(
        NO_PATH,
        "The run measures in spite of plan_path.",
        (_AUTO + "__init__",),
        _reads_no_plan,
        "plan, chosen step: plan_path",
    ),
    Mutant(
        NO_CHECKPOINT,
        "The run measures anew after a checkpoint with a plan was loaded.",
        (_AUTO + "load",),
        _takes_no_plan,
        "plan, chosen step: checkpoint",
    ),
    Mutant(
        NO_MEASUREMENTS,
        "The run measures anew in spite of measurements that were made on the same.",
        (_PLANNER + "Planner._load_measurements",),
        _reads_no_measurements,
        "plan, chosen step: measurements",
    ),
    Mutant(
        ANY_MEASUREMENTS,
        "A plan is made from measurements of another device.",
        (_PLANNER + "differences",),
        _finds_no_difference,
        "plan, measurements of the same run",
    ),
    Mutant(
        ANY_PLAN,
        "A plan for other stages, micro-batches, schedules or more memory is used.",
        (_MODULE + "mismatch", _MODULE + "check_plan"),
        _no_mismatch,
        "plan, refused or not used",
    ),
    Mutant(
        NO_LIMIT,
        "Trials and plans take what they like.",
        (_AUTOTUNE + "budget:Budget.limit_gb",),
        _no_limit,
        "plan, too little memory",
    ),
    Mutant(
        ALL_FIT,
        "The fastest plan is chosen whether it fits or not.",
        ("ds_terapipe.plan.choose:_Search._fits",),
        _everything_fits,
        "plan, too little memory",
    ),
    Mutant(
        STAYS,
        "A plan stays that took longer than a trial beside it.",
        (_WINNER,),
        _plan_stays,
        "plan, compared with trials",
    ),
    Mutant(GIVES_WAY, "The last rival takes the plan's place.", (_WINNER,), _rival_wins, "plan, compared with trials"),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)
_TEST = "tests.pipeline.test_cutting:test_"


def _check(name: str, measure: str, args: tuple[Any, ...], catches: tuple[str, ...], why: str) -> Check:
    return Check(name, measure, args, catches, {other: why for other in _NAMES if other not in catches})


def _simulated(name: str, test: str, args: tuple[Any, ...], catches: tuple[str, ...], why: str) -> Check:
    """A test of cutting without processes."""
    return _check(name, "tests.mutants.claims:passes", (_TEST + test, *args), catches, why)


_RUNS = "what_is_planned_is_what_runs"

CHECKS = (
    _simulated(
        "plan, chosen step: trials", _RUNS, ("trials",), (EQUAL,), "its plan is of this run's trials, is 1F1B and fits"
    ),
    _simulated(
        "plan, chosen step: measurements",
        _RUNS,
        ("measurements",),
        (EQUAL, NO_MEASUREMENTS),
        "its plan is of the same run's measurements, is 1F1B and fits",
    ),
    _simulated(
        "plan, chosen step: plan_path",
        _RUNS,
        ("plan",),
        (EQUAL, DEFAULT, NO_PATH),
        "its plan is from a file, for this run, and has no rival",
    ),
    _simulated(
        "plan, chosen step: checkpoint",
        _RUNS,
        ("checkpoint",),
        (EQUAL, DEFAULT, NO_CHECKPOINT),
        "its plan is from a checkpoint, for this run, and has no rival",
    ),
    _simulated(
        "plan, measurements of the same run",
        "measurements_are_used_again_in_the_same_run_only",
        (),
        (NO_MEASUREMENTS, ANY_MEASUREMENTS),
        "is about which measurements are read",
    ),
    _simulated(
        "plan, refused or not used",
        "a_plan_that_takes_more_than_memory_gb_is_refused_or_not_used",
        (),
        (NO_PATH, NO_CHECKPOINT, ANY_PLAN),
        "is about plans that are given",
    ),
    _simulated(
        "plan, of another schedule",
        "a_plan_of_another_schedule_than_the_given_one_is_refused",
        (),
        (NO_PATH, ANY_PLAN),
        "is about plan_path",
    ),
    _simulated(
        "plan, too little memory",
        "too_little_memory_names_the_least_that_any_trial_takes",
        (),
        (NO_LIMIT, ALL_FIT),
        "is about the limit of memory",
    ),
    _simulated(
        "plan, a trial that does not fit",
        "a_trial_that_needs_more_memory_than_there_is_is_left_out",
        (),
        (NO_LIMIT,),
        "is about trials, and its plan fits",
    ),
    _simulated(
        "plan, compared with trials",
        "a_plan_that_disappoints_gives_way_to_the_best_trial",
        (),
        (STAYS, GIVES_WAY),
        "is about the comparison in the steps after the trials",
    ),
    _simulated(
        "plan, a lucky trial",
        "a_lucky_trial_does_not_displace_a_plan_that_is_faster_in_the_same_steps",
        (),
        (GIVES_WAY,),
        "is about the comparison, which the plan wins",
    ),
    _check(
        "plan, engine",
        "tests.pipeline.test_auto:what_is_given_runs",
        (),
        (EQUAL, DEFAULT, ENGINE_EQUAL, ENGINE_DEFAULT, NO_PATH, NO_CHECKPOINT),
        "runs plans that are given, for this run",
    ),
    _check(
        "plan, engine with too little memory",
        "tests.pipeline.test_auto:too_little_memory_is_refused",
        (),
        (NO_LIMIT, ALL_FIT),
        "comes to no plan",
    ),
)

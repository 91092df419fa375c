"""``"slices": "auto"``: trials, a plan that all ranks have, the same numbers, and plans that outlive the run."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.schedules.mixed_batch import set_batch
from ds_terapipe.pipeline.autotune.comparison import comparison_steps
from ds_terapipe.pipeline.autotune.phases import ROUNDS, Compared
from ds_terapipe.pipeline.autotune.planner import RIVALS
from ds_terapipe.pipeline.checkpoints import PLAN_STATE
from ds_terapipe.plan.choose import Request, plan_of
from ds_terapipe.plan.result import Plan
from ds_terapipe.schedule import peak_live_units
from tests.mutants.claims import holds
from tests.pipeline.models import HIDDEN, VOCABULARY, gpt, masked_loss, micro_batch, steps_of, tied_gpt
from tests.pipeline.training import build_engine, train
from tests.plan.costs import ExampleCost
from tests.spawn import RankResult, launch, launched, run_ranks

MICRO_BATCHES, SEQUENCE = 2, 24
BATCH = 2  # sequences of a micro-batch
TRIALS = 2  # of sequences of 24 tokens: two slices and one
MEASURING = 1 + ROUNDS * TRIALS  # a step to warm up, then the trials
COMPARING = comparison_steps(1 + RIVALS)
GIVEN = (10, 14)


def auto(module: dict[str, Any] | None = None, **keys: Any) -> Any:
    keys = {"slices": "auto", **keys}
    return build_engine(gpt(), masked_loss, token_pipeline=keys, micro_batches=MICRO_BATCHES, module=module)


def plans(engine: Any) -> list[dict[str, Any]]:
    state = engine._cutting.state()
    return state["plans"] if state else []


def compared(engine: Any) -> int:
    """How many plans are still compared with what they predict."""
    return sum(isinstance(phase, Compared) for phase in engine._cutting._phases.values())


def same_numbers() -> dict[str, Any]:
    steps = steps_of(MEASURING + COMPARING + 1, MICRO_BATCHES)
    fixed = build_engine(gpt(), masked_loss, token_pipeline={"slices": 2}, micro_batches=MICRO_BATCHES)
    wanted = train(fixed, steps)
    fixed.destroy()
    engine = auto()
    waited: list[int] = []
    engine._wait_for_device = lambda: waited.append(engine.global_steps)
    known: list[int] = []
    live: list[bool] = []
    cuts: list[tuple[int, ...]] = []
    comparing: list[int] = []

    def look() -> None:
        known.append(len(plans(engine)))
        comparing.append(compared(engine))
        counts = [len(lengths) for lengths in engine.slices_run]
        cuts.append(engine.slices_run[0])
        live.append(engine.peak_live_units <= max(peak_live_units("terapipe", 2, counts)))

    found = train(engine, steps, look)
    engine.destroy()
    return {
        "memory": engine._cutting._planner.budget.model.stages,
        "losses": (wanted.losses, found.losses),
        "weights": max(float((wanted.weights[n] - found.weights[n]).abs().max()) for n in wanted.weights),
        "known": known,
        "live": live,
        "cuts": cuts,
        "waited": waited,
        "comparing": comparing,
        "plan": plans(engine),
    }


def outlives(folder: str) -> dict[str, Any]:
    steps = steps_of(MEASURING + 1, MICRO_BATCHES)
    engine = auto(measurements_path=f"{folder}/costs.json", schedule="terapipe")
    train(engine, steps)
    made = plans(engine)
    engine.save_checkpoint(f"{folder}/checkpoint", tag="here", client_state={"mine": 7})
    engine.destroy()
    resumed = auto()
    _, client = resumed.load_checkpoint(f"{folder}/checkpoint", tag="here")
    from_checkpoint = plans(resumed)
    train(resumed, steps[:1])
    resumed_cut = resumed.slices_run[0]
    resumed.destroy()
    again = auto(measurements_path=f"{folder}/costs.json")
    train(again, steps[:1])
    from_measurements = plans(again)
    again.destroy()
    return {
        "made": made,
        "checkpoint": from_checkpoint,
        "resumed_cut": resumed_cut,
        "client": client,
        "measured": from_measurements,
    }


def given(folder: str) -> dict[str, Any]:
    """What runs with a plan that no trial and no planner would make: from plan_path, and then from a checkpoint."""
    if torch.distributed.get_rank() == 0:
        request = Request(SEQUENCE, 2, MICRO_BATCHES, granularity=2)
        plan_of(ExampleCost([1.0, 1.0], sequences=BATCH), request, "terapipe", GIVEN).save(f"{folder}/plan.json")
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    for known_by, keys in (("plan_path", {"plan_path": f"{folder}/plan.json"}), ("checkpoint", {})):
        engine = auto(**keys)
        if known_by == "checkpoint":
            engine.load_checkpoint(f"{folder}/given", tag="here")
        ran = []
        for step in steps_of(2, MICRO_BATCHES):
            train(engine, [step])
            ran.append((list(engine.slices_run), engine.peak_live_units))
        if known_by == "plan_path":
            engine.save_checkpoint(f"{folder}/given", tag="here")
        found[known_by] = ran
        engine.destroy()
    return found


def odd_steps() -> dict[str, Any]:
    """Evaluation before there is a plan; shorter sequences, which are planned, and longer ones, which are measured."""
    engine = auto(module={"seed_layers": False})  # with it, every layer sets the random state anew
    random = torch.get_rng_state()
    engine.train_batch(iter(steps_of(1, MICRO_BATCHES)[0]))
    engine.eval_batch(iter([micro_batch(m) for m in range(MICRO_BATCHES)]))
    train(engine, steps_of(MEASURING, MICRO_BATCHES)[1:])
    before = len(plans(engine))
    shorter = steps_of(1, MICRO_BATCHES, length=SEQUENCE - 8)
    train(engine, shorter)
    after = [plan["seq_length"] for plan in plans(engine)]
    longer = steps_of(1 + ROUNDS * 3, MICRO_BATCHES, length=SEQUENCE + 8)  # in four slices, two and one
    train(engine, longer)
    engine.destroy()
    random_used = not torch.equal(random, torch.get_rng_state())
    longest = [plan["seq_length"] for plan in plans(engine)]
    return {"before": before, "after": after, "longer": longest, "random_used": random_used}


def larger_micro_batches() -> dict[str, Any]:
    """As ``MixedBatch`` begins a phase of the same length and number of micro-batches, each of twice the sequences."""
    engine = auto()
    train(engine, steps_of(MEASURING, MICRO_BATCHES))
    before = plans(engine)
    set_batch(engine, 2 * BATCH * MICRO_BATCHES, 2 * BATCH)
    larger = [[micro_batch(10 * step + m, batch=2 * BATCH) for m in range(MICRO_BATCHES)] for step in range(MEASURING)]
    engine.train_batch(iter(larger[0]))
    between = plans(engine)
    for step in larger[1:]:
        engine.train_batch(iter(step))
    memory = engine._cutting._planner.budget.model.stages
    engine.destroy()
    return {"before": before, "between": between, "after": plans(engine), "memory": memory}


def ragged_replicas(rank: int, world_size: int) -> dict[str, Any]:
    """Two replicas; every second step the second one has shorter sequences, in one micro-batch or in both."""
    engine = auto()
    whole = steps_of(MEASURING + COMPARING + 2, 2 * MICRO_BATCHES)
    short = steps_of(MEASURING + COMPARING + 2, 2 * MICRO_BATCHES, length=SEQUENCE - 8)
    for number, step in enumerate(whole):
        at = 2 * MICRO_BATCHES - 1 - number % 2
        train(engine, [step, [*step[:at], *short[number][at:]]])
    engine.destroy()
    return {"plans": plans(engine), "left": compared(engine)}


def slow_weights() -> dict[str, list[list[str]]]:
    """By model and stage, the weights that measurements name whose gradients are made slice by slice."""
    found = {}
    for name, layers, keys in (
        ("untied", gpt(), {}),
        ("tied", tied_gpt(), {}),
        ("all of them", tied_gpt(), {"weight_gradients": "slice"}),
    ):
        engine = build_engine(layers, masked_loss, token_pipeline={"slices": "auto", **keys})
        found[name] = [stage["not_deferred"] for stage in engine._cutting._run.measured_on["stages"]]
        engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "numbers": same_numbers(),
        "outlives": outlives(folder),
        "odd": odd_steps(),
        "given": given(folder),
        "slow": slow_weights(),
        "larger": larger_micro_batches(),
    }


def bad(rank: int, world_size: int, keys: dict[str, Any], steps: int) -> None:
    train(auto(**keys), steps_of(steps, MICRO_BATCHES))


results = launched(worker, 2, folder=True)


def test_a_run_with_trials_has_the_losses_and_weights_of_one_without(results: list[dict[str, Any]]) -> None:
    for result in results:
        wanted, found = result["numbers"]["losses"]
        assert found == pytest.approx(wanted, rel=1e-5)
        assert result["numbers"]["weights"] < 1e-5


def test_trials_use_no_random_number(results: list[dict[str, Any]]) -> None:
    assert not any(result["odd"]["random_used"] for result in results)


def test_measurements_name_what_is_not_deferred(results: list[dict[str, Any]]) -> None:
    """The tied table is a parameter of the model's own, which it looks up and multiplies with by functions."""
    tied = [["tied_modules.tokens.weight"]] * 2
    for result in results:
        assert result["slow"] == {"untied": [[], []], "tied": tied, "all of them": [[], []]}


def test_memory_is_counted_in_bytes_of_the_model_s_sizes(results: list[dict[str, Any]]) -> None:
    """Two blocks of the GPT on each stage, two sequences at once, numbers of four bytes."""
    number, blocks = 4 * BATCH, 2
    for stage, memory in enumerate(results[0]["numbers"]["memory"]):
        assert memory.keys_values == memory.key_value_gradients == blocks * 2 * HIDDEN * number
        # qkv, out, up and down: what each is given and the gradient of what each gives; the last stage's head as well; of the two
        # tables, whose sum is the output, one gradient and the indices of each, of eight bytes
        linear = blocks * (HIDDEN + 3 * HIDDEN + HIDDEN + HIDDEN + HIDDEN + 2 * HIDDEN + 2 * HIDDEN + HIDDEN)
        head = HIDDEN + VOCABULARY if stage == 1 else 0
        tables = HIDDEN + 2 * 2 if stage == 0 else 0
        assert memory.weight_gradients == (linear + head + tables) * number
        assert memory.sent == (HIDDEN * number if stage == 0 else 0)
        assert memory.received == (HIDDEN * number if stage == 1 else 0)
        # at least what the linear layers were given; beside them norms, attention and what is in between
        assert 1.0 < memory.activations / (blocks * 5 * HIDDEN * number) < 4.0


def test_the_plan_is_made_after_the_trials_and_all_ranks_have_it(results: list[dict[str, Any]]) -> None:
    first, second = (result["numbers"] for result in results)
    assert first["known"] == second["known"] == [0] * (MEASURING - 1) + [1] * (COMPARING + 2)
    assert first["plan"] == second["plan"]
    plan = Plan.from_dict(first["plan"][0])
    assert sum(plan.slices) == plan.seq_length == SEQUENCE and plan.micro_batches == MICRO_BATCHES
    assert plan.step_s > 0 and len(plan.options) >= 4
    assert all(first["live"]) and all(second["live"])
    assert first["cuts"] == second["cuts"] and first["cuts"][-1] == plan.slices


def test_a_device_is_waited_for_where_seconds_decide(results: list[dict[str, Any]]) -> None:
    """In all steps but the last, when the plan is settled: a host that is ahead would compare how fast it launches."""
    for result in results:
        steps, comparing = len(result["numbers"]["known"]), sum(result["numbers"]["comparing"])
        assert result["numbers"]["waited"] == list(range(1, MEASURING + comparing + 1))
        assert len(result["numbers"]["waited"]) < steps


def test_the_plan_is_compared_with_its_rivals_before_it_stays(results: list[dict[str, Any]]) -> None:
    first, second = (result["numbers"]["comparing"] for result in results)
    lasted = [
        comparison_steps(cuttings) for cuttings in range(1, 2 + RIVALS)
    ]  # as many rivals as came near the fastest
    total = len(first)
    assert first == second
    assert first in [[0] * (MEASURING - 1) + [1] * steps + [0] * (total - MEASURING + 1 - steps) for steps in lasted]


def test_an_explicit_schedule_binds(results: list[dict[str, Any]]) -> None:
    (plan,) = results[0]["outlives"]["made"]
    assert plan["schedule"] == "terapipe" and {option["schedule"] for option in plan["options"]} == {"terapipe"}


def test_a_checkpoint_has_the_plan_and_the_client_s_own_state(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["outlives"]["checkpoint"] == result["outlives"]["made"]
        assert result["outlives"]["resumed_cut"] == tuple(result["outlives"]["made"][0]["slices"])
        assert result["outlives"]["client"]["mine"] == 7 and PLAN_STATE not in result["outlives"]["client"]


def test_measurements_of_the_same_run_spare_the_trials(results: list[dict[str, Any]]) -> None:
    assert [plan["seq_length"] for plan in results[0]["outlives"]["measured"]] == [SEQUENCE]
    (plan,) = results[0]["outlives"]["measured"]
    assert {option["schedule"] for option in plan["options"]} == {"1f1b", "terapipe"}
    assert plan["memory_bytes"][0]["activations"] > 0


@pytest.mark.parametrize("known_by", ["plan_path", "checkpoint"])
def test_a_plan_that_is_given_is_what_runs(results: list[dict[str, Any]], known_by: str) -> None:
    """Its slices and its schedule, in every micro-batch, from the first step on."""
    counts = [len(GIVEN)] * MICRO_BATCHES
    live = {schedule: peak_live_units(schedule, 2, counts) for schedule in ("terapipe", "1f1b")}
    assert live["terapipe"][0] != live["1f1b"][0]  # what tells them apart
    for stage, result in enumerate(results):
        assert result["given"][known_by] == [([GIVEN] * MICRO_BATCHES, live["terapipe"][stage])] * 2


def given_alone(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {"given": given(folder)}


def what_is_given_runs(mutant: str | None) -> bool:
    """Whether the test before holds under a mutant; for ``tests.mutants``."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(given_alone, 2, folder, mutant=mutant)
    return all(
        holds(test_a_plan_that_is_given_is_what_runs, found, known_by) for known_by in ("plan_path", "checkpoint")
    )


def test_evaluation_and_other_lengths_are_no_trouble(results: list[dict[str, Any]]) -> None:
    odd = results[0]["odd"]
    assert odd["before"] == 1 and odd["after"] == [SEQUENCE, SEQUENCE - 8]
    assert odd["longer"] == [SEQUENCE, SEQUENCE - 8, SEQUENCE + 8]


def test_micro_batches_of_another_size_are_measured_anew(results: list[dict[str, Any]]) -> None:
    first, second = (result["larger"] for result in results)
    assert len(first["before"]) == 1 and first["between"] == [] and len(first["after"]) == 1
    assert all(second[when] == first[when] for when in ("before", "between", "after"))
    for one, two in zip(results[0]["numbers"]["memory"], first["memory"], strict=True):
        assert two.keys_values == 2 * one.keys_values


def test_replicas_whose_lengths_differ_now_and_then_measure_and_compare_together() -> None:
    first, *others = run_ranks(ragged_replicas, 4)
    assert [plan["seq_length"] for plan in first["plans"]] == [SEQUENCE] and first["left"] == 0
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("keys", "steps", "message"),
    [
        ({"plan_path": "missing.json"}, 1, "token_pipeline.plan_path: missing.json: cannot be read"),
        ({"measurements_path": __file__}, 1, f"token_pipeline.measurements_path: {__file__}: is no JSON"),
        ({"measurements_path": f"{__file__}/costs.json"}, 1, 'costs.json", must be a file that can be written'),
        ({"memory_gb": 1e-9}, MEASURING, "memory_gb: got 1e-09, must be at least"),
        (
            {"slices": 4, "memory_gb": 2},
            1,
            "token_pipeline.memory_gb: got 2.0, must be absent beside slices that are given",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line_on_every_rank(keys: dict[str, Any], steps: int, message: str) -> None:
    refused(launch(bad, 2, keys, steps), message)


def refused(results: list[RankResult], message: str) -> None:
    for result in results:
        assert result.error is not None and result.error.startswith("ConfigError: "), result.traceback
        assert message in result.error and "\n" not in result.error


def bad_told(rank: int, world_size: int, keys: dict[str, Any], steps: int) -> str | None:
    try:
        bad(rank, world_size, keys, steps)
    except ConfigError as error:
        return f"ConfigError: {error}"
    return None


def too_little_memory_is_refused(mutant: str | None) -> bool:
    """Whether the test before holds for a memory_gb that nothing fits into, under a mutant; for ``tests.mutants``."""
    told = run_ranks(bad_told, 2, {"memory_gb": 1e-9}, MEASURING, mutant=mutant)
    found = [RankResult(rank, error=error) for rank, error in enumerate(told)]
    return holds(refused, found, "memory_gb: got 1e-09, must be at least")

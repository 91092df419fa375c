"""``"slices": "auto"``: trials, a plan that all ranks have, the same numbers, and plans that outlive the run."""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch

from ds_terapipe.optim.schedules.mixed_batch import set_batch
from ds_terapipe.pipeline.autotune import planner
from ds_terapipe.pipeline.autotune.planner import RIVALS
from ds_terapipe.pipeline.autotune.trials import ROUNDS, TURNS
from ds_terapipe.pipeline.checkpoints import PLAN_STATE
from ds_terapipe.pipeline.clock import Clock
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.plan.choose import plan_of
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Plan
from ds_terapipe.schedule import SEARCHED, Placement, text_of
from ds_terapipe.schedule.given import check_text
from tests.pipeline.models import gpt, masked_loss, micro_batch, steps_of
from tests.pipeline.training import build_engine, raised, train, train_plain
from tests.plan.costs import ExampleCost
from tests.schedule.strategies import random_grid
from tests.spawn import launched

MICRO_BATCHES, SEQUENCE = 2, 24
BATCH = 2  # sequences of a micro-batch
MEASURING = 1 + ROUNDS * 2  # a step to warm up, then trials of sequences of 24 tokens: two slices and one
COMPARING = 1 + TURNS * (1 + RIVALS)
GIVEN = (10, 14)
TWO = {"stages_per_place": 2}


def auto(module: Any = None, **keys: Any) -> Any:
    return build_engine(gpt(), masked_loss, token_pipeline=keys, micro_batches=MICRO_BATCHES, module=module)


def plans(engine: Any) -> list[dict[str, Any]]:
    return engine._slicer.state()["plans"]


def same_numbers(path: str) -> dict[str, Any]:
    steps = steps_of(MEASURING + COMPARING + 1, MICRO_BATCHES)
    fixed = build_engine(gpt(), masked_loss, token_pipeline={"slices": 2}, micro_batches=MICRO_BATCHES)
    wanted = train(fixed, steps)
    fixed.destroy()
    engine, waited, after = auto(measurements_path=path), list[int](), list[Any]()  # after each step

    def look() -> None:
        compared = sum(turn.plan is not None and turn.slices.timed for turn in engine._slicer._turns.values())
        after.append((len(plans(engine)), compared, engine.slices_run[0]))

    with mock.patch.object(Clock, "wait", lambda clock: waited.append(engine.global_steps)):
        found = train(engine, steps, look)
    engine.destroy()
    again = auto(measurements_path=path)
    train(again, steps[:1])
    again.destroy()
    return {
        "again": [plan["seq_length"] for plan in plans(again)], "memory": engine._slicer._planner.limit.model.stages,
        "losses": (wanted.losses, found.losses),
        "weights": max(float((wanted.weights[n] - found.weights[n]).abs().max()) for n in wanted.weights), "after": after,
        "waited": sorted({*waited} - {0}), "plan": plans(engine),
    }  # fmt: skip


def any_orders() -> Iterator[tuple[str, ...]]:
    """Valid orders of two stages on each place that no schedule has, some of them with weight gradients in groups."""
    for seed in itertools.count():
        grid = random_grid(seed, Placement.v(2), [2] * MICRO_BATCHES)
        lines = text_of([[action for action in row if action.op.is_compute] for row in grid])
        with suppress(ValueError):
            check_text(lines, Placement.v(2), [2] * MICRO_BATCHES)
            yield lines


ORDERS = {f"order {number}": lines for number, lines in enumerate(itertools.islice(any_orders(), 6))}
AGAIN = "order 0"  # of the checkpoint


def given(folder: str) -> dict[str, Any]:
    """Run plans that no trial and no planner would make: from plan_path, and from a checkpoint."""
    if torch.distributed.get_rank() == 0:
        request = Request(SEQUENCE, Placement.v(2), MICRO_BATCHES)
        plan = plan_of(ExampleCost([1.0] * 4, sequences=BATCH), request, "1f1b", GIVEN)
        for name, lines in ORDERS.items():
            dataclasses.replace(plan, schedule=SEARCHED, order=lines).save(f"{folder}/{name}.json")
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    keys_by: dict[str, Any] = {"slices": {"slices": list(GIVEN)}}
    keys_by |= {name: {"plan_path": f"{folder}/{name}.json"} for name in ORDERS} | {"checkpoint": {**TWO, "placement": "v"}}
    for known_by, keys in keys_by.items():
        engine, left, ran = auto(**keys), list[int](), list[Any]()
        if known_by == "checkpoint":
            _, found["client"] = engine.load_checkpoint(f"{folder}/given", tag="here")
        look = lambda e=engine, left=left: left.append(e._runtime.left_over)  # noqa: E731
        engine.observers.append(Mock(Observer, watches=True, step_ends=look))

        def note(engine: Any = engine, ran: list[Any] = ran) -> None:
            order = text_of([[action for action in row if action.op.is_compute] for row in engine._watchdog._grid])
            ran.append((list(engine.slices_run), order))

        found[known_by] = train(engine, steps_of(2, MICRO_BATCHES), note).losses, ran, left
        if known_by == AGAIN:
            engine.save_checkpoint(f"{folder}/given", tag="here", client_state={"mine": 7})
        engine.destroy()
    found["other"] = raised(lambda: auto(**TWO, plan_path=f"{folder}/{AGAIN}.json"))
    return found


def odd_steps() -> dict[str, Any]:
    """Evaluation before there is a plan; shorter sequences, longer ones, and as of ``MixedBatch`` twice as many in a batch."""
    engine = auto(module={"seed_layers": False})  # with it, every layer sets the random state
    random, lengths = torch.get_rng_state(), []

    def run(steps: Any) -> None:
        train(engine, steps)
        lengths.append([plan["seq_length"] for plan in plans(engine)])

    engine.train_batch(iter(steps_of(1, MICRO_BATCHES)[0]))
    engine.eval_batch(iter([micro_batch(m) for m in range(MICRO_BATCHES)]))
    run(steps_of(MEASURING, MICRO_BATCHES)[1:])
    run(steps_of(1, MICRO_BATCHES, length=SEQUENCE - 8))
    run(steps_of(1 + ROUNDS * 3, MICRO_BATCHES, length=SEQUENCE + 8))  # in four slices, two and one
    drew = not torch.equal(random, torch.get_rng_state())
    set_batch(engine, 2 * BATCH * MICRO_BATCHES, 2 * BATCH)
    for step in steps_of(MEASURING, MICRO_BATCHES, batch=2 * BATCH):
        run([step])
    engine.destroy()
    return {"lengths": lengths, "drew": drew, "plan": plans(engine), "memory": engine._slicer._planner.limit.model.stages}


def several(folder: str) -> tuple[Any, ...]:
    """Measure two stages on a place, plan by other times, for which a searched order is the best, and resume."""
    steps, losses, made, measure = steps_of(MEASURING + 2, MICRO_BATCHES), list[float](), list[Any](), planner.measured_cost
    wanted = train_plain(gpt(), masked_loss, steps).losses
    cost = ExampleCost((1.0, 2.0, 1.0, 2.0), 1e-3, 5e-4, 5e-5, 1e-3, 0.0, BATCH)
    vars(cost).update(min_length=8, max_slice=SEQUENCE, max_length=SEQUENCE, overhead_s=0.0, layers=None)
    with mock.patch.object(planner, "measured_cost", lambda *given: measure(*given) and cost):
        for part in (steps[:-1], steps[-1:]):
            engine = auto(stages_per_place=2, placement="v")
            if made:
                engine.load_checkpoint(folder, tag="v")
            losses += train(engine, part).losses
            made += [*plans(engine), {*engine.slices_run}]
            engine.save_checkpoint(folder, tag="v")
            engine.destroy()
    return losses, wanted, made


CANNOT = (
    ({"plan_path": "missing.json"}, "token_pipeline.plan_path: missing.json: cannot be read"),
    ({"measurements_path": f"{__file__}/costs.json"}, 'costs.json", must be a file that can be written'),
)


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {"numbers": same_numbers(f"{folder}/costs.json"), "odd": odd_steps(), "given": given(folder)}
    return {**found, "several": several(folder), "told": [raised(partial(auto, **keys)) for keys, _ in CANNOT]}


results = launched(worker, 2, timeout=240, folder=True)


def test_a_run_with_trials_has_the_losses_and_weights_of_one_without(results):
    for result in results:
        wanted, found = result["numbers"]["losses"]
        assert found == pytest.approx(wanted, rel=1e-5) and result["numbers"]["weights"] < 1e-5


def test_trials_use_no_random_number_and_evaluation_and_other_shapes_are_no_trouble(results):
    """Lengths are planned from what is known, or measured; micro-batches of another size are measured again."""
    first, second = (result["odd"] for result in results)
    assert not first["drew"] and not second["drew"] and first["plan"] == second["plan"]
    lengths = [SEQUENCE, SEQUENCE - 8, SEQUENCE + 8]
    assert first["lengths"] == [lengths[:1], lengths[:2], lengths, *[[]] * (MEASURING - 1), lengths[:1]]
    for one, two in zip(results[0]["numbers"]["memory"], first["memory"], strict=True):
        assert two.keys_values == 2 * one.keys_values


def test_the_plan_is_made_after_the_trials_and_compared_with_its_rivals_on_all_ranks(results):
    first, second = (result["numbers"] for result in results)
    assert first["plan"] == second["plan"] and first["again"] == [SEQUENCE]  # planned without a trial
    plan = Plan.from_dict(first["plan"][0])
    assert sum(plan.slices) == plan.seq_length == SEQUENCE and plan.micro_batches == MICRO_BATCHES
    assert plan.step_s > 0 and len(plan.options) >= 4
    known, comparing, cuts = zip(*first["after"], strict=True)
    assert second["after"] == first["after"] and cuts[-1] == plan.slices
    assert known == (0,) * (MEASURING - 1) + (1,) * (COMPARING + 2)
    steps = sum(comparing)  # as many rivals as came near the fastest
    assert steps in [1 + TURNS * plans for plans in range(1, 2 + RIVALS)]
    assert comparing == (0,) * (MEASURING - 1) + (1,) * steps + (0,) * (len(known) - MEASURING + 1 - steps)
    # A device is waited for where seconds decide, in all steps but the last ones, when the plan is settled: a host that is
    # ahead would compare how fast it launches.
    assert first["waited"] == second["waited"] == [*range(1, MEASURING + steps + 1)]
    assert MEASURING + steps < len(known)


def test_a_plan_that_is_given_is_what_runs(results):
    """Its slices and its order, in every micro-batch, from the first step on, on two stages a place; nothing is left over."""
    for found in (result["given"] for result in results):
        wanted, *_ = found["slices"]
        for name in (*ORDERS, "checkpoint"):
            losses, ran, left = found[name]
            assert losses == pytest.approx(wanted, rel=1e-5) or name == "checkpoint", name
            assert (ran, left) == ([([GIVEN] * MICRO_BATCHES, ORDERS.get(name, ORDERS[AGAIN]))] * 2, [0, 0]), name
        assert found["client"]["mine"] == 7 and PLAN_STATE not in found["client"]
        assert "stages on places 0, 1, 1, 0, must be for this run's stages on places 0, 1, 0, 1" in found["other"]


def test_two_stages_on_a_place_are_planned_by_search_where_that_pays_and_resumed(results):
    (losses, wanted, (plan, ran, again, ran_again)), other = (result["several"] for result in results)
    assert losses == pytest.approx(wanted, rel=1e-5) == other[0] and other[2] == [plan, ran, again, ran_again]
    assert plan["order"] == again["order"] and ran == ran_again == {tuple(plan["slices"])} == {(8, 8, 8)}
    assert [stage.place for stage in Plan.from_dict(plan).placement.stages] == [0, 1, 1, 0]


def test_what_cannot_be_planned_is_one_line_on_every_rank(results):
    assert results[0]["told"] == results[1]["told"]
    for said, (_, message) in zip(results[0]["told"], CANNOT, strict=True):
        assert message in said and "\n" not in said

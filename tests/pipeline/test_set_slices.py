"""``engine.set_slices``: the next step is cut so, or all ranks refuse; assignments; what observers see of each step."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest

from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.schedule import Action, Op
from tests.pipeline.models import gpt, masked_loss, micro_batch
from tests.pipeline.training import build_engine, raised
from tests.ran import lengths_of
from tests.spawn import launched

TOKENS, MICRO_BATCHES = 24, 2
UNEVEN = [7, 2, 9, 1, 5]
# arguments of rank 0 and of rank 1, the message
REFUSED: list[tuple[tuple[Any, ...], tuple[Any, ...], str]] = [
    ((0,), (0,), 'slices: got 0, must be a positive number, a list of lengths or "auto", use e.g. 8'),
    ((4,), (2,), "slices: got 2 on rank 1 and 4 on rank 0, must be the same on all, use"),
    ((4, "1f1b"), (4, "terapipe"), 'schedule: got "terapipe" on rank 1 and "1f1b" on rank 0, must be the same on all'),
]
STAYS = "got an assignment, must stay as it"
# object, attribute, value, the message
ASSIGNED: list[tuple[str, str, Any, str]] = [
    ("engine", "token_pipeline", {}, f"engine.token_pipeline: {STAYS} is, use engine.set_slices("),
    ("block", "slices", 2, f"token_pipeline.slices: {STAYS} was read, use engine.set_slices(...)"),
]


def calls_of(row: Sequence[Action]) -> list[Any]:
    both, messages = (call.outer, call.inner), {Op.RECV_FORWARD: "received", Op.SEND_FORWARD: "sent"}
    calls = [each.step_begins() for each in both]
    for index, action in enumerate(row):
        calls += [each.action_begins(index, action) for each in both]
        calls += [each.message(action.stage, messages[action.op], ANY) for each in both if action.op in messages]
        calls += [each.action_ends(action) for each in both[::-1]]
    return [*calls, *(each.step_ends() for each in both)]


def cut_again_and_again(rank: int, keys: dict[str, Any]) -> dict[str, Any]:
    engine = build_engine(gpt(), masked_loss, token_pipeline=keys, micro_batches=MICRO_BATCHES)
    seen = Mock()
    for name in ("outer", "off", "inner"):
        seen.attach_mock(observer := Mock(Observer, watches=name != "off"), name)
        engine.observers.append(observer)
    steps: list[Any] = []
    live: list[int] = []

    def step() -> None:
        number = len(steps)
        seen.reset_mock()
        engine.train_batch(iter([micro_batch(10 * number + m, TOKENS) for m in range(MICRO_BATCHES)]))
        live.append(engine.peak_live_units)
        row = engine._watchdog._grid[rank]
        weights, told = sum(action.op is Op.WEIGHT_GRADIENTS for action in row), calls_of(row) == seen.mock_calls
        steps.append((engine.slices_run, engine.units_run, engine.token_pipeline.schedule, weights, told))

    found: dict[str, Any] = {"at first": (engine.slices_run, engine.units_run)}
    of = {"engine": engine, "block": engine.token_pipeline}
    found["assigned"] = [raised(lambda r=row: setattr(of[r[0]], r[1], r[2])) for row in ASSIGNED]
    step()
    found["refused"] = [raised(lambda row=row: engine.set_slices(*row[rank])) for row in REFUSED]
    step()
    engine.set_slices(UNEVEN, "terapipe")
    step()
    engine.set_slices(3)
    step()
    engine.eval_batch(iter([micro_batch(7, TOKENS)] * MICRO_BATCHES))
    found["evaluated"] = engine.slices_run, engine.units_run
    engine.set_slices("auto")
    for _ in range(3):
        step()
    engine.set_slices(1, "1f1b")
    step()
    engine.destroy()
    return {**found, "steps": steps, "live": live}


SETTINGS: Any = {"given": {"slices": 4}, "auto": {"slices": "auto", "schedule": "1f1b", "memory_gb": 1.0}}


def every_setting(rank: int, world: int) -> dict[str, Any]:
    return {name: cut_again_and_again(rank, keys) for name, keys in SETTINGS.items()}


ranks = launched(every_setting, 2, timeout=200)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_next_step_is_cut_as_set(ranks, kind):
    # 24 tokens leave room for slices of 8 only: 2, then 1
    first, schedule = SETTINGS[kind]["slices"], SETTINGS[kind].get("schedule", "auto")
    wanted = [(2 if first == "auto" else first, schedule)] * 2 + [(UNEVEN, "terapipe"), (3, "terapipe")]
    wanted += [(2, "terapipe"), (2, "terapipe"), (1, "terapipe"), (1, "1f1b")]
    for found in (rank[kind] for rank in ranks):
        assert found["at first"] == ((), (0, 0))
        for number, (step, (cut, order)) in enumerate(zip(found["steps"], wanted, strict=True)):
            lengths = lengths_of(TOKENS, cut)
            count = MICRO_BATCHES * len(lengths)
            weights = MICRO_BATCHES if len(lengths) > 1 else 0
            assert step == ((lengths,) * MICRO_BATCHES, (count, count), order, weights, True), number
        assert found["live"][2:4] == [len(UNEVEN) * MICRO_BATCHES, 3 * MICRO_BATCHES], "as TeraPipe holds them"
        assert found["evaluated"] == (((8, 8, 8),) * MICRO_BATCHES, (3 * MICRO_BATCHES, 0))


def test_bad_or_different_values_and_assignments_are_refused_on_every_rank(ranks):
    first, second = (rank["given"]["refused"] + rank["given"]["assigned"] for rank in ranks)
    assert first == second
    for said, (*_, message) in zip(first, REFUSED + ASSIGNED, strict=True):
        assert message in said and said.startswith(("ConfigError: token_pipeline.", "ConfigError: engine.token_pipeline")), said

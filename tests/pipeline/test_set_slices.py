"""``engine.set_slices``: takes effect with the next step, or is refused on every rank; other ways to change settings are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule import Op
from tests.pipeline.models import gpt, masked_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.ran import lengths_of
from tests.spawn import run_ranks

TOKENS, MICRO_BATCHES = 24, 2
UNEVEN = [7, 2, 9, 1, 5]
CHANGES: dict[str, list[tuple[Any, ...]]] = {  # by name: arguments of rank 0 and of rank 1
    "bad value": [(0,), (0,)],
    "bad schedule": [(2, "gpipe"), (2, "gpipe")],
    "bad on one rank": [(4,), ([4, -1],)],
    "other slices": [(4,), (2,)],
    "other schedules": [(4, "1f1b"), (4, "terapipe")],
}


def refused(change: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        change()
    return str(raised.value)


def assignments(engine: Any) -> dict[str, str]:
    def assign(name: str, value: Any) -> None:
        setattr(engine.token_pipeline, name, value)

    return {
        "block": refused(lambda: setattr(engine, "token_pipeline", {"slices": 2})),
        "slices": refused(lambda: assign("slices", 2)),
        "timeout": refused(lambda: assign("timeout_s", 5.0)),
    }


def cut_again_and_again(rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    engine = build_engine(gpt(), masked_loss, token_pipeline=settings, micro_batches=MICRO_BATCHES)
    steps: list[Any] = []

    def step(what: str) -> None:
        number = len(steps)
        engine.train_batch(iter([micro_batch(10 * number + m, TOKENS) for m in range(MICRO_BATCHES)]))
        weights = sum(action.op is Op.WEIGHT_GRADIENTS for action in engine._watchdog._grid[rank])
        steps.append((what, engine.slices_run, engine.units_run, engine.token_pipeline.schedule, weights))

    found: dict[str, Any] = {"at first": (engine.slices_run, engine.units_run), "assigned": assignments(engine)}
    step("as built")
    found["refused"] = {
        name: refused(lambda arguments=arguments: engine.set_slices(*arguments[rank]))
        for name, arguments in CHANGES.items()
    }
    step("after refusals")
    engine.set_slices(UNEVEN, "terapipe")
    step("uneven")
    engine.set_slices(3)
    step("three")
    engine.eval_batch(iter([micro_batch(7, TOKENS)] * MICRO_BATCHES))
    found["evaluated"] = engine.slices_run, engine.units_run
    engine.set_slices("auto")
    for _ in range(3):
        step("auto")
    engine.set_slices(1, "1f1b")
    step("whole")
    engine.destroy()
    return {**found, "steps": steps}


SETTINGS: dict[str, dict[str, Any]] = {
    "given": {"slices": 4},
    "auto": {"slices": "auto", "schedule": "1f1b", "memory_gb": 1.0},
    "whole": {"slices": 1},
}


@cache
def results(kind: str) -> list[dict[str, Any]]:
    return run_ranks(cut_again_and_again, 2, SETTINGS[kind], timeout=100)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_next_step_is_cut_as_set(kind: str) -> None:
    settings, ranks = SETTINGS[kind], results(kind)
    for found in ranks:
        assert found["at first"] == ((), (0, 0))
        steps = found["steps"]
        # 24 tokens leave room for slices of 8 only: 2, then 1
        first = [2, 2] if settings["slices"] == "auto" else [settings["slices"]] * 2
        schedule = settings.get("schedule", "auto")
        wanted: list[tuple[Any, str]] = [
            (first[0], schedule),
            (first[1], schedule),
            (UNEVEN, "terapipe"),
            (3, "terapipe"),
        ]
        wanted += [(2, "terapipe"), (2, "terapipe"), (1, "terapipe"), (1, "1f1b")]
        for (what, slices, units, ran, weights), (cut, order) in zip(steps, wanted, strict=True):
            lengths = lengths_of(TOKENS, cut)
            assert (slices, ran) == ((lengths,) * MICRO_BATCHES, order), what
            assert units == (MICRO_BATCHES * len(lengths),) * 2, what
            assert weights == (MICRO_BATCHES if len(lengths) > 1 else 0), what
        assert found["evaluated"] == (((8, 8, 8),) * MICRO_BATCHES, (3 * MICRO_BATCHES, 0))


@pytest.mark.parametrize("name", CHANGES)
def test_bad_or_different_values_are_refused_on_every_rank(name: str) -> None:
    messages = {
        "bad value": 'token_pipeline.slices: got 0, must be a positive number, a list of lengths or "auto", use e.g. 8',
        "bad schedule": 'token_pipeline.schedule: got "gpipe", must be "auto" or "terapipe" or "1f1b", use "terapipe"',
        "bad on one rank": "token_pipeline.slices: got [4, -1], must be",
        "other slices": "token_pipeline.slices: got 2 on rank 1 and 4 on rank 0, must be the same on all, use",
        "other schedules": 'token_pipeline.schedule: got "terapipe" on rank 1 and "1f1b" on rank 0, must be the same on all',
    }
    said = {found["refused"][name] for found in results("given")}
    assert len(said) == 1, said
    assert messages[name] in said.pop()


def test_assignments_are_refused() -> None:
    for found in results("given"):
        said = found["assigned"]
        assert (
            said["block"] == "engine.token_pipeline: got an assignment, must stay as it is, use engine.set_slices(...)"
        )
        assert said["slices"].startswith("token_pipeline.slices: got an assignment")
        assert said["slices"].endswith("use engine.set_slices(...)")
        assert said["timeout"].endswith("use another configuration for a new engine")

"""The run of DeepSpeed's own tests complains when a test fails with the key, and when the key or our engine was not there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks import deepspeed_suite as suite
from tests.benchmarks import deepspeed_suite_hooks as hooks


def ran(
    outcome: str = "passed", engine: str = suite.OURS, built: int = 2, trained: int = 6, keys: int = 2
) -> suite.Ran:
    events = {(hooks.BUILT, engine): built, ("train_batch", engine): trained, (hooks.INJECTED, ""): keys}
    return suite.Ran(outcome, "its output", Counter({event: times for event, times in events.items() if times}))


plain = ran(engine=suite.PLAIN, keys=0)

COMPLAINTS = {
    "fails": (plain, ran("failed"), "failed with the key"),
    "is skipped": (plain, ran("skipped"), "skipped with the key"),
    "never ends": (plain, suite.Ran(), "missing with the key"),
    "DeepSpeed's engine": (plain, ran(engine=suite.PLAIN), "with the key a PipelineEngine ran"),
    "our engine without the key": (ran(keys=0), ran(), "without the key a TokenPipelineEngine ran"),
    "one engine without the key": (plain, ran(keys=1), "an engine was built without the key"),
    "no engine": (plain, ran(built=0, trained=0, keys=0), "did {"),
    "a batch less": (plain, ran(trained=5), "did {"),
}


@pytest.mark.parametrize("case", COMPLAINTS)
def test_what_is_complained_about(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, text = COMPLAINTS[case]
    assert text in suite.complaint(before, after)
    assert suite.report({"good": plain, case: before}, {"good": ran(), case: after}) == 1
    printed = capsys.readouterr().out
    assert "2 of 2 tests pass without the key, 1 of them with it" in printed and text in printed


def test_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    fine = {"good": (plain, ran()), "no engine": (suite.Ran("passed"), suite.Ran("passed"))}
    fine["fails anyway"] = (suite.Ran("failed"), suite.Ran("failed"))
    assert suite.report({name: pair[0] for name, pair in fine.items()}, {n: pair[1] for n, pair in fine.items()}) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 tests pass without the key, 2 of them with it" in printed
    assert "the key was put into 2 configurations, and TokenPipelineEngine ran 6 batches" in printed


def test_nothing_run_is_complained_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.report({"idle": suite.Ran("passed")}, {"idle": suite.Ran("passed")}) == 1
    assert "no test ran a batch with the key" in capsys.readouterr().out


@pytest.mark.parametrize("block", [None, {"slices": 1}])
def test_the_hooks_put_the_key_in_and_write_down_what_ran(
    block: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"train_batch_size": 2}

    class TokenPipelineEngine:
        def train_batch(self) -> str:
            return "loss"

    def initialize(args: Any = None, model: Any = None, config: Any = None) -> tuple[Any, ...]:
        assert config == (given if block is None else {**given, "token_pipeline": block})
        return TokenPipelineEngine(), None, None, None

    monkeypatch.setenv(hooks.FOLDER, str(tmp_path))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    hooks.pytest_runtest_setup(SimpleNamespace(nodeid="a test"))
    engine, *_ = hooks._observed(initialize, block)(config=given)
    assert engine.train_batch() == engine.train_batch() == "loss" and given == {"train_batch_size": 2}
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed")):
        report = SimpleNamespace(when=when, outcome=outcome, passed=outcome == "passed", nodeid="a test")
        report.longreprtext, report.sections = f"{when}'s error", [("Captured stdout", "said")]
        hooks.pytest_runtest_logreport(report)
    found = suite.read(tmp_path)["a test"]
    assert (found.outcome, found.text) == ("failed", "teardown's error\nsaid")
    assert found.done() == {hooks.BUILT: 1, "train_batch": 2} and found.engines() == {suite.OURS}
    assert found.events[hooks.INJECTED, ""] == (block is not None)


def test_the_key_only_goes_into_a_config_that_is_a_dict() -> None:
    observed = hooks._observed(lambda args=None, model=None, config=None: (None,), {"slices": 1})
    with pytest.raises(TypeError, match="a config that is a dict, not str"):
        observed(config="ds_config.json")


def checkout(folder: Path) -> Path:
    """A folder with all that is looked for in DeepSpeed's."""
    for name in (*suite.FILES, suite.COMPARISON, "conftest.py", "pytest.ini", "unit/__init__.py"):
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name).touch()
    for name, old, _ in suite.EDITS:
        with (folder / "tests" / name).open("a") as file:
            file.write(f"{old}\n")
    (folder / "tests" / suite.COMPARISON).write_text(f"first\nassert saved.{suite.GONE}\nlast\n")
    return folder


def test_the_copy_is_changed_and_the_checkout_is_not(tmp_path: Path) -> None:
    source = checkout(tmp_path / "source")
    before = {path: path.read_text() for path in source.rglob("*") if path.is_file()}
    (tmp_path / "copy").mkdir()
    tests = suite.prepare(source, tmp_path / "copy")
    for name, old, new in suite.EDITS:
        assert old not in (tests / name).read_text() and new in (tests / name).read_text()
    assert (tests / suite.COMPARISON).read_text() == "first\nlast\n"
    assert "import deepspeed_suite_hooks" in (tests / "unit/__init__.py").read_text()
    assert (tests / "deepspeed_suite_hooks.py").exists()
    assert {path: path.read_text() for path in source.rglob("*") if path.is_file()} == before


def test_other_checkouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must be a checkout of DeepSpeed"):
        suite.prepare(tmp_path, tmp_path)
    source = checkout(tmp_path / "source")
    (source / "tests" / suite.MODEL).write_text("nothing to change")
    (tmp_path / "copy").mkdir()
    with pytest.raises(SystemExit, match=r"alexnet_model\.py: has 'fork_rng.*' 0 times, must be once"):
        suite.prepare(source, tmp_path / "copy")

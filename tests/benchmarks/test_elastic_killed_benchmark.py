"""The benchmark counts kills, and one thing that differs fails it; tests/elastic/test_elastic_killed.py kills."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import elastic_killed
from tests.elastic.killed import Kill, Row


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The benchmark on runs that are pretended: of the kills, the ``late``-th comes when all is over."""

    def run(*arguments: str, late: int = -1, row_wrong: str = "", end_wrong: str = "") -> tuple[int, dict[str, Any]]:
        made: list[Row] = []

        def run_killed(kills: Sequence[Kill], whole: Any, folder: Path) -> tuple[list[Row], list[str]]:
            rows = []
            for kill in kills:
                wrong = (row_wrong,) if row_wrong and not made else ()
                rows.append(Row(kill, 4, "step 5", len(made) != late, "waited", wrong))
                made.append(rows[-1])
            return rows, [end_wrong] if end_wrong else []

        monkeypatch.setattr(elastic_killed, "run_whole", lambda folder, precision, cached: None)
        monkeypatch.setattr(elastic_killed, "run_killed", run_killed)
        status = elastic_killed.main([*arguments, "--json", str(tmp_path / "points.json")])
        return status, json.loads((tmp_path / "points.json").read_text())

    return run


def test_as_many_die_as_were_asked_for(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, written = run("--points", "7", late=2)
    assert status == 0 and written["wrong"] == []
    assert [row["died"] for row in written["points"]].count(True) == 7 and len(written["points"]) == 8
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 8 + 1 and sum("over before" in line for line in lines) == 1
    assert lines[-1].startswith("7 kills in ") and lines[-1].endswith("equal to the bit, checkpoints whole")


@pytest.mark.parametrize("wrong", [{"row_wrong": "last: /a differs"}, {"end_wrong": "loss of step 3"}])
def test_one_thing_that_differs_fails_it(run: Any, capsys: pytest.CaptureFixture[str], wrong: dict[str, str]) -> None:
    status, written = run("--points", "1", **wrong)
    assert status == 1 and written["wrong"] == list(wrong.values())
    assert "1 things WRONG" in capsys.readouterr().out


def test_the_same_seed_is_the_same_points(run: Any) -> None:
    assert run("--points", "9", "--seed", "3") == run("--points", "9", "--seed", "3")
    assert run("--points", "9", "--seed", "3") != run("--points", "9", "--seed", "4")


def test_no_points_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elastic_killed.main(["--points", "0"])
    assert "--points: got 0, must be at least 1" in capsys.readouterr().err

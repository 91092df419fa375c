"""The history of the shapes: what a run writes, what is read of it, the text and the picture."""

import json
import logging
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_terapipe import cli
from ds_terapipe.elastic.shapes.history import History, StepShape, check_history, read_history
from ds_terapipe.elastic.shapes.picture import shapes_svg, shapes_text
from ds_terapipe.errors import ConfigError
from tests.programs import ROOT

TWO = StepShape(2, 1, 1, 4, 0, (0, 5, 11))
ONE = StepShape(1, 2, 1, 2, 5, (0, 11))
MORE = ONE._replace(frozen_layers=7)
Coordinate = namedtuple("Coordinate", "pipe data")


def topology(replicas: int) -> Any:
    """Of two processes."""
    return SimpleNamespace(world_size=lambda: 2, get_coord=lambda rank: Coordinate(*divmod(rank, replicas)))


def train(path: Path, *parts: tuple[StepShape, int, int] | float, closes: bool = True) -> None:
    """A run: shapes with their first step and the one behind the last, and between them the seconds of a change."""
    history = History(str(path))
    for part in parts:
        if isinstance(part, float):
            history.changed(part)
            continue
        ran_on, first, stop = part
        for step in range(first, stop):
            with history.step(step, ran_on, topology(ran_on.replicas)):
                pass
    if closes:
        history.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(path: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines(path)]


def steps(path: Path) -> list[tuple[int, int | None]]:
    return [(period.first, period.stop) for period in read_history(str(path))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """60 steps in three periods, as of seconds 100, 120 (after one of 2 s), 150 (after one of half a second), until 160."""
    path = tmp_path / "history.jsonl"
    train(path, (TWO, 0, 20), 2.0, (ONE, 20, 40), 0.5, (MORE, 40, 60))
    told = [{**line, "time": at} for line, at in zip(lines(path), (100.0, 120.0, 150.0, 160.0), strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in told))
    return path


def test_a_line_is_written_where_something_changes(run: Path) -> None:
    found, periods = lines(run), read_history(str(run))
    assert events(run) == [("start", 0), ("change", 20), ("change", 40), ("end", 60)]
    assert [line["seconds"] for line in found[:3]] == [0, 2.0, 0.5]
    assert [line["ranks"] for line in found[:3]] == [[[0, 0], [1, 0]], *[[[0, 0], [0, 1]]] * 2]
    assert [period.ran_on for period in periods] == [TWO, ONE, MORE]
    assert [(period.seconds, period.begins) for period in periods] == [(18, 1), (29.5, 0), (10, 0)]


def test_lines_are_there_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    history = History(str(path))
    with history.step(0, TWO, topology(1)):
        assert events(path) == [("start", 0)]
    history.close()


def test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint(run: Path) -> None:
    # load_checkpoint goes to the shape of the checkpoint, which takes 0.25 s
    train(run, 0.25, (ONE, 30, 35), 1.0, (TWO, 35, 50))
    assert [(each.first, each.stop, each.ran_on, each.begins, each.change_seconds) for each in read_history(str(run))] == [
        (0, 20, TWO, True, 0), (20, 30, ONE, False, 2.0), (30, 35, ONE, True, 0.25), (35, 50, TWO, False, 1.0),
    ]  # fmt: skip
    assert read_history(str(run))[1].seconds is None


def test_a_run_that_was_killed_goes_on(run: Path) -> None:
    start, change, more, _ = run.read_bytes().splitlines(keepends=True)
    run.write_bytes(start + change + more[:40])
    first, second = read_history(str(run))
    assert (first.stop, second.first, second.stop, second.seconds) == (20, 20, None, None)
    assert "step 20 on: 1 stage x 2 replicas" in shapes_text([first, second])
    assert "the end of the last shape is unknown" in shapes_svg([first, second])
    train(run, (MORE, 25, 27))
    assert run.read_bytes().startswith(start + change + b'{"event": "start", "step": 25')
    assert steps(run) == [(0, 20), (20, 25), (25, 27)]


def test_a_script_that_does_not_destroy_its_engine_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    program = "import sys, pathlib; from tests.elastic import test_history as t; "
    program += "t.train(pathlib.Path(sys.argv[1]), (t.TWO, 0, 3), closes=False)"
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=True, timeout=60)
    assert steps(path) == [(0, 3)]


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        train(tmp_path / "folder" / "history.jsonl", (TWO, 0, 3), (ONE, 3, 5))
    assert len(caplog.records) == 1 and "elastic_pipeline.history_path: cannot write" in caplog.text


@pytest.mark.parametrize(("content", "line"), [
    ("Dear diary", 1), ("", 0), ('{run}{"event": "begin", "step": 3, "time": 1.0}\n', 5), ('{run}{"event": "sta', 0),
])  # fmt: skip
def test_a_file_that_is_something_else_is_left_alone(run: Path, content: str, line: int) -> None:
    """The rest of a line in whose middle a run was killed is taken away; of another file's, nothing is."""
    whole = content.replace("{run}", run.read_text()).encode()
    run.write_bytes(whole)
    if not line:
        check_history(str(run)), check_history("/dev/null")
        return
    with pytest.raises(ConfigError) as refused:
        check_history(str(run))
    rule = "must be a new file or one that a run has written, use another name"
    assert str(refused.value) == f"elastic_pipeline.history_path: got {run} (line {line}), {rule}"
    assert run.read_bytes() == whole


def test_a_process_has_all_stages_of_its_place(tmp_path: Path) -> None:
    placed = TWO._replace(parts=(0, 3, 6, 9, 11), places=(0, 1, 1, 0))
    train(tmp_path / "v.jsonl", (placed, 0, 3))
    (period,) = read_history(str(tmp_path / "v.jsonl"))
    title, *told = shapes_text([period]).splitlines()
    assert period.ran_on == placed and ": 2 places x 1 replica (" in title
    assert [line.partition("layers ")[2] for line in told] == [
        "0 to 2 on process 0", "3 to 5 on process 1", "6 to 8 on process 1", "9 to 10 on process 0"
    ]  # fmt: skip
    assert re.findall(">layers ([^<]*)<", shapes_svg([period])) == ["0 to 2", "9 to 10", "3 to 5", "6 to 8"]


def test_the_command_prints_the_text_or_writes_the_picture_or_json(run: Path, capsys: Any) -> None:
    periods, picture = read_history(str(run)), run.with_name("shapes.svg")

    def printed(*arguments: str) -> str:
        assert cli.main(["shapes", str(run), *arguments]) == 0
        return capsys.readouterr().out

    whole = "  stage 0: layers 0 to 10 on processes 0, 1"
    two = "1 stage x 2 replicas (2 micro-batches of 1)"
    assert printed().splitlines() == [
        "steps 0 to 19, 18.0 s: 2 stages x 1 replica (4 micro-batches of 1), 0 of 11 layers frozen",
        "  stage 0: layers 0 to 4 on process 0", "  stage 1: layers 5 to 10 on process 1",
        f"steps 20 to 39, 29.5 s: {two}, 5 of 11 layers frozen, after a change of 2.00 s", whole,
        f"steps 40 to 59, 10.0 s: {two}, 7 of 11 layers frozen, after a change of 0.50 s", whole,
    ]  # fmt: skip
    assert printed("--output", str(picture)) == f"written to {picture}\n" and picture.read_text() == shapes_svg(periods)
    # changes 20 pixels apart: their steps have room beside each other, their seconds have not
    marks = re.findall('fill="#4b5563" text-anchor="middle">([^<]*)<', shapes_svg(periods, width=160))
    assert marks == ["0", "20", "2.00 s", "40", "60"] and re.search('rect x="84.*x="944.*>60<', shapes_svg(periods[1:]), re.S)
    first, second, _ = json.loads(printed("--json", "-"))["periods"]
    assert (first["first"], first["stop"], first["parts"], first["ranks"]) == (0, 20, [0, 5, 11], [[0, 0], [1, 0]])
    assert (second["replicas"], second["frozen_layers"], second["change_seconds"]) == (2, 5, 2.0)
    run.write_text("[1]\n")
    assert cli.main(["shapes", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ds_terapipe shapes: error: ") and 'history.jsonl:1: got "[1]", must be a line of' in error

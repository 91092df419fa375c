"""The history of the shapes: what a run writes, what is read of it, the text and the picture."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_terapipe import cli
from ds_terapipe.elastic.shapes.history import History, StepShape, check_history, read_history
from ds_terapipe.elastic.shapes.picture import shapes_svg, shapes_text
from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule.svg import COLOURS, EMPTY
from tests.documents import ROOT

TWO = StepShape(2, 1, 1, 4, 0, (0, 5, 11))
ONE = StepShape(1, 2, 1, 2, 5, (0, 11))
MORE = ONE._replace(frozen_layers=7)
Coordinate = namedtuple("Coordinate", "pipe data")


class Topology:
    """Of two processes."""

    def __init__(self, ran_on: StepShape) -> None:
        self._replicas = ran_on.replicas

    def world_size(self) -> int:
        return 2

    def get_coord(self, rank: int) -> Coordinate:
        return Coordinate(*divmod(rank, self._replicas))


def train(history: History, ran_on: StepShape, first: int, stop: int) -> None:
    for step in range(first, stop):
        with history.step(step, ran_on, Topology(ran_on)):
            pass


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def edited(path: Path, number: int, **fields: Any) -> Path:
    """The file with another line of that number."""
    found = lines(path)
    found[number].update(fields)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """60 steps in three periods, as of seconds 100, 120 (after one of 2 s), 150 (after one of half a second), until 160."""
    path = tmp_path / "history.jsonl"
    history = History(str(path))
    train(history, TWO, 0, 20)
    history.changed(2.0)
    train(history, ONE, 20, 40)
    history.changed(0.5)
    train(history, MORE, 40, 60)
    history.close()
    for number, at in enumerate((100.0, 120.0, 150.0, 160.0)):
        edited(path, number, time=at)
    return path


def test_a_line_is_written_where_something_changes(run: Path) -> None:
    found = lines(run)
    assert [(line["event"], line["step"]) for line in found] == [
        ("start", 0),
        ("change", 20),
        ("change", 40),
        ("end", 60),
    ]
    assert [line["seconds"] for line in found[:3]] == [0, 2.0, 0.5]
    assert [line["ranks"] for line in found[:3]] == [[[0, 0], [1, 0]], *[[[0, 0], [0, 1]]] * 2]
    periods = read_history(str(run))
    assert [(period.first, period.stop, period.ran_on) for period in periods] == [
        (0, 20, TWO),
        (20, 40, ONE),
        (40, 60, MORE),
    ]
    assert [period.ranks for period in periods] == [((0, 0), (1, 0)), *[((0, 0), (0, 1))] * 2]
    assert [period.seconds for period in periods] == [18, 29.5, 10] and [period.begins for period in periods] == [
        1,
        0,
        0,
    ]


def test_lines_are_there_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(str(path))
    assert not path.exists()
    with history.step(0, TWO, Topology(TWO)):
        assert [line["event"] for line in lines(path)] == ["start"]
    with pytest.raises(KeyError), history.step(1, TWO, Topology(TWO)):
        raise KeyError
    history.close()
    history.close()
    assert [(line["event"], line["step"]) for line in lines(path)] == [("start", 0), ("end", 1)]


def test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint(run: Path) -> None:
    second = History(str(run))
    second.changed(0.25)  # load_checkpoint goes to the shape of the checkpoint
    train(second, ONE, 30, 35)
    second.changed(1.0)
    train(second, TWO, 35, 50)
    second.close()
    periods = read_history(str(run))
    assert [(period.first, period.stop, period.ran_on) for period in periods] == [
        (0, 20, TWO), (20, 30, ONE), (30, 35, ONE), (35, 50, TWO),
    ]  # fmt: skip
    assert [period.begins for period in periods] == [True, False, True, False]
    assert [period.change_seconds for period in periods] == [0, 2.0, 0.25, 1.0] and periods[1].seconds is None
    # to the very beginning: nothing is left of the others
    third = History(str(run))
    train(third, ONE, 0, 1)
    third.close()
    assert [(period.first, period.stop) for period in read_history(str(run))] == [(0, 1)]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("Dear diary", 1),
        ("{}\n", 1),
        ('{"event": "start"', 0),
        ('{"ev', 0),
        ("", 0),
        ('{"loss": 1.0', 1),
        ("\n", 1),
        ("{run}Dear diary", 5),
        ("{run}Dear diary\n", 5),
        ('{run}{"event": "begin", "step": 3, "time": 1.0}\n', 5),
        ('{run}{"event": "sta', 0),
        ("{run}", 0),
        (b"\xff\xfe", 1),
        (b"\xff\n", 1),
    ],
)
def test_a_file_that_is_something_else_is_left_alone(run: Path, content: str | bytes, line: int) -> None:
    """The rest of a line in whose middle a run was killed is taken away; of another file's, nothing is."""
    whole = content if isinstance(content, bytes) else content.replace("{run}", run.read_text()).encode()
    run.write_bytes(whole)
    if not line:
        check_history(str(run))
        return
    with pytest.raises(ConfigError) as refused:
        check_history(str(run))
    rule = "a new file or one that a run has written"
    assert (
        str(refused.value)
        == f"elastic_pipeline.history_path: got {run} (line {line}), must be {rule}, use another name"
    )
    assert run.read_bytes() == whole


def test_what_is_no_file_is_no_history_of_something_else(tmp_path: Path) -> None:
    for path in (tmp_path / "new.jsonl", Path("/dev/null")):
        check_history(str(path))


def test_load_checkpoint_in_the_middle_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(str(path))
    train(history, TWO, 0, 6)
    train(history, TWO, 3, 8)  # back to a checkpoint, in the same shape
    history.close()
    assert [(line["event"], line["step"]) for line in lines(path)] == [("start", 0), ("start", 3), ("end", 8)]
    assert [(period.first, period.stop) for period in read_history(str(path))] == [(0, 3), (3, 8)]


def test_a_run_that_was_killed(run: Path) -> None:
    whole = run.read_bytes()
    start, change, more, _ = whole.splitlines(keepends=True)
    run.write_bytes(start + change + more[:40])
    first, second = read_history(str(run))
    assert (first.stop, second.first, second.stop, second.seconds) == (20, 20, None, None)
    assert "step 20 on: 1 stage x 2 replicas" in shapes_text([first, second])
    assert "nobody has written" in shapes_svg([first, second])
    history = History(str(run))
    train(history, MORE, 25, 27)
    history.close()
    assert run.read_bytes().startswith(start + change + b'{"event": "start", "step": 25')
    assert [(period.first, period.stop) for period in read_history(str(run))] == [(0, 20), (20, 25), (25, 27)]


def test_a_run_whose_first_step_failed(run: Path) -> None:
    before = read_history(str(run))
    history = History(str(run))
    with pytest.raises(KeyError), history.step(60, MORE, Topology(MORE)):
        raise KeyError
    history.close()
    assert [line["step"] for line in lines(run)[-2:]] == [60, 60] and read_history(str(run)) == before


def test_a_script_that_does_not_destroy_its_engine(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    program = f"""
from tests.elastic.test_history import History, TWO, train
train(History({str(path)!r}), TWO, 0, 3)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    assert [(period.first, period.stop) for period in read_history(str(path))] == [(0, 3)]


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "history.jsonl"
    history = History(str(path))
    with caplog.at_level(logging.ERROR):
        train(history, TWO, 0, 3)
        train(history, ONE, 3, 5)
    history.close()
    assert len(caplog.records) == 1 and "elastic_pipeline.history_path: cannot write" in caplog.text


@pytest.mark.parametrize(
    ("number", "fields", "message"),
    [
        (0, {"event": "begin"}, 'history.jsonl:1: event: got "begin", must be "start" or "change" or "end"'),
        (0, {"event": "change"}, 'history.jsonl:1: event: got "change", must be "start", or after one and at a later step'),
        (2, {"step": 10}, 'history.jsonl:3: event: got "change", must be "start", or after one and at a later step'),
        (1, {"event": "end"}, 'history.jsonl:3: event: got "change", must be "start", or after one and at a later step'),
        (0, {"step": -1}, "history.jsonl:1: step: got -1, must be an integer of 0 or more"),
        (1, {"step": 0.5}, "history.jsonl:2: step: got 0.5, must be an integer of 0 or more"),
        (1, {"time": None}, "history.jsonl:2: time: got null, must be a number"),
        (1, {"stages": 0}, "history.jsonl:2: stages: got 0, must be a positive integer"),
        (1, {"frozen_layers": "5"}, 'history.jsonl:2: frozen_layers: got "5", must be an integer of 0 or more'),
        (1, {"parts": [0, 5, 11]}, "history.jsonl:2: parts: got [0, 5, 11], must be where 1 stages begin"),
        (0, {"parts": [0, 11, 5]}, "history.jsonl:1: parts: got [0, 11, 5], must be where 2 stages begin"),
        (0, {"ranks": [[0, 0], [2, 0]]}, "history.jsonl:1: ranks: got [[0, 0], [2, 0]], must be [stage, replica] of each"),
        (0, {"ranks": [[0, 0], [0, 1]]}, "history.jsonl:1: ranks: got [[0, 0], [0, 1]], must be [stage, replica] of each"),
        (0, {"ranks": []}, "history.jsonl:1: ranks: got [], must be [stage, replica] of each process"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line(run: Path, number: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_history(str(edited(run, number, **fields)))
    assert message in str(caught.value) and str(run) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "history.jsonl: got \"no step\", must be a file that elastic_pipeline.history_path names, with a step in it"),
        (b"[1]\n", 'history.jsonl:1: got "[1]", must be a line of a file that elastic_pipeline.history_path names'),
        (b"step 3\n", 'history.jsonl:1: got "step 3", must be a line of a file'),
        (b"\xff\xfe\n", "history.jsonl: cannot be read (no text), must be a file that elastic_pipeline.history_path names"),
        (None, "history.jsonl: cannot be read (No such file or directory)"),
    ],
)  # fmt: skip
def test_what_is_no_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "history.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["shapes", str(path)]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("ds_terapipe shapes: error: ")


def test_the_text(run: Path) -> None:
    assert shapes_text(read_history(str(run))).splitlines() == [
        "steps 0 to 19, 18.0 s: 2 stages x 1 replica (4 micro-batches of 1), 0 of 11 layers frozen",
        "  stage 0: layers 0 to 4 on process 0",
        "  stage 1: layers 5 to 10 on process 1",
        "steps 20 to 39, 29.5 s: 1 stage x 2 replicas (2 micro-batches of 1), 5 of 11 layers frozen, after a change of 2.00 s",
        "  stage 0: layers 0 to 10 on processes 0, 1",
        "steps 40 to 59, 10.0 s: 1 stage x 2 replicas (2 micro-batches of 1), 7 of 11 layers frozen, after a change of 0.50 s",
        "  stage 0: layers 0 to 10 on processes 0, 1",
    ]


def boxes(svg: str, colour: str) -> list[tuple[float, ...]]:
    """x, y, width and height of the picture's rectangles of a colour, those of the legend left out."""
    found = [
        each.attrib for each in ElementTree.fromstring(svg) if each.tag.endswith("rect") and each.get("fill") == colour
    ]
    return [
        tuple(float(each[name]) for name in ("x", "y", "width", "height")) for each in found if each["height"] != "12"
    ]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg) if each.tag.endswith("text")]


def test_the_picture(run: Path) -> None:
    svg = shapes_svg(read_history(str(run)), width=960)
    left, third, row = 84, (960 - 84 - 16) / 3, 96.0
    second = 46 + row + 5  # the row of process 1
    layer = row / 11
    (light, dark), (light_too, dark_too) = COLOURS[:2]

    def rounded(values: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
        return [tuple(round(each, 1) for each in value) for value in values]

    def box(period: int, top: float, first: int, stop: int) -> tuple[float, ...]:
        return left + period * third, top + first * layer, third - 1, (stop - first) * layer

    trained = [box(0, 46, 0, 5), box(0, second, 5, 11), box(1, 46, 5, 11), box(2, 46, 7, 11)]
    assert rounded(boxes(svg, dark)) == rounded(trained)
    assert rounded(boxes(svg, light)) == rounded([box(1, 46, 0, 5), box(2, 46, 0, 7)])
    assert rounded(boxes(svg, dark_too)) == rounded([box(1, second, 5, 11), box(2, second, 7, 11)])
    assert rounded(boxes(svg, light_too)) == rounded([box(1, second, 0, 5), box(2, second, 0, 7)])
    assert len(boxes(svg, EMPTY)) == 6
    said = texts(svg)
    assert {"process 0", "process 1", "2.00 s", "0.50 s", "0", "20", "40", "60", "2 stages x 1 replica"} <= set(said)
    assert {"layers 0 to 4", "replica 1: layers 0 to 6, frozen", "replica 0: layers 7 to 10"} <= set(said)
    assert "resumed" not in said and not any("nobody" in text for text in said)
    assert svg.count("stroke-dasharray") == 2


def test_the_picture_of_a_resumed_run_of_many_processes(run: Path) -> None:
    history = History(str(run))
    train(history, TWO, 50, 55)
    history.close()
    said = texts(shapes_svg(read_history(str(run))))
    assert "resumed" in said and "50" in said and "60" not in said
    wide = StepShape(1, 32, 1, 1, 0, (0, 96))
    many = Path(run).with_name("many.jsonl")
    line = {
        "event": "start",
        "step": 7,
        "time": 1.0,
        "seconds": 0.0,
        **wide._asdict(),
        "ranks": [[0, n] for n in range(32)],
    }
    many.write_text(json.dumps(line) + "\n")
    svg = shapes_svg(read_history(str(many)))
    assert "process 31" in texts(svg) and len(boxes(svg, COLOURS[0][1])) == 4  # hues come again


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shapes", str(run)]) == 0
    periods = read_history(str(run))
    assert capsys.readouterr().out == shapes_text(periods) + "\n"
    picture = tmp_path / "shapes.svg"
    assert cli.main(["shapes", str(run), "--output", str(picture)]) == 0
    assert capsys.readouterr().out == f"written to {picture}\n" and picture.read_text() == shapes_svg(periods)
    assert cli.main(["shapes", str(run), "--json", "-"]) == 0
    first, second, _ = json.loads(capsys.readouterr().out)["periods"]
    assert (first["first"], first["stop"], first["parts"], first["ranks"]) == (0, 20, [0, 5, 11], [[0, 0], [1, 0]])
    assert (second["replicas"], second["frozen_layers"], second["change_seconds"]) == (2, 5, 2.0)
    assert cli.main(["shapes", str(run), "--output", str(run / "shapes.svg")]) == 1
    assert "--output: cannot write" in capsys.readouterr().err

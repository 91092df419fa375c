from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe import cli
from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule import Op, order, replay, with_messages
from ds_terapipe.tracing.chrome import MEASURED, Event, events_of, read, to_json, write
from ds_terapipe.tracing.summary import summarise
from tests.schedule import strategies


def _seconds(action):
    return {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}[action.op]


def _simulated(stages=2, slices=(2, 2)):
    grid = with_messages(order("1f1b", stages, slices))
    return events_of(grid, replay(grid, _seconds).intervals)


@given(strategies.names, strategies.stages, strategies.slices)
def test_a_file_gives_back_what_was_written(tmp_path_factory, name, stages, slices):
    grid = with_messages(order(name, stages, slices))
    events = events_of(grid, replay(grid, _seconds).intervals)
    path = tmp_path_factory.mktemp("trace") / "t.json"
    write(path, events, {"model": "tiny"})
    assert sorted(read(path)) == sorted(events)
    assert json.loads(path.read_text())["otherData"]["model"] == "tiny"


def test_every_stage_is_a_named_process():
    data = to_json(_simulated(3, (2,)))
    names = {e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "stage 0, rank 0, predicted", 1: "stage 1, rank 1, predicted", 2: "stage 2, rank 2, predicted"}
    complete = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in complete} == {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    assert max(e["ts"] + e["dur"] for e in complete) == 1e6 * max(e.end for e in _simulated(3, (2,)))


def test_a_summary_adds_up_to_the_schedule():
    # two stages, one micro-batch of two slices: 0F 0F .. 1B 1B; stage 0 is busy for 6 of 9
    lines = summarise(_simulated(2, (2,)))
    assert [line.stage for line in lines] == [0, 1]
    for line in lines:
        assert line.busy == pytest.approx(6.0) and line.schedule == pytest.approx(9.0)
        assert line.bubble == pytest.approx(3.0 / 9.0)
    assert lines[0].waiting == pytest.approx({1: 3.0})
    assert lines[1].waiting == pytest.approx({0: 1.0})


def test_steps_are_averaged_and_collectives_named():
    events = []
    for step, late in ((3, 0.0), (4, 1.0)):
        at = 10.0 * step
        events.append(Event(MEASURED, 0, 0, step, "0F0.0", "F", at, at + 1.0 + late))
        events.append(Event(MEASURED, 0, 0, step, "optimiser", "optimiser", at + 3.0, at + 3.5 + late))
    (line,) = summarise(events)
    assert line.steps == 2 and line.busy == pytest.approx(1.5) and line.collectives == pytest.approx({"optimiser": 1.0})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ('{"traceEvents": [', "is no JSON"),
        ("[]", "traceEvents is missing"),
        ('{"traceEvents": []}', "otherData.format: got null"),
        (
            '{"traceEvents": [{"ph": "X"}], "otherData": {"format": "ds_terapipe trace 1"}}',
            "traceEvents[0]: 'args' is missing",
        ),
        ('{"traceEvents": [7], "otherData": {"format": "ds_terapipe trace 1"}}', "traceEvents[0]"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, content, message):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@given(st.integers(1, 400))
def test_a_truncated_file_is_never_read_as_a_shorter_trace(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("trace") / "t.json"
    write(path, _simulated())
    text = path.read_text()
    path.write_text(text[:-cut])
    with pytest.raises(ConfigError):
        read(path)


def test_the_command_prints_draws_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    predicted, measured = tmp_path / "p.json", tmp_path / "m.json"
    write(predicted, _simulated())
    write(
        measured,
        [event._replace(run=MEASURED, step=4, start=event.start + 7, end=event.end + 7.5) for event in _simulated()],
    )
    picture, merged = tmp_path / "both.svg", tmp_path / "both.json"
    arguments = ["trace", str(measured), str(predicted), "--picture", str(picture), "--merged", str(merged)]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5 and table[1].split()[0] == "measured" and table[3].split()[0] == "predicted"
    assert {event.run for event in read(merged)} == {"measured", "predicted"}
    svg = picture.read_text()
    assert "m: measured, step 4" in svg and "p: predicted, ms" in svg
    assert cli.main(["trace", str(measured), "--json", "-"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [line["stage"] for line in stages] == [0, 1] and all(line["run"] == "measured" for line in stages)
    assert cli.main(["trace", str(measured), "--step", "9"]) == 1
    assert "--step: got 9" in capsys.readouterr().err

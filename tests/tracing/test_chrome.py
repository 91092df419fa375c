"""Traces as files: what is written comes back, a summary adds up, and the command prints, draws and merges."""

import json

import pytest
from hypothesis import given, strategies as st

from ds_terapipe import cli
from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule import Op, Placement, as_placement, order, replay, with_messages
from ds_terapipe.tracing.chrome import MEASURED, Event, events_of, read, write
from ds_terapipe.tracing.summary import summarise
from tests.schedule import strategies


def simulated(stages=2, slices=(2, 2), name="1f1b"):
    placement = as_placement(stages)
    grid = with_messages(order(name, placement, slices), placement)
    return events_of(grid, replay(grid, lambda action: 1.0 + (action.op is Op.BACKWARD), placement=placement).intervals)


@given(strategies.names, st.integers(1, 4), strategies.few_slices, st.integers(1, 400))
def test_a_file_gives_back_what_was_written_or_is_refused_when_it_is_cut_off(tmp_path_factory, name, stages, slices, cut):
    events, path = simulated(stages, slices, name), tmp_path_factory.mktemp("trace") / "t.json"
    write(path, events, {"model": "tiny"})
    assert sorted(read(path)) == sorted(events) and {event.step for event in events} == {0}
    text = path.read_text()
    assert json.loads(text)["otherData"]["model"] == "tiny"
    path.write_text(text[:-cut])
    with pytest.raises(ConfigError):
        read(path)


def test_a_summary_adds_up_to_the_schedule():
    # two stages, one micro-batch of two slices: 0F 0F .. 1B 1B; stage 0 is busy for 6 of 9
    lines = summarise(simulated(2, (2,)))
    assert [line.stage for line in lines] == [0, 1]
    for line in lines:
        assert (line.busy, line.schedule, line.bubble) == pytest.approx((6.0, 9.0, 3.0 / 9.0))
    assert lines[0].waiting == pytest.approx({1: 3.0}) and lines[1].waiting == pytest.approx({0: 1.0})
    twice = summarise(simulated(Placement.interleaved(2, 2), (1,), "interleaved"))
    assert [set(line.waiting) for line in twice] == [{1, 3}, {0, 2}]


def test_steps_are_averaged_and_collectives_named():
    events = []
    for step, late in ((3, 0.0), (4, 1.0)):
        at = 10.0 * step
        events.append(Event(MEASURED, 0, 0, step, "0F0.0", "F", at, at + 1.0 + late))
        events.append(Event(MEASURED, 0, 0, step, "optimiser", "optimiser", at + 3.0, at + 3.5 + late))
    (line,) = summarise(events)
    assert line.steps == 2 and line.collectives == pytest.approx({"optimiser": 1.0})
    assert line.busy == line.schedule == pytest.approx(1.5) and line.other == line.bubble == pytest.approx(0)


HEAD = '"otherData": {"format": "ds_terapipe trace 1"}}'
BROKEN = {'{"traceEvents": [': "is no JSON", '{"traceEvents": [{"ph": "X"}], ' + HEAD: "traceEvents[0]: 'args' is missing"}


@pytest.mark.parametrize("content", [None, *BROKEN])
def test_broken_files_are_one_line(tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read(path)
    said = str(error.value)
    assert BROKEN.get(content, "cannot be read") in said and str(path) in said and "\n" not in said


def test_the_command_prints_draws_and_merges(tmp_path, capsys):
    predicted, measured, picture, merged = (tmp_path / name for name in ("p.json", "m.json", "both.svg", "both.json"))
    write(predicted, simulated())
    write(measured, [e._replace(run=MEASURED, step=4, start=e.start + 7, end=e.end + 7.5) for e in simulated()])
    arguments = ["trace", str(measured), str(predicted), "--picture", str(picture), "--merged", str(merged)]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5 and table[1].split()[0] == "measured" and table[3].split()[0] == "predicted"
    assert {event.run for event in read(merged)} == {"measured", "predicted"}
    assert "m: measured, step 4" in picture.read_text() and "p: predicted, ms" in picture.read_text()
    assert cli.main(["trace", str(measured), "--json", "-"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [(line["stage"], line["run"]) for line in stages] == [(0, "measured"), (1, "measured")]
    assert cli.main(["trace", str(measured), "--step", "9"]) == 1
    assert "--step: got 9" in capsys.readouterr().err

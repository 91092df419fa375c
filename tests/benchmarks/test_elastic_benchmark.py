"""The elastic benchmark's own reasoning, and that all of it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.elastic import Case, cases, fastest, growth_lines, main, table, target_lines, transitions_in
from tests.benchmarks.elastic_columns import Timed, of_deepspeed, of_ours
from tests.benchmarks.gpt import Shape
from tests.benchmarks.measure import Result
from tests.benchmarks.rounds import Minima
from tests.pipeline.footprint import Footprint

HALF = Case(2, 5, 0.5)


def ran(clean: int = 3, **seconds: float) -> Result:
    named = {name.replace("_", "-"): value for name, value in seconds.items()}
    return Result(Minima(named, clean, clean, 1.05, 1.05, []), {}, {}, {})


def test_cases_freeze_the_embedding_and_a_part_of_the_layers() -> None:
    found = cases(Shape(), [2, 4], [0.5, 0.75])
    assert [(case.sequences, case.frozen) for case in found] == [(2, 5), (4, 5), (2, 7), (4, 7)]
    assert found[0] == HALF and found[0].title == "B=2, embedding + 4"


def test_deepspeed_runs_only_where_both_stages_train() -> None:
    assert [column.name for column in of_deepspeed(Shape(), 5)] == ["deepspeed6", "deepspeed7", "replicas"]
    assert [column.name for column in of_deepspeed(Shape(), 8)] == ["deepspeed9", "replicas"]
    ours = of_ours(5, [1, "auto"])
    each = ["ours1", "kept-1", "reshaped-1", "cached-1", "measured-1"]
    each += ["auto", "kept-auto", "reshaped-auto", "cached-auto", "measured-auto"]
    assert [column.name for column in ours] == each
    assert {column.trains for column in ours} == {"everything", "all but 5"}


def test_the_fastest_of_each_kind_is_compared() -> None:
    result = ran(
        ours1=1.2,
        ours4=1.0,
        kept_4=0.9,
        reshaped_1=0.69,
        reshaped_4=0.71,
        cached_1=0.54,
        cached_4=0.56,
        deepspeed6=0.9,
        deepspeed7=0.86,
        replicas=0.6,
    )
    assert fastest(result, "deepspeed") == ("deepspeed7", 0.86) and fastest(result, "torch") is None
    assert target_lines({HALF: result}) == [
        "B=2, embedding + 4: reshaped-1 takes 0.690 of ours4, at most 0.70: pass",
        "B=2, embedding + 4: reshaped-1 takes 0.802 of deepspeed7, at most 0.80: miss",
        "B=2, embedding + 4: cached-1 takes 0.540 of ours4, at most 0.55: pass",
    ]
    assert target_lines({Case(2, 7, 0.75): ran(ours4=1.0, reshaped_1=0.56)})[0].endswith("at most 0.55: miss")
    assert target_lines({HALF: ran(2, ours4=1.0, reshaped_1=0.1, deepspeed6=1.0)})[0].endswith("inconclusive")
    assert target_lines({HALF: ran(ours4=1.0)})[0] == "B=2, embedding + 4: ours or reshaped not measured"
    assert "0.690 (0.69)" in table({HALF: result})[2]


def test_what_is_chosen_is_compared_with_the_better_of_both_shapes() -> None:
    def line(**seconds: float) -> str:
        return target_lines({HALF: ran(**seconds)})[-1]

    assert line(kept_4=1.0, reshaped_4=0.8, measured_4=0.832).endswith(
        "measured-4 takes 1.040 of reshaped-4, at most 1.05: pass"
    )
    assert line(kept_4=0.7, reshaped_4=0.8, measured_4=0.8).endswith("takes 1.143 of kept-4, at most 1.05: miss")
    assert line(kept_4=1.0, measured_4=0.83).endswith("not measured")


def test_a_transition_costs_what_its_first_steps_take_beside_the_others() -> None:
    seconds = [9.0, 1.0, 1.0, 1.0, 1.0, 1.5, 0.7, 0.5, 0.6, 0.5]
    found = transitions_in([Timed(2 - (number > 4), each) for number, each in enumerate(seconds)], 5)
    assert [(one.stages, one.step, one.step_before) for one in found] == [(1, 0.5, 1.0)]
    assert found[0].until_second == pytest.approx(1.2) == found[0].in_all and found[0].steps == pytest.approx(2.4)


def test_trials_of_slices_count_as_the_transition_s() -> None:
    later = [Timed(1, each) for each in (1.5, 0.5, 0.7, 0.7, 0.5, 0.5, 0.5, 0.5)]
    (one,) = transitions_in([*[Timed(2, 1.0)] * 8, *later], 8)
    assert (
        one.until_second == pytest.approx(1.0) and one.in_all == pytest.approx(1.4) and one.steps == pytest.approx(2.8)
    )


@pytest.mark.parametrize(
    ("name", "more"), [("files", 1), ("threads", 1), ("groups", 1), ("shared", 1), ("resident", 30)]
)
def test_whatever_grows_is_a_miss(name: str, more: int) -> None:
    tenth = Footprint(9, 40, 80, 2, 1000)
    lines = growth_lines([(tenth, tenth), (tenth, tenth._replace(**{name: getattr(tenth, name) + more}))], 50)
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["pass", "miss"]


@pytest.mark.full
def test_all_of_it_runs_and_reshapes_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all.json"
    assert main(["--quick", "--reshapes", "16", "--json", str(file)]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert set(found["lines"]) == {
        "Seconds per step (share of our fastest unfrozen step)",
        "Targets",
        "Transitions",
        "Footprint",
    }
    (runs,) = [value for key, value in found.items() if key.startswith("transitions")]
    assert [one["stages"] for one in runs[0]["transitions"]] == [1, 2, 1]
    for name in ("files", "threads", "groups", "shared"):
        grown = [int(after) - int(before) for before, after in re.findall(rf"{name} (\d+) -> (\d+)", said)]
        assert len(grown) == 2 and max(grown) <= 0, (name, said)

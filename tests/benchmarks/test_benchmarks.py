"""The results that docs quote, and what benchmarks conclude from what runs bring."""

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks import large_batch, measure
from tests.benchmarks.elastic_finetune import Run, check
from tests.benchmarks.measure import Lines, WrongResult

ROOT, RESULTS = Path(__file__).parents[2], Path(__file__).parent / "results"


@pytest.mark.parametrize("name", ["token_pipeline", "two_hosts", "emulation", "llama", "elastic", "lamb"])
def test_tables_of_the_docs_have_the_results_and_their_ratios(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    first = next(iter(result["rows"].values()))
    for document in result["documents"]:
        text = (ROOT / document).read_text().replace("**", "")
        for title, row in result["rows"].items():
            (line,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", text, re.MULTILINE)
            cells = [list(map(float, re.findall(r"[\d.]+", cell))) for cell in line.split("|")]
            assert [cell[0] for cell in cells] == row
            for cell, other in zip(cells, first, strict=True):
                ratio = row[0] / cell[0] if result["peer"] == "its first column" else cell[0] / other
                assert len(cell) == 1 or cell[1] == pytest.approx(ratio, rel=0.006)


@pytest.mark.parametrize(("name", "plan"), [("", large_batch.Plan()), ("_again", large_batch.Plan((512,), range(3, 9)))])
def test_figures_of_large_batches_in_the_docs_are_what_the_runs_say(name: str, plan: large_batch.Plan) -> None:
    done = Lines(RESULTS / f"large_batch{name}" / "runs.jsonl", large_batch.Run).read()
    text = (ROOT / "docs/explanation/lamb.md").read_text().replace("**", "")
    assert large_batch.needed(plan, done) == []
    for line in large_batch.report(plan, done)[2 : 4 if name else 6]:
        assert (line.split("|")[2].strip() if name else line) in text


def test_a_run_that_is_not_what_its_column_is_about_is_found() -> None:
    found = {"seconds": [1.0] * 3, "frozen": [0, 2, 4], "stages": [2, 1, 1], "samples": [8, 16, 24], "read": [0, 0, 8]}
    run = Run("cache", 0, 1 / 4, "uniform", 8)
    check(run, found, 8, 8)
    for wrong in ({"frozen": [0, 2, 2]}, {"stages": [2, 2, 2]}, {"samples": [8, 16, 16]}, {"read": [0, 0, 0]}):
        with pytest.raises(WrongResult, match=f": {next(iter(wrong))}: got"):
            check(run, {**found, **wrong}, 8, 8)


def test_columns_that_train_differently_are_refused() -> None:
    trains = {"a": "all", "b": "all", "c": "some"}
    measure.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.00005], "c": [3.0, 1.0]}, trains)
    with pytest.raises(WrongResult, match=r"b has losses \[2.0, 1.1\] in its first steps, a has \[2.0, 1.0\]"):
        measure.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.1]}, trains)


def test_a_sweep_makes_what_its_file_lacks(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "folder" / "runs.jsonl", large_batch.Run, {"alphas": (1, 2)})
    one, two, three = (large_batch.Run("lamb", 16, 0.1, seed, 32) for seed in range(3))
    lines.add(one, loss=0)
    with open(lines.path, "a") as file:
        file.write('{"run": {"optimizer": "la')  # of a process that was killed
    Lines(lines.path, large_batch.Run, {"alphas": (1,)}).add(three, loss=3)
    found = measure.sweep(lambda done: [r for r in (one, two) if r not in done], lambda run: {"loss": run.seed}, lines)
    assert found == {one: {"loss": 0}, two: {"loss": 1}}
    assert Lines(lines.path, large_batch.Run).read() == {**found, three: {"loss": 3}}

"""Each benchmark's plan without a run of it, what it concludes from what runs bring, and the results that docs quote."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests.benchmarks import deepspeed_suite as suite
from tests.benchmarks import elastic, elastic_finetune, emulation, lamb, large_batch, measure, prediction
from tests.benchmarks.elastic_finetune import Run, what_is_wrong
from tests.benchmarks.elastic_finetune_tasks import TASKS, Settings, layers_of, mean_loss, read
from tests.benchmarks.measure import Lines, Probe, WrongResult, run_rounds
from tests.benchmarks.measure import Settings as Rounds
from tests.benchmarks.models import Shape, Workload
from tests.benchmarks.token_pipeline import columns
from tests.optim import oracle

ROOT, RESULTS = Path(__file__).parents[2], Path(__file__).parent / "results"


@pytest.mark.parametrize("name", ["token_pipeline", "llama", "elastic", "lamb"])
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


@pytest.mark.parametrize(
    ("name", "plan"), [("", large_batch.Plan()), ("_again", large_batch.Plan((512,), range(3, 9)))]
)
def test_figures_of_large_batches_in_the_docs_are_what_the_runs_say(name: str, plan: large_batch.Plan) -> None:
    done = large_batch.losses_in(Lines(RESULTS / f"large_batch{name}" / "runs.jsonl"))
    text = (ROOT / "docs/lamb.md").read_text().replace("**", "")
    assert large_batch.needed(plan, done) == []
    for line in large_batch.report(plan, done)[2 : 4 if name else 6]:
        assert (line.split("|")[2].strip() if name else line) in text


def test_columns_slicings_and_cases() -> None:
    every = ["one", "deepspeed", "deepspeed2", "ours1", "ours2", "ours4", "ours8", "ours16", "auto"]
    assert list(columns(Workload(Shape(), 1))) == every
    found = elastic.columns(Workload(Shape(), 2), 5, [4])
    ours = ["ours4", "kept-4", "reshaped-4", "cached-4", "measured-4"]
    assert [column.name for column in found] == [*ours, "deepspeed6", "deepspeed7", "replicas"]
    assert {column.trains for column in found} == {"everything", "all but 5"}
    assert all(sum(run.slices) == 1024 for run in prediction.runs(1024, 2))
    cases = emulation.cases_for(4, 2, 160, 8)
    assert cases[0].lengths == (160,) and all(sum(case.lengths) == 160 for case in cases)
    with pytest.raises(WrongResult):
        emulation.check_losses([1.0, 1.01])


def test_a_change_of_shape_costs_what_its_first_steps_take_beside_the_others() -> None:
    seconds = [9.0, 1.0, 1.0, 1.0, 1.0, 1.5, 0.7, 0.5, 0.6, 0.5]
    assert elastic.transitions_in(seconds, 5) == [pytest.approx((1.2, 2.4))]


def test_columns_of_lamb_work_on_the_tensors_of_bert() -> None:
    """Each optimizer moves all parameters, and the moments that all share."""
    assert [lamb.parameters_of(model) for model in ("bert-base", "bert-large")] == [110_106_428, 336_226_108]
    case = lamb.Case("tiny")
    for column in ("adamw", "eager", "adamw2", "read"):  # the others need the compiled op
        kept = [*case.parameters, *(moment for both in case.moments.values() for moment in both)]
        before = [tensor.clone() for tensor in kept]
        case(column)
        same = {torch.equal(old, new) for old, new in zip(before, kept, strict=True)}
        assert same == {column == "read"}, column


def test_eager_lamb_is_the_papers() -> None:
    parameter, *gradients = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    optimizer, right = lamb.EagerLamb([parameter], **{**lamb.SETTINGS, "lr": 0.1}), oracle.Oracle(lr=0.1)
    for gradient in gradients:
        before, parameter.grad = parameter.clone(), gradient
        optimizer.step()
        ((expected,), _) = right.step([before], [gradient])
        assert oracle.step_error(before, parameter, expected) <= oracle.STEP_TOLERANCE


def test_fine_tuning_probes_first_and_trains_the_fastest_of_each_kind() -> None:
    plan, finished = elastic_finetune.Plan((0, 1), (1 / 4, 1 / 2)), elastic_finetune.Finished([], {})
    while (missing := elastic_finetune.needed(plan, finished)) and missing[0][0]:
        run = missing[0][1]
        seconds = {16: 0.8, 8: 0.7, 4: 0.9}[run.micro_batch] + 0.3 * (run.partition == "parameters")
        finished.probes.append((run, seconds))
    frozen = [(column, 0.25) for column in ("freeze", "reshape", "cache")]
    rows = [("pipeline", None), ("replicas", None), *frozen, ("cache", 0.5)]
    assert [(run.column, run.alpha) for _, run in missing] == rows + rows[::-1] and len(finished.probes) == 24
    assert {run[3:] for _, run in missing} == {("uniform", 8)}
    for _, run in missing:
        found = {"seconds": [50.0, 25.0 if run.column == "cache" else 50.0], "fastest": [0.5] * 2, "steps": 10}
        finished.results[run] = {**found, "dev": [80.0, 88.0], "test": 87.0 + run.seed, "slowdown": [1.1]}
    assert elastic_finetune.needed(plan, finished) == []
    last = "| ours with cache, alpha 0.5 | 2 | 75.0 ± 0.0 | 1.33 | 10 ± 0 | 88.00 ± 0.00 | 87.50 ± 0.71 | 1.10 |"
    assert elastic_finetune.table(plan, finished)[-1] == last


MOVED = [[(3, 0, 1, 2)], [(10, 2, 1, 2)], [(20, 4, 1, 2)], [(30, 5, 1, 2)], []]
READ = [{"read": 0, "continued": 0}] * 4 + [{"read": 160, "continued": 0}]


def test_a_run_that_is_not_what_its_column_is_about_is_found() -> None:
    for column, changed, said in (
        ("cache", {}, []),
        ("cache", {"frozen": [0, 2, 4, 4, 5]}, ["frozen"]),
        ("freeze", {"counts": [{}] * 5}, ["changes"]),
        ("cache", {"counts": READ[:1] * 5}, ["counts"]),
        ("reshape", {}, ["counts"]),
    ):
        found = {"seconds": [1.0] * 5, "frozen": [0, 2, 4, 5, 5], "changes": MOVED, "counts": READ} | changed
        wrong = what_is_wrong(Run(column, 0, 1 / 4, "uniform", 8), found, 8)
        assert [one.partition(":")[0] for one in wrong] == said


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_read_and_trained(task: str) -> None:
    settings = Settings(task, None, True, 64, 1e-3, epochs=1, batch=8)
    layers, again = ([spec.build() for spec in layers_of(settings, 0)] for _ in range(2))
    for one, other in zip(layers, again, strict=True):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    value, labels = read(settings)["train"][torch.arange(4)]
    for layer in layers:
        value = layer(value)
    loss = mean_loss(value, labels)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(value.shape[-1]), rel=0.2)
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


def ran(outcome: str = "passed", engine: str = suite.OURS, trained: int = 6) -> suite.Ran:
    return suite.Ran(outcome, "its output", {(engine, "engine"): 2, (engine, "train_batch"): trained})


def test_a_test_of_deepspeeds_that_passes_without_our_engine_fails() -> None:
    plain = ran(engine=suite.PLAIN)
    assert suite.complaint(plain, ran()) == suite.complaint(ran("failed"), ran("failed")) == ""
    wrong = ((suite.Ran(), "missing"), (plain, "with the key a PipelineEngine ran"), (ran(trained=5), "did {"))
    for ours, said in wrong:
        assert suite.complaint(plain, ours).startswith(said)
        assert suite.report({"good": plain, "case": plain}, {"good": ran(), "case": ours}) == 1


# ------------------------------------------------------------------------------------------------------ rounds and probes

QUIET, NOISY, SLOW = Probe(1.0, 1.1), Probe(1.0, 1.3), Probe(1.2, 1.3)


def test_a_round_is_dropped_where_two_take_over_1_15_times_what_one_takes() -> None:
    for *probes, clean in ((QUIET, QUIET, True), (NOISY, QUIET, False), (QUIET, NOISY, False), (QUIET, SLOW, False)):
        (one,) = run_rounds({"a": lambda: 1.0}, Rounds(1, 1, patience=0), iter(probes).__next__).rounds
        assert one.clean is clean


def test_minima_are_of_clean_rounds_and_fewer_than_three_are_inconclusive() -> None:
    probes, times = iter([QUIET, QUIET, QUIET, NOISY, QUIET, QUIET]), iter([5.0, 10.0, 1.0, 1.0, 4.0, 12.0])
    columns = {"slow": times.__next__, "peer": times.__next__}
    result = run_rounds(columns, Rounds(2, 9, patience=0), probes.__next__)
    # every other round is in the reverse order
    assert [one.seconds for one in result.rounds] == [
        {"slow": 5.0, "peer": 10.0}, {"slow": 1.0, "peer": 1.0}, {"slow": 4.0, "peer": 12.0},
    ]  # fmt: skip
    assert result.seconds == {"slow": 4.0, "peer": 10.0}
    head, _, line, peer = result.table("title", "peer")
    assert head == "title: INCONCLUSIVE, fewer than 3 clean: 2 clean rounds of 3, two at once 1.10x slower than one"
    assert line.split() == ["slow", "4", "0.40", "2.50"] and peer.split() == ["peer", "10", "1.00", "1.00"]


def test_three_clean_rounds_are_enough_and_without_a_clean_one_the_attempts_end_it() -> None:
    result = run_rounds({"a": itertools.count(2.0).__next__}, Rounds(3, 9), lambda: QUIET)
    assert result.state == "3 clean rounds of 3, two at once 1.10x slower than one"
    result = run_rounds({"a": itertools.count(2.0).__next__}, Rounds(3, 4, patience=1), lambda: NOISY)
    assert len(result.rounds) == 4 and result.seconds == {"a": 2.0} and result.state.startswith("INCONCLUSIVE")


def test_a_round_begins_when_the_machine_is_quiet_or_patience_ends() -> None:
    probes = iter([NOISY, NOISY, QUIET, QUIET, NOISY, NOISY, NOISY, QUIET])
    rounds = run_rounds({"a": lambda: 1.0}, Rounds(2, 2, patience=2), probes.__next__).rounds
    assert [(one.before, one.after) for one in rounds] == [(QUIET, QUIET), (NOISY, QUIET)]


def test_the_fastest_call_counts_and_the_first_does_not() -> None:
    clock, calls = iter([0.0, 5.0, 10.0, 12.0]), []
    assert measure.fastest(lambda: calls.append(1), 2, clock.__next__) == 2.0 and len(calls) == 3


def test_columns_that_train_differently_are_refused() -> None:
    trains = {"a": "all", "b": "all", "c": "some"}
    measure.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.00005], "c": [3.0, 1.0]}, trains)
    with pytest.raises(WrongResult, match=r"b has losses \[2.0, 1.1\] in its first steps, a has \[2.0, 1.0\]"):
        measure.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.1]}, trains)


def test_a_file_keeps_whole_lines_of_its_settings(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "folder" / "runs.jsonl", {"lr": 1e-4, "alphas": (1, 2)})
    lines.add(run=1)
    with open(lines.path, "a") as file:
        file.write('{"run": 2, "sett')  # of a process that was killed
    assert lines.read() == [{"run": 1}]
    lines.add(run=3)
    Lines(lines.path, {"lr": 2e-4}).add(run=4)
    assert lines.read() == [{"run": 1}, {"run": 3}]
    assert Lines(lines.path).read() == [{"run": 1}, {"run": 3}, {"run": 4}]

"""The fine-tuning benchmark in short: all of it runs and goes on where it was, what it plans, checks and says is right."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import elastic_finetune, elastic_finetune_picture
from tests.benchmarks.elastic_finetune import parse, settings_of
from tests.benchmarks.elastic_finetune_models import mean_loss
from tests.benchmarks.elastic_finetune_picture import curves
from tests.benchmarks.elastic_finetune_plan import (
    Finished,
    Job,
    Plan,
    Probed,
    Result,
    Store,
    chosen_alpha,
    expected_frozen,
    needed,
    probes,
    what_is_wrong,
)
from tests.benchmarks.elastic_finetune_report import epochs_table, launch_lines, table, target_lines
from tests.benchmarks.elastic_finetune_run import (
    CACHE,
    COLUMNS,
    FREEZE,
    OURS,
    PIPELINE,
    REPLICAS,
    RESHAPE,
    Change,
    Run,
)
from tests.benchmarks.elastic_finetune_tasks import TASKS, Samples, collate, layers_of, read

PLAN = Plan(32, (0, 1, 2), (1 / 4, 1 / 2))
ENTRIES, STEPS, EPOCHS = 8, 10, 5


def result(run: Run, seconds: float = 100.0, dev: float = 88.0, test: float = 88.0) -> Result:
    """What a run of the column has to be."""
    frozen = expected_frozen(run.alpha, ENTRIES, EPOCHS)
    moves = run.column in (RESHAPE, CACHE)
    shape = (1, 2) if moves or run.column == REPLICAS else (2, 1)
    changes = [Change(3, 0, 1, 2)] if moves else []
    changes += [Change(STEPS * n, frozen[n], *shape) for n in range(1, EPOCHS) if frozen[n] > frozen[n - 1]]
    counts = [{"read": 0, "continued": 0, "computed": 320, "kept": 320} if run.column == CACHE else {}] * 2
    counts += [{"read": 160, "continued": 160, "computed": 0, "kept": 160} if run.column == CACHE else {}] * 3
    each = [seconds / EPOCHS] * EPOCHS
    return Result(
        run, STEPS, each, [one / STEPS for one in each], [0.5] * EPOCHS, [dev] * EPOCHS, frozen, [shape] * EPOCHS, counts,
        changes, [1.1] * (EPOCHS + 1), test,
    )  # fmt: skip


def made(plan: Plan, train: Callable[[Run], Result]) -> tuple[Finished, list[Job]]:
    """What the sweep ends with, and what it did."""
    finished, jobs = Finished(), []
    while missing := needed(plan, finished):
        job = missing[0]
        jobs.append(job)
        if job.probe:
            seconds = {16: 0.8, 8: 0.7, 4: 0.9}[job.run.micro_batch] + 0.3 * (job.run.partition == "parameters")
            finished.probes.append(Probed(job.run, seconds, seconds + 0.1))
        else:
            finished.results.append(train(job.run))
    return finished, jobs


SECONDS = {PIPELINE: 100.0, REPLICAS: 90.0, FREEZE: 95.0, RESHAPE: 60.0, CACHE: 45.0}


def usual(run: Run) -> Result:
    """Half of the layers frozen at once is faster, and does harm."""
    harm = 3.0 if run.alpha == 1 / 2 else 0.0
    return result(run, SECONDS[run.column] * (0.8 if harm else 1.0), 88.0 - harm + 0.1 * run.seed, 87.0 - harm)


# ----------------------------------------------------------------------------------------------------------------- plan


def test_probes_are_of_all_partitions_and_micro_batches() -> None:
    found = probes(PLAN)
    assert [(run.partition, run.micro_batch) for run in found if run.column == PIPELINE] == [
        (partition, size) for partition in ("uniform", "parameters") for size in (4, 8, 16)
    ]
    assert [run.micro_batch for run in found if run.column == REPLICAS] == [4, 8, 16] and len(found) == 12
    assert {run.alpha for run in found} == {None}
    assert [run.micro_batch for run in probes(replace(PLAN, batch=16, columns=(REPLICAS,)))] == [4, 8]


def test_seed_by_seed_and_alpha_is_chosen_before_the_rest() -> None:
    finished, jobs = made(PLAN, usual)
    assert [job.probe for job in jobs] == [True] * 24 + [False] * (3 * 4 + 3 * 2)
    assert [job.run for job in jobs[:24]] == probes(PLAN) * 2 and len(needed(PLAN, Finished())) == 24
    kinds = [(job.run.column, job.run.alpha, job.run.seed) for job in jobs[24:]]
    first = [(PIPELINE, None), (REPLICAS, None), (CACHE, 1 / 4), (CACHE, 1 / 2)]
    assert kinds[:8] == [(*kind, 0) for kind in first] + [(*kind, 1) for kind in first[::-1]]
    assert {kind[:2] for kind in kinds[12:]} == {(FREEZE, 1 / 4), (RESHAPE, 1 / 4)}
    assert len(set(jobs[24:])) == 18 and needed(PLAN, finished) == []
    assert {(run.partition, run.micro_batch) for run in (job.run for job in jobs[24:])} == {("uniform", 8)}


def test_the_fastest_of_all_rounds_is_trained() -> None:
    finished, _ = made(PLAN, usual)
    finished.results.clear()
    finished.probes.append(Probed(Run(PIPELINE, 0, None, "parameters", 16), 0.6, 0.9))
    assert needed(PLAN, finished)[0].run == Run(PIPELINE, 0, None, "parameters", 16)
    said = launch_lines(finished)
    assert len(said) == 3 and said[0].count("**") == 2 and said[0].endswith("**parameters 16: 0.600 s**")


def test_alpha_is_the_fastest_that_does_no_harm_else_the_most_accurate() -> None:
    assert chosen_alpha(PLAN, made(PLAN, usual)[0]) == 1 / 4
    assert chosen_alpha(PLAN, made(PLAN, lambda run: replace(usual(run), dev=[88.0] * EPOCHS))[0]) == 1 / 2

    def harms(run: Run) -> Result:
        return replace(usual(run), dev=[90.0 - (run.column == CACHE) * (20 - 10 * (run.alpha or 0))])

    assert chosen_alpha(PLAN, made(PLAN, harms)[0]) == 1 / 2
    finished, _ = made(PLAN, usual)
    finished.results = [one for one in finished.results if one.run.column != CACHE or one.run.seed < 2]
    assert chosen_alpha(PLAN, finished) is None


def test_frozen_layers_follow_the_rule() -> None:
    # 7 (1 - (1 - alpha)^T), rounded up
    assert expected_frozen(1 / 3, 8, 5) == [0, 3, 4, 5, 6] and expected_frozen(None, 8, 2) == [0, 0]
    assert expected_frozen(1 / 4, 8, 5) == [0, 2, 4, 5, 5] and expected_frozen(1 / 2, 8, 5) == [0, 4, 6, 7, 7]


# ---------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("column", COLUMNS)
def test_a_run_that_is_right_is_right(column: str) -> None:
    run = Run(column, 0, 1 / 4 if column in OURS else None, "uniform", 8)
    assert what_is_wrong(result(run), ENTRIES) == []


@pytest.mark.parametrize(
    ("column", "wrong", "said"),
    [
        (FREEZE, {"frozen": [0, 2, 4, 4, 5]}, "frozen layers"),
        (FREEZE, {"changes": [Change(12, 2, 2, 1)]}, "before steps"),
        (FREEZE, {"changes": [Change(STEPS, 2, 1, 2), Change(20, 4, 1, 2), Change(30, 5, 1, 2)]}, "shapes"),
        (RESHAPE, {"changes": [Change(STEPS, 2, 2, 1), Change(20, 4, 2, 1), Change(30, 5, 2, 1)]}, "shapes"),
        (CACHE, {"counts": [{"read": 0, "continued": 0}] * EPOCHS}, "cache"),
        # the fourth frozen epoch has as many frozen layers as the third
        (CACHE, {"counts": [{"read": 0, "continued": 320}] * EPOCHS}, "cache"),
        (RESHAPE, {"counts": [{"read": 1, "continued": 0}] * EPOCHS}, "cache"),
        (PIPELINE, {"frozen": [0, 0, 0, 0, 1]}, "frozen layers"),
        (PIPELINE, {"changes": [Change(3, 0, 1, 2)]}, "shapes"),
    ],
)
def test_a_run_that_is_something_else_is_found(column: str, wrong: dict[str, Any], said: str) -> None:
    run = Run(column, 0, 1 / 4 if column in OURS else None, "uniform", 8)
    (found,) = what_is_wrong(replace(result(run), **wrong), ENTRIES)
    assert found.startswith(said) or said in found


# ---------------------------------------------------------------------------------------------------------------- report


def test_targets() -> None:
    finished, _ = made(PLAN, usual)
    assert target_lines(PLAN, finished, 85.0) == [
        "alpha 0.25 was chosen on dev",
        "the pipeline's accuracy on dev is 88.10 %, at least 85: pass",
        "2.22 times as fast as the pipeline, at least 2.0: pass; 2.22 if all steps were as fast as the fastest of their epoch",
        "accuracy on test 0.00 points below the pipeline's, at most 0.50 below: pass",
        "2.00 times as fast as data parallel, more than 1: pass; 2.00 if all steps were as fast as the fastest of their epoch",
    ]

    def bad(run: Run) -> Result:
        one = usual(run)
        return replace(one, test=one.test - (run.column == CACHE), seconds=[20.0] * EPOCHS)

    said = [line for line in target_lines(PLAN, made(PLAN, bad)[0], 89.0) if "missed" in line]
    assert len(said) == 4
    finished.results.pop()
    finished.results = [one for one in finished.results if one.run.column != REPLICAS]
    assert target_lines(PLAN, finished) == ["not all runs are finished"]


def test_a_standard_deviation_of_both_is_allowed() -> None:
    spread = {0: -2.0, 1: 0.0, 2: 2.0}

    def noisy(run: Run) -> Result:
        one = usual(run)
        return replace(one, test=one.test + spread[run.seed] - 1.9 * (run.column == CACHE))

    assert any(
        "1.90 points below the pipeline's, at most 2.00 below: pass" in line
        for line in target_lines(PLAN, made(PLAN, noisy)[0])
    )


def test_tables_have_every_column() -> None:
    finished, _ = made(PLAN, usual)
    lines = table(PLAN, finished)
    assert (
        len(lines) == 2 + 6
        and "| 3 | 45.0 ± 0.0 | 2.22x | 2.00x | 88.10 ± 0.10 | 87.00 ± 0.00 | 45.0 ± 0.0 |" in lines[-1]
    )
    assert "5 frozen, 1 x 2" in epochs_table(PLAN, finished)[-1]
    assert len(table(PLAN, Finished())) == 2 and target_lines(PLAN, Finished()) == ["not all runs are finished"]


def test_a_picture_has_a_line_for_each_column(tmp_path: Path) -> None:
    finished, _ = made(PLAN, usual)
    found = {curve.column: curve.points for curve in curves(finished)}
    assert list(found) == list(COLUMNS) and found[CACHE][-1] == (pytest.approx(45.0), pytest.approx(88.1))
    path, picture = tmp_path / "bert.jsonl", tmp_path / "accuracy.svg"
    store = Store(path, {"task": "bert"})
    for one in finished.results:
        store.write(one)
    assert elastic_finetune_picture.main([str(path), str(path), "--output", str(picture)]) == 0
    circles = [one for one in ElementTree.fromstring(picture.read_text()).iter() if one.tag.endswith("circle")]
    assert len(circles) == 2 * len(COLUMNS) * EPOCHS
    with pytest.raises(SystemExit):
        elastic_finetune_picture.main([str(tmp_path / "none"), "--output", str(picture)])


def test_a_picture_has_our_columns_where_some_seeds_are_missing() -> None:
    """An alpha is chosen by the seeds that all have; those of others are in the means."""
    finished, _ = made(PLAN, usual)
    finished.results = [one for one in finished.results if one.run.alpha != 1 / 2 or one.run.seed == 1]
    found = {curve.column: curve.points[-1] for curve in curves(finished)}
    assert list(found) == list(COLUMNS) and found[CACHE] == (pytest.approx(45.0), pytest.approx(88.1))
    finished.results = [one for one in finished.results if one.run.alpha != 1 / 4 or one.run.seed != 1]
    with pytest.raises(ValueError, match="got no seed of which all alphas have a run, must have one"):
        curves(finished)


# ------------------------------------------------------------------------------------------------------------- the file


def test_store_keeps_lines_and_passes_over_half_of_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "folder" / "bert.jsonl", {"lr": 1e-4, "cache": (("dtype", "exact"),)})
    run = Run(CACHE, 1, 1 / 3, "uniform", 16)
    lines = [Probed(replace(run, alpha=None), 0.5, 0.75), result(run), result(replace(run, seed=2))]
    for one in lines[:2]:
        store.write(one)
    with open(store.path, "a") as file:
        file.write('{"kind": "run", "sett')  # a process that was killed
    assert store.read() == Finished(lines[:1], lines[1:2])
    store.write(lines[2])
    assert store.read() == Finished(lines[:1], lines[1:])
    assert Store(store.path, {"lr": 2e-4}).read() == Finished()
    assert Store(store.path, None).read() == store.read()


# ------------------------------------------------------------------------------------------------------------------ data


def settings(*arguments: str) -> Any:
    return settings_of(parse(arguments))


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_can_be_learned(task: str) -> None:
    found = settings("--quick", "--task", task)
    data = read(found)
    assert len(data.train) % found.batch == 0 and data.digest == read(found).digest
    layers = [spec.build() for spec in layers_of(found, 0)]
    again = [spec.build() for spec in layers_of(found, 0)]
    others = [spec.build() for spec in layers_of(found, 1)]
    for layer, same in zip(layers, again, strict=True):
        for (name, one), (_, other) in zip(layer.named_parameters(), same.named_parameters(), strict=True):
            assert torch.equal(one, other), name
    head = [p for p in layers[-1].parameters() if p.dim() > 1][-1]
    assert not torch.equal(head, [p for p in others[-1].parameters() if p.dim() > 1][-1])
    value, labels = data.train.some(torch.arange(4))
    for layer in layers:
        value = layer(value)
        # what DeepSpeed sends from stage to stage
        assert all(part.is_contiguous() for part in (value if isinstance(value, tuple) else (value,)))
    classes = value.shape[-1]
    assert value.shape == (*labels.shape, classes)
    loss = mean_loss(value, labels)
    assert loss.item() == pytest.approx(math.log(classes), rel=0.2)
    loss.backward()
    assert all(p.grad is not None for layer in layers for name, p in layer.named_parameters())


def test_rows_make_the_micro_batch_that_they_are() -> None:
    samples = Samples([torch.arange(12).view(6, 2), torch.arange(6)], torch.arange(6) * 2)
    inputs, labels = collate([samples[index] for index in (4, 1)])
    assert torch.equal(inputs[0], samples.some([4, 1])[0][0]) and torch.equal(inputs[1], torch.tensor([4, 1]))
    assert torch.equal(labels, torch.tensor([8, 2]))
    assert samples.first(3).labels.tolist() == [0, 4, 8] and len(samples.first(None)) == 6
    single = Samples([torch.arange(6)], torch.arange(6))
    assert torch.equal(single.some([3])[0], torch.tensor([3])) and torch.equal(
        collate([single[3]])[0], torch.tensor([3])
    )


def test_images_are_read_from_a_zip_file(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for part, count in (("train", 30), ("test", 4)):
            for kind, colour in (("cat", 200), ("dog", 20)):
                for number in range(count):
                    file = BytesIO()
                    pillow.new("RGB", (32, 32), (colour, 0, 0)).save(file, "PNG")
                    archive.writestr(f"{part}/{kind}/{number:04}.png", file.getvalue())
    data = read(settings("--task", "vit", "--data", str(path), "--batch", "16"))
    assert (len(data.train), len(data.dev), len(data.test)) == (48, 6, 8)
    (images,) = data.test.inputs
    assert images.shape == (8, 3, 32, 32) and images.dtype == torch.uint8
    assert images[:, 0, 5, 5].tolist() == [200] * 4 + [20] * 4 and data.test.labels.tolist() == [0] * 4 + [1] * 4


def test_the_label_of_a_byte_is_the_next_one(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"module{number}.py").write_text("".join(f"value = {number + line}\n" for line in range(600)))
    data = read(settings("--task", "gpt", "--data", str(tmp_path), "--limit", "64"))
    (tokens, places), labels = data.train.some(torch.arange(5))
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and places[0].tolist() == list(range(128))
    assert bytes(tokens[0].tolist()).decode().count("value") > 5 and len(data.train) == 64


def test_what_is_not_there_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert elastic_finetune.main(["--task", "vit", "--folder", str(tmp_path)]) == 1
    assert "--data: got None, must be what vit reads" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--alphas", "1/3,1"], ["--alphas", "x"], ["--columns", "cash"], ["--seeds", "0"]]
)
def test_arguments_that_make_no_sense_are_refused(arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)


# ------------------------------------------------------------------------------------------------------------- all of it


@pytest.mark.full
def test_all_of_it_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every column trains the same samples from the same weights, freezes and moves what it should, and uses its cache."""
    arguments = ["--quick", "--folder", str(tmp_path)]
    assert elastic_finetune.main(arguments) == 0
    path = tmp_path / "bert-quick.jsonl"
    lines = path.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    runs = [one for one in found if one["kind"] == "run"]
    assert {one["run"]["column"] for one in runs} == set(COLUMNS) and len(runs) == 6
    # fp32, in other orders of sums, and key biases have rounding for gradients
    assert [one["losses"][0] for one in runs] == pytest.approx([runs[0]["losses"][0]] * 6, rel=1e-4)
    for alpha in {one["run"]["alpha"] for one in runs} - {None}:
        same = [one for one in runs if one["run"]["alpha"] == alpha]
        assert all(one["losses"] == pytest.approx(same[0]["losses"], rel=1e-4) for one in same)
    assert "Targets" in capsys.readouterr().out
    path.write_text("".join(f"{line}\n" for line in lines) + '{"kind"')  # killed while it wrote
    assert elastic_finetune.main([*arguments, "--report"]) == 0
    assert elastic_finetune.main(arguments) == 0  # nothing is missing
    assert path.read_text().splitlines()[:-1] == lines

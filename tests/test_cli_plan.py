"""The commands ``ds_terapipe plan`` and ``ds_terapipe simulate``."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import ds_terapipe.config  # noqa: F401  DeepSpeed's own messages at its import are not the commands'
from ds_terapipe import cli
from ds_terapipe.commands.progress import progress
from ds_terapipe.plan import (
    LayerSeconds,
    MeasuredCost,
    MemoryModel,
    Plan,
    Sample,
    StageCost,
    StageMemory,
    sample_points,
)
from ds_terapipe.plan.costs.analytic_memory import analytic_memory, fixed_bytes
from ds_terapipe.plan.costs.hardware import Model
from ds_terapipe.schedule import NAMES, Op
from ds_terapipe.tracing.chrome import read
from tests.plan.costs import ExampleCost

MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 50304}
SMALL = ["--granularity", "64", "--seq-length", "512"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def figures(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json", "-")
    assert status == 0, err
    return dict(json.loads(out))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    block = {"slices": "auto", "granularity": 64, "schedule": "1f1b", "memory_gb": 4}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    path.write_text(json.dumps({**sizes, "token_pipeline": block}))
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    cost = ExampleCost([1.0, 1.5], link=1e-7)
    points = sample_points(512, 8)
    stages = [
        StageCost([Sample(n, c, cost.forward(k, n, c), cost.backward(k, n, c)) for n, c in points]) for k in range(2)
    ]
    memory = MemoryModel(tuple(StageMemory(activations=1e5) for _ in range(2)))
    about = {"ranks": {"pipe": 2, "data": 1, "model": 1}, "overhead_s": 0.25, "weight_gradients": "slice"}
    path = tmp_path / "costs.json"
    MeasuredCost(stages, [[(8, 1e-6), (512, 5e-5)]], 1, about, memory).save(path)
    return path


def test_a_plan_is_printed_written_and_simulated_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    target, out_json = tmp_path / "plan.json", tmp_path / "figures.json"
    shape = ["--model", model, "--cluster", "p3.16xlarge"]
    status, out, _ = run(
        capsys, "plan", *shape, *SMALL, "--stages", 4, "--sequences", 4, "--output", target, "--json", out_json
    )
    plan, data = Plan.load(target), json.loads(out_json.read_text())
    assert status == 0 and all(line in out for line in plan.lines())
    assert {key: data[key] for key in plan.to_dict()} == plan.to_dict()
    assert (plan.stages, plan.micro_batches, plan.sequences, plan.seq_length) == (4, 4, 1, 512)
    assert plan.about["model"] == "model" and plan.memory[0].fixed > 0
    simulated = figures(capsys, "simulate", "--plan", target, *shape)
    assert simulated["predicted_step_s"] == pytest.approx(plan.step_s, rel=1e-12)
    assert simulated["slices"] == list(plan.slices) and simulated["bubble"] == pytest.approx(plan.bubble)
    assert [use["total"] for use in simulated["memory_bytes"]] == [use.total for use in plan.memory]


def test_the_configuration_is_read_and_arguments_win(
    capsys: pytest.CaptureFixture[str], model: Path, config: Path
) -> None:
    arguments = ["plan", "--ds-config", config, "--model", model, "--stages", 2, "--seq-length", 512]
    found = figures(capsys, *arguments)
    assert (found["sequences"], found["micro_batches"], found["schedule"]) == (2, 3, "1f1b")
    assert found["memory_limit_bytes"] == 4e9 and found["memory_bytes"][0]["fixed"] == 0
    assert all(length % 64 == 0 for length in found["slices"])
    found = figures(
        capsys, *arguments, "--sequences", 4, "--micro-batches", 4, "--schedule", "terapipe", "--memory-gb", 5
    )
    assert (found["sequences"], found["micro_batches"], found["schedule"]) == (1, 4, "terapipe")
    assert found["memory_limit_bytes"] == 5e9


def test_zero_shares_the_optimizer_among_the_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    shape, sizes = Model("model", 8, 1024, 16, vocab_size=50304), {"train_micro_batch_size_per_gpu": 1}
    for zero, shards in (({}, 1), ({"zero_optimization": {"stage": 1}}, 4)):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({**sizes, **zero}))
        arguments = ["--model", model, "--ds-config", path, *SMALL, "--stages", 2, "--data-parallel", 4]
        found = [use["fixed"] for use in figures(capsys, "plan", *arguments)["memory_bytes"]]
        assert found == list(fixed_bytes(shape, (4, 4), 1, shards))


def test_deepspeed_s_batch_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for sizes, replicas, expected in [
        ((24, 2, 3), None, (2, 3)),
        ((24, 2, None), 4, (2, 3)),
        ((24, None, 3), 4, (2, 3)),
        ((24, None, None), 4, (6, 1)),
        ((None, 2, "auto"), None, (2, 2)),  # no cost: as many micro-batches as stages
    ]:
        path.write_text(json.dumps({name: size for name, size in zip(names, sizes, strict=True) if size}))
        extra = ["--data-parallel", replicas] if replicas else []
        found = figures(capsys, "simulate", "--ds-config", path, "--stages", 2, *extra)
        assert (found["sequences"], found["micro_batches"]) == expected
    path.write_text('{"train_batch_size": 2}')
    status, _, err = run(capsys, "simulate", "--ds-config", path, "--data-parallel", 4)
    assert status == 1 and "train_batch_size: got 2, must be micro-batch size x" in err


def test_uneven_stages_get_better_boundaries(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ["plan", "--model", model, *SMALL, "--stages", 2, "--sequences", 4]
    found = figures(capsys, *arguments, "--stage-layers", "1,7")
    advice = found["stage_layers"]
    assert advice["present"] == [1, 7] and sum(advice["best"]) == 8 and advice["slowest_stage_gain"] > 0.2
    assert advice["predicted_step_s"] < found["predicted_step_s"]
    best = ",".join(map(str, advice["best"]))
    _, out, _ = run(capsys, *arguments, "--stage-layers", "1,7")
    assert f"--stage-layers {best} in place of 1,7" in out
    again = figures(capsys, *arguments, "--stage-layers", best)
    assert again["predicted_step_s"] <= advice["predicted_step_s"] * (1 + 1e-9)
    assert again["stage_layers"]["slowest_stage_gain"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        (
            (0, 0),
            "stages: 1,3 layers would take 25.0% less than 2,2 in the slowest stage: begin the stages of the",
        ),
        ((1, 1), "stages: --stage-layers 1,1 is as good as any"),
    ],
)
def test_boundaries_from_measured_layers(
    capsys: pytest.CaptureFixture[str], measured: Path, ends: tuple[int, int], line: str
) -> None:
    cost = MeasuredCost.load(measured)
    cost.layers = LayerSeconds(((3.0, 1.0), (1.0, 1.0)), ends)
    cost.save(measured)
    _, out, err = run(capsys, "plan", "--measured", measured, "--sequences", 4)
    assert line in out, (out, err)
    advice = figures(capsys, "plan", "--measured", measured, "--sequences", 4)["stage_layers"]
    assert advice == {
        "present": [2 - ends[0], 2 - ends[1]],
        "best": [1, 3] if ends == (0, 0) else [1, 1],
        "slowest_stage_gain": 0.25 if ends == (0, 0) else 0.0,
        "predicted_step_s": None,
    }


def test_micro_batches_are_compared(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ["plan", "--model", model, *SMALL, "--stages", 2, "--sequences", 4]
    found = figures(capsys, *arguments)
    advice = found["micro_batch_advice"]
    assert sorted((each["sequences"], each["micro_batches"]) for each in advice) == [(1, 4), (2, 2), (4, 1)]
    seconds = [each["predicted_step_s"] for each in advice]
    assert seconds == sorted(seconds)
    for each in advice:
        planned = figures(capsys, *arguments, "--micro-batches", each["micro_batches"])
        assert planned["predicted_step_s"] == pytest.approx(each["predicted_step_s"], rel=1e-9)


def test_too_little_memory_says_what_would_fit(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ["plan", "--model", model, *SMALL, "--stages", 2, "--sequences", 4]
    status, _, err = run(capsys, *arguments, "--memory-gb", 0.001)
    assert status == 1 and err.count("\n") == 1 and "memory_gb: got 0.001, must be at least " in err
    enough = err.split("must be at least ")[1].split(":")[0]
    assert run(capsys, *arguments, "--memory-gb", enough)[0] == 0
    status, _, err = run(capsys, "plan", "--model", "gpt3-13b", "--stages", 1)
    assert status == 1 and "p3.16xlarge: memory_gb: got 16, must be at least" in err
    assert "with weights, gradients and optimiser" in err


def test_measurements(capsys: pytest.CaptureFixture[str], measured: Path, tmp_path: Path) -> None:
    found = figures(capsys, "plan", "--measured", measured, "--sequences", 4, "--memory-gb", 1)
    assert (found["stages"], found["seq_length"], found["micro_batches"]) == (2, 512, 4)
    assert found["overhead_s"] == 0.25 and not found["weights_once"] and found["stage_layers"] is None
    assert found["about"]["ranks"]["pipe"] == 2
    data = json.loads(measured.read_text())
    data["measured_on"]["memory_limit_bytes"] = 2e9
    (tmp_path / "limited.json").write_text(json.dumps(data))
    assert figures(capsys, "plan", "--measured", tmp_path / "limited.json")["memory_limit_bytes"] == 2e9
    config = tmp_path / "with_path.json"
    config.write_text(json.dumps({"token_pipeline": {"slices": "auto", "measurements_path": str(measured)}}))
    again = figures(capsys, "plan", "--ds-config", config, "--sequences", 4, "--memory-gb", 1)
    assert again["predicted_step_s"] == found["predicted_step_s"]
    for arguments, message in [
        (["--stages", 3], "--stages: got 3, must be what"),
        (["--stage-layers", "1,1"], "--stage-layers: got"),
        (["--weight-gradients", "micro_batch"], "--weight-gradients: got"),
        (["--sequences", 4, "--micro-batches", 2], "sequences: got 1, must be the 2 of a micro-batch"),
        (["--seq-length", 1024], "got 1024, must be within what was measured, 512"),
    ]:
        status, _, err = run(capsys, "plan", "--measured", measured, *arguments)
        assert status == 1 and message in err and err.count("\n") == 1


def test_unit_costs_have_the_closed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "run.svg", tmp_path / "run.json"
    arguments = ["simulate", "--stages", 4, "--micro-batches", 3, "--slices", 8, "--schedule", "terapipe"]
    status, out, _ = run(capsys, *arguments, "--picture", picture, "--trace", trace)
    assert status == 0 and "unit costs: forward of a sequence 1, backward 2" in out
    found = figures(capsys, *arguments)
    assert found["predicted_step_s"] == pytest.approx(3 * 3 + 3 * 3 / 8, rel=1e-9) and found["unit_costs"]
    for row in found["per_stage"]:
        assert row["busy_s"] + row["idle_s"] == pytest.approx(found["predicted_step_s"])
        assert row["fill_s"] + row["imbalance_s"] + row["messages_s"] == pytest.approx(row["idle_s"])
        assert row["live_sequences"] == 3 and row["live_tokens"] == 3 * 2048
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    events = read(trace)
    assert max(event.end for event in events) == pytest.approx(found["predicted_step_s"], abs=1e-5)
    assert len([event for event in events if event.kind == Op.FORWARD.value]) == 4 * 3 * 8


def test_live_sequences_under_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "simulate", "--stages", 8, "--micro-batches", 32, "--slices", 4, "--schedule", "1f1b")
    assert found["per_stage"][0]["live_sequences"] == 2.75


def test_slices_as_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "simulate", "--stages", 2, "--slices", "128x2,64")
    assert found["slices"] == [128, 128, 64] and found["seq_length"] == 320
    for text, message in [
        ("1,x", "must be a number of equal slices, or lengths"),
        ("9000", "got 9000, must be at most the tokens of a sequence, 2048"),
    ]:
        status, _, err = run(capsys, "simulate", "--slices", text)
        assert status == 1 and message in err
    status, _, err = run(capsys, "simulate", "--slices", "64,64", "--seq-length", 256)
    assert status == 1 and "lengths that add up to the sequence, 256 tokens, not 128" in err


def test_schedules_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "compared.svg"
    arguments = ["simulate", "--compare", "--stages", 4, "--micro-batches", 4, "--slices", 4]
    status, out, _ = run(capsys, *arguments, "--picture", picture)
    assert status == 0
    found = figures(capsys, *arguments)
    rows = {row["schedule"] + str(len(row["slices"])): row for row in found["schedules"]}
    # (K - 1) (f + b) divided by nothing, by two chunks, by four slices
    steps = {name: row["predicted_step_s"] for name, row in rows.items()}
    assert set(steps) == {"1f1b1", "interleaved1", *(f"{name}4" for name in NAMES)}
    expected = {"1f1b1": 21, "interleaved1": 16.5, "terapipe4": 14.25, "1f1b4": 14.25}
    assert {name: steps[name] for name in expected} == pytest.approx(expected)
    assert rows["1f1b4"]["live_sequences"] == 1.75 and rows["terapipe4"]["live_sequences"] == 4
    assert all(row["name"] in out for row in rows.values()) and "interleaving does not beat slices" in out
    text = picture.read_text()
    assert all(row["name"].replace("'", "&#x27;") in text for row in rows.values())
    coarse = figures(capsys, *arguments[:-1], 1)
    assert any("interleaving beats" in line for line in coarse["verdicts"])
    odd = figures(capsys, "simulate", "--compare", "--stages", 4, "--micro-batches", 3, "--slices", 4)
    assert [row["schedule"] for row in odd["schedules"]] == ["1f1b", *NAMES]
    assert any("3 micro-batches are no multiple of the 4 stages" in line for line in odd["verdicts"])


def test_verdicts_follow_the_figures(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ["--model", model, *SMALL, "--stages", 4, "--sequences", 8]
    for command in (["plan"], ["simulate", "--compare"]):
        found = figures(capsys, *command, *arguments)
        kinds = [each["kind"] for each in found["alternatives"]]
        assert kinds == ["interleaved", "tensor_parallel", "tensor_parallel"]
        rows = found.get("schedules", [found])
        # the schedules with their best slices are the last of a comparison
        step = min(row["predicted_step_s"] for row in rows[-len(NAMES) :])
        for each, line in zip(found["alternatives"], found["verdicts"], strict=True):
            assert each["beats_slices"] == (each["predicted_step_s"] < step) and each["name"] in line
            assert ("does not beat" in line) != each["beats_slices"]


def test_what_does_not_fit_is_compared_and_marked(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ["simulate", "--compare", "--model", model, *SMALL, "--stages", 4, "--sequences", 16]
    fit = {row["name"]: row for row in figures(capsys, *arguments)["schedules"]}
    least = min(row["peak_bytes"] for row in fit.values())
    status, out, _ = run(capsys, *arguments, "--memory-gb", least / 1e10)
    assert status == 0 and out.count("does not fit into memory") >= len(fit)


def test_measured_costs_compared(capsys: pytest.CaptureFixture[str], measured: Path) -> None:
    found = figures(capsys, "simulate", "--measured", measured, "--micro-batches", 2, "--compare")
    assert [row["schedule"] for row in found["schedules"]] == ["1f1b", "interleaved", *NAMES]
    assert any("part of the measured stage" in line for line in found["verdicts"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"train_micro_batch_size_per_gpu": 1', "bad.json: is no JSON"),
        ("[]", "bad.json: got [], must be a DeepSpeed configuration"),
        ('{"token_pipeline": {"slices": -3}}', "bad.json: token_pipeline.slices: got -3"),
        ('{"token_pipeline": {"slicse": 3}}', 'bad.json: token_pipeline: unknown key "slicse"'),
        ('{"gradient_accumulation_steps": 0}', "bad.json: gradient_accumulation_steps: got 0"),
        (
            '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}',
            "bad.json: train_batch_size: got 7, must be micro-batch size x",
        ),
    ],
)
def test_a_bad_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path, content: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    status, _, err = run(capsys, "plan", "--ds-config", path, "--model", model, "--stages", 2)
    assert status == 1 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "--model: missing"),
        (["plan", "--model", "{model}"], "--stages: missing"),
        (["plan", "--model", "{model}", "--stages", "9"], "--stages: got 9, must be at most the model's layers, 8"),
        (["plan", "--model", "{model}", "--stages", "0"], "--stages: got 0, must be a positive number"),
        (["plan", "--model", "gpt4", "--stages", "2"], "gpt4: cannot be read"),
        (["plan", "--model", "{model}", "--cluster", "{model}", "--stages", "2"], "model.json: num_layers: got 8"),
        (["plan", "--cluster", "p3.16xlarge"], "--cluster: got no model"),
        (["plan", "--model", "{model}", "--stage-layers", "5,2"], '--stage-layers: got "5,2"'),
        (["plan", "--model", "{model}", "--stages", "2", "--tensor-parallel", "3"], "--tensor-parallel: got 3"),
        (["plan", "--model", "{model}", "--stages", "2", "--memory-gb", "nan"], "--memory-gb: got NaN"),
        (["simulate", "--stage-layers", "5,3"], "--stage-layers: got"),
        (["plan", "--measured", "{model}"], "model.json: format: got null"),
        (["simulate", "--plan", "{model}"], "model.json: format: got null"),
        (["simulate", "--sequences", "3", "--micro-batches", "2"], "--sequences: got 3, must be a multiple of 2"),
        (["simulate", "--trace", "x.json", "--compare"], "--trace: got"),
        (["simulate", "--picture", "{model}/x.svg"], "--picture: cannot write"),
        (["simulate", "--trace", "{model}/x.json"], "--trace: cannot write"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str], message: str
) -> None:
    status, _, err = run(capsys, *(argument.format(model=model) for argument in arguments))
    assert status == 1 and message in err and err.count("\n") == 1
    assert err.startswith(f"ds_terapipe {arguments[0]}: error: ")


def test_a_truncated_plan_names_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    target.write_text(json.dumps({"format": "ds_terapipe plan 1", "slices": [4, 4], "seq_length": 9}))
    status, _, err = run(capsys, "simulate", "--plan", target)
    assert status == 1 and "plan.json: slices: got [4, 4], must be lengths that add up to seq_length, 9" in err


def test_analytic_memory_of_the_standard_shape() -> None:
    # Korthikanti et al. 2022, table 2 without the scores: H (10 + 24 / T) bytes per token and layer
    shape = Model("m", 6, 512, 8, vocab_size=1000)
    for tensor in (1, 4):
        first, last = analytic_memory(shape, (4, 2), tensor, sequences=3).stages
        assert first.activations == pytest.approx(3 * 4 * 512 * (10 + 24 / tensor))
        assert last.activations - first.activations / 2 == pytest.approx(3 * 6 * 1000 / tensor)
        assert first.keys_values == pytest.approx(3 * 4 * 2 * 2 * 512 / tensor) == first.key_value_gradients / 2
        assert (first.received, first.sent, last.sent) == (0, 3 * 2 * 512, 0)
    # ZeRO, section 3.1: 16 bytes per parameter, of which 12 are shared by the replicas
    assert fixed_bytes(shape, (4, 2), 2)[0] == 16 * (4 * 12 * 512**2 + 512 * 1000) / 2
    assert fixed_bytes(shape, (4, 2), 2, 4)[1] == 7 * (2 * 12 * 512**2 + 512 * 1000) / 2


def test_progress_shows_up_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""
    with progress("planning", every_s=0.01), contextlib.redirect_stderr(io.StringIO()):
        while "so far" not in told:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert told.startswith("planning: 0 s so far")
    capsys.readouterr()
    with progress("planning", every_s=60):
        pass
    assert capsys.readouterr().err == ""

"""The commands ``ds_terapipe plan`` and ``ds_terapipe simulate``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import ds_terapipe.config  # noqa: F401  DeepSpeed's own messages at its import are not the commands'
from ds_terapipe import cli
from ds_terapipe.plan.costs.analytic_memory import analytic_memory
from ds_terapipe.plan.costs.cost import MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.hardware import Model
from ds_terapipe.plan.costs.memory import MemoryModel, StageMemory
from ds_terapipe.plan.result import Plan
from ds_terapipe.schedule import NAMES, Op, Placement
from ds_terapipe.tracing.chrome import read
from tests.plan.costs import ExampleCost, sample_points

MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 50304}
SMALL = ["--granularity", "64", "--seq-length", "512"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    searches = ("--search", 0.02) if arguments[0] in ("plan", "simulate") else ()
    status = cli.main([str(argument) for argument in (*arguments, *searches)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def figures(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json", "-")
    assert status == 0, err
    return dict(json.loads(out))


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status, _, err = run(capsys, *arguments)
    assert status == 1 and err.count("\n") == 1 and err.startswith(f"ds_terapipe {arguments[0]}: error: "), err
    return err


@pytest.fixture
def model(tmp_path):
    return written(tmp_path / "model.json", MODEL)


@pytest.fixture
def measured(tmp_path):
    cost, points = ExampleCost([1.0, 1.5], link=1e-7), sample_points(512, 8)
    stages = [StageCost([Sample(n, c, cost.forward(k, n, c), cost.backward(k, n, c)) for n, c in points]) for k in range(2)]
    memory = MemoryModel(tuple(StageMemory(activations=1e5) for _ in range(2)))
    about = {"ranks": {"pipe": 2, "data": 1, "model": 1}, "overhead_s": 0.25, "weight_gradients": "slice"}
    MeasuredCost(stages, [[(8, 1e-6), (512, 5e-5)]], 1, about, memory).save(tmp_path / "costs.json")
    return tmp_path / "costs.json"


def test_a_plan_is_printed_written_and_simulated_alike(tmp_path, capsys, model):
    target, out_json = tmp_path / "plan.json", tmp_path / "figures.json"
    shape = ["--model", model, "--cluster", "p3.16xlarge"]
    more = ["--stages", 4, "--sequences", 4, "--output", target, "--json", out_json]
    status, out, _ = run(capsys, "plan", *shape, *SMALL, *more)
    plan, data = Plan.load(target), json.loads(out_json.read_text())
    assert status == 0 and all(line in out for line in plan.lines())
    assert {key: data[key] for key in plan.to_dict()} == plan.to_dict()
    assert plan.placement.places == 4  # two stages on each
    assert (plan.stages, plan.micro_batches, plan.sequences, plan.seq_length) == (8, 4, 1, 512)
    assert plan.about["model"] == "model" and plan.memory[0].fixed > 0
    simulated = figures(capsys, "simulate", "--plan", target, *shape)
    assert simulated["predicted_step_s"] == pytest.approx(plan.step_s, rel=1e-12)
    turned = figures(capsys, "simulate", "--compare", *shape, *SMALL, *more[:4], "--schedule", "interleaved")["schedules"]
    alone = figures(capsys, "simulate", *shape, *SMALL, *more[:4], "--slices", 1, "--schedule", "1f1b")
    # without slices, and with some; DeepSpeed's has one stage on each place
    assert sum(row["schedule"] == "interleaved" for row in turned) == 2 and turned[0]["bubble"] == alone["bubble"]["total"]
    assert simulated["slices"] == list(plan.slices) and simulated["bubble"] == pytest.approx(plan.bubble)
    assert [use["total"] for use in simulated["memory_bytes"]] == [use.total for use in plan.memory]
    # embedding and two layers are frozen on the first of two places, a layer trains there, five on the second one
    placement, layer, table = Placement.of([0, 0, 1], [0, 3, 4, 11], 1), 12 * 1024**2, 1024 * 50304
    replace(plan, schedule="1f1b", order=None, memory=(), placement=placement).save(target)
    fixed = [use["fixed"] for use in figures(capsys, "simulate", "--plan", target, *shape)["memory_bytes"]]
    assert fixed == [2 * (2 * layer + table) + 16 * layer, 16 * (5 * layer + table)]
    busy = [place["busy_s"] for place in figures(capsys, "simulate", "--plan", target)["per_stage"]]
    assert busy == pytest.approx([4 * (3 - 3 / 4 * 2), 12])  # of 3 on each of 4 micro-batches


def test_the_configuration_is_read_and_arguments_win(tmp_path, capsys, model):
    block = {"slices": "auto", "granularity": 64, "schedule": "1f1b", "memory_gb": 4}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = written(tmp_path / "ds_config.json", {**sizes, "token_pipeline": block})
    arguments = ["plan", "--ds-config", config, "--model", model, "--stages", 2, "--seq-length", 512]
    found = figures(capsys, *arguments)
    assert (found["sequences"], found["micro_batches"], found["schedule"]) == (2, 3, "1f1b")
    assert found["memory_limit_bytes"] == 4e9 and found["memory_bytes"][0]["fixed"] == 0
    assert all(length % 64 == 0 for length in found["slices"])
    other = ["--sequences", 4, "--micro-batches", 4, "--schedule", "terapipe", "--memory-gb", 5]
    found = figures(capsys, *arguments, *other, "--tensor-parallel", 16, "--sequence-parallel", "--seq-length", 576)
    assert all(length % 16 == 0 for option in found["options"] for length in option["slices"])
    assert [found[name] for name in ("sequences", "micro_batches", "schedule", "memory_limit_bytes")] == [1, 4, "terapipe", 5e9]
    config = written(tmp_path / "v.json", {**sizes, "token_pipeline": {"slices": 4, "stages_per_place": 2, "placement": "v"}})
    found = [figures(capsys, command, "--ds-config", config, *arguments[3:]) for command in ("plan", "simulate")]
    assert [(each["schedule"], each["stages"]) for each in found] == [("searched", 4), ("interleaved", 4)]


@pytest.mark.parametrize(("sizes", "replicas", "expected"), [
    ((24, 2, None), ["--data-parallel", 4], (2, 3)),
    ((24, None, None), ["--data-parallel", 4], (6, 1)),
    ((None, 2, "auto"), [], (2, 2)),  # no cost: as many micro-batches as stages
])  # fmt: skip
def test_deepspeeds_batch_sizes_are_read(tmp_path, capsys, sizes, replicas, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size}
    found = figures(capsys, "simulate", "--ds-config", written(tmp_path / "ds_config.json", given), "--stages", 2, *replicas)
    assert (found["sequences"], found["micro_batches"]) == expected


def test_uneven_stages_get_better_boundaries(capsys, model):
    arguments = ["plan", "--model", model, *SMALL, "--stages", 2, "--sequences", 4, "--stage-layers"]
    found = figures(capsys, *arguments, "1,7")
    advice = found["stage_layers"]
    assert advice["present"] == [1, 7] and sum(advice["best"]) == 8 and advice["slowest_stage_gain"] > 0.2
    assert advice["predicted_step_s"] < found["predicted_step_s"]
    best = ",".join(map(str, advice["best"]))
    assert f"--stage-layers {best} in place of 1,7" in run(capsys, *arguments, "1,7")[1]
    again = figures(capsys, *arguments, best)
    slices = ",".join(f"{length}x1" for length in found["slices"])
    same = figures(capsys, "simulate", *arguments[1:], best, "--slices", slices, "--schedule", found["schedule"])
    assert again["predicted_step_s"] <= same["predicted_step_s"] == pytest.approx(advice["predicted_step_s"], rel=1e-9)
    assert again["stage_layers"]["slowest_stage_gain"] == pytest.approx(0, abs=1e-12)
    written(model, {name: MODEL[name] for name in MODEL if name != "vocab_size"})
    uses = figures(capsys, *arguments, "1,7", "--memory-gb", 100)["memory_bytes"]
    limit = max(use["total"] for use in uses) / 1e9 + 1e-9  # 4,4 holds 8 layers' units on the first stage
    assert "--stage-layers 1,7 is as good as any" in run(capsys, *arguments, "1,7", "--memory-gb", limit)[1]


def test_measurements_are_planned_by(capsys, measured, tmp_path):
    found = figures(capsys, "plan", "--measured", measured, "--sequences", 4, "--memory-gb", 1)
    assert (found["stages"], found["seq_length"], found["micro_batches"], found["about"]["ranks"]["pipe"]) == (2, 512, 4, 2)
    assert found["overhead_s"] == 0.25 and not found["weights_once"] and found["stage_layers"] is None
    data = json.loads(measured.read_text())
    data["measured_on"]["memory_limit_bytes"] = 2e9
    assert figures(capsys, "plan", "--measured", written(tmp_path / "limited.json", data))["memory_limit_bytes"] == 2e9
    config = written(tmp_path / "with_path.json", {"token_pipeline": {"slices": "auto", "measurements_path": str(measured)}})
    again = figures(capsys, "plan", "--ds-config", config, "--sequences", 4, "--memory-gb", 1)
    assert again["predicted_step_s"] == found["predicted_step_s"]


def test_unit_costs_have_the_closed_form(tmp_path, capsys):
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
    found = figures(capsys, *arguments[:-1], "interleaved")  # two stages on each place halve what is not at work
    assert found["predicted_step_s"] == pytest.approx(3 * 3 + 3 * 3 / 8 / 2) and found["per_stage"][0]["live_sequences"] < 2
    for text, slices in (("128x2,64", [128, 128, 64]), ("320x1", [320])):
        lengths = figures(capsys, "simulate", "--stages", 2, "--slices", text)
        assert lengths["slices"] == slices and lengths["seq_length"] == 320


def test_schedules_are_compared(tmp_path, capsys):
    picture = tmp_path / "compared.svg"
    arguments = ["simulate", "--compare", "--stages", 4, "--micro-batches", 4, "--slices"]
    run(capsys, *arguments, 4, "--picture", picture)
    each = figures(capsys, *arguments, 4)["schedules"]
    rows = {row["schedule"] + str(len(row["slices"])): row for row in each if "a place" not in row["name"]}
    assert set(rows) == {"1f1b1", "interleaved1", *(f"{name}4" for name in NAMES)}
    assert len(each) == len(rows) + 2  # of two stages on each place
    searched = figures(capsys, *arguments[:-2], 2, "--slices", 4, "--weight-gradients", "micro_batch")["schedules"]
    assert [row["predicted_step_s"] for row in searched if row["schedule"] == "searched"][-1] < searched[2]["predicted_step_s"]
    # (K - 1) (f + b) divided by nothing, by two chunks, by four slices
    expected = {"1f1b1": 21, "interleaved1": 16.5, "terapipe4": 14.25, "1f1b4": 14.25}
    assert {name: rows[name]["predicted_step_s"] for name in expected} == pytest.approx(expected)
    assert rows["1f1b4"]["live_sequences"] == 1.75 and rows["terapipe4"]["live_sequences"] == 4
    assert all(row["name"].replace("'", "&#x27;") in picture.read_text() for row in rows.values())


def test_verdicts_follow_the_figures(capsys, model):
    arguments = ["--model", model, *SMALL, "--stages", 4, "--sequences", 8]
    for command in (["plan"], ["simulate", "--compare"]):
        found = figures(capsys, *command, *arguments)
        assert [each["kind"] for each in found["alternatives"]] == ["interleaved", "tensor_parallel", "tensor_parallel"]
        # the first two of a comparison are without slices
        step = min(row["predicted_step_s"] for row in found.get("schedules", [{}, {}, found])[2:])
        for each, line in zip(found["alternatives"], found["verdicts"], strict=True):
            assert each["beats_slices"] == (each["predicted_step_s"] < step) and each["name"] in line
            assert ("does not beat" in line) != each["beats_slices"]


FILES = {
    "grouped": {**MODEL, "hidden_size": 768, "num_attention_heads": 12, "num_query_groups": 4},
    "half": '{"train_micro_batch_size_per_gpu": 1', "block": {"token_pipeline": {"slices": -3}}, "near": {"token_pipline": {}},
    "sizes": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), [
    ("plan", "--model: missing"),
    ("plan --stages 2 --model {model} --ds-config {half}", "half.json: is no JSON"),
    ("plan --stages 2 --model {model} --ds-config {block}", "block.json: token_pipeline.slices: got -3"),
    ("plan --stages 2 --model {model} --ds-config {sizes}", "sizes.json: train_batch_size: got 7, must be micro-batch"),
    ("plan --stages 2 --model {model} --ds-config {near}", 'near.json: token_pipline: unknown key, must be spelt "token_pip'),
    ("check --world 2 --model {model}", "--ds-config: missing, must be there beside --model"),
    ("plan --model {model} --stages 9", "--stages: got 9, must be at most the model's layers, 8"),
    ("plan --model gpt4 --stages 2", "gpt4: cannot be read"),
    ("plan --model gpt3-13b --stages 1", "gradients and optimiser: memory_gb: got 16, must be at least"),
    ("plan --model {model} --stage-layers 5,2", '--stage-layers: got "5,2"'),
    ("plan --model {model} --stages 2 --micro-batches 3 --sequences 8", "a multiple of 3, for 3 micro-batches, use 9"),
    ("plan --model {grouped} --stages 2 --tensor-parallel 6", "got 6, must be a divisor of the model's 12 attention"),
    ("plan --measured {measured} --stages 3", "--stages: got 3, must be what"),
    ("plan --measured {measured} --seq-length 1024", "got 1024, must be within what was measured, 512"),
    ("simulate --schedule interleaved --stages 1", '--schedule: got "interleaved", must be another one on a single stage'),
    ("plan --schedule interleaved --stages 5 --model {model}", "--schedule: stages on a place: got 2, must be 1 for 8 layers in"),
    ("plan --model {model} --stages 2 --sequence-parallel", "--sequence-parallel: got true, must be absent with one device"),
    ("plan --model {model} --stages 2 --tensor-parallel 2 --sequence-parallel --seq-length 511", "2 devices that share the"),
    ("simulate --model {model} --stages 2 --tensor-parallel 2 --sequence-parallel --slices 3,2045", "--slices: got [3, 2045]"),
    ("simulate --slices 1,x", "must be a number of equal slices, or lengths"),
    ("simulate --trace {model}/x.json", "--trace: cannot write"),
])  # fmt: skip
def test_bad_arguments_are_one_line(tmp_path, capsys, model, measured, arguments, message):
    files = {name: written(tmp_path / f"{name}.json", content) for name, content in FILES.items()}
    assert message in fails(capsys, *arguments.format(model=model, measured=measured, **files).split())


def test_analytic_memory_of_the_standard_shape():
    # Korthikanti et al. 2022, table 2 without the scores: H (10 + 24 / T) bytes per token and layer
    shape = Model("m", 6, 512, 8, vocab_size=1000)
    for tensor in (1, 4):
        shared = analytic_memory(shape, (4, 2), tensor, 3, token_shares=tensor).stages[0]  # section 4.2.2: H 34 / T
        assert shared.activations == pytest.approx(3 * (4 * 34 + 2) * 512 / tensor) and shared.sent == 3 * 2 * 512 / tensor
        first, last = analytic_memory(shape, (4, 2), tensor, sequences=3).stages
        layers = first.activations - 3 * 2 * 512  # without outputs
        assert layers == pytest.approx(3 * 4 * 512 * (10 + 24 / tensor))
        assert last.activations - layers / 2 == pytest.approx(3 * 6 * 1000 / tensor)
        assert first.keys_values == pytest.approx(3 * 4 * 2 * 2 * 512 / tensor) == first.key_value_gradients / 2
        assert (first.received, last.received, first.sent, last.sent) == (0, 3 * 2 * 512, 3 * 2 * 512, 0)
        assert first.weight_gradients == 3 * 4 * 2 * 512 * (4 + 12 / tensor)  # inputs and output gradients of four matrices
    # ZeRO, section 3.1: 16 bytes per parameter, of which 12 are shared by the replicas
    shared = analytic_memory(shape, (4, 2), 2, optimizer_shards=4).stages[1]
    assert shared.fixed == 7 * (2 * 12 * 512**2 + 512 * 1000) / 2

"""``ds_terapipe plan --frozen``: the shapes of an elastic pipeline, by arithmetic that can be checked by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_terapipe.plan import LayerSeconds, MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.hardware import CLUSTERS
from tests.test_cli_plan import figures, run

SECONDS = ((3.0, 3.0), (3.0, 6.0))  # forward and backward of four entries, a third of it forward
LENGTH = 64
SHAPE = ("stages", "replicas", "micro_batch", "micro_batches", "layers")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Two stages that were measured with their single layers; 0.5 s of a step come on top."""
    stages = [StageCost([Sample(LENGTH, 0, sum(row) / 3, 2 * sum(row) / 3)]) for row in SECONDS]
    about = {"ranks": {"pipe": 2, "data": 1, "model": 1}, "overhead_s": 0.5, "weight_gradients": "slice"}
    path = tmp_path / "costs.json"
    MeasuredCost(stages, [[(LENGTH, 0.0)]], 1, about, layers=LayerSeconds(SECONDS)).save(path)
    return path


def written(tmp_path: Path, name: str, content: Mapping[str, Any]) -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def uncut(tmp_path: Path) -> Path:
    """A configuration without token_pipeline: one slice."""
    return written(tmp_path, "ds_config.json", {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 50304}
    return written(tmp_path, "model.json", sizes)


def shape_of(row: Mapping[str, Any]) -> Sequence[Any]:
    return [row[name] for name in SHAPE]


def test_measured_layers_by_hand(capsys: pytest.CaptureFixture[str], measured: Path, uncut: Path) -> None:
    arguments = ["plan", "--measured", measured, "--ds-config", uncut, "--frozen"]
    data = figures(capsys, *arguments, 2)
    (table,) = data["frozen"]
    assert (data["slices"], data["layers"], table["frozen_layers"]) == ([LENGTH], 4, 2)
    # 6 and 9 s; frozen 2 and 9; all on one stage 11, half the micro-batches
    assert table["launched"]["predicted_step_s"] == pytest.approx(15 + 3 * 9 + 0.5)
    assert table["launched_frozen"]["predicted_step_s"] == pytest.approx(11 + 3 * 9 + 0.5)
    one, two = table["shapes"]
    assert shape_of(one) == [1, 2, 1, 2, [4]] and one["predicted_step_s"] == pytest.approx(2 * 11 + 0.5)
    assert shape_of(two) == [2, 1, 1, 4, [3, 1]] and two["predicted_step_s"] == pytest.approx(11 + 3 * 6 + 0.5)
    assert table["taken"] == one and one["peak_bytes"] is one["fits"] is None
    assert one["speed_against_launched"] == pytest.approx(42.5 / 22.5)
    assert one["speed_against_launched_frozen"] == pytest.approx(38.5 / 22.5)
    # a micro-batch is as large as a replica's share allows, the batch stays
    odd = figures(capsys, *arguments, 2, "--sequences", 3)["frozen"][0]
    assert [shape_of(row) for row in odd["shapes"]] == [[2, 1, 1, 3, [3, 1]]]


def test_slices_fill_the_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Path, uncut: Path
) -> None:
    config = {**json.loads(uncut.read_text()), "token_pipeline": {"slices": 4}}
    path = written(tmp_path, "sliced.json", config)
    (table,) = figures(capsys, "plan", "--measured", measured, "--ds-config", path, "--frozen", 2)["frozen"]
    assert table["launched"]["predicted_step_s"] == pytest.approx((15 + 15 * 9) / 4 + 0.5)
    assert table["shapes"][0]["predicted_step_s"] == pytest.approx(2 * 11 + 0.5)
    # nobody says how many: those of the plan, here one, for no shorter slice was measured
    assert figures(capsys, "plan", "--measured", measured, "--sequences", 4, "--frozen", 2)["slices"] == [LENGTH]


def test_the_launch_is_as_a_plan_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], uncut: Path) -> None:
    """What is predicted agrees with the simulator where messages are free: times of layers, gradients, optimiser."""
    free = {"latency_s": 1e-15, "message_bytes_per_s": 1e30}
    names = ("peak_tflops", "memory_gb", "memory_gb_per_s", "link_gb_per_s", "slowest_link_gb_per_s", "node_gb_per_s")
    sizes = {name: getattr(CLUSTERS["p3.16xlarge"], name) for name in names}
    cluster = written(tmp_path, "cluster.json", {**sizes, "devices_per_node": 2, "rates": free})
    model = written(tmp_path, "layers.json", {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8})
    shape = ["--model", model, "--cluster", cluster, "--stages", 2, "--data-parallel", 4, "--seq-length", 256]
    simulated = figures(capsys, "simulate", *shape, "--micro-batches", 4, "--slices", 1, "--schedule", "1f1b")
    (table,) = figures(capsys, "plan", *shape, "--ds-config", uncut, "--frozen", 2)["frozen"]
    assert shape_of(table["launched"]) == [2, 4, 1, 4, [4, 4]]
    assert table["launched"]["predicted_step_s"] == pytest.approx(simulated["predicted_step_s"], rel=1e-9)
    assert [(row["stages"], row["replicas"]) for row in table["shapes"]] == [(1, 8), (2, 4), (4, 2), (8, 1)]


def test_a_shape_is_not_there_twice(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (table,) = figures(capsys, "plan", "--model", model, "--stages", 1, "--data-parallel", 2, "--frozen", 3)["frozen"]
    assert shape_of(table["launched_frozen"])[:2] == [1, 2]
    assert [shape_of(row)[:2] for row in table["shapes"]] == [[2, 1]]  # all layers of one stage are on it


def test_bytes_of_the_model_s_entries(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    """16 bytes of a trained weight, 2 of a frozen one; activations of live micro-batches of layers that train."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    table_bytes, layer, hidden, tokens = 1024 * 50304, 12 * 1024**2, 1024, 512
    kept, logits = 34 * hidden * tokens, 6 * 50304 * tokens
    arguments = ["plan", "--model", model, "--stages", 2, "--seq-length", tokens, "--frozen", 5]
    for zero, shards in (({}, 1), ({"zero_optimization": {"stage": 1}}, 2)):
        path = written(tmp_path, "config.json", {**config, **zero})
        (table,) = figures(capsys, *arguments, "--ds-config", path)["frozen"]
        (halves,) = figures(capsys, *arguments, "--ds-config", path, "--tensor-parallel", 2)["frozen"]
        first = 16 * (table_bytes + 4 * layer) + 2 * 4 * kept
        last = 16 * (table_bytes + 4 * layer) + 4 * kept + logits
        assert table["launched"]["layers"] == [5, 6] and table["launched"]["peak_bytes"] == max(first, last)
        kept_half = 22 * hidden * tokens
        assert halves["launched"]["peak_bytes"] == max(first - 8 * kept, last - 4 * kept - logits) / 2 + max(
            8 * kept_half, 4 * kept_half + logits / 2
        )
        one = table["shapes"][0]
        each = 4 + 12 / shards  # of two replicas, which share the optimiser where there is ZeRO
        assert one["peak_bytes"] == 2 * (table_bytes + 4 * layer) + each * (table_bytes + 4 * layer) + 4 * kept + logits


def test_what_does_not_fit_is_not_taken(capsys: pytest.CaptureFixture[str], model: Path, uncut: Path) -> None:
    arguments = ["plan", "--model", model, "--ds-config", uncut, "--stages", 4, "--seq-length", 512, "--frozen", "4,8"]
    tables = figures(capsys, *arguments)["frozen"]
    assert [table["frozen_layers"] for table in tables] == [4, 8]
    assert [table["taken"]["stages"] for table in tables] == [1, 1]
    large = tables[0]["taken"]["peak_bytes"]
    limit = f"{large / 1e9 - 0.01:.3f}"
    data = figures(capsys, *arguments, "--memory-gb", limit)
    assert data["memory_limit_bytes"] == pytest.approx(float(limit) * 1e9)
    one, two, _ = data["frozen"][0]["shapes"]
    assert (one["fits"], two["fits"]) == (False, True) and data["frozen"][0]["taken"] == two
    assert data["frozen"][1]["taken"]["stages"] == 1  # less trains, so it fits
    _, out, _ = run(capsys, *arguments, "--memory-gb", limit)
    assert out.count("does not fit") == 1 and out.count("(taken)") == 2
    for table in data["frozen"]:
        assert f"{table['frozen_layers']} of 11 layers frozen:" in out
        for row in (table["launched"], table["launched_frozen"], *table["shapes"]):
            found = [line for line in out.splitlines() if f"{row['peak_bytes'] / 1e9:.3f} GB" in line]
            assert any(f"{1e3 * row['predicted_step_s']:.1f} ms" in line for line in found)
            assert any(f"{row['speed_against_launched_frozen']:.2f}x" in line for line in found)


def test_the_configuration_says_what_a_rank_may_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    block = {"resize": {"policy": "measured", "memory_gb": 1.9}}
    path = written(tmp_path, "config.json", {"train_micro_batch_size_per_gpu": 1, "elastic_pipeline": block})
    arguments = ["plan", "--model", model, "--ds-config", path, "--stages", 2, "--frozen", 3]
    assert figures(capsys, *arguments)["memory_limit_bytes"] == 1.9e9
    assert figures(capsys, *arguments, "--memory-gb", 3)["memory_limit_bytes"] == 3e9
    block["resize"]["memory_gb"] = -1
    written(tmp_path, "config.json", {"train_micro_batch_size_per_gpu": 1, "elastic_pipeline": block})
    status, _, err = run(capsys, *arguments)
    assert status == 1 and "config.json: elastic_pipeline.resize.memory_gb: got -1" in err and err.count("\n") == 1


def test_memory_is_no_limit_where_it_is_not_known(
    capsys: pytest.CaptureFixture[str], measured: Path, uncut: Path
) -> None:
    arguments = ["plan", "--measured", measured, "--ds-config", uncut, "--frozen", 2, "--memory-gb", 0.001]
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "so memory_gb is no limit" in out and "does not fit" not in out
    assert out.count("no limit") == 1
    assert figures(capsys, *arguments)["memory_limit_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--frozen", "4,x"],
            '--frozen: got "4,x", must be a positive number of entries of the layer list, or several',
        ),
        (["--frozen", "0"], '--frozen: got "0", must be a positive number'),
        (["--frozen", "4"], "--frozen: got 4, must be at most 3 entries"),
        (["--frozen", "2", "--output", "plan.json"], '--output: got "plan.json", must be absent beside --frozen'),
        (["--frozen", "2", "--seq-length", "32"], "--seq-length: got 32, must be what the layers of"),
        (["--frozen", "2", "--memory-gb", "-1"], "--memory-gb: got -1.0, must be a positive number"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], measured: Path, uncut: Path, arguments: list[str], message: str
) -> None:
    status, _, err = run(capsys, "plan", "--measured", measured, "--ds-config", uncut, *arguments)
    assert status == 1 and message in err and err.count("\n") == 1


def test_costs_that_know_no_layers(capsys: pytest.CaptureFixture[str], measured: Path, uncut: Path) -> None:
    data = json.loads(measured.read_text())
    measured.write_text(json.dumps({**data, "layers": None}))
    status, _, err = run(capsys, "plan", "--measured", measured, "--ds-config", uncut, "--frozen", 2)
    assert status == 1 and err.count("\n") == 1
    assert "costs.json: layers: missing, must be the seconds of single layers, use --model, or a file of" in err


def test_layers_that_were_frozen_when_measured(capsys: pytest.CaptureFixture[str], measured: Path, uncut: Path) -> None:
    data = json.loads(measured.read_text())
    data["measured_on"]["placement"] = {"places": [0, 1], "boundaries": [0, 2, 4], "forward_only": 1}
    measured.write_text(json.dumps(data))
    status, _, err = run(capsys, "plan", "--measured", measured, "--ds-config", uncut, "--frozen", 2)
    assert status == 1 and err.count("\n") == 1
    assert "costs.json: placement: got stages that only go forward, must be a measurement with nothing frozen" in err

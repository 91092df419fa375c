"""``ds_terapipe plan --frozen``: the shapes of an elastic pipeline, by arithmetic that can be checked by hand."""

import json

import pytest

from ds_terapipe.plan.costs.cost import MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.hardware import CLUSTERS
from ds_terapipe.plan.stages import LayerSeconds
from tests.test_cli_plan import MODEL, fails, figures, written

SECONDS = ((3.0, 3.0), (3.0, 6.0))  # forward and backward of four entries, a third of it forward
LENGTH = 64
SIZES = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}


@pytest.fixture
def measured(tmp_path):
    """Arguments: two stages that were measured with their single layers, 0.5 s of a step on top; one slice."""
    stages = [StageCost([Sample(LENGTH, 0, sum(row) / 3, 2 * sum(row) / 3)]) for row in SECONDS]
    about = {"ranks": {"pipe": 2, "data": 1, "model": 1}, "overhead_s": 0.5, "weight_gradients": "slice"}
    MeasuredCost(stages, [[(LENGTH, 0.0)]], 1, about, layers=LayerSeconds(SECONDS)).save(tmp_path / "costs.json")
    config = written(tmp_path / "ds_config.json", SIZES)
    return ["plan", "--measured", tmp_path / "costs.json", "--ds-config", config]


@pytest.fixture
def model(tmp_path):
    config = written(tmp_path / "ds_config.json", SIZES)
    return ["plan", "--model", written(tmp_path / "model.json", MODEL), "--ds-config", config]


def shape_of(row):
    return [row[name] for name in ("stages", "replicas", "micro_batch", "micro_batches", "layers")]


def test_measured_layers_by_hand(capsys, measured):
    data = figures(capsys, *measured, "--frozen", 2)
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
    odd = figures(capsys, *measured, "--frozen", 2, "--sequences", 3)["frozen"][0]
    assert [shape_of(row) for row in odd["shapes"]] == [[2, 1, 1, 3, [3, 1]]]
    # slices of the plan, here one, for no shorter one was measured, or as many as the configuration says
    assert figures(capsys, *measured[:3], "--sequences", 4, "--frozen", 2)["slices"] == [LENGTH]
    sliced = written(measured[-1].with_name("sliced.json"), {**SIZES, "token_pipeline": {"slices": 4}})
    (table,) = figures(capsys, *measured, "--ds-config", sliced, "--frozen", 2)["frozen"]
    assert table["launched"]["predicted_step_s"] == pytest.approx((15 + 15 * 9) / 4 + 0.5)


@pytest.mark.parametrize(("node", "each"), [(2, 1), (4, 1), (4, 2)])  # the replicas of a stage are on several, or on one
def test_the_launch_is_as_a_plan_has_it(tmp_path, capsys, node, each):
    """Predictions agree with the simulator where messages are free: times of layers, gradients, optimiser."""
    names = ("peak_tflops", "memory_gb", "memory_gb_per_s", "link_gb_per_s", "slowest_link_gb_per_s", "node_gb_per_s")
    rates = {"latency_s": 1e-15, "message_bytes_per_s": 1e30}
    sizes = {name: getattr(CLUSTERS["p3.16xlarge"], name) for name in names}
    cluster = written(tmp_path / "cluster.json", {**sizes, "devices_per_node": node, "rates": rates})
    model = written(tmp_path / "layers.json", {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8})
    shape = ["--model", model, "--cluster", cluster, "--stages", 2, "--data-parallel", 4, "--seq-length", 256]
    block = {"token_pipeline": {"slices": 1, "stages_per_place": each}}
    config = written(tmp_path / "ds_config.json", {**SIZES, **block})
    simulated = figures(capsys, "simulate", *shape, "--ds-config", config)
    (table,) = figures(capsys, "plan", *shape, "--ds-config", config, "--frozen", 2)["frozen"]
    assert shape_of(table["launched"]) == [2, 4, 1, 4, [4 // each] * 2 * each]
    assert table["launched"]["predicted_step_s"] == pytest.approx(simulated["predicted_step_s"], rel=1e-9)
    assert [(row["stages"], row["replicas"]) for row in table["shapes"]] == [(1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize("own", [True, False])  # a head with a table of its own, or the embedding's, which is frozen
def test_bytes_of_the_models_entries(capsys, model, tmp_path, own):
    """16 bytes of a trained weight, 2 of a frozen one; activations of live micro-batches of layers that train."""
    model[2] = written(tmp_path / "model.json", {**MODEL, "untie_embeddings_and_output_weights": own})
    vocabulary, layer, hidden, tokens = 1024 * 50304, 12 * 1024**2, 1024, 512
    kept, logits = 34 * hidden * tokens, 6 * 50304 * tokens
    weights = vocabulary + 4 * layer  # of either half
    for zero, shards in (({}, 1), ({"zero_optimization": {"stage": 1}}, 2)):
        config = written(tmp_path / "config.json", {**SIZES, **zero})
        arguments = [*model, "--ds-config", config, "--stages", 2, "--seq-length", tokens, "--frozen", 5]
        (table,) = figures(capsys, *arguments)["frozen"]
        (halves,) = figures(capsys, *arguments, "--tensor-parallel", 2)["frozen"]
        peak = max(16 * weights + 2 * 4 * kept, 16 * weights + 4 * kept + logits)
        assert table["launched"]["layers"] == [5, 6] and table["launched"]["peak_bytes"] == peak
        kept_half = 22 * hidden * tokens
        activations = max(8 * kept_half, 4 * kept_half + logits / 2)
        assert halves["launched"]["peak_bytes"] == 16 * weights / 2 + activations
        each = 4 + 12 / shards  # of two replicas, which share the optimiser where there is ZeRO
        head = 0 if own else vocabulary
        assert table["shapes"][0]["peak_bytes"] == (2 + each) * weights - each * head + 4 * kept + logits


def test_what_does_not_fit_is_not_taken(tmp_path, capsys, model):
    arguments = [*model, "--stages", 4, "--seq-length", 512, "--frozen", "4,8"]
    tables = figures(capsys, *arguments)["frozen"]
    assert [(table["frozen_layers"], table["taken"]["stages"]) for table in tables] == [(4, 1), (8, 1)]
    limit = f"{tables[0]['taken']['peak_bytes'] / 1e9 - 0.01:.3f}"
    data = figures(capsys, *arguments, "--memory-gb", limit)
    assert data["memory_limit_bytes"] == pytest.approx(float(limit) * 1e9)
    one, two, _ = data["frozen"][0]["shapes"]
    assert (one["fits"], two["fits"]) == (False, True) and data["frozen"][0]["taken"] == two
    assert data["frozen"][1]["taken"]["stages"] == 1  # less trains, so it fits
    config = written(tmp_path / "config.json", {**SIZES, "elastic_pipeline": {"resize": {"memory_gb": 1.9}}})
    for more, most in (([], 1.9e9), (["--memory-gb", 3], 3e9)):
        assert figures(capsys, *arguments, "--ds-config", config, *more)["memory_limit_bytes"] == most
    written(config, {**SIZES, "elastic_pipeline": {"resize": {"memory_gb": -1}}})
    assert "config.json: elastic_pipeline.resize.memory_gb: got -1" in fails(capsys, *arguments, "--ds-config", config)


@pytest.mark.parametrize(("change", "arguments", "message"), [
    ({}, "--frozen 4,x", '--frozen: got "4,x", must be a positive number of entries of the layer list, or several'),
    ({}, "--frozen 4", "--frozen: got 4, must be at most 3 entries"),
    ({}, "--frozen 2 --seq-length 32", "--seq-length: got 32, must be what the layers of"),
    ({"layers": None}, "--frozen 2", "costs.json: layers: missing, must be the seconds of single layers, use --model"),
    ({"measured_on": {"placement": {"places": [0, 1], "boundaries": [0, 2, 4], "forward_only": 1}}}, "--frozen 2",
     "costs.json: placement: got stages that only go forward, must"),
])  # fmt: skip
def test_bad_arguments_and_measurements_of_no_use_are_one_line(capsys, measured, change, arguments, message):
    written(measured[2], {**json.loads(measured[2].read_text()), **change})
    assert message in fails(capsys, *measured, *arguments.split())

"""Costs and memory by arithmetic: formulas, fits to times and peaks, and the files of a model and a cluster."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.analytic import AnalyticCost
from ds_terapipe.plan.costs.hardware import CLUSTERS, MODELS, Cluster, Model, Rates, load_cluster, load_model
from ds_terapipe.plan.costs.memory import MemoryModel, Peaks, StageMemory, calibrated, memory_use
from ds_terapipe.plan.parts import memory_of_parts
from ds_terapipe.schedule import NAMES, Placement
from tests.schedule import strategies
from tests.test_cli_plan import written

V100 = CLUSTERS["p3.16xlarge"]
GPT = MODELS["gpt3-175b"]
# in the order of its fields
RATES = Rates(1e-3, 80e12, 20e12, 6.0, 10.0, 2e-4, 3e9, 30e9, 2e9)
WEIGHTS = 12 * 12288**2 / 4  # of a layer, on each of four ranks


def cost_of(**changes):
    base = {"model": GPT, "cluster": V100, "rates": RATES, "layers": (2, 2, 2), "tensor_parallel": 4}
    return AnalyticCost(**{**base, **changes})


def test_weight_gradients_made_apart_save_the_traffic_of_all_slices_but_one():
    def step(cost, slices, length):
        units = sum(cost.forward(0, length, i * length) + cost.backward(0, length, i * length) for i in range(slices))
        return units + cost.weights(0, slices * length)

    # Slices this short are bound by traffic, of which 4 of 6 passes are left once per sequence; a whole sequence is not.
    saved = 2 * (64 * 4 * 2 * WEIGHTS / 900e9 - 6 / 3 * 2048 * WEIGHTS / 80e12)
    each, apart = cost_of(), cost_of(weights_apart=True)
    assert step(each, 64, 32) - step(apart, 64, 32) == pytest.approx(saved, rel=1e-9)
    assert [step(each, 1, n) for n in (32, 2048)] == pytest.approx([step(apart, 1, n) for n in (32, 2048)], rel=1e-9)


def test_vocabulary_costs_its_stages():
    plain, full = cost_of(), cost_of(model=dataclasses.replace(GPT, vocab_size=50304))
    extra = [full.forward(stage, 512, 0) - plain.forward(stage, 512, 0) for stage in range(3)]
    assert extra[1] == 0.0 < extra[0] < extra[2]
    # The head is one more matrix of H x V; logits are 24 bytes each, half of them forward.
    assert extra[2] == pytest.approx(512 * 50304 / 4 * (2 * 12288 / 80e12 + 12 / 900e9), rel=1e-9)


def test_the_end_of_a_step_and_layers_of_other_shapes():
    adam = 36 * 2 * WEIGHTS / 900e9
    assert cost_of().step_overhead() == pytest.approx(adam)
    assert cost_of().step_overhead(4) == pytest.approx(adam + 2 * 3 / 4 * 2 * WEIGHTS * 2 * 8 / 2e9)
    llama = Model("llama", 32, 4096, 32, ffn_hidden_size=14336, num_query_groups=8, swiglu=True)
    assert llama.layer_parameters == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336


CLUSTER = {
    "devices_per_node": 4, "peak_tflops": 312, "memory_gb": 40, "memory_gb_per_s": 1555, "link_gb_per_s": 300,
    "slowest_link_gb_per_s": 300, "node_gb_per_s": 25,
}  # fmt: skip
MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def test_files_are_read(tmp_path):
    cluster = load_cluster(written(tmp_path / "given.json", {**CLUSTER, "rates": {"launch_s": 2e-4}}))
    assert isinstance(cluster, Cluster) and cluster.name == "given"
    assert cluster.rates.launch_s == 2e-4 and cluster.rates.flops == pytest.approx(0.6 * 312e12)
    assert load_model(written(tmp_path / "given.json", {**MODEL, "name": "tiny"})) == Model("tiny", 4, 64, 4)
    assert load_model("gpt3-44b").hidden_size == 6144 and load_cluster("p3.16xlarge").memory_gb == 16
    assert dataclasses.replace(V100, rates_known={"flops": 1e12}).rates == dataclasses.replace(V100.rates, flops=1e12)


@pytest.mark.parametrize(("load", "data", "field", "rule"), [
    (load_cluster, {**CLUSTER, "peak_tflop": 1}, "peak_tflop", "peak_tflops"),
    (load_cluster, {**CLUSTER, "memory_gb": -1}, "memory_gb", "a positive number"),
    (load_cluster, {**CLUSTER, "slowest_link_gb_per_s": 301}, "slowest_link_gb_per_s", "link_gb_per_s (300)"),
    (load_cluster, {**CLUSTER, "rates": {"flop": 1}}, "rates.flop", "flops"),
    (load_model, {**MODEL, "num_layer": 4}, "num_layer", "num_layers"),
    (load_model, {**MODEL, "num_attention_heads": 5}, "num_attention_heads", "a divisor of hidden_size (64)"),
])  # fmt: skip
def test_bad_files_are_one_line_with_file_field_and_rule(tmp_path, load, data, field, rule):
    path = written(tmp_path / "given.json", data)
    with pytest.raises(ConfigError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: {field}") and rule in message and "\n" not in message


stage_memories = st.builds(StageMemory, *[st.integers(0, 9).map(float)] * 13)
lengths_of_slices = st.lists(st.integers(1, 9), min_size=1, max_size=4)
# A digit of a peak says of how many tokens a line is held, where large gradients weigh most, and where activations do.
GRADIENTS = StageMemory(1, 2e1, 3e2, 4e3, 5e4, 6e5, 7e6, 8e7, 9e8, 1e10)
ACTIVATIONS = StageMemory(1e10, 2e9, 3e8, 4e7, 5e6, 6e5, 7e4, 8e3, 9e2, 1e1)
PLAIN, FOLDED = Placement.plain(3), Placement.of([0, 1, 1, 0], forward_only=1)
TWO = {"posted_ahead": 2}
ROWS = [
    (("1f1b", [2, 1], 4, False, PLAIN), TWO,
     (12_870_001_087, 12_870_351_025, 12_867_500_962), (88_903_088_710, 62_938_088_710, 52_940_088_710)),
    (("1f1b", [2, 1], 4, False, PLAIN), {"posted_ahead": 0, "sent_kept": 0},
     (12_868_201_087, 12_868_201_025, 12_867_001_024), (88_901_288_710, 62_901_288_710, 52_900_088_710)),
    (("1f1b", [2, 1], 4, True, PLAIN), TWO,
     (10_008_812_125, 10_009_262_063, 10_007_612_000), (88_943_088_700, 62_978_088_700, 52_980_088_700)),
    (("terapipe", [2, 1, 1], 2, True, Placement.plain(2)), TWO,
     (10_008_216_084, 10_007_416_000), (96_002_481_600, 96_000_081_600)),
    (("1f1b", [2, 2], 3, True, FOLDED), TWO, (10_019_416_000, 10_016_632_168), (85_324_959_600, 154_583_759_600)),
    (("forward_only", [2, 1], 12, False, PLAIN), TWO,
     (2_870_600_062, 2_870_750_062, 2_867_150_062), (26_003_688_700, 26_018_688_700, 26_015_088_700)),
    (("terapipe", [1, 2], 3, True, Placement.of([0, 0, 1], forward_only=1)), TWO,
     (10_015_812_126, 10_007_462_000), (114_001_958_700, 108_000_088_700)),
]  # fmt: skip


@pytest.mark.parametrize(("how", "kept", "gradients", "activations"), ROWS)
def test_the_peak_is_the_ledgers(how, kept, gradients, activations):
    for lines, peaks in ((GRADIENTS, gradients), (ACTIVATIONS, activations)):
        uses = memory_use(MemoryModel((lines,) * len(how[-1].stages), **kept), *how)
        assert tuple(use.total for use in uses) == peaks


@pytest.mark.parametrize(("stage", "how", "peaks"), [
    # copies until their gradient comes; sums from the first slice's backward on, so not beside all copies
    (StageMemory(packed=10.0, gradient_sums=7.0), ("terapipe", [2, 1], 1), (20, 7)),
    (StageMemory(packed=10.0, gradient_sums=7.0), ("terapipe", [3], 1), (0, 0)),
    # on the last stage in ``1f1b`` for one micro-batch, in ``terapipe`` for both; what is joined is there uncut, too
    (StageMemory(losses=5.0, joined=3.0), ("1f1b", [2, 1], 2), (54, 39)),
    (StageMemory(losses=5.0, joined=3.0), ("terapipe", [2, 1], 2), (54, 54)),
    (StageMemory(losses=5.0, joined=3.0), ("1f1b", [3], 2), (9, 9)),
    # the first place's stages go backward one after the other
    (StageMemory(gradient_sums=7.0), ("terapipe", [2, 1], 1, False, Placement.of([0, 1, 1, 0])), (7, 14)),
])  # fmt: skip
def test_what_is_there_for_a_time(stage, how, peaks):
    model = MemoryModel((stage,) * (len(how[-1].stages) if len(how) > 3 else 2))
    assert tuple(use.total for use in memory_use(model, *how)) == peaks


def test_the_parts_of_a_stage_share_its_memory_and_the_last_has_the_losses():
    whole = MemoryModel((StageMemory(4.0, sent=1.0, losses=7.0), StageMemory(6.0, received=3.0, losses=5.0)))
    parts = memory_of_parts(whole, Placement.interleaved(2, 2)).stages
    assert [(each.activations, each.losses) for each in parts] == [(2, 0), (3, 0), (2, 0), (3, 5)]
    assert [(each.received, each.sent) for each in parts] == [(0, 1), (3, 1), (3, 1), (3, 0)]


@settings(deadline=None, max_examples=60)
@given(st.data(), strategies.placements(), st.sampled_from(NAMES), lengths_of_slices, st.integers(1, 4), st.booleans())
def test_the_step_that_was_measured_takes_what_was_measured(data, placement, schedule, lengths, micro_batches, once):
    stages = data.draw(st.lists(stage_memories, min_size=len(placement.stages), max_size=len(placement.stages)))
    model = MemoryModel(tuple(replace(stage, working=0.0, joined=0.0) for stage in stages))

    def told(model):
        uses = memory_use(model, schedule, lengths, micro_batches, once, placement)
        assert all(min(use) >= 0 for use in uses)
        return [use.total for use in uses]

    peaks = [total + data.draw(st.integers(0, 50)) for total in told(model)]
    how = (schedule, micro_batches, once, placement)
    found = told(calibrated(model, [Peaks(tuple(lengths), tuple(peaks))], *how))
    for peak, before, after in zip(peaks, told(model), found, strict=True):
        assert before - 1e-6 <= after <= peak + 1e-6, "at most what was taken: the peak may be with a shorter slice"
        if placement.is_plain and len(set(lengths)) == 1 and not any(stage.largest_gradient for stage in stages):
            assert after == pytest.approx(peak)
    assert calibrated(model, [Peaks(tuple(lengths), (0.0,) * len(peaks))], *how) == model


@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4, unique=True))
def test_two_steps_tell_what_grows_with_slices_from_what_does_not(working, joined, counts):
    bare = MemoryModel((StageMemory(activations=1.0),) * 2)
    truth = MemoryModel((replace(bare.stages[0], working=float(working), joined=float(joined)),) * 2)
    measured = []
    for count in counts:
        lengths = (64 // count,) * count
        measured.append(Peaks(lengths, tuple(use.total for use in memory_use(truth, "1f1b", lengths, 1))))
    for one in calibrated(bare, measured, "1f1b", 1).stages:
        assert (one.working, one.joined) == pytest.approx((working, joined), abs=1e-9)


def test_the_same_slices_twice_say_no_more_than_once():
    length, lengths, bare = 777, (259, 518), MemoryModel((StageMemory(activations=1.0),))
    taken = Peaks(lengths, (5000.0,))
    (twice,) = calibrated(bare, [taken, taken._replace(peaks=(5000.1,))], "1f1b", 1).stages
    assert twice.joined == 0.0 and twice.working == pytest.approx((5000.05 - length) / max(lengths), rel=1e-6)

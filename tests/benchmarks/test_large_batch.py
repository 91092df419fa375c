"""The large-batch benchmark in short: LAMB learns, finished runs are not repeated, plan and report are right."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from tests.benchmarks import large_batch, large_batch_plan
from tests.benchmarks.large_batch_corpus import MASK, PREDICTED, SEQUENCE, MaskedSamples, load_corpus
from tests.benchmarks.large_batch_model import make_model, masked_loss
from tests.benchmarks.large_batch_plan import Plan, needed, rows, scaled, tuning
from tests.benchmarks.large_batch_report import conclusion, plot_svg, table, tuning_table
from tests.benchmarks.large_batch_run import Result, Run, Store, share_of_peak, train

PLAN = Plan(
    samples=102_400,
    centres=(
        ("lamb", 16, 8e-3),
        ("lamb", 128, 2.26e-2),
        ("lamb", 512, 4.53e-2),
        ("adamw", 16, 5e-4),
        ("adamw", 128, 1.41e-3),
        ("adamw", 512, 2.83e-3),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _process_group_of_its_own() -> Iterator[None]:
    """Megatron's groups are global to the process: the tests after these make others."""
    yield
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def fake(best: dict[str, float], noise: float = 0.001):
    """A run's result without training: the loss grows with the distance of its LR from the best at its batch."""

    def result(run: Run, corpus=None, say=None) -> Result:
        distance = abs(math.log2(run.learning_rate / (best[run.optimizer] * math.sqrt(run.batch / 16))))
        return Result(run, 2.0 + 0.1 * distance + noise * run.seed, [], 1.0, "text")

    return result


def train_nothing(run: Run) -> Result:
    return Result(run, 2.0, [], 1.0, "text")


def complete(plan: Plan, one_run) -> list[Result]:
    """What the sweep ends with when ``one_run`` trains."""
    finished: list[Result] = []
    while missing := needed(plan, finished):
        finished.append(one_run(missing[0]))
    return finished


def test_lamb_learns():
    corpus = load_corpus()
    run = Run("lamb", batch=16, learning_rate=0.016, seed=0, samples=1024, warmup=0.1)
    result = train(run, corpus)
    # At the start every byte is as likely as any other: 5.55 nats. The bytes' frequencies alone make it about 3.3.
    assert result.curve[0][1] == pytest.approx(math.log(257), abs=0.5)
    assert result.loss is not None and result.loss < 4.2


def test_the_loss_is_that_of_the_whole_model_at_the_masked_positions(monkeypatch):
    """The short cut through the model's parts against BertModel.forward."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where Megatron-core makes its rotary angles
    model = make_model(0)
    batch = MaskedSamples(load_corpus().training, 4, seed=1).batch(0, 4)
    everywhere, _ = model(batch.tokens, torch.ones_like(batch.tokens))
    expected = F.cross_entropy(everywhere.flatten(0, 1)[batch.positions], batch.labels)
    # fp32 sums of a hundred terms of order one.
    torch.testing.assert_close(masked_loss(model, batch), expected, rtol=1e-5, atol=0)


def test_samples_do_not_depend_on_the_batch_and_show_what_the_masks_say():
    text = load_corpus().training
    samples = MaskedSamples(text, 640, seed=3)
    whole, parts = samples.batch(0, 640), [samples.batch(first, 64) for first in range(0, 640, 64)]
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    assert len(whole.labels) == 640 * PREDICTED and len(set(whole.positions.tolist())) == 640 * PREDICTED
    shown = whole.tokens.flatten()[whole.positions]
    # 6400 draws: a standard deviation is 0.005; the byte itself is shown by chance in one more of 256 random ones.
    assert (shown == MASK).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (shown == whole.labels).float().mean().item() == pytest.approx(0.1, abs=0.02)
    restored = whole.tokens.flatten().scatter(0, whole.positions, whole.labels).view(-1, SEQUENCE)
    originals = {bytes(row) for row in text.tolist()}
    assert all(bytes(row) in originals for row in restored.tolist())


def test_a_text_that_is_too_short_is_seen_again():
    text = torch.arange(3 * SEQUENCE).remainder(256).to(torch.uint8).view(3, SEQUENCE)
    samples = MaskedSamples(text, 7, seed=0)
    assert len(samples) == 7 and samples.batch(6, 4).tokens.shape == (1, SEQUENCE)


def test_learning_rate_climbs_and_falls():
    shares = [share_of_peak(step, 20, 0.1) for step in range(20)]
    assert shares[:3] == [0.5, 1.0, pytest.approx(18 / 19)]
    assert shares[-1] == pytest.approx(1 / 19) and max(shares) == 1.0


def test_a_resumed_sweep_repeats_nothing(tmp_path, monkeypatch):
    """Interrupted after every run, in three ways: each run is made once, and the ends are the same."""
    monkeypatch.setattr(large_batch, "train", fake({"lamb": 8e-3, "adamw": 5e-4}))
    plan = Plan(samples=1024)
    corpus = load_corpus()
    store = Store(tmp_path, "text")
    at_once = large_batch.sweep(plan, corpus, store)
    assert len(at_once) == len(set(at_once)) == len(store.read())
    assert large_batch.sweep(plan, corpus, store) == []
    lost = sorted(tmp_path.glob("*.json"))[3]
    lost.unlink()
    (tmp_path / "unfinished.1.tmp").write_text('{"run"')
    (again,) = large_batch.sweep(plan, corpus, store)
    assert again.name in lost.name and lost.exists()
    assert Store(tmp_path, "other text").read() == []
    assert "LAMB, square-root rule" in large_batch.report(plan, store) and (tmp_path / "losses.svg").exists()


def test_store_keeps_results(tmp_path):
    store = Store(tmp_path, "text")
    results = [
        Result(Run("adamw", 128, 1.41e-3, 1, 1024, 0.1), None, [], 0.5, "text"),
        Result(Run("lamb", 16, 8e-3, 0, 1024, 0.1), 2.5, [(16, 5.5), (32, 5.25)], 1.5, "text"),
    ]
    for result in results:
        store.write(result)
    assert store.read() == results
    assert all(file.read_text().count("\n") == 1 for file in tmp_path.iterdir())


def test_plan_tunes_first_then_repeats_with_other_seeds():
    first = needed(PLAN, [])
    assert all(run.seed == 0 for run in first)
    assert [(run.optimizer, run.batch) for run in first] == [
        (name, batch) for name in ("lamb", "adamw") for batch in (16, 128, 512) for _ in range(3)
    ]
    finished = complete(PLAN, fake({"lamb": 8e-3, "adamw": 5e-4}))
    # The best follow the rule here, so that the two rows of an optimizer are the same runs: 9 to tune, 6 other seeds.
    assert len(finished) == 2 * (9 + 6)
    lamb, adamw, ruled_lamb, ruled_adamw = found = rows(PLAN, finished)
    assert [row.title for row in found][::3] == ["LAMB, tuned at every batch", "AdamW, square-root rule"]
    assert lamb.runs == ruled_lamb.runs and adamw.runs == ruled_adamw.runs
    assert [lamb.runs[batch][0].learning_rate for batch in (16, 128, 512)] == [0.008, 0.0226, 0.0453]
    assert all(len(runs) == 3 for row in found for runs in row.runs.values())


def test_rows_differ_where_the_best_does_not_follow_the_rule():
    """LAMB's best at batch 512 is half of what the rule says."""

    def result(run: Run) -> Result:
        best = 8e-3 * math.sqrt(run.batch / 16) / (2 if run.batch == 512 else 1)
        return Result(run, 2.0 + abs(math.log2(run.learning_rate / best)), [], 1.0, "text")

    lamb, _, ruled, _ = rows(PLAN, complete(PLAN, result))
    assert [runs[0].learning_rate for runs in lamb.runs.values()] == [0.008, 0.0226, 0.0226]
    assert [runs[0].learning_rate for runs in ruled.runs.values()] == [0.008, 0.0226, 0.0453]


def test_plan_looks_beyond_the_edge_of_the_rates_tried():
    finished = complete(PLAN, fake({"lamb": 32e-3, "adamw": 5e-4 / 64}))
    best, missing = tuning(PLAN, "lamb", 16, finished)
    assert not missing and best.learning_rate == 0.032
    best, missing = tuning(PLAN, "adamw", 512, finished)
    # Centre / 8 is the last one tried: two beyond the first three.
    assert not missing and best.learning_rate == float(f"{scaled(5e-4, 16, 512) / 8:.3g}")
    assert any("edge" in line for line in tuning_table(PLAN, finished) if line.startswith("- adamw, batch 512"))
    assert not any("edge" in line for line in tuning_table(PLAN, finished) if line.startswith("- lamb"))


def test_plan_ends_when_everything_diverges():
    def diverges(run: Run) -> Result:
        return Result(run, None, [], 1.0, "text")

    finished = complete(PLAN, diverges)
    assert "diverged (3 of 3)" in table(PLAN, finished)[2]
    assert all("diverged" in line for line in conclusion(PLAN, finished))
    ElementTree.fromstring(plot_svg(PLAN, finished))


def test_report_says_which_is_better_and_what_is_missing():
    finished = complete(PLAN, fake({"lamb": 8e-3, "adamw": 1e-3}))
    worse = [
        Result(one.run, one.loss + 0.2, one.curve, one.seconds, one.corpus) if one.run.optimizer == "adamw" else one
        for one in finished
    ]
    assert all("LAMB is better" in line for line in conclusion(PLAN, worse))
    assert all("no difference beyond the noise" in line for line in conclusion(PLAN, finished))
    without_a_seed = [one for one in finished if one.run.seed < 2]
    assert all(line.endswith("not finished") for line in conclusion(PLAN, without_a_seed))
    assert "2 seeds only" in table(PLAN, without_a_seed)[2]
    assert all("not run" in line for line in table(PLAN, [])[2:])
    picture = ElementTree.fromstring(plot_svg(PLAN, finished))
    circles = [one for one in picture.iter() if one.tag.endswith("circle")]
    assert len(circles) == 12


def test_extensions_are_bounded():
    """A loss that falls for ever with the LR costs two more runs per tuning, no more."""

    def falls(run: Run) -> Result:
        return Result(run, run.learning_rate, [], 1.0, "text")

    tried = {
        one.run.learning_rate for one in complete(PLAN, falls) if one.run.optimizer == "lamb" and one.run.batch == 16
    }
    assert len(tried) == 3 + large_batch_plan.EXTENSIONS

"""Models of Hugging Face's families in a pipeline of their own layers, in slices, against the unmodified model in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed, extra hf")

import ds_terapipe
from ds_terapipe import hf
from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.positions import Rotary
from tests.hf.families import features, model_of
from tests.hf.pipelines import compared, train_alone, train_in_pipeline
from tests.pipeline.host_reads import host_reads
from tests.pipeline.training import build_engine
from tests.spawn import launched

STEPS, MICRO_BATCHES, TOLERANCE = 2, 2, 1e-5
# family, kind of batches, slices, schedule; test_slices.py has the others
CASES: list[tuple[str, str, Any, str]] = [
    ("llama, tied, dynamic", "plain", 4, "terapipe"),
    ("phi3", "front", [11, 7, 5, 1], "terapipe"),
    ("gpt2", "behind", 1, "terapipe"),
    ("qwen3", "counted", [1, 8, 1, 13, 1], "1f1b"),
]


def batches_of(*kinds: str) -> list[list[dict[str, torch.Tensor]]]:
    """Steps of a micro-batch of each kind."""
    return [[features(kind, 10 * step + m) for m, kind in enumerate(kinds)] for step in range(STEPS)]


def every_family() -> list[float]:
    """The largest difference from one process, of each case."""
    found = []
    for family, kind, slices, schedule in CASES:
        model, batches = model_of(family), batches_of(kind, kind)
        got = train_in_pipeline(model, batches, {"slices": slices, "schedule": schedule})
        found.append(compared(got, train_alone(model, batches), model.config))
    return found


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a user writes it, of whole sequences."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


RECOMPUTED = {"pipeline": {"use_reentrant": False}}
AGAIN = {"loss": own_loss, "activation_checkpointing": True, "config": RECOMPUTED}


def without_the_key() -> dict[str, float]:
    """DeepSpeed's own engine and ours on the same pipelines, with a loss of one's own and layers recomputed, too."""
    found: dict[str, float] = {}
    cut = {"slices": [1, 22, 1]}
    for family, kind in (("gemma2", "packed"), ("gpt2", "front")):
        model, batches = model_of(family), batches_of(kind, kind)
        theirs = train_in_pipeline(model, batches, None)
        runs = {"ours": train_in_pipeline(model, batches, cut)}
        if family == "gemma2":
            for name, block in (("ours", cut), ("theirs", None)):
                runs[f"recomputed, {name}"] = train_in_pipeline(model, batches, block, **AGAIN)
        runs["alone"] = train_alone(copy.deepcopy(model), batches)
        found |= {f"{family}, {name}": compared(theirs, got, model.config) for name, got in runs.items()}
    (long, short) = batches_of("plain", "plain")[0]
    steps = [[{name: value[:, :17] for name, value in short.items()}, long]]
    alone = train_alone(copy.deepcopy(model), steps)
    for name, block in (("ours", {"slices": 3}), ("theirs", None)):
        found[f"lengths differ, {name}"] = compared(train_in_pipeline(model, steps, block), alone, model.config)
    return found


def means_over_a_step() -> tuple[float, float]:
    """The largest difference where the loss is one mean over the step; how far that is from the mean of means."""
    model, batches, found = model_of("llama"), batches_of("plain", "front"), []
    for step in batches:
        step[1]["labels"][:, 4:] = -100
    expected = train_alone(copy.deepcopy(model), batches, mean_over_step=True)
    for slices, stages in ((1, 2), (4, 2), (4, 1)):  # the last of two replicas
        got = train_in_pipeline(model, batches, {"slices": slices}, stages=stages, mean_over="step")
        found.append(compared(got, expected, model.config))
    return max(found), abs(train_alone(model, batches).losses[0] / expected.losses[0] - 1)


def padded() -> tuple[int, list[str]]:
    """Of a step of padded batches whose layers are recomputed: how often positions are worked out, and what the host reads."""
    whole, made = Rotary._whole, []
    Rotary._whole = lambda *args: (made.append(args), whole(*args))[1]
    pipeline = hf.pipeline(model_of("llama"), num_stages=2, activation_checkpointing=True)
    engine = build_engine([], None, made=pipeline, token_pipeline={"slices": 4}, config=RECOMPUTED)
    step = [hf.batch(features) for features in batches_of("front", "front")[0]]
    engine.train_batch(iter(step))
    made.clear()
    with host_reads() as reads:
        engine.train_batch(iter(step))
    engine.destroy()
    Rotary._whole = whole
    return len(made), reads


def without_an_optimizer(rank: int) -> str:
    """What is said where the second stage has none."""
    made = hf.pipeline(model_of("llama"), num_stages=2)
    given = {} if rank else {"optimizer": torch.optim.SGD(made.parameters(), lr=0.1)}
    config = {"train_micro_batch_size_per_gpu": 2, "token_pipeline": {"slices": 2}}
    engine, *_ = ds_terapipe.initialize(model=made, config=config, **given)
    with pytest.raises(ConfigError) as said:
        engine.train_batch(iter([hf.batch(batches_of("plain")[0][0])]))
    engine.destroy()
    return str(said.value)


def work(rank: int, world: int) -> tuple[Any, ...]:
    return every_family(), without_the_key(), means_over_a_step(), padded(), without_an_optimizer(rank)


ranks = launched(work, 2, timeout=240)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number])))
def test_families_train_as_in_one_process(ranks: list[Any], number: int) -> None:
    assert max(found[number] for found, *_ in ranks) <= TOLERANCE


def test_the_same_script_without_the_key_has_the_same_losses(ranks: list[Any]) -> None:
    for _, found, *_ in ranks:
        assert len(found) == 8 and not {name: value for name, value in found.items() if not value <= TOLERANCE}


def test_the_mean_over_a_step_is_that_of_all_labels_of_all_micro_batches(ranks: list[Any]) -> None:
    for *_, (off, apart), _, _ in ranks:
        assert off <= TOLERANCE and apart > 1e-3


def test_positions_of_a_micro_batch_are_worked_out_once_and_no_host_waits(ranks: list[Any]) -> None:
    assert [found[3] for found in ranks] == [(MICRO_BATCHES, [])] * 2


def test_a_rank_without_an_optimizer_is_named(ranks: list[Any]) -> None:
    for *_, said in ranks:
        assert said.startswith("optimizer: got none on a rank that trains, must be one on every rank")

"""Models of Hugging Face's families in a pipeline of their own layers, in slices, against the unmodified model in one process."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ds_terapipe.errors import ConfigError
from tests.spawn import launched

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")

STEPS, MICRO_BATCHES = 2, 2
TOLERANCE = 1e-5
ONES = [1, 8, 1, 13, 1]
# family, kind of batches, slices, schedule; test_slices.py has the others
CASES: list[tuple[str, str, Any, str]] = [
    ("llama, tied, dynamic", "plain", 4, "terapipe"),
    ("gemma2", "packed", ONES, "1f1b"),
    ("phi3", "front", [11, 7, 5, 1], "terapipe"),
    ("gpt2", "shifted", 4, "1f1b"),
    ("gpt2", "behind", 1, "terapipe"),
    ("qwen3", "counted", ONES, "1f1b"),
]


def batches_of(*kinds: str) -> list[list[dict[str, torch.Tensor]]]:
    """Steps of a micro-batch of each kind."""
    from tests.hf import families

    return [[families.features(kind, 10 * step + m) for m, kind in enumerate(kinds)] for step in range(STEPS)]


def every_family(rank: int, world: int) -> list[float]:
    """The largest difference from one process, of each case."""
    from tests.hf import families, pipelines

    found = []
    for family, kind, slices, schedule in CASES:
        model, batches = families.model_of(family), batches_of(kind, kind)
        expected = pipelines.train_alone(model, batches)
        got = pipelines.train_in_pipeline(model, batches, {"slices": slices, "schedule": schedule})
        found.append(max(pipelines.compared(got, expected, model.config).values()))
    return found


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a user writes it, of whole sequences."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


RECOMPUTED = {"pipeline": {"use_reentrant": False}}
AGAIN = {"loss": own_loss, "activation_checkpointing": True, "config": RECOMPUTED}


def without_the_key(rank: int, world: int) -> dict[str, float]:
    """DeepSpeed's own engine and ours on the same pipelines, with a loss of one's own and layers recomputed, too."""
    from tests.hf import families, pipelines

    found: dict[str, float] = {}

    def compare(name: str, got: Any, expected: Any) -> None:
        found[name] = max(pipelines.compared(got, expected, model.config).values())

    for family, kind in (("gemma2", "packed"), ("gpt2", "front")):
        model, batches = families.model_of(family), batches_of(kind, kind)
        theirs = pipelines.train_in_pipeline(model, batches, None)
        compare(family, pipelines.train_in_pipeline(model, batches, {"slices": [1, 22, 1]}), theirs)
        compare(f"{family} alone", theirs, pipelines.train_alone(model, batches))
        if family == "gemma2":
            for name, block in (("ours", {"slices": [1, 22, 1]}), ("theirs", None)):
                compare(f"recomputed, {name}", pipelines.train_in_pipeline(model, batches, block, **AGAIN), theirs)
    (long, short) = batches_of("plain", "plain")[0]
    steps = [[{name: value[:, :17] for name, value in short.items()}, long]]
    for name, block in (("ours", {"slices": 3}), ("theirs", None)):
        got = pipelines.train_in_pipeline(model, steps, block)
        compare(f"lengths that differ, {name}", got, pipelines.train_alone(model, steps))
    return found


def means_over_a_step(rank: int, world: int) -> tuple[float, float]:
    """The largest difference where the loss is one mean over the step; how far that is from the mean of means."""
    from tests.hf import families, pipelines

    model, batches, found = families.model_of("llama"), batches_of("plain", "front"), []
    for step in batches:
        step[1]["labels"][:, 4:] = -100
    expected = pipelines.train_alone(model, batches, mean_over_step=True)
    for slices, stages in ((1, 2), (4, 2), (4, 1)):  # the last of two replicas
        got = pipelines.train_in_pipeline(model, batches, {"slices": slices}, stages=stages, mean_over="step")
        found.append(max(pipelines.compared(got, expected, model.config).values()))
    return max(found), abs(pipelines.train_alone(model, batches).losses[0] / expected.losses[0] - 1)


def padded(rank: int, world: int) -> tuple[int, list[str]]:
    """Of a step of padded batches whose layers are recomputed: how often positions are worked out, and what the host reads."""
    from ds_terapipe import hf
    from ds_terapipe.hf.positions import Rotary
    from tests.hf.families import model_of
    from tests.pipeline.host_reads import host_reads
    from tests.pipeline.training import build_engine

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


def without_an_optimizer(rank: int, world: int) -> str:
    """What is said where the second stage has none."""
    import ds_terapipe
    from ds_terapipe import hf
    from tests.hf.families import model_of

    made = hf.pipeline(copy.deepcopy(model_of("llama")), num_stages=2)
    given = {} if rank else {"optimizer": torch.optim.SGD(made.parameters(), lr=0.1)}
    config = {"train_micro_batch_size_per_gpu": 2, "token_pipeline": {"slices": 2}}
    engine, *_ = ds_terapipe.initialize(model=made, config=config, **given)
    with pytest.raises(ConfigError) as said:
        engine.train_batch(iter([hf.batch(batches_of("plain")[0][0])]))
    engine.destroy()
    return str(said.value)


def others(rank: int, world: int) -> tuple[Any, ...]:
    return tuple(each(rank, world) for each in (without_the_key, means_over_a_step, padded, without_an_optimizer))


in_slices, ranks = launched(every_family, 2, timeout=240), launched(others, 2, timeout=240)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number])))
def test_families_train_as_in_one_process(in_slices: list[list[float]], number: int) -> None:
    assert [found[number] <= TOLERANCE for found in in_slices] == [True, True], in_slices


def test_the_same_script_without_the_key_has_the_same_losses(ranks: list[Any]) -> None:
    for found, *_ in ranks:
        assert not {name: value for name, value in found.items() if value > TOLERANCE}


def test_the_mean_over_a_step_is_that_of_all_labels_of_all_micro_batches(ranks: list[Any]) -> None:
    for _, (off, apart), *_ in ranks:
        assert off <= TOLERANCE and apart > 1e-3


def test_positions_of_a_micro_batch_are_worked_out_once_and_no_host_waits(ranks: list[Any]) -> None:
    assert [found[2] for found in ranks] == [(MICRO_BATCHES, [])] * 2


def test_a_rank_without_an_optimizer_is_named(ranks: list[Any]) -> None:
    assert all(
        found[3].startswith("optimizer: got none on a rank that trains, must be one on every rank") for found in ranks
    )

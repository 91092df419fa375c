"""Hugging Face's decoders in a pipeline of their own layers: sliced, frozen and moved as the unmodified model in one process."""

import copy
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ds_terapipe
from ds_terapipe import hf
from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.record import names_of
from ds_terapipe.hf.weights import Weights
from tests.hf.families import SGD, compared, features, model_of, renamed, train_alone, train_in_pipeline, without_key_biases
from tests.pipeline.host_reads import host_reads
from tests.pipeline.training import Trace, build_engine, mine, worst
from tests.spawn import launched

STEPS, MICRO_BATCHES, TOLERANCE = 2, 2, 1e-5


def batches_of(*kinds: str) -> list[list[dict[str, torch.Tensor]]]:
    return [[features(kind, 10 * step + m) for m, kind in enumerate(kinds)] for step in range(STEPS)]


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss of whole sequences, as a user writes it."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


CLIPPED = {"gradient_clipping": 1e9}  # which makes the norm
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


def means_over_a_step() -> tuple[float, float, float]:
    """Differences from one mean over the step, as in Trainer: the largest, that of losses and norms, that of a mean of means."""
    model, batches, found = model_of("llama"), batches_of("plain", "front", "counted", "behind"), []
    for step in batches:
        step[1]["labels"][:, 4:] = -100
    expected, scalars = train_alone(copy.deepcopy(model), batches, mean_over_step=True), []
    norms = [float(torch.cat([each.flatten() for each in of.values()]).norm()) for of in expected.gradients]
    for slices, stages in ((1, 2), (4, 2), (4, 1)):  # the last of two replicas
        got = train_in_pipeline(model, batches, {"slices": slices}, stages=stages, config=CLIPPED, mean_over="step")
        found.append(compared(got, expected, model.config))
        pairs = zip(got.losses + got.norms, expected.losses + norms, strict=True)
        scalars += [abs(a / b - 1) for a, b in pairs]
    return max(found), max(scalars), abs(train_alone(model, batches).losses[0] / expected.losses[0] - 1)


def padded() -> list[str]:
    """Host reads in a step of padded batches whose layers are recomputed."""
    pipeline = hf.pipeline(model_of("llama"), num_stages=2, activation_checkpointing=True)
    engine = build_engine([], None, made=pipeline, token_pipeline={"slices": 4}, config=RECOMPUTED)
    step = [hf.batch(features) for features in batches_of("front", "front")[0]]
    engine.train_batch(iter(step))
    with host_reads() as reads:
        engine.train_batch(iter(step))
    engine.destroy()
    return reads


def short(stages: int, slices: int) -> tuple[float, list[Any], float]:
    """Difference from one process, slices that ran, and the logits' length, where rows end in padding: of one replica, or all."""
    model, (step, *_) = model_of("qwen2"), batches_of("plain", "plain")
    for each in step[:stages]:
        each["attention_mask"] = torch.ones_like(each["input_ids"])
        each["attention_mask"][:, 11:] = 0
        each["labels"][:, 11:] = -100
    expected = train_alone(copy.deepcopy(model), [step])
    keys, made = {"slices": slices}, hf.pipeline(model, num_stages=stages)
    engine = build_engine([], None, made=made, token_pipeline=keys, optimizer=SGD, micro_batches=stages)
    here = [hf.batch(features) for features in mine(engine, step)]
    loss, ran = float(engine.train_batch(iter(here))), engine.slices_run
    _, logits = engine.eval_batch(iter(here), return_logits=True)
    engine.destroy()
    return abs(loss / expected.losses[0] - 1), ran, 0 if logits is None else logits.shape[1]


def without_an_optimizer(rank: int) -> tuple[str, str]:
    """Return the errors where the second stage has nothing to train, and none of our keys, or no optimizer."""
    made, optimizer = hf.pipeline(model_of("llama"), num_stages=2), {"optimizer": SGD}
    made.requires_grad_(rank == 0)
    with pytest.raises(ConfigError) as idle:
        ds_terapipe.initialize(model=made, config={"train_micro_batch_size_per_gpu": 2, **optimizer})
    made.requires_grad_(True)
    given = {} if rank else {"optimizer": torch.optim.SGD(made.parameters(), lr=0.1)}
    config = {"train_micro_batch_size_per_gpu": 2, "token_pipeline": {"slices": 2}}
    engine, *_ = ds_terapipe.initialize(model=made, config=config, **given)
    with pytest.raises(ConfigError) as said:
        engine.train_batch(iter([hf.batch(batches_of("plain")[0][0])]))
    engine.destroy()
    return str(idle.value), str(said.value)


FREEZE, RESIZE = [[2, 2], [4, 3]], [[2, 1], [4, 2]]
ELASTIC = {"gpt2": ("plain", "model"), "qwen3": ("packed", "folder")}


def alone(model: Any, names: list[dict[str, str]], steps: list[list[Any]]) -> Trace:
    def freeze(step: int) -> None:
        entries = max((entries for first, entries in FREEZE if first <= step), default=0)
        frozen = tuple(name for entry in names[:entries] for name in entry.values())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))

    return train_alone(model, steps, before_step=freeze)


def frozen_and_moved(family: str, kind: str, given: str, folder: Path) -> dict[str, Any]:
    model, rank = model_of(family), torch.distributed.get_rank()
    theirs: Any = copy.deepcopy(model)
    if given == "folder":
        if rank == 0:
            model.save_pretrained(folder)
        torch.distributed.barrier()
    made = hf.pipeline(folder if given == "folder" else theirs, num_stages=2)
    keys = {"elastic_pipeline": {"freeze": {"policy": "schedule", "frozen_layers": FREEZE}, "resize": {"policy": RESIZE}}}
    steps = [[features(kind, 10 * step + m) for m in range(MICRO_BATCHES)] for step in range(6)]
    losses, stages = [], []
    with mock.patch.object(Weights, "read", side_effect=AssertionError("what trains is read again")):
        engine = build_engine([], None, made=made, token_pipeline={"slices": 3}, optimizer=SGD, config=keys)
        torch.distributed.barrier()
        if given == "folder" and rank == 0:
            shutil.rmtree(folder)
        torch.distributed.barrier()
        for step in steps:
            losses.append(float(engine.train_batch(iter([hf.batch(each) for each in step]))))
            stages.append(engine.num_stages)
    expected = alone(model, names_of(made.source), steps)
    own = dict(engine.module.named_parameters())
    got = renamed(Trace(weights={name: p.detach().clone() for name, p in own.items()}), made).weights
    pairs = [{name: without_key_biases(model.config, name, of[name]) for name in got} for of in (got, expected.weights)]
    here = set(map(id, own.values()))
    away = [p for p in theirs.parameters() if id(p) not in here] if given == "model" else []
    engine.destroy()
    return {
        "off": max(worst(*pairs), *(abs(a / b - 1) for a, b in zip(losses, expected.losses, strict=True))),
        "missing": set(expected.weights) - set(got), "stages": stages,
        "away": {p.untyped_storage().nbytes() // p.element_size() for p in away},
    }  # fmt: skip


def work(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    elastic = {family: frozen_and_moved(family, *case, Path(folder, family)) for family, case in ELASTIC.items()}
    rest = padded(), without_an_optimizer(rank), elastic, (short(2, 4), short(1, 2))
    return without_the_key(), means_over_a_step(), *rest


ranks = launched(work, 2, timeout=240, folder=True)


def test_the_same_script_without_the_key_has_the_same_losses_and_the_mean_is_that_of_a_steps_labels(ranks: list[Any]) -> None:
    for found, (off, scalars, apart), *_ in ranks:
        assert len(found) == 8 and not {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert off <= TOLERANCE and scalars <= 1e-6 and apart > 1e-3, (off, scalars, apart)


def test_no_host_waits_for_positions(ranks: list[Any]) -> None:
    assert [found[2] for found in ranks] == [[], []]


def test_a_rank_without_an_optimizer_and_one_without_trained_weights_are_named(ranks: list[Any]) -> None:
    for idle, said in (found[3] for found in ranks):
        assert idle.startswith("token_pipeline: got none with nothing trained on stage 1, must be there (DeepSpeed")
        assert said.startswith("optimizer: got none on a rank that trains, must be one on every rank")


def test_slices_of_padding_alone_are_not_run_where_no_output_is_asked_for(ranks: list[Any]) -> None:
    for ran, (*_, (of_stages, of_replicas)) in zip((((12,),), ((12, 12),)), ranks, strict=True):
        for wanted, (off, slices, logits) in ((((6, 6), (6, 6)), of_stages), (ran, of_replicas)):
            assert off <= TOLERANCE and slices == wanted and logits in (0, 24)


@pytest.mark.parametrize("family", ELASTIC)
def test_a_decoder_freezes_and_moves_as_in_one_process(ranks: list[Any], family: str) -> None:
    for *_, found, _ in ranks:
        assert found[family]["off"] <= 1e-5 and found[family]["stages"] == [2, 2, 1, 1, 2, 2], found[family]
    assert not set.intersection(*(found[family]["missing"] for *_, found, _ in ranks))


def test_of_a_model_that_was_given_nothing_is_kept_that_has_moved_away(ranks: list[Any]) -> None:
    for *_, found, _ in ranks:
        # where the measured times leave the last stage the tied head alone, the first one has all weights
        assert found["gpt2"]["away"] == ({1} if found["gpt2"]["missing"] else set()), "numbers in memory of each weight"
    assert any(found["gpt2"]["away"] for *_, found, _ in ranks)

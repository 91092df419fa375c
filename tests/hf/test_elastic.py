"""Hugging Face's decoders freeze and move: as the unmodified model in one process, whose same layers are frozen."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed, extra hf")

from ds_terapipe import hf
from ds_terapipe.elastic import engine as elastic_engine
from ds_terapipe.hf.record import names_of
from ds_terapipe.hf.weights import Weights
from tests.hf.families import features, model_of, without_key_biases
from tests.hf.pipelines import SGD, renamed, train_alone
from tests.pipeline.training import Trace, build_engine, worst
from tests.spawn import launched

FREEZE, RESIZE, STEPS, MICRO_BATCHES = [[2, 2], [4, 3]], [[2, 1], [4, 2]], 6, 2
CASES = {"gpt2": ("plain", "model"), "qwen3": ("packed", "folder")}


def alone(model: Any, names: list[dict[str, str]], steps: list[list[Any]]) -> Trace:
    """The training of one process."""

    def freeze(step: int) -> None:
        entries = max((entries for first, entries in FREEZE if first <= step), default=0)
        frozen = tuple(name for entry in names[:entries] for name in entry.values())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))

    return train_alone(model, steps, before_step=freeze)


def one(family: str, kind: str, given: str, folder: Path) -> dict[str, Any]:
    model, rank = model_of(family), torch.distributed.get_rank()
    theirs: Any = copy.deepcopy(model)
    if given == "folder":
        if rank == 0:
            model.save_pretrained(folder)
        torch.distributed.barrier()
    made = hf.pipeline(folder if given == "folder" else theirs, num_stages=2)
    moved: list[nn.Module] = []
    to, look = nn.Module.to, elastic_engine.check_movable

    def noted(module: nn.Module, *args: Any) -> None:
        """Nothing that trains may be moved by the look at whether it can be: on a device that would be off it."""
        with mock.patch.object(nn.Module, "to", lambda self, *a, **k: (moved.append(self), to(self, *a, **k))[1]):
            look(module, *args)
        assert not {id(p) for each in moved for p in each.parameters()} & set(map(id, module.parameters()))

    keys = {
        "elastic_pipeline": {"freeze": {"policy": "schedule", "frozen_layers": FREEZE}, "resize": {"policy": RESIZE}}
    }
    steps = [[features(kind, 10 * step + m) for m in range(MICRO_BATCHES)] for step in range(STEPS)]
    losses, stages = [], []
    with mock.patch.object(Weights, "read", side_effect=AssertionError("what trains is read again")):
        with mock.patch.object(elastic_engine, "check_movable", noted):
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
    pairs = [
        {name: without_key_biases(model.config, name, each[name]) for name in got} for each in (got, expected.weights)
    ]
    here = set(map(id, own.values()))
    away = [p for p in theirs.parameters() if id(p) not in here] if given == "model" else []
    engine.destroy()
    return {
        "off": max(worst(*pairs), *(abs(a / b - 1) for a, b in zip(losses, expected.losses, strict=True))),
        "missing": set(expected.weights) - set(got),
        "stages": stages,
        "away": (len(away), sum(p.untyped_storage().nbytes() for p in away) / max(sum(p.numel() for p in away), 1)),
    }


def work(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {family: one(family, *case, Path(folder, family)) for family, case in CASES.items()}


ranks = launched(work, 2, timeout=200, folder=True)


@pytest.mark.parametrize("family", CASES)
def test_a_decoder_freezes_and_moves_as_in_one_process(ranks: list[Any], family: str) -> None:
    for found in ranks:
        assert found[family]["off"] <= 1e-5 and found[family]["stages"] == [2, 2, 1, 1, 2, 2], found[family]
    assert not set.intersection(*(found[family]["missing"] for found in ranks))


def test_of_a_model_that_was_given_nothing_is_kept_that_has_moved_away(ranks: list[Any]) -> None:
    for found in ranks:
        count, bytes_each = found["gpt2"]["away"]
        assert count > 0 and bytes_each < 0.1, "bytes for each of its numbers"

"""Checkpoints of our engine and of DeepSpeed's own are interchangeable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ds_terapipe.names import MANIFEST
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import ADAMW, build_engine, train, worst
from tests.spawn import launched

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 6}}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16 zero1 fp32 sum": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
SLICED = {"slices": [7, 2, 9, 1, 5]}
ENGINES: dict[str, dict[str, Any] | None] = {"own": None, "ours": SLICED, "one slice": {"slices": 1}}


def engine(kind: str, name: str) -> Any:
    return build_engine(
        tied_gpt(), masked_loss, token_pipeline=ENGINES[name], optimizer=ADAMW, config={**KINDS[kind], **WARMUP}
    )


def exchange(kind: str, saver: str, loader: str, folder: str) -> dict[str, Any]:
    """Two steps with one engine, save, two more with it and with another one that loads."""
    steps = steps_of(4, 2)
    first = engine(kind, saver)
    train(first, steps[:2])
    first.save_checkpoint(folder, tag="two", client_state={"note": saver})
    uninterrupted = train(first, steps[2:])
    first.destroy()
    second = engine(kind, loader)
    path, client = second.load_checkpoint(folder, tag="two")
    assert path is not None and client["note"] == saver
    resumed = train(second, steps[2:])
    counted = (second.global_steps, second.global_samples, second.get_lr())
    second.destroy()
    return {
        "losses": max(abs(a - b) / b for a, b in zip(resumed.losses, uninterrupted.losses, strict=True)),
        "weights": worst(resumed.weights, uninterrupted.weights),
        "counted": counted,
        "files": sorted(set(os.listdir(Path(folder) / "two")) - {MANIFEST}),
        "manifest": (Path(folder) / "two" / MANIFEST).exists(),
    }


def ways(kind: str) -> list[tuple[str, str]]:
    """Who saves and who loads. One slice is the very computation of DeepSpeed's own engine."""
    if kind == "fp32":
        return [("own", "ours"), ("ours", "own")]
    return [("own", "one slice"), ("one slice", "own")]


WAYS = [(kind, saver, loader) for kind in KINDS for saver, loader in ways(kind)]


def worker(rank: int, world_size: int, folder: str) -> dict[tuple[str, str, str], Any]:
    return {way: exchange(*way, folder=str(Path(folder) / "-".join(way))) for way in WAYS}


ranks = launched(worker, 2, timeout=180, folder=True)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_training_goes_on_where_it_was(ranks: list[dict[Any, Any]], way: tuple[str, str, str]) -> None:
    kind, *_ = way
    limit = 1e-5 if kind == "fp32" else 0.0
    for results in ranks:
        found = results[way]
        assert found["losses"] <= limit and found["weights"] <= limit, found
        assert found["counted"] == results[WAYS[0]]["counted"] and found["counted"][:2] == (4, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_same_names(ranks: list[dict[Any, Any]], kind: str) -> None:
    files = [found["files"] for way, found in ranks[0].items() if way[0] == kind]
    assert all(names == files[0] for names in files)
    assert any(name.startswith("layer_02-") for name in files[0])
    assert all(found["manifest"] == (way[1] != "own") for way, found in ranks[0].items())

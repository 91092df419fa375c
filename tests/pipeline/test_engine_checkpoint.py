"""Checkpoints of our engine and of DeepSpeed's own are interchangeable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_terapipe.names import MANIFEST
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import ADAMW, build_engine, train, worst
from tests.spawn import launched

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 6}}}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 zero1": BF16,
    "bf16 zero1 fp32 sum": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
}
ENGINES: dict[str, Any] = {"own": None, "ours": {"slices": [7, 2, 9, 1, 5]}, "one slice": {"slices": 1}}
# who saves and who loads; one slice is the very computation of DeepSpeed's own engine
WAYS = [
    (kind, *pair)
    for kind in KINDS
    for other in ("ours" if kind == "fp32" else "one slice",)
    for pair in (("own", other), (other, "own"))
]


def exchange(kind: str, saver: str, loader: str, folder: str) -> dict[str, Any]:
    """Two steps with one engine, save, two more with it and with another one that loads."""

    def engine(name: str) -> Any:
        options: Any = {"optimizer": ADAMW, "config": {**KINDS[kind], **WARMUP}}
        return build_engine(tied_gpt(), masked_loss, token_pipeline=ENGINES[name], **options)

    steps, first = steps_of(4, 2), engine(saver)
    train(first, steps[:2])
    first.save_checkpoint(folder, tag="two", client_state={"note": saver})
    uninterrupted = train(first, steps[2:])
    first.destroy()
    second = engine(loader)
    path, client = second.load_checkpoint(folder, tag="two")
    assert path is not None and client["note"] == saver
    resumed = train(second, steps[2:])
    counted = (second.global_steps, second.global_samples, second.get_lr())
    second.destroy()
    off = [abs(a - b) / b for a, b in zip(resumed.losses, uninterrupted.losses, strict=True)]
    files = sorted(file.name for file in Path(folder, "two").iterdir())
    return {"off": max(*off, worst(resumed.weights, uninterrupted.weights)), "counted": counted, "files": files}


def worker(rank: int, world_size: int, folder: str) -> dict[tuple[str, str, str], Any]:
    return {way: exchange(*way, folder=str(Path(folder) / "-".join(way))) for way in WAYS}


ranks = launched(worker, 2, timeout=180, folder=True)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_training_goes_on_where_it_was(ranks: list[dict[Any, Any]], way: tuple[str, str, str]) -> None:
    for found in ranks:
        assert found[way]["off"] <= (1e-5 if way[0] == "fp32" else 0.0)
        assert found[way]["counted"] == found[WAYS[0]]["counted"] and found[way]["counted"][:2] == (4, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_same_names(ranks: list[dict[Any, Any]], kind: str) -> None:
    own, ours = sorted((found["files"] for way, found in ranks[0].items() if way[0] == kind), key=len)
    assert ours == sorted([*own, MANIFEST]) and any(name.startswith("layer_02-") for name in own)

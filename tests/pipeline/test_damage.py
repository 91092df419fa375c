"""A checkpoint with a damaged, missing or foreign file: one line that names it, on every rank, and nothing is changed."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
from hypothesis import given, strategies as st
from torch import Tensor
from zlib_ng import zlib_ng

from ds_terapipe import manifest
from ds_terapipe.manifest import measured
from ds_terapipe.names import ELASTIC_STATE, MANIFEST
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import ADAMW, build_engine, raised
from tests.spawn import launched

SLICED = {"slices": 2, "timeout_s": 60}
ZERO1 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
MOVES = {"elastic_pipeline": {"resize": {"policy": [[900, 2]]}}}
STAYS = {"elastic_pipeline": {"resize": {"policy": "off"}}}
# Whose checkpoint is damaged, and who reads it: stages and further keys of ds_config.json.
KINDS: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "stages": ((2, {}), (2, {})), "replicas, bf16, ZeRO-1": ((1, ZERO1), (1, ZERO1)),
    "elastic, by name": ((2, STAYS), (1, STAYS)), "elastic, into the saved shape": ((2, STAYS), (1, MOVES)),
}  # fmt: skip


def archive(folder: Path, **options: Any) -> Path:
    torch.save({name: torch.randn(300) for name in "abc"}, folder / "file", **options)
    return folder / "file"


@patch.object(manifest, "_BLOCK", 1 << 10)
@given(at=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_one_changed_byte_of_an_archive_changes_its_checksum(tmp_path_factory, at, mask):
    """Of a record, between two, or in the directory."""
    path = archive(tmp_path_factory.mktemp("file"))
    before, data = measured(path), bytearray(path.read_bytes())
    data[int(at * len(data))] ^= mask
    path.write_bytes(data)
    assert measured(path).checksum != before.checksum


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("with_crcs", [True, False])
def test_a_file_just_saved_has_the_checksum_of_its_bytes(tmp_path, monkeypatch, legacy, with_crcs):
    """An archive says it without being read; so do files of torch's other form, and archives without CRCs."""
    read: list[int] = []
    crc = zlib_ng.crc32
    monkeypatch.setattr(zlib_ng, "crc32", lambda data, *start: read.append(len(data)) or crc(data, *start))
    torch.serialization.set_crc32_options(with_crcs)
    try:
        path = archive(tmp_path, _use_new_zipfile_serialization=not legacy)
        saved = measured(path, just_saved=True)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (sum(read) >= 3 * 1200) == (legacy or not with_crcs) and read
    assert measured(path) == saved and saved.bytes == path.stat().st_size


def changed(at: float, data: bytes) -> bytes:
    index = int(at * (len(data) - 1))
    return data[:index] + bytes([data[index] ^ 16]) + data[index + 1 :]


def rewrite(change: Callable[[bytes], bytes], file: Path, other: Path) -> None:
    file.write_bytes(change(file.read_bytes()))


# of a file, beside another one
DAMAGES: dict[str, Callable[[Path, Path], Any]] = {
    **{f"a bit at {at}": partial(rewrite, partial(changed, at)) for at in (0, 0.5, 1)},
    "cut": partial(rewrite, lambda data: data[: len(data) // 2]), "another file's": lambda file, other: shutil.copy(other, file),
    "gone": lambda file, other: file.unlink(), "a folder": lambda file, other: (file.unlink(), file.mkdir()),
}  # fmt: skip
Change = Callable[[Path], Any]


def damages_of(good: Path) -> dict[tuple[str, str], Change]:
    """Each file of a checkpoint, damaged in each way, by the name of the file and how."""
    names = sorted(path.relative_to(good).as_posix() for path in good.rglob("*") if path.is_file())
    others = dict(zip(names, [*names[1:], names[0]], strict=True))
    found = {(n, how): lambda bad, n=n, d=d: d(bad / n, good / others[n]) for n in names for how, d in DAMAGES.items()}
    # without a manifest it is read as one of DeepSpeed's own
    return {key: change for key, change in found.items() if key not in ((MANIFEST, "gone"), (MANIFEST, "a folder"))}


def engine_of(stages: int, config: dict[str, Any], token_pipeline: Any = SLICED) -> Any:
    options = {"optimizer": ADAMW, "stages": stages, "micro_batches": stages, "config": config}
    return build_engine(gpt(2), mean_loss, token_pipeline=token_pipeline, **options)


def step(engine: Any) -> None:
    engine.train_batch(iter([micro_batch(m, masked=False) for m in range(engine.micro_batches)]))


def state_of(engine: Any) -> tuple[list[Tensor], Any]:
    tensors = [*engine.module.parameters()]
    for group in engine.basic_optimizer.param_groups:
        tensors += [value for p in group["params"] for value in engine.basic_optimizer.state[p].values()]
        tensors += group["params"]
    counts = engine.global_steps, list(map(int, engine.module.parts)), getattr(engine, "frozen_layers", 0)
    return [t.detach().clone() for t in tensors if isinstance(t, Tensor)], counts


def same(a: Any, b: Any) -> bool:
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(map(torch.equal, a[0], b[0]))


def said(engine: Any, folder: Path) -> str:
    return raised(partial(engine.load_checkpoint, str(folder.parent), tag=folder.name))


def refusals(engine: Any, good: Path, damages: dict[Any, Change]) -> dict[Any, tuple[str, bool]]:
    """Errors of loading copies of a checkpoint, each with one damage, and whether the engine's state stayed as it was."""
    before, bad, found = state_of(engine), good.parents[1] / "bad" / good.name, {}
    for name, damage in damages.items():
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(bad.parent, ignore_errors=True)
            shutil.copytree(good, bad)
            damage(bad)
        torch.distributed.barrier()
        text = said(engine, bad)
        found[name] = text, same(before, state_of(engine))
        texts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(texts, text)
        # after another answer a rank may wait for another
        assert all(each.startswith("ConfigError: load_checkpoint: ") for each in texts), (name, texts)
    assert said(engine, good) == "" and engine.global_steps == 1
    return found


def sweep(rank: int, world_size: int, folder: str) -> dict[str, dict[Any, tuple[str, bool]]]:
    found = {}
    for number, (kind, (saver, reader)) in enumerate(KINDS.items()):
        good = Path(folder, str(number), "good", "tag")
        engine = engine_of(*saver)
        step(engine)
        engine.save_checkpoint(str(good.parent), tag="tag")
        if reader != saver:
            engine.destroy()
            engine = engine_of(*reader)
        step(engine)
        step(engine)
        found[kind] = refusals(engine, good, damages_of(good))
        engine.destroy()
    return found


swept = launched(sweep, 2, folder=True, timeout=280)


@pytest.mark.parametrize("kind", KINDS)
def test_each_damage_is_named_on_every_rank_and_changes_nothing(swept: list[Any], kind: str) -> None:
    for found in swept:
        for (name, how), (text, unchanged) in found[kind].items():
            right = text.startswith("ConfigError: load_checkpoint: got ") and "\n" not in text and ", use " in text
            assert right and unchanged and (f"{name} " in text or f"{name}," in text), (name, how, text)
        assert len(found[kind]) > 25


LAYER_0, LAYER = "layer_00-model_states.pt", "layer_01-model_states.pt"
STATE_0, STATE = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"


def swap(one: str, other: str) -> Change:
    return lambda f: [(f / a).rename(f / b) for a, b in ((one, "other"), (other, one), ("other", other))]


def put(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda f: torch.save(change(torch.load(f / name, weights_only=False)), f / name)


def other_moments(state: Any) -> Any:
    state["optimizer"]["state"][1].update(exp_avg=torch.zeros(3))
    return state


# Damages of DeepSpeed's own checkpoint of two stages, and the messages.
FOREIGN: dict[str, tuple[Change, str]] = {
    "no layer": (lambda f: (f / LAYER).unlink(), "no file of layer 1 in "),
    "an empty layer": (lambda f: (f / LAYER).write_bytes(b""), f"{LAYER} (EOFError: "),
    "layers of other shapes": (swap(LAYER, LAYER_0), f"{LAYER_0} without"),
    "a layer of another size": (put(LAYER, lambda s: {**s, "up.bias": s["up.bias"][:3]}),
                                f"{LAYER} with up.bias of shape [3], must be [64]"),
    "no weights at all": (put(LAYER, lambda s: [1]), f"{LAYER} without states"),
    "two tensor-parallel ranks": (lambda f: shutil.copy(f / LAYER, f / "layer_01-model_01-model_states.pt"),
                                  "2 files of layer 1 in "),
    "no states": (lambda f: (f / STATE).unlink(), "1 files mp_rank_*_model_states.pt in "),
    "states of other stages": (swap(STATE, STATE_0), "_model_states.pt with other parameter groups"),
    "no optimizer": (put(STATE, lambda s: {k: s[k] for k in s if k != "optimizer"}), f"{STATE} without the optimizer's state, "),
    "another optimizer's moments": (put(STATE, other_moments), f"{STATE} with exp_avg of shape [3], must be ["),
}  # fmt: skip
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 6}}}


def foreign(rank: int, world_size: int, path: str) -> dict[str, tuple[str, bool]]:
    good = Path(path, "good", "tag")
    own = engine_of(2, WARMUP, None)
    step(own)
    own.save_checkpoint(str(good.parent), tag="tag")
    own.destroy()
    engine = engine_of(2, WARMUP)
    assert said(engine, good.with_name("nowhere")).startswith("ConfigError: load_checkpoint: got ")
    found = refusals(engine, good, {name: change for name, (change, _) in FOREIGN.items()})
    engine.destroy()
    return found


def overwritten(rank: int, world_size: int, path: str) -> tuple[str, str, int]:
    folder = Path(path, "over")
    for engine, steps in ((engine_of(2, STAYS), 2), (engine_of(2, {}, None), 1)):
        for _ in range(steps):
            step(engine)
        engine.save_checkpoint(str(folder), tag="tag")
        engine.destroy()
    engine = engine_of(2, {})
    stale = said(engine, folder / "tag")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for name in (MANIFEST, ELASTIC_STATE):
            (folder / "tag" / name).unlink()
    torch.distributed.barrier()
    after, steps = said(engine, folder / "tag"), engine.global_steps
    engine.destroy()
    return stale, after, steps


others_saved = launched([foreign, overwritten], 2, folder=True)


@pytest.mark.parametrize("name", FOREIGN)
def test_what_can_be_told_without_a_manifest_is(others_saved: list[Any], name: str) -> None:
    for text, unchanged in (found[name] for found, _ in others_saved):
        assert unchanged and text.startswith("ConfigError: load_checkpoint: got ") and "\n" not in text, text
        assert FOREIGN[name][1] in text and ", use " in text, text


def test_what_deepspeed_saved_over_it_is_not_called_damaged(others_saved: list[Any]) -> None:
    for stale, after, steps in (over for _, over in others_saved):
        assert "of a later save than ds_terapipe_manifest.json (DeepSpeed has saved here without our keys)" in stale
        assert stale.endswith("tag, or remove ds_terapipe_manifest.json and elastic_pipeline.json to read what DeepSpeed saved")
        assert after == "" and steps == 1

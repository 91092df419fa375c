"""An engine that is destroyed leaves nothing behind, however often one is built."""

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed import distributed_c10d

import ds_terapipe
from ds_terapipe.pipeline.operators.interception import Overrides
from tests.pipeline.footprint import Footprint, footprint, settled
from tests.pipeline.models import gpt, masked_loss, mean_loss, micro_batch, tied_gpt
from tests.pipeline.test_engine_data import Texts, loading_here
from tests.pipeline.training import ADAMW, build_engine, raised
from tests.spawn import launched

MEMORY = 0.02  # of the resident memory, in twenty-five rounds
SLICED = {"slices": 4}


def data() -> Any:
    return iter([micro_batch(m, masked=False) for m in range(2)])


ROUNDS, FULL = 10, 5  # engines that are made, and after how many of them caches are full


def change(before: Footprint, after: Footprint, *names: str) -> dict[str, int]:
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def come_and_go(rank: int, world_size: int) -> tuple[dict[str, int], float]:
    """By how much counts grew since caches were full, and the share of memory, in as many rounds as :data:`MEMORY` is for."""
    for number in range(1, ROUNDS + 1):
        engine = build_engine(tied_gpt(2), mean_loss, stages=1 + number % 2, token_pipeline=SLICED)
        engine.train_batch(data())
        engine.destroy()
        del engine
        gc.collect()  # at one time in each round: what is allocated between garbage keeps whole pages
        if number == FULL:
            torch.distributed.barrier()
            before = footprint()
    torch.distributed.barrier()
    after = settled(before)
    return change(before, after, *Footprint._fields[:-1]), (after.resident / before.resident - 1) * 25 / (ROUNDS - FULL)


grown = launched(come_and_go, 2, timeout=240)


def test_nothing_grows(grown: list[Any]) -> None:
    for counts, memory in grown:
        assert max(counts.values()) <= 0 == counts["groups"] and memory < MEMORY, (counts, memory)


GONE = "ConfigError: model: got a PipelineModule whose engine was destroyed, must be built again, "
GONE += "use PipelineModule(...) again and load its weights"
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "zero": {"optimizer": ADAMW, "config": {"zero_optimization": {"stage": 1}}},
    "bf16": {"optimizer": ADAMW, "config": {"bf16": {"enabled": True}}},
}


def left_by(kind: str, folder: str) -> dict[str, Any]:
    """Leftovers of a destroyed engine while the engine is held, then only its module and optimizer."""
    monitor = {"tensorboard": {"enabled": True, "output_path": folder, "job_name": "close"}}
    options = {**KINDS[kind], "config": {**KINDS[kind].get("config", {}), **monitor}}
    before = footprint()
    with loading_here():
        engine = build_engine(tied_gpt(2), masked_loss, token_pipeline=SLICED, training_data=Texts(), **options)
        for _ in range(2):
            engine.train_batch()
    loader, held = weakref.ref(engine.data_iterator), footprint()
    engine.destroy()
    ended = settled(before._replace(files=held.files), 10.0)  # a thread may be seen a little longer than join waits
    module, optimizer, engines = engine.module, engine.optimizer, weakref.ref(engine)
    found: dict[str, Any] = {
        "grew": min(change(before, held, "groups", "threads", "files").values()) > 0,
        "left": [*change(before, ended, "groups", "threads").values()],
        "hooks": len(module._forward_pre_hooks) + len(module._forward_hooks),
        "kept": [loader() is not None, deepspeed_groups.mpu is not None, Overrides._library is not None],
        "again": raised(engine.destroy) or raised(partial(engine.train_batch, data())),
        "another": raised(partial(ds_terapipe.initialize, model=module, config={"token_pipeline": SLICED})),
    }
    with mock.patch.object(type(get_accelerator()), "synchronize") as wait:
        del engine
        torch.distributed.barrier()
        found["left"] += change(before, settled(before), "groups", "threads", "files").values()
    found["waits"] = wait.call_count
    found["kept"].append(engines() is not None)  # by module and optimizer
    assert optimizer is not None and sum(p.numel() for p in module.parameters()) > 0
    return found


def names() -> set[str]:
    return {group.group_name for group in distributed_c10d._world.pg_map}


def collected() -> dict[str, Any]:
    before, engine = names(), build_engine(gpt(2), mean_loss, token_pipeline=SLICED)
    engine.train_batch(data())
    made, engines = names() - before, weakref.ref(engine)
    del engine
    footprint()  # collects
    watching = any(thread.name == "ds_terapipe-watchdog" for thread in threading.enumerate())
    found = {"alive": [engines() is not None, watching, Overrides._library is not None]}
    found |= {"made": made, "kept": names() - before}
    engine = build_engine(gpt(2), mean_loss, token_pipeline=SLICED)
    engine.train_batch(data())
    build_engine((), None, made=engine.module, token_pipeline=SLICED).destroy()
    found["without its module"] = raised(partial(engine.train_batch, data()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {**found, "after the job": raised(engine.destroy)}


def all_that_is_left(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {kind: left_by(kind, str(Path(folder, kind))) for kind in KINDS}
    return {**found, "collected": collected()}  # which ends the job


left = launched(all_that_is_left, 2, folder=True)


@pytest.mark.parametrize("kind", KINDS)
def test_destroy_undoes_what_the_engine_did_and_engine_and_module_say_so(left: list[dict[str, Any]], kind: str) -> None:
    for found in (rank[kind] for rank in left):
        assert found["grew"], "there was nothing to undo"
        assert max(found["left"]) <= 0 and found["left"][:2] == [0, 0]
        assert found["hooks"] == 0 and not any(found["kept"])
        # garbage is collected in another engine's step too, where the device may wait for what this rank has yet to send
        assert found["waits"] == 0
        # a second destroy() says nothing
        assert found["again"].startswith("RuntimeError: this engine is no longer usable (destroy() was called)")
        assert found["another"] == GONE


def test_an_engine_that_is_collected_leaves_its_groups_to_all_ranks(left: list[dict[str, Any]]) -> None:
    for found in (rank["collected"] for rank in left):
        assert not any(found["alive"])
        assert found["made"] == found["kept"] != set()  # a collector runs on every rank at another time
        assert found["after the job"] == "" and found["without its module"] == GONE

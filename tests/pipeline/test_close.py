"""An engine that is destroyed leaves nothing behind, however often one is built; and takes nothing from one that goes on."""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from deepspeed.runtime import dataloader
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

import ds_terapipe
from ds_terapipe.pipeline.operators.interception import Overrides
from ds_terapipe.process_groups import close_groups
from tests.pipeline.footprint import Footprint, footprint, settled
from tests.pipeline.models import gpt, mean_loss, micro_batch, tied_gpt
from tests.pipeline.training import ADAMW, build_engine, difference
from tests.spawn import launched, run_ranks

RANKS, STEPS = 2, 2
ROUNDS, SETTLED = 30, 5  # the first rounds fill caches
MEMORY = 0.02  # of the resident memory, from the fifth round to the thirtieth
SLICED = {"slices": 4}
MEGATRON = importlib.util.find_spec("megatron") is not None


def data() -> Any:
    return iter([micro_batch(m, masked=False) for m in range(2)])


# -------------------------------------------------------------------------------------------------------- many, one by one


def ours(stages: int) -> Any:
    engine = build_engine(tied_gpt(2), mean_loss, stages=stages, token_pipeline=SLICED)
    for _ in range(STEPS):
        engine.train_batch(data())
    engine.destroy()
    return engine


def deepspeeds(stages: int) -> Any:
    engine = build_engine(tied_gpt(2), mean_loss, stages=stages, token_pipeline=None)
    for _ in range(STEPS):
        engine.train_batch(data())
    engine.destroy()
    return engine


def megatron(stages: int) -> Any:
    from ds_terapipe.megatron import destroy_parallel
    from tests.megatron.common import Model, batches, build, deepspeed_config

    model, replicas = Model(), RANKS // stages
    config = deepspeed_config(model, replicas, token_pipeline=SLICED)
    engine, *_ = ds_terapipe.initialize(model=build(model, stages=stages), config=config)
    of_this_replica = batches(engine.grid.data_parallel_id, replicas)
    for _ in range(STEPS):
        engine.train_batch(of_this_replica)
    engine.destroy()
    destroy_parallel()
    return engine


LOOPS: dict[str, Callable[[int], Any]] = {"ours": ours, "megatron": megatron, "DeepSpeed's": deepspeeds}


def come_and_go(rank: int, world_size: int, loop: str, rounds: int) -> tuple[Footprint, Footprint, int]:
    """Footprints after the fifth and the last of some engines, two stages and one by turns, and how many are alive then."""
    alive = []
    for number in range(1, rounds + 1):
        alive.append(weakref.ref(LOOPS[loop](1 + number % 2)))
        gc.collect()  # at one time in each round: what is allocated between garbage keeps whole pages
        if number == SETTLED:
            torch.distributed.barrier()
            before = footprint()
    torch.distributed.barrier()
    after = footprint() if loop == "DeepSpeed's" else settled(before)
    return before, after, sum(engine() is not None for engine in alive)


def growth(before: Footprint, after: Footprint, rounds: int) -> tuple[dict[str, int], float]:
    """By how much the counts grew; and the memory, as a part of it, in as many rounds as :data:`MEMORY` is for."""
    counts = {name: getattr(after, name) - getattr(before, name) for name in Footprint._fields if name != "resident"}
    share = after.resident / before.resident - 1
    print(f"grew from round {SETTLED} to {rounds}: {counts}, resident {share:.2%}")
    return counts, share * (ROUNDS - SETTLED) / (rounds - SETTLED)


needs_megatron = pytest.mark.skipif(not MEGATRON, reason="needs megatron-core")


@pytest.mark.parametrize(
    ("loop", "rounds"),
    [
        ("ours", 16),
        pytest.param("ours", ROUNDS, marks=pytest.mark.full),
        pytest.param("megatron", 12, marks=needs_megatron),
        pytest.param("megatron", ROUNDS, marks=[pytest.mark.full, needs_megatron]),
    ],
)
def test_nothing_grows(loop: str, rounds: int) -> None:
    for before, after, alive in run_ranks(come_and_go, RANKS, loop, rounds, timeout=240):
        counts, memory = growth(before, after, rounds)
        assert alive == 0
        assert max(counts.values()) <= 0 and counts["groups"] == 0
        assert memory < MEMORY


def test_the_meter_sees_what_deepspeeds_own_engine_leaves() -> None:
    for before, after, _ in run_ranks(come_and_go, RANKS, "DeepSpeed's", ROUNDS, timeout=240):
        counts, memory = growth(before, after, ROUNDS)
        assert all(counts[name] >= ROUNDS - SETTLED for name in ("groups", "threads", "files"))
        assert memory > MEMORY


# ------------------------------------------------------------------------------------------------------ what one leaves


class Texts(torch.utils.data.Dataset):
    """Samples without a batch dimension."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        (tokens, positions), targets = micro_batch(index, batch=1, masked=False)
        return (tokens[0], positions[0]), targets[0]


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "zero": {"optimizer": ADAMW, "config": {"zero_optimization": {"stage": 1}}},
    "bf16": {"optimizer": ADAMW, "config": {"bf16": {"enabled": True}}},
}


def left_by(kind: str, folder: str) -> dict[str, Any]:
    """What is there while somebody has the engine, then module and optimizer, then nothing of an engine that was destroyed."""
    options = {**KINDS[kind], "config": {**KINDS[kind].get("config", {}), "tensorboard": monitor(folder)}}
    before = footprint()
    # DeepSpeed starts two processes that load: none here, a test's process may not have children
    with mock.patch.object(dataloader, "DataLoader", lambda *a, **k: DataLoader(*a, **{**k, "num_workers": 0})):
        engine = build_engine(tied_gpt(2), mean_loss, token_pipeline=SLICED, training_data=Texts(), **options)
        for _ in range(STEPS):
            engine.train_batch()
    loader = weakref.ref(engine.data_iterator)
    held = footprint()
    engine.destroy()
    module, optimizer, engines = engine.module, engine.optimizer, weakref.ref(engine)
    found: dict[str, Any] = {
        "grew": held.groups > before.groups and held.threads > before.threads and held.files > before.files,
        "with the engine": change(before, footprint(), "groups", "threads"),
        "the loader": loader() is not None,
        "hooks": len(module._forward_pre_hooks) + len(module._forward_hooks),
        "asks the grid": deepspeed_groups.mpu is not None,
        "overrides": Overrides._library is not None,
        "again": raised(engine.destroy) or raised(partial(engine.train_batch, data())),
        "another": raised(partial(ds_terapipe.initialize, model=module, config={"token_pipeline": SLICED})),
    }
    del engine
    torch.distributed.barrier()
    found["with the module"] = change(before, settled(before), "groups", "threads", "files")
    found["engine"] = engines() is not None
    weights = sum(p.numel() for p in module.parameters())
    del optimizer
    return {**found, "weights": weights}


def monitor(folder: str) -> dict[str, Any]:
    return {"enabled": True, "output_path": folder, "job_name": "close"}


def change(before: Footprint, after: Footprint, *names: str) -> dict[str, int]:
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_kinds(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {kind: left_by(kind, str(Path(folder) / kind)) for kind in KINDS}


left = launched(all_kinds, RANKS, folder=True)


@pytest.mark.parametrize("kind", KINDS)
def test_destroy_undoes_what_the_engine_did(left: list[dict[str, Any]], kind: str) -> None:
    for rank in left:
        found = rank[kind]
        assert found["grew"], "there was nothing to undo"
        assert found["with the engine"] == {"groups": 0, "threads": 0}
        assert max(found["with the module"].values()) <= 0
        assert not found["engine"], "module and optimizer keep it"
        assert not found["the loader"]
        assert found["hooks"] == 0 and not found["asks the grid"] and not found["overrides"]
        assert found["weights"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_module_say_that_they_are_gone(left: list[dict[str, Any]], kind: str) -> None:
    for rank in left:
        assert rank[kind]["again"].startswith(
            "RuntimeError: this engine is no longer usable (destroy() was called)"
        )  # a second destroy() says nothing
        assert rank[kind]["another"] == (
            "ConfigError: model: got a PipelineModule whose engine was destroyed, must be built anew, "
            "use PipelineModule(...) again and load its weights"
        )


def collected(rank: int, world_size: int) -> dict[str, Any]:
    """An engine that nobody destroys; then one that is destroyed after its job."""
    before = names()
    engine = build_engine(gpt(2), mean_loss, token_pipeline=SLICED)
    engine.train_batch(data())
    made, engines = names() - before, weakref.ref(engine)
    del engine
    footprint()  # collects
    watching = sum(thread.name == "ds_terapipe-watchdog" for thread in threading.enumerate())
    found = {"alive": engines() is not None, "watching": watching, "overrides": Overrides._library is not None}
    found |= {"made": made, "kept": names() - before}
    users = torch.distributed.new_group([0, 1])
    torch.distributed.destroy_process_group(users)
    found["gone already"] = raised(partial(close_groups, [users, None, torch.distributed.GroupMember.NON_GROUP_MEMBER]))
    engine = build_engine(gpt(2), mean_loss, token_pipeline=SLICED)
    engine.train_batch(data())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {**found, "after the job": raised(engine.destroy)}


def names() -> set[str]:
    return {group.group_name for group in distributed_c10d._world.pg_map}


def test_an_engine_that_is_collected_leaves_its_groups_to_all_ranks() -> None:
    for found in run_ranks(collected, RANKS):
        assert not found["alive"] and found["watching"] == 0 and not found["overrides"]
        assert found["made"] == found["kept"]  # a collector runs on every rank at another time
        assert found["gone already"] == found["after the job"] == ""


# -------------------------------------------------------------------------------------------------------- two at once


def two_at_once(rank: int, world_size: int) -> list[list[float]]:
    """By how much two engines that train by turns differ from each alone. Two stages, and two replicas of one."""
    alone = []
    for number in (0, 1):
        engine = one_of_two(number)
        losses = [float(engine.train_batch(data())) for _ in range(4)]
        alone.append((losses, weights(engine)))
        engine.destroy()
    return [by_turns(alone, goes) for goes in (0, 1)]


def one_of_two(number: int) -> Any:
    # clipping asks DeepSpeed's groups
    return build_engine(
        tied_gpt(2), mean_loss, stages=2 - number, module={"base_seed": number}, token_pipeline=SLICED, clip=0.5
    )


def by_turns(alone: list[tuple[list[float], dict[str, torch.Tensor]]], goes: int) -> list[float]:
    """Differences of all losses of both, one of which ``goes`` after two steps, and of the other one's weights."""
    pair, losses = [one_of_two(number) for number in (0, 1)], [[], []]
    for number in (0, 1, 0, 1):
        losses[number].append(float(pair[number].train_batch(data())))
    pair[goes].destroy()
    stays = 1 - goes
    losses[stays] += [float(pair[stays].train_batch(data())) for _ in range(2)]
    assert Overrides._library is not None and len(losses[stays]) == 4
    found = [abs(a - b) for number in (0, 1) for a, b in zip(losses[number], alone[number][0], strict=False)]
    found += [difference(got, alone[stays][1][name]) for name, got in weights(pair[stays]).items()]
    pair[stays].destroy()
    return found


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_two_engines_train_by_turns_as_each_alone() -> None:
    for rank in run_ranks(two_at_once, RANKS):
        for found in rank:  # the older goes first, the younger
            assert len(found) > 6 and max(found) == 0.0


# ------------------------------------------------------------------------------------------------- megatron-core's groups


def megatrons_groups(rank: int, world_size: int) -> tuple[set[str], set[str], list[str], str]:
    from megatron.core import parallel_state

    from ds_terapipe.megatron import destroy_parallel, initialize_parallel

    users = torch.distributed.new_group([0, 1])
    before, quiet = names(), footprint()
    for _ in range(2):
        initialize_parallel(tensor=2)
        made = names() - before
        destroy_parallel()
        destroy_parallel()
    torch.distributed.all_reduce(torch.zeros(1), group=users)
    kept = [name for name, value in vars(parallel_state).items() if isinstance(value, torch.distributed.ProcessGroup)]
    return made, names() ^ before, kept, str(change(quiet, settled(quiet), "threads"))


@needs_megatron
def test_megatron_cores_groups_are_destroyed_and_no_others() -> None:
    for made, changed, kept, threads in run_ranks(megatrons_groups, RANKS):
        assert len(made) > 5
        assert not changed and not kept
        assert threads == "{'threads': 0}"

"""What can be wrong with elastic_pipeline, its model, launch and batch: one line, the same on every rank, before a step."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from logging.handlers import BufferingHandler
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec

from ds_terapipe import ConfigError
from ds_terapipe.elastic.saved import state
from ds_terapipe.names import ELASTIC_STATE
from tests.documents import ROOT
from tests.elastic.samples import Texts
from tests.elastic.training import Case, data_of, engine_of
from tests.mutants.claims import holds, refused_or_let_pass
from tests.pipeline.models import FrozenBlock, FrozenEmbedding
from tests.spawn import launched, run_ranks

CASE = Case("gpt", "sgd", 2, (), (), steps=1, slices=None)
SCHEDULE = {"policy": "schedule"}
HALVE = {"resize": {"policy": "halve"}}
BESIDE = "beside elastic_pipeline.freeze.policy, resize.policy or partition"

BLOCKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "alpha above": ({"freeze": {"policy": "alpha", "alpha": 1.5, "interval": 4}}, "freeze.alpha: got 1.5, must be ", "e.g. 0.33"),
    "alpha zero": ({"freeze": {"policy": "alpha", "alpha": 0, "interval": 4}}, "freeze.alpha: got 0, must be ", "e.g. 0.33"),
    "policy": ({"freeze": {"policy": "grad-norm"}}, 'freeze.policy: got "grad-norm"', 'use "grad_norm"'),
    "decreasing": (
        {"freeze": {**SCHEDULE, "frozen_layers": [[1, 3], [2, 2]]}}, "frozen_layers: got [[1, 3], [2, 2]]", "not decreasing",
    ),
    "too many": (
        {"freeze": {**SCHEDULE, "frozen_layers": [[1, 2], [2, 6]]}},
        "freeze.frozen_layers: got 6, must be at most 5 entries (the head, ",
        "use at most 5",
    ),
    "no list": ({"freeze": SCHEDULE}, "freeze.frozen_layers: got null", "[[10, 2], [20, 4]]"),
    "epoch of what": ({"freeze": {"policy": "alpha"}}, 'freeze.interval: got "epoch"', '"interval": 1000'),
    "not read": ({"freeze": {"policy": "static", "alpha": 0.5}}, "freeze.alpha: got 0.5, must be absent", "leave it out"),
    "processes": (
        {"resize": {"policy": [[1, 1], [2, 3]]}}, "resize.policy: got 3, must be a number of stages that divides the 2 processes",
        "use 1 or 2",
    ),
    "stages of nothing": ({"resize": {"policy": [[1, 0]]}}, "resize.policy: got [[1, 0]]", "stages 1 or more"),
    "memory of a list": (
        {"resize": {"policy": "halve", "memory_gb": 2}}, "resize.memory_gb: got 2.0", 'use "policy": "measured", or leave it out',
    ),
    "memory of a rank": ({"resize": {"policy": "measured", "memory_gb": 0}}, "resize.memory_gb: got 0", "use e.g. 40"),
    "partition": ({"partition": "measure"}, 'elastic_pipeline.partition: got "measure"', 'use "measured"'),
    "halved": ({"resize": {"policy": "halved"}}, 'resize.policy: got "halved"', 'use "halve"'),
    "key": ({"resizes": {}}, 'elastic_pipeline: unknown key "resizes"', 'use "resize"'),
    "memory": ({"cache": {"enabled": True, "memory_gb": -1}}, "cache.memory_gb: got -1, must be a positive", "use e.g. 8"),
    "disk": (
        {"cache": {"enabled": True, "disk_path": "/dev/null/cache"}},
        'elastic_pipeline.cache.disk_path: got "/dev/null/cache", must be a folder that can be written to (Not a directory), use '
        'e.g. "cache/"',
    ),
    "history": ({"history_path": " "}, 'history_path: got " ", must be the name of a file', 'use "history.jsonl"'),
    "no folder": (
        {"history_path": "/dev/null/history.jsonl"}, 'elastic_pipeline.history_path: got "/dev/null/history.jsonl"',
        "must be a file that can be written (Not a directory), use e.g. history.jsonl",
    ),
    "another file": (
        {"history_path": str(ROOT / "pyproject.toml")}, "pyproject.toml (line 1), must be a new file or one", "use another name",
    ),
    "seed": ({"data": {"seed": -1}}, "data.seed: got -1, must be an integer of 0 or more", "use e.g. 1234"),
}  # fmt: skip
BESIDES: dict[str, tuple[dict[str, Any], str, str]] = {
    "offload": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        f"must be absent {BESIDE} (what is offloaded does not move), or", 'use device "none"',
    ),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast: got ",
        f"must be bfloat16 or off {BESIDE}", "use dtype bfloat16",
    ),
    "ZeRO-2": ({"zero_optimization": {"stage": 2}}, f"zero_optimization.stage: got 2, must be 0 or 1 {BESIDE}", "use 1"),
}  # fmt: skip


NORMS = {"freeze": {"policy": "grad_norm", "interval": 3}}
FLAT: dict[str, dict[str, Any]] = {
    "norms and bf16": {"bf16": {"enabled": True}},
    "norms and fp16": {"fp16": {"enabled": True}},
    "norms and ZeRO-1": {"zero_optimization": {"stage": 1}},
}


def refused(case: Case = CASE, **options: Any) -> tuple[str, str]:
    """Class and text of what ``initialize`` raises."""
    try:
        engine = engine_of(case, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    engine.destroy()
    return "nothing", ""


def worker(rank: int, world_size: int, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    blocks = {name: block for name, (block, *_) in BLOCKS.items() if names is None or name in names}
    found = {name: refused(config={"elastic_pipeline": block}) for name, block in blocks.items()}
    if names is not None:
        return found
    for name, (keys, *_) in BESIDES.items():
        for number, block in enumerate((HALVE, {"freeze": {**SCHEDULE, "frozen_layers": [[1, 1]]}})):
            found[f"{name} {number}"] = refused(config={**keys, "elastic_pipeline": block})
    for name, keys in FLAT.items():
        found[name] = refused(config={**keys, "elastic_pipeline": NORMS})
    odd = Case("texts", "sgd", 2, (), ((1, 1),), slices=None, batch=3, size=1)
    found["batch"] = refused(odd)
    back = {"freeze": {"policy": "alpha", "interval": 3, "unfreeze": ["lr_restart"]}}
    found["one count"] = refused(replace(CASE, optimizer="fused adam"), config={"elastic_pipeline": back})
    frozen = [LayerSpec(FrozenEmbedding), LayerSpec(FrozenBlock)]
    found["nothing trains"] = refused(specs=frozen)
    other = {"freeze": {**SCHEDULE, "frozen_layers": [[1, 1 + rank]]}}
    found["ranks differ"] = refused(config={"elastic_pipeline": other})
    other = {"resize": {"policy": [[1, 1]] if rank else "off"}}
    found["ranks move differently"] = refused(config={"elastic_pipeline": other})
    found |= {"devices": devices_and_objects(), "nobody reads": warnings()}
    return {**found, "fine": trains(), "two rules": only_static_beside_zero()}


def devices_and_objects() -> list[Any]:
    """What ``initialize`` does, in its order: numbers of devices that are set, and objects that are gathered."""
    found: list[Any] = []
    gather = torch.distributed.all_gather_object

    def noted(*args: Any, **options: Any) -> None:
        found.append("objects")
        gather(*args, **options)

    with mock.patch.object(get_accelerator(), "set_device", found.append):
        with mock.patch.object(torch.distributed, "all_gather_object", noted):
            engine_of(CASE, config={"elastic_pipeline": HALVE}).destroy()
    return found


def warnings() -> list[list[str]]:
    """Of a block ``data``, without ``training_data`` and with it, and of none."""
    found, logger = [], logging.getLogger("ds_terapipe.elastic")
    shuffled: dict[str, Any] = {"elastic_pipeline": {"data": {"shuffle": True}}}
    for options in (
        {"config": shuffled},
        {"config": shuffled, "training_data": Texts(8)},
        {"config": {"elastic_pipeline": {}}},
    ):
        handler = BufferingHandler(100)
        logger.addHandler(handler)
        refused(**options)
        logger.removeHandler(handler)
        found.append([record.getMessage() for record in handler.buffer])
    return found


def trains() -> list[float]:
    """After all that was refused."""
    engine = engine_of(CASE, config={"elastic_pipeline": HALVE})
    losses = [float(engine.train_batch(iter(data_of(CASE)[0])))]
    engine.destroy()
    return losses


def only_static_beside_zero() -> tuple[str, str]:
    """A user's own frozen layers need nothing moved."""
    return refused(config={"zero_optimization": {"stage": 1}, "elastic_pipeline": {"enabled": True}})


ranks = launched(worker, 2, timeout=200)


def check(name: str, ranks: Any, *parts: str) -> None:
    kind, text = ranks[0][name]
    assert (kind, "\n" in text) == ("ConfigError", False), (kind, text)
    assert all(found[name] == (kind, text) for found in ranks)
    for part in parts:
        assert part in text, text
    assert (", must " in text and ", use " in text) or name == "key"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_is_wrong(ranks, name):
    check(name, ranks, *BLOCKS[name][1:])


@pytest.mark.parametrize("name", BESIDES)
def test_what_does_not_go_with_a_change_of_shape_or_frozen_layers(ranks, name):
    for number in (0, 1):
        check(f"{name} {number}", ranks, *BESIDES[name][1:])
    assert ranks[0]["two rules"] == ("nothing", "")


@pytest.mark.parametrize("name", FLAT)
def test_a_policy_that_wants_gradients_which_are_in_flat_parts(ranks, name):
    check(
        name, ranks, 'freeze.policy: got "grad_norm", must be a policy without norms of gradients beside', 'use "alpha"'
    )


def test_layers_that_come_back_beside_one_step_count_of_a_group(ranks):
    check(
        "one count",
        ranks,
        'freeze.unfreeze: got ["lr_restart"], must be absent beside DeepSpeed\'s FusedAdam',
        "use []",
    )


def test_a_process_has_its_own_device_before_objects_are_gathered_on_it(ranks):
    for rank, found in enumerate(ranks):
        assert found["devices"][:2] == [rank, "objects"]


def test_a_batch_that_replicas_cannot_share(ranks):
    text = "resize.policy: got 1, must be a number of stages whose replicas, here 2, divide the batch of 3 samples"
    check("batch", ranks, text, "use 2")


def test_ranks_that_would_decide_differently(ranks):
    for name in ("ranks differ", "ranks move differently"):
        check(name, ranks, "elastic_pipeline: got other settings on rank 1 than on rank 0", "use one file")


def test_a_model_of_which_nothing_trains(ranks):
    check("nothing trains", ranks, "model: got no parameter with requires_grad")


def test_an_order_of_samples_that_nobody_reads_is_one_line(ranks):
    line = "elastic_pipeline.data: got shuffle without training_data, does nothing; give deepspeed.initialize training_data"
    assert [found["nobody reads"] for found in ranks] == [[[line], [], []], [[], [], []]]


def test_what_was_refused_leaves_nothing_behind(ranks):
    assert ranks[0]["fine"] == ranks[1]["fine"]


# for tests.mutants
def blocks_are_refused(mutant: str | None, *names: str) -> bool:
    ranks = refused_or_let_pass(run_ranks(worker, 2, names, mutant=mutant))
    return holds(lambda: [check(name, ranks, *BLOCKS[name][1:]) for name in names])


# --------------------------------------------------------------------------------------------------------- checkpoints

NOW = {
    "frozen_layers": 2, "stages": 2, "parts": [0, 3, 6], "layers": 6, "processes": 4, "tensor_parallel_size": 1,
    "train_batch_size": 8, "seed": None, "norms": None, "policy": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ({"layers": 7}, "load_checkpoint: got a checkpoint with layers 7, must be 6"),
        ({"tensor_parallel_size": 2}, "with tensor_parallel_size 2, must be 1"),
        ({"train_batch_size": 6}, "with train_batch_size 6, must be 8"),
        ({"frozen_layers": 1}, "with 1 frozen layers, must be at least the 2 that are frozen now, use a new engine"),
    ],
)
def test_a_checkpoint_of_another_training(saved, text):
    with pytest.raises(ConfigError) as caught:
        state.check({**NOW, **saved}, NOW)
    assert text in str(caught.value) and "\n" not in str(caught.value) and ", use " in str(caught.value)


def test_another_shape_is_gone_to_where_shapes_change_on_as_many_processes():
    saved = {**NOW, "stages": 1, "parts": [0, 6], "frozen_layers": 3}
    assert state.same_shape(saved, NOW, moves=True) and not state.same_shape(saved, NOW, moves=False)
    assert state.same_shape({**NOW, "frozen_layers": 3}, NOW, moves=False)
    assert not state.same_shape({**NOW, "processes": 2}, NOW, moves=True)


def test_what_is_saved_is_read_again(tmp_path):
    folder = tmp_path / "one"
    assert state.read(folder) is None
    state.write(folder, NOW)
    state.write(folder, {**NOW, "frozen_layers": 3})
    assert state.read(folder) == {**NOW, "frozen_layers": 3} == json.loads((folder / ELASTIC_STATE).read_text())
    assert [path.name for path in folder.iterdir()] == [ELASTIC_STATE]
    for content in ("{", "[]", "{}", json.dumps({**NOW, "parts": [0, 6]}), json.dumps({**NOW, "layers": "6"})):
        (folder / ELASTIC_STATE).write_text(content)
        with pytest.raises(ConfigError, match=r"^load_checkpoint: got .* must be .*, use another checkpoint$"):
            state.read(folder)

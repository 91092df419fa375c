"""A mistake in elastic_pipeline, the model, the launch or the batch is one line, the same on every rank, before a step."""

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
from tests.pipeline.models import FrozenBlock, FrozenEmbedding
from tests.spawn import launched

CASE = Case("gpt", "sgd", 2, (), (), steps=1, slices=None)
ODD = Case("texts", "sgd", 2, (), ((1, 1),), slices=None, batch=3, size=1)
HALVE = {"resize": {"policy": "halve"}}
NORMS = {"freeze": {"policy": "grad_norm", "interval": 3}}
BESIDE = "beside elastic_pipeline.freeze.policy, resize.policy or partition"
FLAT = 'freeze.policy: got "grad_norm", must be a policy without norms of gradients beside', 'use "alpha"'
OTHERS = "elastic_pipeline: got other settings on rank 1 than on rank 0", "use one file"


def schedule(*pairs: list[int]) -> dict[str, Any]:
    return {"freeze": {"policy": "schedule", "frozen_layers": [*pairs]}}


# what is in the configuration beside an elastic block that says less, or by rank; what is said
CONFIGS: dict[str, tuple[Any, ...]] = {
    "value": ({"freeze": {"policy": "alpha", "alpha": 1.5, "interval": 4}}, "freeze.alpha: got 1.5, must be ", "use e.g. 0.33"),
    "disk": (
        {"cache": {"enabled": True, "disk_path": "/dev/null/cache"}},
        'elastic_pipeline.cache.disk_path: got "/dev/null/cache", must be a folder that can be written to (Not a directory), use '
        'e.g. "cache/"',
    ),
    "no folder": (
        {"history_path": "/dev/null/history.jsonl"}, 'elastic_pipeline.history_path: got "/dev/null/history.jsonl"',
        "must be a file that can be written (Not a directory), use e.g. history.jsonl",
    ),
    "another file": (
        {"history_path": str(ROOT / "pyproject.toml")}, "pyproject.toml (line 1), must be a new file or one", "use another name",
    ),
    "ranks differ": ((schedule([1, 1]), schedule([1, 2])), *OTHERS),
}  # fmt: skip
BESIDES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "offload": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, HALVE,
        (f"must be absent {BESIDE} (what is offloaded does not move), or", 'use device "none"'),
    ),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}}, HALVE,
        ("torch_autocast: got ", f"must be bfloat16 or off {BESIDE}", "use dtype bfloat16"),
    ),
    "ZeRO-2": (
        {"zero_optimization": {"stage": 2}}, schedule([1, 1]),
        (f"zero_optimization.stage: got 2, must be 0 or 1 {BESIDE}", "use 1"),
    ),
    "norms and bf16": ({"bf16": {"enabled": True}}, NORMS, FLAT),
    "norms and ZeRO-1": ({"zero_optimization": {"stage": 1}}, NORMS, FLAT),
}  # fmt: skip
MODELS = {
    "batch": (
        "resize.policy: got 1, must be a number of stages whose replicas, here 2, divide the batch of 3 samples",
        "use 2",
    ),
    "one count": ('freeze.unfreeze: got ["lr_restart"], must be absent beside DeepSpeed\'s FusedAdam', "use []"),
    "nothing trains": ("model: got no parameter with requires_grad", "use "),
}


def refused(case: Case = CASE, **options: Any) -> tuple[str, str]:
    """Class and text of what ``initialize`` raises."""
    try:
        engine = engine_of(case, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    engine.destroy()
    return "nothing", ""


def worker(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (block, *_) in CONFIGS.items():
        found[name] = refused(config={"elastic_pipeline": block[rank] if isinstance(block, tuple) else block})
    for name, (keys, block, _) in BESIDES.items():
        found[name] = refused(config={**keys, "elastic_pipeline": block})
    back = {"freeze": {"policy": "alpha", "interval": 3, "unfreeze": ["lr_restart"]}}
    return {
        **found,
        "batch": refused(ODD),
        "one count": refused(replace(CASE, optimizer="fused adam"), config={"elastic_pipeline": back}),
        "nothing trains": refused(specs=[LayerSpec(FrozenEmbedding), LayerSpec(FrozenBlock)]),
        # a user's own frozen layers need nothing moved
        "static": refused(config={"zero_optimization": {"stage": 1}, "elastic_pipeline": {"enabled": True}}),
        "warnings": [warnings(**options) for options in ({}, {"training_data": Texts(8)})],
        "order": order_of_devices_and_objects(),
    }


def order_of_devices_and_objects() -> tuple[list[Any], float]:
    """Numbers of devices that ``initialize`` sets, objects that it gathers; the loss of a step after all that was refused."""
    found: list[Any] = []
    gather = torch.distributed.all_gather_object
    noted = lambda *args, **options: (found.append("objects"), gather(*args, **options))  # noqa: E731
    with (
        mock.patch.object(get_accelerator(), "set_device", found.append),
        mock.patch.object(torch.distributed, "all_gather_object", noted),
    ):
        engine = engine_of(CASE, config={"elastic_pipeline": HALVE})
    loss = float(engine.train_batch(iter(data_of(CASE)[0])))
    engine.destroy()
    return found, loss


def warnings(**options: Any) -> list[str]:
    handler, logger = BufferingHandler(100), logging.getLogger("ds_terapipe.elastic")
    logger.addHandler(handler)
    refused(config={"elastic_pipeline": {"data": {"shuffle": True}}}, **options)
    logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


ranks = launched(worker, 2, timeout=200)
SAID = {
    **{name: parts for name, (_, *parts) in CONFIGS.items()},
    **{name: parts for name, (*_, parts) in BESIDES.items()},
    **MODELS,
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_wrong_is_one_line_on_every_rank(ranks: Any, name: str) -> None:
    kind, text = ranks[0][name]
    assert (kind, "\n" in text) == ("ConfigError", False), (kind, text)
    assert all(found[name] == (kind, text) for found in ranks)
    assert all(part in text for part in SAID[name]), text
    assert ", must " in text and ", use " in text


def test_what_was_refused_leaves_nothing_behind_and_what_is_right_is_not_refused(ranks: Any) -> None:
    assert ranks[0]["order"][1] == ranks[1]["order"][1] > 0 and ranks[0]["static"] == ("nothing", "")


def test_a_process_has_its_own_device_before_objects_are_gathered_on_it(ranks: Any) -> None:
    assert [found["order"][0][:2] for found in ranks] == [[0, "objects"], [1, "objects"]]


def test_an_order_of_samples_without_training_data_is_one_line(ranks: Any) -> None:
    line = "elastic_pipeline.data: got shuffle without training_data, does nothing; give deepspeed.initialize training_data"
    assert [found["warnings"] for found in ranks] == [[[line], []], [[], []]]


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
def test_a_checkpoint_of_another_training_is_refused(saved: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        state.check({**NOW, **saved}, NOW)
    assert text in str(caught.value) and "\n" not in str(caught.value) and ", use " in str(caught.value)


def test_what_is_saved_is_read_again_and_nothing_else(tmp_path: Any) -> None:
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

"""A mistake in elastic_pipeline, the model, the launch or the batch is one line, on every rank, before a step."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import IterableDataset

from ds_terapipe import ConfigError
from ds_terapipe.elastic.policies.freeze import FreezePolicy
from ds_terapipe.elastic.saved import state
from ds_terapipe.elastic.settings import CacheSettings, DataSettings, FreezeSettings, ResizeSettings, parse
from tests.elastic.samples import registered
from tests.elastic.test_elastic_measured import Hooked
from tests.elastic.training import Case, data_of, engine_of
from tests.json_values import JSON
from tests.pipeline.models import Block, FrozenBlock, FrozenEmbedding, gpt
from tests.pipeline.test_shared_weights import sharing
from tests.spawn import launched

Odd = type("Odd", (Block,), {"forward": lambda self, x: Block.forward(self, x if self.training else x.cumsum(1))})
CASE = Case("gpt", "sgd", 2, (), (), steps=1, slices=None)
ODD = Case("texts", "sgd", 2, (), ((1, 1),), slices=None, batch=3, size=1)
SHARING = Case("texts", "adamw", 1, (), ((1, 2),), slices=None, steps=3)
BACK = {"policy": "alpha", "interval": 3, "unfreeze": ["lr_restart"]}
HALVE, ONE = {"resize": {"policy": "halve"}}, {"zero_optimization": {"stage": 1}}
BESIDE = "beside elastic_pipeline.freeze.policy, resize.policy or partition"
CURRICULUM = {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}, "data_cluster_path": "."}}}
ALWAYS = "data_sampling.curriculum_learning.enabled: got true, must be false beside"


def block(elastic: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"config": {**keys, "elastic_pipeline": elastic}}


def schedule(*pairs: list[int]) -> dict[str, Any]:
    return {"freeze": {"policy": "schedule", "frozen_layers": [*pairs]}}


def mine(rank: int, *answers: float) -> dict[str, Any]:
    """A policy that gives each rank an answer."""
    cls = type("Mine", (FreezePolicy,), {"at_step": lambda self, step, frozen: answers[rank]})
    return {"steps": 1, "policy": cls, **block({"freeze": {"policy": "mine"}})}


# options of `refused` on a rank, and what is said
REFUSED: dict[str, tuple[Any, ...]] = {
    "disk": (lambda rank: block({"cache": {"enabled": True, "disk_path": "/dev/null/cache"}}),
             'elastic_pipeline.cache.disk_path: got "/dev/null/cache", must be a folder that can be written to (Not a directory)',
             'use e.g. "cache/"'),
    "no folder": (lambda rank: block({"history_path": "/dev/null/history.jsonl"}),
                  'elastic_pipeline.history_path: got "/dev/null/history.jsonl"',
                  "must be a file that can be written (Not a directory), use e.g. history.jsonl"),
    "ranks differ": (lambda rank: block(schedule([1, 1 + rank])), "got other settings on rank 1 than on rank 0", "use one file"),
    "offload": (lambda rank: block(HALVE, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}),
                f"must be absent {BESIDE} (what is offloaded does not move), or", 'use device "none"'),
    "ZeRO-2": (lambda rank: block(schedule([1, 1]), zero_optimization={"stage": 2}),
               f"zero_optimization.stage: got 2, must be 0 or 1 {BESIDE}", "use 1"),
    "norms and ZeRO-1": (lambda rank: block({"freeze": {"policy": "grad_norm", "interval": 3}}, **ONE),
                         'freeze.policy: got "grad_norm", must be a policy without norms of gradients beside', 'use "alpha"'),
    "one rank fails": (lambda rank: mine(rank, 0, 0.5), "freeze.policy: got 0.5 from Mine.at_step, must be a number of entries"),
    "answers differ": (lambda rank: mine(rank, 0, 1),
                       'freeze.policy: got 1 entries to freeze on rank 1 and 0 on rank 0 from "mine", must be the same on all'),
    "batch": (lambda rank: {"case": ODD},
              "resize.policy: got 1, must be a number of stages whose replicas, here 2, divide the batch of 3 samples", "use 2"),
    "one count": (lambda rank: {"case": replace(CASE, optimizer="fused adam"), **block({"freeze": BACK})},
                  'freeze.unfreeze: got ["lr_restart"], must be absent beside DeepSpeed\'s FusedAdam', "use []"),
    "replaced": (lambda rank: {"optimizer": {"type": "Adagrad"}, **block(HALVE, **ONE)},
                 'optimizer.type: got "Adagrad", must be one that layers can leave', 'use e.g. "AdamW", or zero_optimization'),
    "matrices": (lambda rank: {"optimizer": {"type": "Muon", "params": {"torch_adam": True}}, **block(HALVE, **ONE)},
                 'optimizer.type: got "MuonWithAuxAdam", must be one that layers can leave'),
    "curriculum": (lambda rank: {"training_data": [0], **block({}, data_efficiency=CURRICULUM)}, f"{ALWAYS} elastic_pipeline"),
    "of stages": (lambda rank: {"token_pipeline": {"slices": 1}, "training_data": [0],
                                **block({"enabled": False}, data_efficiency=CURRICULUM)}, f"{ALWAYS} several pipeline stages"),
    "stream": (lambda rank: {"training_data": type("Pairs", (IterableDataset,), {"__iter__": iter})(), **block({})},
               'training_data: got "Pairs", must be a dataset with __len__ and __getitem__ beside', "a list, or an iterator"),
    "other data": (lambda rank: {"training_data": [0] * (1 + rank), **block({})},
                   'training_data: got "2 samples on rank 1 and 1 on rank 0", must be the same on all ranks', "use the whole"),
    "shared": (lambda rank: {"case": SHARING, "steps": 2, "specs": sharing("head's weight")},
               "got entries 0 and 5 of the layer list on stages 0 and 1, which share trained weights and would train copies",
               ' use TiedLayerSpec("shared", Embedding, ..., tied_weight_attr=["tokens.weight"]'),
    "stray": (lambda rank: {"case": SHARING, "optimizer": lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(3))], lr=0.1)},
              "optimizer: got parameter 50 of group 0, of shape [3], must be in the PipelineModule where layers may go"),
    "hook": (lambda rank: {"kind": Hooked, **block(HALVE)},
             "elastic_pipeline.resize.policy: got 1 hooks on module 3, registered on a live layer"),
    "nothing trains": (lambda rank: {"specs": [LayerSpec(FrozenEmbedding), LayerSpec(FrozenBlock)]},
                       "model: got no parameter with requires_grad"),
}  # fmt: skip


def refused(case: Case = CASE, steps: int = 0, policy: Any = FreezePolicy, **options: Any) -> tuple[str, Any]:
    """Class and text of what ``initialize``, or so many steps after it, raise; or else the steps' losses."""
    try:
        with registered("mine", policy):
            engine = engine_of(case, **options)
            losses = [float(engine.train_batch(iter(micro_batches))) for micro_batches in data_of(case)[:steps]]
    except Exception as error:
        return type(error).__name__, str(error)
    engine.destroy()
    return "nothing", losses


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {
        **{name: refused(**options(rank)) for name, (options, *_) in REFUSED.items()},
        "frozen": refused(replace(CASE, slices=2, freeze=((1, 2),), steps=2), 2, specs=[*gpt()[:1], LayerSpec(Odd), *gpt()[2:]]),
        "static": refused(**block({"enabled": True}, **ONE)),  # a user's own frozen layers need nothing moved
        "step": refused(steps=1, **block(HALVE)),  # after all that was refused
    }


ranks = launched(worker, 2, timeout=200)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_line_on_every_rank(ranks: Any, name: str) -> None:
    kind, text = ranks[0][name]
    assert (kind, "\n" in text) == ("ConfigError", False), (kind, text)
    assert all(found[name] == (kind, text) for found in ranks)
    assert all(part in text for part in REFUSED[name][1:]), text
    assert ", must " in text and ", use " in text


def test_what_was_refused_leaves_nothing_behind_and_what_is_right_is_not_refused(ranks: Any) -> None:
    (_, (loss,)) = ranks[0]["step"]
    assert all("can't be cut: the input of layer 1 (Odd)" in found["frozen"][1] for found in ranks), ranks[0]["frozen"]
    assert ranks[0]["step"] == ranks[1]["step"] and loss > 0 and all(found["static"] == ("nothing", []) for found in ranks)


NOW = {
    "frozen_layers": 2, "stages": 2, "parts": [0, 3, 6], "places": [0, 1], "layers": 6, "processes": 4, "tensor_parallel_size": 1,
    "train_batch_size": 8, "seed": None, "norms": None, "policy": None,
}  # fmt: skip


@pytest.mark.parametrize(("saved", "text"), [
    ({"layers": 7}, "load_checkpoint: got a checkpoint with layers 7, must be 6"),
    ({"frozen_layers": 1}, "with 1 frozen layers, must be at least the 2 that are frozen now, use a new engine"),
])  # fmt: skip
def test_a_checkpoint_of_another_training_is_refused(saved: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        state.check({**NOW, **saved}, NOW)
    assert text in str(caught.value) and "\n" not in str(caught.value) and ", use " in str(caught.value)


BLOCKS = {"freeze": FreezeSettings, "resize": ResizeSettings, "cache": CacheSettings, "data": DataSettings}
KEYS = [(block, key) for block, kind in BLOCKS.items() for key in kind.model_fields]


def mistake_in(**block: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse({"elastic_pipeline": block})
    assert "\n" not in str(caught.value)
    return str(caught.value)


PAIRS = "must be a list of [step, entries], steps increasing, entries 1 or more and not decreasing"
ABSENT = "must be absent beside"


def freeze(said: str, policy: Any = "alpha", **keys: Any) -> tuple[dict[str, Any], str]:
    return {"freeze": {"policy": policy, **keys}}, f"freeze.{said}"


def pairs_of(frozen_layers: Any, said: str = PAIRS) -> tuple[dict[str, Any], str]:
    return {"freeze": {"policy": "schedule", "frozen_layers": frozen_layers}}, said


@pytest.mark.parametrize(("block", "message"), [
    freeze("alpha: got 1.5, must be above 0 and below 1, use e.g. 0.33", alpha=1.5),
    freeze("alpha: got true", alpha=True),
    freeze(f'alpha: got 0.33, {ABSENT} "policy": "schedule", which does not read it, use "policy": "alpha" or "grad_norm" or '
           '"plateau", or leave it out', "schedule", alpha=0.33, frozen_layers=[[1, 1]]),
    freeze('frozen_layers: got null, must be a list of [step, entries] beside "policy": "schedule", use e.g. [[', "schedule"),
    freeze('policy: got "grad-norm", must be "static" or "schedule" or ', "grad-norm"),
    freeze('interval: got 0, must be "epoch" or a positive number of steps, use e.g. 1000', interval=0),
    pairs_of([], f"freeze.frozen_layers: got [], {PAIRS}"),
    pairs_of([[20, 2], [10, 4]]), pairs_of([[20, 2], [20, 4]]), pairs_of([[10, 4], [20, 2]]), pairs_of([[10, 0]]),
    freeze("tolerance: got 1, must be above 0 and below 1", "plateau", tolerance=1),
    freeze("patience: got 0, must be a positive number", "plateau", patience=0),
    freeze('unfreeze: got "loss_rises", must be a list of "lr_restart" or "loss_rise" or "policy", use e.g. ["lr_restart"]',
           unfreeze="loss_rises"),
    freeze(f'unfreeze: got ["lr_restart"], {ABSENT} "policy": "static", which freezes nothing, use e.g. "policy": "alpha", '
           "or leave it out", "static", unfreeze=["lr_restart"]),
    ({"resize": {"policy": "off", "memory_gb": 3}}, f'resize.memory_gb: got 3, {ABSENT} another "policy" than "measured"'),
    ({"enabled": "yes"}, 'enabled: got "yes", must be true or false, use true'),
    ({"partition": True}, 'partition: got true, must be "as_launched" or "measured", use "as_launched"'),
    ({"resize": {"policy": [[10, 0]]}}, "steps increasing, stages 1 or more, use e.g. [[10, 2], [20, 1]]"),
    ({"cache": {"memory_gb": 0}}, "cache.memory_gb: got 0, must be a positive number of 1e9 bytes"),
    ({"cache": {"disk_path": " "}}, 'cache.disk_path: got " ", must be the name of a folder, use "cache/"'),
    ({"cache": {"dtype": "bf61"}}, 'cache.dtype: got "bf61", must be "exact" or "bf16", use "bf16"'),
    ({"cache": {"memory_gb": 8}}, "cache.enabled: missing, must be there beside memory_gb, use true"),
    ({"cache": {"enabled": True, "disk_gb": 8}}, 'disk_gb: got 8, must be absent without disk_path, use e.g. "disk_path"'),
    ({"data": {"shuffle": "yes"}}, 'data.shuffle: got "yes", must be true or false, use false'),
    ({"data": {"sed": 1}}, 'data: unknown key "sed", must be one of shuffle, seed, use "seed"'),
    ({"data": [1]}, "data: got [1], must be a block of keys, use some of shuffle, seed"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(block: dict[str, Any], message: str) -> None:
    found = mistake_in(**block)
    assert message in found and found.startswith("elastic_pipeline.")


def test_the_block_itself() -> None:
    assert mistake_in(freze={}).startswith('elastic_pipeline: unknown key "freze"')
    for block in (3, None, [8]):
        with pytest.raises(ConfigError, match=r"elastic_pipeline: got .*, must be a block of keys, use some of enabled"):
            parse({"elastic_pipeline": block})


def test_a_registered_policy_says_what_it_reads() -> None:
    with registered("mine", type("Mine", (FreezePolicy,), {"reads": ("alpha",)})):
        assert parse({"elastic_pipeline": {"freeze": {"policy": "mine", "alpha": 0.4}}}).freeze.alpha == 0.4
        assert '"policy": "mine", which does not read it' in mistake_in(freeze={"policy": "mine", "frozen_layers": [[1, 1]]})
    assert '"static"' in mistake_in(freeze={"policy": "mine"})


@given(st.sampled_from(KEYS), JSON)
def test_any_json_is_accepted_or_one_line(where: tuple[str, str], value: Any) -> None:
    block, key = where
    try:
        assert isinstance(getattr(parse({"elastic_pipeline": {block: {key: value}}}), block), BLOCKS[block])
    except ConfigError as error:
        assert re.match(rf"elastic_pipeline\.{block}\.\w+: (got |missing)", str(error)) and "\n" not in str(error)

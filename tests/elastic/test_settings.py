"""The block elastic_pipeline: defaults, what is accepted, and the one line that every mistake gets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.elastic.policies.freeze import FreezePolicy
from ds_terapipe.elastic.settings import (
    CacheSettings,
    DataSettings,
    ElasticPipelineConfig,
    FreezeSettings,
    ResizeSettings,
    check_config,
    parse,
)
from ds_terapipe.errors import ConfigError
from tests.elastic.samples import registered
from tests.json_values import JSON

BLOCKS = {"freeze": FreezeSettings, "resize": ResizeSettings, "cache": CacheSettings, "data": DataSettings}
KEYS = [(block, key) for block, kind in BLOCKS.items() for key in kind.model_fields]


def parsed(**block: Any) -> Any:
    return parse({"train_batch_size": 1, "elastic_pipeline": block})


def refused(**block: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(**block)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    freeze = {"policy": "static", "alpha": 0.33, "interval": "epoch", "tolerance": 0.1, "patience": 3}
    assert parsed().model_dump() == {
        "enabled": True,
        "freeze": {**freeze, "unfreeze": (), "frozen_layers": None},
        "resize": {"policy": "measured", "memory_gb": None},
        "partition": "as_launched",
        "history_path": None,
        "cache": {"enabled": False, "dtype": "exact", "memory_gb": None, "disk_path": None, "disk_gb": None},
        "data": {"shuffle": False, "seed": 1234},
    }
    assert ElasticPipelineConfig() == parsed()
    assert parse({"train_batch_size": 1}) is None and parsed(enabled=False, freeze="nonsense", colour="red") is None


@pytest.mark.parametrize(
    ("block", "key", "value"),
    [
        ({"freeze": {"policy": "alpha", "alpha": 0.5, "interval": 100}}, "interval", 100),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[0, 1], [10, 2], [20, 2]], "interval": 7}},
         "frozen_layers", ((0, 1), (10, 2), (20, 2))),
        ({"freeze": {"policy": "static", "frozen_layers": None, "unfreeze": []}}, "frozen_layers", None),
        ({"resize": {"policy": [[0, 4], [10, 2], [11, 4]]}}, "policy", ((0, 4), (10, 2), (11, 4))),
        ({"cache": {"enabled": True, "memory_gb": 8, "disk_path": "cache/"}}, "memory_gb", 8.0),
    ],
)  # fmt: skip
def test_what_is_right_is_accepted(block: dict[str, Any], key: str, value: Any) -> None:
    (name,) = block
    found = getattr(getattr(parsed(**block), name), key)
    assert found == value and type(found) is type(value)


PAIRS = "must be a list of [step, entries], steps increasing, entries 1 or more and not decreasing"
ABSENT = "must be absent beside"


def freeze(said: str, policy: Any = "alpha", **keys: Any) -> tuple[dict[str, Any], str]:
    return {"freeze": {"policy": policy, **keys}}, f"freeze.{said}"


def schedule(frozen_layers: Any, said: str = PAIRS) -> tuple[dict[str, Any], str]:
    return {"freeze": {"policy": "schedule", "frozen_layers": frozen_layers}}, said


@pytest.mark.parametrize(
    ("block", "message"),
    [
        freeze("alpha: got 1.5, must be above 0 and below 1, use e.g. 0.33", alpha=1.5),
        freeze("alpha: got NaN", alpha=float("nan")),
        freeze("alpha: got true", alpha=True),
        freeze(f'alpha: got 0.5, {ABSENT} "policy": "static"', "static", alpha=0.5),
        freeze(
            f'alpha: got 0.33, {ABSENT} "policy": "schedule", which does not read it, use "policy": "alpha" or "grad_norm" or '
            '"plateau", or leave it out', "schedule", alpha=0.33, frozen_layers=[[1, 1]],
        ),
        freeze(f'frozen_layers: got [[1, 1]], {ABSENT} "policy": "alpha", which does not read it, use "policy": "schedule", or '
               "leave it out", frozen_layers=[[1, 1]]),
        freeze('frozen_layers: got null, must be a list of [step, entries] beside "policy": "schedule", use e.g. [[', "schedule"),
        freeze('policy: got "grad-norm", must be "static" or "schedule" or ', "grad-norm"),
        freeze('interval: got 0, must be "epoch" or a positive number of steps, use e.g. 1000', interval=0),
        schedule([], f"freeze.frozen_layers: got [], {PAIRS}"),
        schedule([[20, 2], [10, 4]]),
        schedule([[10, 4], [20, 2]]),
        schedule([[10, 0]]),
        schedule([10, 2]),
        schedule([[True, 2]]),
        freeze("tolerance: got 1, must be above 0 and below 1", "plateau", tolerance=1),
        freeze("patience: got 0, must be a positive number", "plateau", patience=0),
        freeze(f'patience: got 2, {ABSENT} "policy": "al', patience=2),
        freeze('unfreeze: got "loss_rises", must be a list of "lr_restart" or "loss_rise" or "policy", use ["loss_rise"]',
               unfreeze="loss_rises"),
        freeze(f'unfreeze: got ["lr_restart"], {ABSENT} "policy": "static", which freezes nothing, use e.g. "policy": "alpha", '
               "or leave it out", "static", unfreeze=["lr_restart"]),
        ({"resize": {"policy": "off", "memory_gb": 3}}, f'resize.memory_gb: got 3.0, {ABSENT} "policy": "off", which does not'),
        ({"resize": {"policy": "measured", "memory_gb": -1}}, "memory_gb: got -1, must be a positive number of 1e9 bytes"),
        ({"partition": True}, 'partition: got true, must be "as_launched" or "measured", use "as_launched"'),
        ({"resize": {"policy": "half"}}, 'use "halve"'),
        ({"resize": {"policy": None}}, 'policy: got null, must be "off", "halve", "measured" or a list of [step, stages]'),
        ({"resize": {"policy": [[10, 0]]}}, "steps increasing, stages 1 or more, use e.g. [[10, 2], [20, 1]]"),
        ({"cache": {"memory_gb": 0}}, "cache.memory_gb: got 0, must be a positive number of 1e9 bytes"),
        ({"cache": {"disk_path": " "}}, 'cache.disk_path: got " ", must be the name of a folder, use "cache/"'),
        ({"cache": {"dtype": "bf61"}}, 'cache.dtype: got "bf61", must be "exact" or "bf16", use "bf16"'),
        ({"cache": {"memory_gb": 8}}, "cache.enabled: missing, must be there beside memory_gb, use true"),
        ({"cache": {"enabled": True, "disk_gb": 8}}, 'disk_gb: got 8.0, must be absent without disk_path, use e.g. "disk_path"'),
        ({"cache": {"enabled": 1}}, "cache.enabled: got 1, must be true or false, use false"),
        ({"history_path": " "}, 'history_path: got " ", must be the name of a file, use "history.jsonl"'),
        ({"data": {"shuffle": "yes"}}, 'data.shuffle: got "yes", must be true or false, use false'),
        ({"data": {"sed": 1}}, 'data: unknown key "sed", must be one of shuffle, seed, use "seed"'),
        ({"data": [1]}, "data: got [1], must be a block of keys, use some of shuffle, seed"),
        ({"freeze": {"strict": True}}, 'freeze: unknown key "strict"'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(block: dict[str, Any], message: str) -> None:
    found = refused(**block)
    assert message in found and found.startswith("elastic_pipeline.")


def test_the_block_itself_and_what_was_read_stays() -> None:
    assert refused(freze={}).startswith('elastic_pipeline: unknown key "freze"')
    for block in (3, None, [8]):
        with pytest.raises(
            ConfigError, match=r"elastic_pipeline: got .*, must be a block of keys, use some of enabled"
        ):
            parse({"elastic_pipeline": block})
    with pytest.raises(
        ConfigError, match=r"elastic_pipeline.freeze.alpha: got an assignment, must stay as it was read"
    ):
        parsed(freeze={"policy": "alpha"}).freeze.alpha = 0.5


def test_an_optimizer_that_is_offloaded_may_not_stand_beside_frozen_layers() -> None:
    settings = parsed(freeze={"policy": "alpha", "interval": 3})
    for block in ({"device": "none"}, {"device": None}, {}, None):
        assert check_config(settings, {"zero_optimization": {"stage": 1, "offload_optimizer": block}}) is settings
    rule = 'must be absent .* \\(what is offloaded does not move\\), or have device "none", use device "none"'
    with pytest.raises(ConfigError, match=rf"zero_optimization.offload_optimizer: got .*, {rule}"):
        check_config(settings, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})


def test_a_registered_policy_says_what_it_reads() -> None:
    with registered("mine", type("Mine", (FreezePolicy,), {"reads": ("alpha",)})):
        assert parsed(freeze={"policy": "mine", "alpha": 0.4}).freeze.alpha == 0.4
        said = refused(freeze={"policy": "mine", "frozen_layers": [[1, 1]]})
        assert '"policy": "mine", which does not read it' in said
    assert '"static"' in refused(freeze={"policy": "mine"})


@given(st.sampled_from(KEYS), JSON)
def test_any_json_is_accepted_or_one_line(where: tuple[str, str], value: Any) -> None:
    block, key = where
    try:
        assert isinstance(getattr(parsed(**{block: {key: value}}), block), BLOCKS[block])
    except ConfigError as error:
        assert re.match(rf"elastic_pipeline\.{block}\.\w+: (got |missing)", str(error)) and "\n" not in str(error)

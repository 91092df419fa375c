"""The block elastic_pipeline: defaults, what is accepted, and the one line that every mistake gets."""

from __future__ import annotations

import re

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
from tests.elastic.policies import registered
from tests.json_values import JSON

BLOCKS = {"freeze": FreezeSettings, "resize": ResizeSettings, "cache": CacheSettings, "data": DataSettings}


def parsed(**block):
    return parse({"train_batch_size": 1, "elastic_pipeline": block})


def refused(**block) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(**block)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults():
    assert parsed().model_dump() == {
        "enabled": True,
        "freeze": {
            "policy": "static",
            "alpha": 0.33,
            "interval": "epoch",
            "tolerance": 0.1,
            "patience": 3,
            "unfreeze": (),
            "frozen_layers": None,
        },
        "resize": {"policy": "measured", "memory_gb": None},
        "partition": "as_launched",
        "history_path": None,
        "cache": {"enabled": False, "dtype": "exact", "memory_gb": None, "disk_path": None, "disk_gb": None},
        "data": {"shuffle": False, "seed": 1234},
    }
    assert ElasticPipelineConfig() == parsed()


def test_absent_and_disabled_blocks_are_the_same():
    assert parse({"train_batch_size": 1}) is None
    assert parsed(enabled=False, freeze="nonsense", colour="red") is None


@pytest.mark.parametrize(
    ("block", "keys", "value"),
    [
        ({"freeze": {"policy": "alpha", "alpha": 0.5, "interval": 100}}, "freeze.interval", 100),
        ({"freeze": {"policy": "grad_norm", "interval": "epoch"}}, "freeze.alpha", 0.33),
        ({"freeze": {"policy": "grad_norm", "alpha": 0.2}}, "freeze.alpha", 0.2),
        (
            {"freeze": {"policy": "schedule", "frozen_layers": [[0, 1], [10, 2], [20, 2]], "interval": 7}},
            "freeze.frozen_layers",
            ((0, 1), (10, 2), (20, 2)),
        ),
        ({"freeze": {"policy": "static", "frozen_layers": None}}, "freeze.frozen_layers", None),
        ({"resize": {"policy": "halve"}}, "resize.policy", "halve"),
        ({"resize": {"policy": [[0, 4], [10, 2], [11, 4]]}}, "resize.policy", ((0, 4), (10, 2), (11, 4))),
        ({"cache": {"enabled": True, "memory_gb": 8, "disk_path": "cache/"}}, "cache.memory_gb", 8.0),
        ({"data": {"shuffle": True, "seed": 0}}, "data.seed", 0),
        ({"freeze": {"policy": "static", "unfreeze": []}}, "freeze.unfreeze", ()),
    ],
)
def test_accepted(block, keys, value):
    found = parsed(**block)
    for key in keys.split("."):
        found = getattr(found, key)
    assert found == value and type(found) is type(value)


PAIRS = "must be a list of [step, entries], steps increasing, entries 1 or more and not decreasing"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"freeze": {"policy": "alpha", "alpha": 1.5}},
            "freeze.alpha: got 1.5, must be above 0 and below 1, use e.g. 0.33",
        ),
        ({"freeze": {"policy": "alpha", "alpha": 0}}, "freeze.alpha: got 0, must be above 0"),
        ({"freeze": {"policy": "alpha", "alpha": 1.0}}, "freeze.alpha: got 1.0, must be above 0"),
        ({"freeze": {"policy": "alpha", "alpha": float("nan")}}, "freeze.alpha: got NaN"),
        ({"freeze": {"policy": "alpha", "alpha": "auto"}}, 'freeze.alpha: got "auto"'),
        ({"freeze": {"policy": "alpha", "alpha": True}}, "freeze.alpha: got true"),
        ({"freeze": {"alpha": 0.5}}, 'freeze.alpha: got 0.5, must be absent beside "policy": "static"'),
        (
            {"freeze": {"policy": "schedule", "frozen_layers": [[1, 1]], "alpha": 0.33}},
            'freeze.alpha: got 0.33, must be absent beside "policy": "schedule", which does not read it, '
            'use "policy": "alpha" or "grad_norm" or "plateau", or leave it out',
        ),
        (
            {"freeze": {"policy": "alpha", "frozen_layers": [[1, 1]]}},
            'freeze.frozen_layers: got [[1, 1]], must be absent beside "policy": "alpha", which does not read it, '
            'use "policy": "schedule", or leave it out',
        ),
        (
            {"freeze": {"policy": "schedule"}},
            'freeze.frozen_layers: got null, must be a list of [step, entries] beside "policy": "schedule", use e.g. [[',
        ),
        ({"freeze": {"policy": "grad-norm"}}, 'freeze.policy: got "grad-norm", must be "static" or "schedule" or '),
        ({"freeze": {"policy": "grad-norm"}}, 'use "grad_norm"'),
        ({"freeze": {"policy": ["alpha"]}}, 'freeze.policy: got ["alpha"]'),
        (
            {"freeze": {"interval": 0}},
            'freeze.interval: got 0, must be "epoch" or a positive number of steps, use e.g. 1000',
        ),
        ({"freeze": {"interval": "epochs"}}, 'use "epoch"'),
        ({"freeze": {"interval": 1.0}}, "freeze.interval: got 1.0"),
        ({"freeze": {"policy": "schedule", "frozen_layers": []}}, f"freeze.frozen_layers: got [], {PAIRS}"),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[20, 2], [10, 4]]}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[10, 2], [10, 4]]}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[10, 4], [20, 2]]}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[10, 0]]}}, PAIRS),
        ({"freeze": {"policy": "plateau", "tolerance": 1}}, "freeze.tolerance: got 1, must be above 0 and below 1"),
        ({"freeze": {"policy": "plateau", "patience": 0}}, "freeze.patience: got 0, must be a positive number"),
        ({"freeze": {"policy": "alpha", "patience": 2}}, 'freeze.patience: got 2, must be absent beside "policy": "al'),
        (
            {"freeze": {"unfreeze": "loss_rises"}},
            'freeze.unfreeze: got "loss_rises", must be a list of "lr_restart" or "loss_rise" or "policy", use ["loss_rise"]',
        ),
        ({"freeze": {"unfreeze": ["lr"]}}, 'freeze.unfreeze: got ["lr"], must be a list of'),
        ({"freeze": {"unfreeze": True}}, "freeze.unfreeze: got true, must be a list of"),
        (
            {"freeze": {"unfreeze": ["lr_restart"]}},
            'freeze.unfreeze: got ["lr_restart"], must be absent beside "policy": "static", which freezes nothing, use '
            'e.g. "policy": "alpha", or leave it out',
        ),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[-1, 2]]}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[10, 2, 3]]}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": [10, 2]}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": {"10": 2}}}, PAIRS),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[True, 2]]}}, PAIRS),
        (
            {"resize": {"policy": "off", "memory_gb": 3}},
            'resize.memory_gb: got 3.0, must be absent beside "policy": "off", which does not read it',
        ),
        (
            {"resize": {"policy": "measured", "memory_gb": -1}},
            "resize.memory_gb: got -1, must be a positive number of 1e9 bytes",
        ),
        ({"partition": True}, 'partition: got true, must be "as_launched" or "measured", use "as_launched"'),
        ({"resize": {"policy": "half"}}, 'use "halve"'),
        (
            {"resize": {"policy": None}},
            'resize.policy: got null, must be "off", "halve", "measured" or a list of [step, stages]',
        ),
        ({"resize": {"policy": [[10, 0]]}}, "steps increasing, stages 1 or more, use e.g. [[10, 2], [20, 1]]"),
        ({"resize": {"policy": [[10, 2], [5, 1]]}}, "resize.policy: got [[10, 2], [5, 1]]"),
        ({"cache": {"memory_gb": 0}}, "cache.memory_gb: got 0, must be a positive number of 1e9 bytes"),
        ({"cache": {"disk_path": " "}}, 'cache.disk_path: got " ", must be the name of a folder, use "cache/"'),
        ({"cache": {"dtype": "bf61"}}, 'cache.dtype: got "bf61", must be "exact" or "bf16", use "bf16"'),
        ({"cache": {"memory_gb": 8}}, "cache.enabled: missing, must be there beside memory_gb, use true"),
        ({"cache": {"disk_gb": 0, "disk_path": "x"}}, "cache.disk_gb: got 0, must be a positive number of 1e9 bytes"),
        (
            {"cache": {"enabled": True, "disk_gb": 8}},
            'cache.disk_gb: got 8.0, must be absent without disk_path, use e.g. "disk_path": "cache/"',
        ),
        ({"cache": {"enabled": 1}}, "cache.enabled: got 1, must be true or false, use false"),
        ({"data": {"shuffle": "yes"}}, 'data.shuffle: got "yes", must be true or false, use false'),
        ({"data": {"seed": -1}}, "data.seed: got -1, must be an integer of 0 or more"),
        ({"data": {"seed": False}}, "data.seed: got false"),
        ({"data": {"sed": 1}}, 'data: unknown key "sed", must be one of shuffle, seed, use "seed"'),
        ({"data": [1]}, "data: got [1], must be a block of keys, use some of shuffle, seed"),
        ({"freeze": {"strict": True}}, 'freeze: unknown key "strict"'),
        ({"enabled": 0}, "enabled: got 0, must be true or false, use true"),
        ({"enabled": 1}, "enabled: got 1, must be true or false, use true"),
    ],
)
def test_refused(block, message):
    found = refused(**block)
    assert message in found and found.startswith("elastic_pipeline.")


def test_the_block_itself():
    assert refused(freze={}).startswith('elastic_pipeline: unknown key "freze"')
    for block in (3, None, True, "on", [8]):
        with pytest.raises(
            ConfigError, match=r"elastic_pipeline: got .*, must be a block of keys, use some of enabled"
        ):
            parse({"elastic_pipeline": block})


def test_it_stays_as_it_was_read():
    settings = parsed(freeze={"policy": "alpha"})
    with pytest.raises(
        ConfigError, match=r"elastic_pipeline.freeze.alpha: got an assignment, must stay as it was read"
    ):
        settings.freeze.alpha = 0.5
    with pytest.raises(ConfigError, match=r"elastic_pipeline.resize: got an assignment"):
        settings.resize = None


FREEZES = {"freeze": {"policy": "alpha", "interval": 3}}


@pytest.mark.parametrize("block", [{"device": "none"}, {"device": None}, {}, None])
def test_an_optimizer_whose_offloading_is_off_may_stand_beside(block):
    settings = parsed(**FREEZES)
    assert check_config(settings, {"zero_optimization": {"stage": 1, "offload_optimizer": block}}) is settings


def test_one_that_is_offloaded_may_not():
    rule = 'must be absent .* \\(what is offloaded does not move\\), or have device "none", use device "none"'
    with pytest.raises(ConfigError, match=rf"zero_optimization.offload_optimizer: got .*, {rule}"):
        check_config(parsed(**FREEZES), {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})


def test_a_registered_policy_says_what_it_reads():
    class Mine(FreezePolicy):
        reads = ("alpha",)

    with registered("mine", Mine):
        assert parsed(freeze={"policy": "mine", "alpha": 0.4}).freeze.alpha == 0.4
        assert '"policy": "mine", which does not read it' in refused(
            freeze={"policy": "mine", "frozen_layers": [[1, 1]]}
        )
    assert '"static"' in refused(freeze={"policy": "mine"})


KEYS = [(block, key) for block, kind in BLOCKS.items() for key in kind.model_fields]


@given(st.sampled_from(KEYS), JSON)
def test_any_json_is_accepted_or_one_line(where, value):
    block, key = where
    try:
        assert isinstance(getattr(parsed(**{block: {key: value}}), block), BLOCKS[block])
    except ConfigError as error:
        assert re.match(rf"elastic_pipeline\.{block}\.\w+: (got |missing)", str(error)) and "\n" not in str(error)

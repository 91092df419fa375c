"""The hook in ``deepspeed.initialize``, in this process: half imported modules, the switch, keys and arguments."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
from deepspeed.runtime import config, constants

from ds_terapipe import autoload
from ds_terapipe.errors import ConfigError
from ds_terapipe.register import _near_miss, wrap


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """A module ``deepspeed`` that is half imported."""
    module = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    others = [finder for finder in sys.meta_path if not isinstance(finder, autoload._Watch)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.delenv("DS_TERAPIPE_AUTOLOAD", raising=False)
    return module


def initialize(args=None, model=None, config=None, config_params=None):
    return args, model, config, config_params


def watchers() -> list[autoload._Watch]:
    return [finder for finder in sys.meta_path if isinstance(finder, autoload._Watch)]


def test_a_half_imported_deepspeed(module):
    """The name is not there yet: AttributeError as ever, and the wrapper as soon as it is."""
    autoload.load()
    with pytest.raises(AttributeError, match="initialize"):
        module.initialize  # noqa: B018
    assert not hasattr(module, "initialize")
    vars(module)["initialize"] = initialize
    assert module.initialize.ds_terapipe_original is initialize
    assert module.initialize is vars(module)["initialize"]
    assert inspect.signature(module.initialize) == inspect.signature(initialize)
    assert type(module) is ModuleType and not watchers()


def test_a_function_that_others_put_there_is_wrapped_too(module):
    vars(module)["initialize"] = print
    autoload.load()
    module.initialize = initialize
    assert module.initialize.ds_terapipe_original is initialize
    assert module.initialize(config={}) == (None, None, {}, None)
    del module.initialize
    assert not hasattr(module, "initialize")


def test_an_import_that_fails_and_is_tried_again(module, monkeypatch):
    autoload.load()
    second = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", second)
    assert [finder.find_spec("deepspeed.ops") for finder in watchers()] == [None]
    vars(second)["initialize"] = initialize
    assert second.initialize.ds_terapipe_original is initialize


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_the_switch(module, monkeypatch, value):
    monkeypatch.setenv("DS_TERAPIPE_AUTOLOAD", value)
    autoload.load()
    assert type(module) is ModuleType and not watchers()


def test_load_never_raises(module, monkeypatch):
    def broken(module):
        raise RuntimeError("broken")

    monkeypatch.setattr(sys, "meta_path", ())
    autoload.load()
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(autoload, "_cover", broken)
    autoload.load()
    assert sys.meta_path[0].find_spec("deepspeed.ops") is None


@pytest.mark.parametrize("right", ["token_pipeline", "elastic_pipeline"])
def test_keys_that_nearly_are_ours_are_refused(right):
    camel = "".join(word.title() for word in right.split("_"))
    for key in (right.replace("line", "lne"), right.replace("_", "-"), right.replace("_", ""), camel, f"{right}s"):
        with pytest.raises(ConfigError, match=f'^{key}: unknown key, must be spelt "{right}", use "{right}"$'):
            wrap(initialize)(config={key: {}, "train_batch_size": 1})


def test_no_key_of_deepspeed_is_taken_for_ours():
    """All lower-case words in DeepSpeed's sources of configuration keys, top-level ones among them."""
    values = [value for module in (config, constants) for value in vars(module).values()]
    words = {word for word in values if isinstance(word, str) and word.replace("_", "").isalnum()}
    words |= {
        "pipeline",
        "tensor_parallel",
        "data_efficiency",
        "curriculum_learning",
        "elasticity",
        "sequence_parallel",
    }
    assert len(words) > 100
    assert [word for word in words if _near_miss(word)] == []


def test_deepspeed_gets_its_arguments_as_they_are():
    args, model, settings = object(), object(), {"train_batch_size": 1, "my_section": {}}
    given = wrap(initialize)(args, model, config_params=settings)
    assert [id(each) for each in given] == [id(args), id(model), id(None), id(settings)]
    assert wrap(initialize).ds_terapipe_original is wrap(wrap(initialize)).ds_terapipe_original is initialize
    assert wrap(initialize)() == (None,) * 4

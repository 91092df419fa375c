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


def fresh_deepspeed(monkeypatch) -> ModuleType:
    module = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("DS_TERAPIPE_AUTOLOAD", raising=False)
    return module


def test_a_half_imported_deepspeed(monkeypatch):
    """The name is not there yet: AttributeError as ever, and the wrapper as soon as it is."""
    module = fresh_deepspeed(monkeypatch)
    autoload.load()
    with pytest.raises(AttributeError, match="initialize"):
        module.initialize  # noqa: B018
    assert not hasattr(module, "initialize")

    def initialize(args=None, config=None):
        return config

    vars(module)["initialize"] = initialize
    assert module.initialize.ds_terapipe_original is initialize
    assert module.initialize is vars(module)["initialize"]
    assert inspect.signature(module.initialize) == inspect.signature(initialize)
    assert type(module) is ModuleType
    assert not any(isinstance(finder, autoload._Watch) for finder in sys.meta_path)


def test_a_function_that_others_put_there_is_wrapped_too(monkeypatch):
    module = fresh_deepspeed(monkeypatch)
    vars(module)["initialize"] = print
    autoload.load()

    def theirs(config=None):
        return "theirs"

    module.initialize = theirs
    assert module.initialize.ds_terapipe_original is theirs
    assert module.initialize(config={}) == "theirs"
    del module.initialize
    assert not hasattr(module, "initialize")


def test_an_import_that_fails_and_is_tried_again(monkeypatch):
    first = fresh_deepspeed(monkeypatch)
    autoload.load()
    second = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", second)
    for finder in sys.meta_path:
        if isinstance(finder, autoload._Watch):
            assert finder.find_spec("deepspeed.ops") is None
    vars(second)["initialize"] = lambda: None
    assert hasattr(second.initialize, "ds_terapipe_original")
    assert first is not second


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_the_switch(monkeypatch, value):
    module = fresh_deepspeed(monkeypatch)
    monkeypatch.setenv("DS_TERAPIPE_AUTOLOAD", value)
    before = list(sys.meta_path)
    autoload.load()
    assert type(module) is ModuleType and sys.meta_path == before


def test_load_never_raises(monkeypatch):
    fresh_deepspeed(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", ())
    autoload.load()

    def broken(module):
        raise RuntimeError("broken")

    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(autoload, "_cover", broken)
    autoload.load()
    assert sys.meta_path[0].find_spec("deepspeed.ops") is None


@pytest.mark.parametrize("right", ["token_pipeline", "elastic_pipeline"])
def test_keys_that_nearly_are_ours_are_refused(right):
    def initialize(args=None, model=None, config=None):
        raise AssertionError("DeepSpeed was called")

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
    calls = []

    def initialize(args=None, model=None, config=None, config_params=None):
        calls.append((args, model, config, config_params))
        return "result"

    args, model, settings = object(), object(), {"train_batch_size": 1, "my_section": {}}
    assert wrap(initialize)(args, model, config_params=settings) == "result"
    assert [id(each) for each in calls[0]] == [id(args), id(model), id(None), id(settings)]
    assert wrap(initialize).ds_terapipe_original is wrap(wrap(initialize)).ds_terapipe_original is initialize
    assert wrap(initialize)() == "result"

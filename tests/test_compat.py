"""Private names that the package relies on are there, and a DeepSpeed without them is refused."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import deepspeed
import pytest

from ds_terapipe import compat
from ds_terapipe.errors import ConfigError


@pytest.mark.parametrize("name", compat.NAMES, ids=lambda name: name.path)
def test_name_exists(name):
    if importlib.util.find_spec(name.package) is None:
        pytest.skip(f"{name.package} is not installed")
    assert compat.exists(name.path), f"{name.path}, seen in {name.seen}, is gone; used for {name.reason}"


@pytest.mark.parametrize(
    "path",
    [
        "deepspeed:no_such_name",
        "deepspeed.no_such_module:name",
        "deepspeed.runtime.pipe.engine:PipelineEngine.no_such_method",
        "deepspeed.runtime.pipe.engine:PipelineEngine.__init__#no_such_attribute",
    ],
)
def test_missing_names_are_noticed(path):
    assert not compat.exists(path)


def test_no_name_is_listed_twice():
    paths = [name.path for name in compat.NAMES]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+abc123", "0.19.12"])
def test_of_versions_that_were_tested_nothing_is_said(monkeypatch, caplog, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    monkeypatch.setattr(compat, "_SAID", set())
    compat.require()
    assert not caplog.messages


@pytest.mark.parametrize("version", ["0.18.9", "0.19.7", "0.20.0", "1.0"])
def test_another_version_is_said_once_in_one_line(monkeypatch, caplog, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    monkeypatch.setattr(compat, "_SAID", set())
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        compat.require("elastic_pipeline")
    (line,) = caplog.messages
    assert line == (
        f"elastic_pipeline: got DeepSpeed {version}, which no test has run on, use pip install 'deepspeed>=0.19.8,<0.20' where "
        "something fails"
    )


def test_the_other_processes_of_a_launch_say_nothing(monkeypatch, caplog):
    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    monkeypatch.setattr(compat, "_SAID", set())
    monkeypatch.setenv("RANK", "1")
    compat.require()
    assert not caplog.messages


def _imported_anew(monkeypatch):
    """``ds_terapipe.megatron``, imported a second time."""
    for name in [name for name in sys.modules if name.startswith("ds_terapipe.megatron")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("ds_terapipe.megatron")


def test_another_megatron_is_said_and_used(monkeypatch, caplog):
    monkeypatch.setattr("megatron.core.__version__", "0.21.0")
    monkeypatch.setattr(compat, "_SAID", set())
    assert callable(_imported_anew(monkeypatch).gpt_pipeline)
    (line,) = caplog.messages
    assert line.startswith("ds_terapipe.megatron: got megatron-core 0.21.0, which no test has run on, use pip install ")


def test_a_megatron_that_does_not_fit_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", "0.21.0")
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt.gpt_layer_specs", None)
    with pytest.raises(
        ImportError, match=r"megatron-core 0\.21\.0 does not fit .*gpt_layer_specs.*, must be 0\.16 or newer"
    ) as raised:
        _imported_anew(monkeypatch)
    assert "\n" not in str(raised.value)


def test_a_missing_name_is_refused_by_name(monkeypatch):
    gone = compat.Name("deepspeed:gone_tomorrow", "0.19.8", "nothing")
    monkeypatch.setattr(compat, "report", lambda packages: {gone: False})
    with pytest.raises(ConfigError, match="lacks deepspeed:gone_tomorrow"):
        compat.require()

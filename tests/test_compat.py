"""Private names that the package relies on are there, and a DeepSpeed without them is refused."""

from __future__ import annotations

import importlib.util

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
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    compat.require()


@pytest.mark.parametrize("version", ["0.18.9", "0.19.7", "0.20.0", "1.0"])
def test_other_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(ConfigError, match=rf"got DeepSpeed {version}, must be 0\.19\.8 or newer, below 0\.20"):
        compat.require()


def test_a_missing_name_is_refused_by_name(monkeypatch):
    gone = compat.Name("deepspeed:gone_tomorrow", "0.19.8", "nothing")
    monkeypatch.setattr(compat, "report", lambda packages: {gone: False})
    with pytest.raises(ConfigError, match="lacks deepspeed:gone_tomorrow"):
        compat.require()

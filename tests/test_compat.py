"""Private names that the package relies on are there, and a DeepSpeed without them is refused."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from ds_terapipe import compat


@pytest.mark.parametrize("name", compat.NAMES, ids=lambda name: name.path)
def test_name_exists(name):
    if importlib.util.find_spec(name.package) is None:
        pytest.skip(f"{name.package} is not installed")
    assert compat.exists(name.path), f"{name.path}, seen in {name.seen}, is gone; used for {name.reason}"


def test_missing_names_are_noticed_and_none_is_listed_twice():
    engine = "deepspeed.runtime.pipe.engine:PipelineEngine"
    for path in ("deepspeed:no_such_name", "deepspeed.no_such_module:name", f"{engine}.no_such_method",
                 f"{engine}.__init__#no_such_attribute"):  # fmt: skip
        assert not compat.exists(path), path
    assert len({name.path for name in compat.NAMES}) == len(compat.NAMES)


@pytest.mark.parametrize(
    ("version", "rank", "said"),
    [
        *((version, "0", False) for version in ("0.19.8+abc123", "0.19.12")),
        *((version, "0", True) for version in ("0.19.7", "0.20.0")),
        ("0.20.0", "1", False),
    ],
)
def test_a_version_that_no_test_ran_on_is_said_once_by_one_rank(monkeypatch, caplog, version, rank, said):
    monkeypatch.setattr("deepspeed.__version__", version)
    monkeypatch.setattr(compat, "_SAID", set())
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        compat.require("elastic_pipeline")
    assert caplog.messages == said * [
        f"elastic_pipeline: got DeepSpeed {version}, which no test has run on, use pip install 'deepspeed>=0.19.8,<0.20' where "
        "something fails"
    ]


def test_another_megatron_is_said_and_used_and_one_that_does_not_fit_refused_in_one_line(monkeypatch, caplog):
    def imported():
        for name in [name for name in sys.modules if name.startswith("ds_terapipe.megatron")]:
            monkeypatch.delitem(sys.modules, name)
        return importlib.import_module("ds_terapipe.megatron")

    monkeypatch.setattr("megatron.core.__version__", "0.21.0")
    monkeypatch.setattr(compat, "_SAID", set())
    assert callable(imported().gpt_pipeline)
    (line,) = caplog.messages
    assert line.startswith("ds_terapipe.megatron: got megatron-core 0.21.0, which no test has run on, use pip install ")
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt.gpt_layer_specs", None)
    text = r"megatron-core 0\.21\.0 does not fit .*gpt_layer_specs.*, must be 0\.16 or newer"
    with pytest.raises(ImportError, match=text) as raised:
        imported()
    assert "\n" not in str(raised.value)

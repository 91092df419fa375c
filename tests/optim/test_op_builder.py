"""The op builders: DeepSpeed's conventions, the cache, its lock, and what is said when there is nothing to compile with."""

import fcntl
import logging
import re
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_terapipe import jit
from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.op import backends
from ds_terapipe.optim.op.builder import CpuLambBuilder, CudaLambBuilder
from ds_terapipe.pipeline.operators import compiled

# Compiles in a second: what is tested is how modules are built and found.
SMALL = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_small", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__small() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jit.Recipe:
    """A module of its own in a cache of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    source = tmp_path / "a folder" / "small.cpp"
    source.parent.mkdir()
    source.write_text(SMALL)
    return small(source, 42)


def small(source: Path, answer: int) -> jit.Recipe:
    return jit.Recipe("_small", (str(source),), ("-fPIC", f"-DANSWER={answer}"))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The package's warnings, with ops that nothing has loaded yet."""
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(logging.getLogger("ds_terapipe"), "propagate", True)
    backends._warn.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def test_pick_takes_the_op_of_the_device() -> None:
    found = [backends.pick(*each).name for each in ((CPU,), (CPU, "plain"), (torch.device("meta"),))]
    assert found == ["cpu", "plain", "plain"]
    for name in ("cuda", "fast"):
        with pytest.raises(ConfigError, match=f'backend: got "{name}"'):
            backends.pick(CPU, name)
    assert not [flag for flag in CpuLambBuilder().cxx_args() if "march" in flag or "mtune" in flag], "one processor's"


def test_an_op_that_has_no_code_for_the_device_is_pytorchs(monkeypatch, warnings):
    """Which is found before the first step."""
    no_code = RuntimeError("FusedLamb on CUDA, occupancy: no kernel image is available for execution on the device")
    monkeypatch.setattr(CudaLambBuilder, "load", lambda self: SimpleNamespace(blocks_of_device=mock.Mock(side_effect=no_code)))
    assert backends.pick(CUDA).name == "plain"
    assert "several times slower than its cuda op" in warnings.text
    with pytest.raises(ConfigError, match="must be auto or plain where the op cannot be loaded"):
        backends.pick(CUDA, "cuda")


@pytest.mark.parametrize(("tool", "message"), [("compiler", r"C\+\+ compiler"), ("pybind11_include", "pybind11")])
def test_what_is_missing_is_named_in_one_warning(recipe, monkeypatch, warnings, tool, message):
    monkeypatch.setattr(jit, tool, lambda: [] if tool == "compiler" else None)
    monkeypatch.setattr(CpuLambBuilder, "built_ahead", lambda self: False)
    with pytest.raises(jit.BuildError, match=message):
        jit.obtain(recipe)
    usable, remark = CpuLambBuilder().status()
    assert not usable and re.search(message, remark) and not CpuLambBuilder().is_compatible()
    warnings.clear()
    assert [backends.pick(CPU).name for _ in range(3)] == ["plain"] * 3
    assert len([record for record in warnings.records if re.search(message, record.getMessage())]) == 1
    with pytest.raises(ConfigError, match=message):
        backends.pick(CPU, "cpu")
    warnings.clear()
    assert compiled.load.__wrapped__() is None and re.search(f"in Python, only slower: .*{message}", warnings.text)


def test_a_module_is_compiled_once_and_found_again(recipe: jit.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jit.obtain(recipe)
    assert jit.import_from("_small", path).answer == 42
    monkeypatch.setattr(jit, "compile_to", lambda *_: pytest.fail("compiled again"))
    assert jit.obtain(recipe) == path
    source = Path(recipe.sources[0])
    assert jit.module_path(small(source, 43)) != path and sysconfig.get_config_var("SOABI") in path.parent.name
    source.write_text(SMALL + "// changed\n")
    assert jit.module_path(recipe) != path


def test_a_lock_is_that_of_a_living_process(recipe: jit.Recipe) -> None:
    """One that is left behind holds up nothing; waiting for another process ends with the lock's name."""
    lock = jit.module_path(recipe).parent / "lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(jit.BuildError, match=f"holds {lock}"):
            jit.obtain(recipe, lock_timeout_s=0.2)
    lock.write_text("left behind")
    (lock.parent / "build_left").mkdir()
    assert jit.obtain(recipe, lock_timeout_s=1.0).is_file()


def test_an_error_of_the_compiler_is_shown_and_leaves_nothing(recipe: jit.Recipe) -> None:
    Path(recipe.sources[0]).write_text("#error not today\n")
    with pytest.raises(jit.BuildError, match="not today"):
        jit.obtain(recipe)
    assert [entry.name for entry in jit.module_path(recipe).parent.iterdir()] == ["lock"]


def test_those_who_come_together_compile_once(recipe: jit.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is of an open file: threads wait for each other as processes do."""
    calls, compile_to = [], jit.compile_to
    monkeypatch.setattr(jit, "compile_to", lambda *arguments: calls.append(arguments) or compile_to(*arguments))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(jit.obtain, [recipe] * 2)
    assert first == second and jit.import_from("_small", first).answer == 42 and len(calls) == 1

"""The op builders: DeepSpeed's conventions, the cache, its lock, and what is said when there is nothing to compile with."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.op import backends, jit
from ds_terapipe.optim.op.builder import CpuLambBuilder, CudaLambBuilder, builders

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


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jit.Recipe:
    """A module of its own in a cache of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    source = tmp_path / "a folder" / "small.cpp"
    source.parent.mkdir()
    source.write_text(SMALL)
    return small(source, 42)


def small(source: Path, answer: int) -> jit.Recipe:
    return jit.Recipe("_small", (str(source),), (), (), ("-fPIC", f"-DANSWER={answer}"))


def test_builders_keep_deepspeeds_conventions() -> None:
    for builder in builders():
        assert isinstance(builder, OpBuilder)
        assert builder.BUILD_VAR == "DS_BUILD_FUSED_LAMB_TERAPIPE"
        assert builder.absolute_name() == f"ds_terapipe.optim.{builder.MODULE}"
        assert all(Path(path).is_absolute() for path in [*builder.sources(), *builder.include_paths()])
        assert isinstance(builder.is_compatible(verbose=True), bool)
    names = [builder.name for builder in builders()]
    deepspeed_ops = __import__("deepspeed.ops.op_builder.all_ops", fromlist=["ALL_OPS"]).ALL_OPS
    assert len(set(names)) == 2 and not set(names) & set(deepspeed_ops)


def test_flags_are_explicit_and_fit_every_processor() -> None:
    flags = CpuLambBuilder().cxx_args()
    assert {"-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off"} <= set(flags)
    assert not [flag for flag in flags if "march" in flag or "mtune" in flag or "fast" in flag]


@pytest.mark.parametrize(
    ("names", "codes"),
    [
        ("8.0+PTX", ["compute_80", "sm_80"]),
        ("8.0;9.0+PTX", ["sm_80", "compute_90", "sm_90"]),
        ("Hopper", ["compute_90", "sm_90"]),
        ("", ["sm_80", "sm_90"]),
    ],
)
def test_the_architectures_are_those_that_pytorch_takes(
    names: str, codes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    flags = [flag for flag in CudaLambBuilder().nvcc_args() if "gencode" in flag]
    assert sorted(flag.partition("code=arch=")[2].partition("code=")[2] for flag in flags) == sorted(codes)


class _NoCode:
    """A module that was compiled for other devices."""

    @staticmethod
    def blocks_of_device() -> None:
        raise RuntimeError("FusedLamb on CUDA, occupancy: no kernel image is available for execution on the device")


@pytest.mark.parametrize("names", ["not one", None])
def test_an_op_that_has_no_code_for_the_device_is_pytorchs(
    names: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it can be compiled for is wrong, or does not fit; it is said before the first step."""
    if names is None:
        monkeypatch.setattr(CudaLambBuilder, "load", lambda self: _NoCode())
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
        monkeypatch.setattr(CudaLambBuilder, "load", lambda self: self.nvcc_args())
    assert backends.pick(torch.device("cuda", 0)).name == "plain"
    assert "several times slower than its cuda op" in caplog.text
    with pytest.raises(ConfigError, match="must be auto or plain where the op cannot be loaded"):
        backends.pick(torch.device("cuda", 0), "cuda")


def test_every_source_and_header_is_named_once() -> None:
    cpu = [*CpuLambBuilder.SOURCES, *CpuLambBuilder.HEADERS]
    there = sorted(path.name for path in jit.source_folder().glob("lamb_cpu*"))
    assert sorted(name for name in cpu if name.startswith("lamb_cpu")) == there
    folder = jit.source_folder()
    assert all((folder / name).is_file() for name in [*cpu, *CudaLambBuilder.SOURCES, *CudaLambBuilder.HEADERS])


def test_the_op_is_loaded_once_and_says_what_it_picked() -> None:
    module = CpuLambBuilder().load()
    assert CpuLambBuilder().load() is module
    assert module.digest == jit.source_digest(CpuLambBuilder().recipe())
    usable, remark = CpuLambBuilder().status()
    assert usable and remark == f"instruction set {module.instruction_set()}"


def test_a_module_is_compiled_once_and_found_again(recipe: jit.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jit.obtain(recipe)
    assert jit.import_from("_small", path).answer == 42
    monkeypatch.setattr(jit, "compile_to", lambda *_: pytest.fail("compiled again"))
    assert jit.obtain(recipe) == path
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted(["lock", path.name])


def test_other_sources_and_other_flags_are_another_module(recipe: jit.Recipe) -> None:
    first, source = jit.module_path(recipe), Path(recipe.sources[0])
    assert jit.module_path(small(source, 43)) != first
    source.write_text(SMALL + "// changed\n")
    assert jit.module_path(recipe) != first
    assert sysconfig.get_config_var("SOABI") in first.parent.name


def test_an_error_of_the_compiler_is_shown_and_leaves_nothing(recipe: jit.Recipe) -> None:
    Path(recipe.sources[0]).write_text("#error not today\n")
    with pytest.raises(jit.BuildError, match="not today"):
        jit.obtain(recipe)
    assert [entry.name for entry in jit.module_path(recipe).parent.iterdir()] == ["lock"]


def test_the_lock_of_a_killed_process_is_no_lock(recipe: jit.Recipe) -> None:
    lock = jit.module_path(recipe).parent / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("left behind")
    (lock.parent / "build_left").mkdir()
    assert jit.obtain(recipe, lock_timeout_s=1.0).is_file()


def test_waiting_for_another_process_ends_with_the_locks_name(recipe: jit.Recipe) -> None:
    lock = jit.module_path(recipe).parent / "lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(jit.BuildError, match=f"holds {lock}"):
            jit.obtain(recipe, lock_timeout_s=0.2)


def test_processes_that_come_together_compile_once(recipe: jit.Recipe, tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import sys, pathlib
        sys.path.insert(0, {str(Path(jit.__file__).parent)!r})
        import jit
        recipe = jit.Recipe("_small", ({recipe.sources[0]!r},), (), (), {recipe.cxx_args!r})
        compile_to = jit.compile_to
        def counted(*arguments):
            print("compiled")
            compile_to(*arguments)
        jit.compile_to = counted
        assert jit.import_from("_small", jit.obtain(recipe)).answer == 42
    """)
    script = tmp_path / "rank.py"
    script.write_text(program)
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env=_rank(rank), stdout=subprocess.PIPE, text=True)
        for rank in (1, 0)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "".join(said).split() == ["compiled"]


def _rank(rank: int) -> dict[str, str]:
    import os

    return {**os.environ, "LOCAL_RANK": str(rank)}


@pytest.mark.parametrize(
    ("tool", "message"), [("compiler", r"C\+\+ compiler"), ("ninja", "ninja"), ("pybind11_include", "pybind11")]
)
def test_what_is_missing_is_named(recipe: jit.Recipe, monkeypatch: pytest.MonkeyPatch, tool: str, message: str) -> None:
    monkeypatch.setattr(jit, tool, lambda: None)
    with pytest.raises(jit.BuildError, match=message):
        jit.obtain(recipe)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    builder = CpuLambBuilder()
    monkeypatch.setattr(builder, "built_ahead", lambda: False)
    usable, remark = builder.status()
    assert not usable and message.strip("\\").replace("\\", "") in remark
    assert not builder.is_compatible()


def test_without_a_compiler_pytorch_takes_over_with_one_warning(
    recipe: jit.Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "compiler", lambda: None)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(CpuLambBuilder, "built_ahead", lambda self: False)
    backends._warn.cache_clear()
    monkeypatch.setattr(logging.getLogger("ds_terapipe"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        chosen = [backends.pick(torch.device("cpu")) for _ in range(3)]
    assert [backend.name for backend in chosen] == ["plain"] * 3
    assert len([record for record in caplog.records if "no C++ compiler" in record.getMessage()]) == 1
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        backends.pick(torch.device("cpu"), "cpu")


def test_pick_takes_the_op_of_the_device() -> None:
    assert backends.pick(torch.device("cpu")).name == "cpu"
    assert backends.pick(torch.device("cpu"), "plain").name == "plain"
    assert backends.pick(torch.device("meta")).name == "plain"
    for name in ("cuda", "fast"):
        with pytest.raises(ConfigError, match=f'backend: got "{name}"'):
            backends.pick(torch.device("cpu"), name)


def test_a_module_built_ahead_of_other_sources_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from types import ModuleType

    stale = ModuleType("ds_terapipe.optim._lamb_cpu")
    stale.digest = "another"
    monkeypatch.setattr(CpuLambBuilder, "built_ahead", lambda self: True)
    monkeypatch.setattr("importlib.import_module", lambda name: stale)
    monkeypatch.setattr(logging.getLogger("ds_terapipe"), "propagate", True)
    builder = CpuLambBuilder()
    with caplog.at_level(logging.WARNING):
        assert builder._ahead() is None
    assert "built ahead of other sources" in caplog.text
    stale.digest = jit.source_digest(builder.recipe())
    assert builder._ahead() is stale

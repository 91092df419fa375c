"""The installed package: public names, entry points, requirements, and what it may import."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, metadata, requires, version
from pathlib import Path

import pytest

import ds_terapipe

from .spawn import run_script

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ds_terapipe"


def test_version_and_requirements():
    assert version("ds_terapipe") == ds_terapipe.__version__ == "0.1.0"
    required = set(requires("ds_terapipe"))
    plain = {re.split(r"[<>=;\s]", entry)[0] for entry in required if "extra" not in entry}
    assert plain == {"torch", "numpy", "deepspeed", "ninja", "pybind11", "tqdm", "zlib-ng"}
    for wanted in ("deepspeed<0.20,>=0.19.8", "megatron-core<0.20,>=0.16", "transformers<6,>=5.0"):
        assert any(entry.startswith(wanted) for entry in required), wanted
    assert metadata("ds_terapipe")["Requires-Python"] == ">=3.10"


def test_entry_points_and_the_command():
    points = {group: entry_points(group=group, name="ds_terapipe") for group in ("torch.backends", "console_scripts")}
    found = [point.value for each in points.values() for point in each]
    assert found == ["ds_terapipe.autoload:load", "ds_terapipe.cli:main"], "install the package first"
    command = [str(Path(sys.executable).parent / "ds_terapipe"), "--help"]
    assert "usage: ds_terapipe" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_public_names():
    assert sorted(ds_terapipe._PUBLIC) == sorted(ds_terapipe.__all__) and set(ds_terapipe.__all__) <= set(dir(ds_terapipe))
    assert callable(ds_terapipe.register) and callable(ds_terapipe.initialize)
    assert issubclass(ds_terapipe.ConfigError, ValueError)
    with pytest.raises(AttributeError, match="no_such_name"):
        ds_terapipe.no_such_name  # noqa: B018


def imports(path: Path, indent: str = "") -> set[str]:
    """Top-level packages that a file imports, relative imports left out; at its top only, or in functions too."""
    pattern = rf"^{indent}(?:from (\w+)\S* import|import (\w+))"
    return {first or second for first, second in re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)}


def test_the_hook_and_the_schedules_need_only_the_standard_library():
    for name in ("__init__.py", "autoload.py", "errors.py", "register.py"):
        assert imports(PACKAGE / name) <= sys.stdlib_module_names, name
    for path in (PACKAGE / "schedule").rglob("*.py"):
        assert imports(path, indent=r"\s*") - {"ds_terapipe"} <= sys.stdlib_module_names, path


def test_every_part_but_megatron_is_imported_without_megatron_core(tmp_path):
    end = run_script(
        """
import importlib, pkgutil, sys

class NoMegatron:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(name)

sys.meta_path.insert(0, NoMegatron())
import ds_terapipe
found = pkgutil.walk_packages(ds_terapipe.__path__, "ds_terapipe.", onerror=lambda name: None)
names = {module.name for module in found if not module.name.startswith("ds_terapipe.megatron")}
for name in names:
    importlib.import_module(name)
for name in ds_terapipe.__all__:
    getattr(ds_terapipe, name)
assert {"ds_terapipe.config", "ds_terapipe.pipeline.engine", "ds_terapipe.schedule.orders"} <= names
""",
        tmp_path,
    )
    assert end.code == 0, end.output[-3000:]


def test_every_target_that_runs_python_makes_its_environment():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z-]+):([^#\n]*)(?:##.*)?\n((?:\t.*\n)+)", text, re.MULTILINE)
    running = {name: needs.split() for name, needs, recipe in rules if "$(RUN)" in recipe}
    assert {"demo", "test", "lint", "gpu-lamb"} <= set(running)
    assert all("venv" in needs for needs in running.values()), running


FAKE_PYTHON = """#!/usr/bin/env bash
# Stands in for `python -m venv` and for the environment's own python, and writes down what it is asked for.
echo "$*" >> {log}
[ "$1" = -c ] && exit 0
if [ "$2" = venv ]; then
  mkdir -p "$3/bin" && echo "VIRTUAL_ENV=$3" > "$3/bin/activate" && cp "$0" "$3/bin/python"
elif [ -e {broken} ]; then
  exit 1
fi
"""
MADE, KEPT = ["venv", "pip", "pip"], []


def test_an_environment_is_made_once_and_again_where_it_is_no_good_and_those_of_others_are_left_alone(tmp_path):
    """configs/venv.sh in a folder of its own with a stand-in for Python."""
    pins, log, python, venv = (tmp_path / name for name in ("constraints.txt", "log", "python", ".venv"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "setup.py").touch()
    pins.write_text("torch==2.13.0\ntorchvision==0.1\n")
    python.write_text(FAKE_PYTHON.format(log=log, broken=tmp_path / "broken"))
    python.chmod(0o755)

    def make(name: str = ".venv") -> tuple[int, list[str], str]:
        log.write_text("")
        env = {**os.environ, "VENV": name, "PYTHON": str(python), "TORCH": "torch==2.13.0"}
        command = ["bash", str(tmp_path / "configs" / "venv.sh")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, re.findall(r"^-m (\w+)", log.read_text(), re.MULTILINE), done.stderr

    (tmp_path / "broken").touch()
    assert make()[:2] == (1, ["venv", "pip"])
    (venv / "left").touch()
    (tmp_path / "broken").unlink()
    assert make()[:2] == (0, MADE)
    assert not (venv / "left").exists() and not (venv / ".begun").exists()
    assert log.read_text().count(f"-c {venv / 'constraints.txt'}") == 2  # another torch than the pinned one can be installed
    assert (venv / "constraints.txt").read_text() == "torchvision==0.1\n"
    assert make()[:2] == (0, KEPT)
    later = (venv / ".installed").stat().st_mtime + 10
    os.utime(pins, (later, later))
    assert make()[:2] == (0, ["pip", "pip"])
    os.utime(pins, (1, 1))
    (venv / "bin" / "python").unlink()
    assert make()[:2] == (0, MADE)
    (venv / "bin" / "activate").write_text("VIRTUAL_ENV=/elsewhere/.venv")
    assert make()[:2] == (0, MADE)
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "pyvenv.cfg").touch()
    status, ran, said = make("theirs")
    assert (status, ran) == (1, []) and "VENV: got theirs, which was not made here" in said
    assert [path.name for path in theirs.iterdir()] == ["pyvenv.cfg"]


def test_the_op_can_be_built_ahead_and_its_sources_come_with_the_package(tmp_path):
    source, target, cache, wrapper = (tmp_path / name for name in ("source", "installed", "cache", "wrapper"))
    kept_out = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "tests", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=kept_out)
    wrapper.write_text('#!/bin/sh\nexec "$@" -O0\n')  # in a fourth of the time
    wrapper.chmod(0o755)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-compile"]
    ahead = {**os.environ, "DS_BUILD_FUSED_LAMB_TERAPIPE": "1", "CXX": f"{wrapper} c++"}
    subprocess.run([*command, "--target", str(target), str(source)], check=True, env=ahead, cwd=tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(target)!r})
from ds_terapipe.optim.op.builder import builders
import ds_terapipe
builder = builders()[0]
assert ds_terapipe.__file__.startswith({str(target)!r}) and builder.sources()[0].startswith({str(target)!r})
assert builder.built_ahead() and builder.status()[0] and builder.load()
"""
    end = run_script(program, tmp_path, env={"TORCH_EXTENSIONS_DIR": str(cache), "CXX": f"{wrapper} c++"})
    assert end.code == 0, end.output
    assert not cache.exists()

"""Show versions, the hook on DeepSpeed, ops, and files of killed launches.

Show the installed versions, the state of the hook on deepspeed.initialize and of compiled ops, and missing private
names of DeepSpeed and Megatron. List files that killed launches have left: locks of compilations, and DeepSpeed's
buffers in shared memory.

example:
  ds_terapipe report
  ds_terapipe report --json report.json
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple

import ds_terapipe.compat as compat
from ds_terapipe.autoload import SWITCH, is_off
from ds_terapipe.build_locks import REMOVE, locks, remove_stale
from ds_terapipe.commands.output import show
from ds_terapipe.commands.progress import progress
from ds_terapipe.shared_memory import left_behind
from ds_terapipe.version import __version__

PACKAGES = ("torch", "deepspeed", "megatron-core", "pybind11", "ninja")

# Asked of a fresh interpreter, in which nothing but PyTorch's entry point can have set the hook.
HOOK = """
import json, deepspeed
original = getattr(deepspeed.initialize, "ds_terapipe_original", None)
code = getattr(original, "__code__", None)
print(json.dumps({"on": original is not None, "wraps": code and f"{code.co_filename}:{code.co_firstlineno}"}))
"""


class OpLine(NamedTuple):
    """One op: whether it was built with the package, whether it can be built here, and a remark."""

    name: str
    installed: bool
    compatible: bool
    remark: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "--remove-stale-locks",
        action="store_true",
        help="remove locks of compilations that no process of this machine holds. No other machine that shares the folder may be "
        "compiling",
    )


def run(options: argparse.Namespace) -> None:
    """Print the report."""
    # DeepSpeed prints while it looks for compilers; that is kept aside
    with progress("looking"), redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        removed = remove_stale() if options.remove_stale_locks else []
        data = {**collect(), "removed_locks": [lock.path for lock in removed]}
    data["messages"] = [line for line in said.getvalue().splitlines() if line.strip()]
    show(options, as_text(data), data)


def collect() -> dict[str, Any]:
    """Return all data of the report, in plain types."""
    versions = {"ds_terapipe": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "versions": versions,
        "hook": hook(),
        "names": names(),
        "ops": [line._asdict() for line in [*deepspeed_ops(), *our_ops()]],
        "locks": [lock._asdict() for lock in locks()],
        "buffers": [buffer._asdict() for buffer in left_behind()],
    }


def hook() -> dict[str, Any]:
    """Return whether ``deepspeed.initialize`` is wrapped in a process that only imports DeepSpeed, and around what."""
    answer = subprocess.run([sys.executable, "-c", HOOK], capture_output=True, text=True, check=False)
    lines = answer.stdout.strip().splitlines()
    if answer.returncode or not lines:
        problem = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        return {"on": False, "wraps": None, "problem": problem}
    found: dict[str, Any] = json.loads(lines[-1])
    return {**found, "problem": None if found["on"] else _why_off()}


def _why_off() -> str:
    torch_switch = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    for name, off in ((SWITCH, is_off()), (torch_switch, os.environ.get(torch_switch, "1") != "1")):
        if off:
            return f"{name}={os.environ[name]} turns it off; import ds_terapipe in train.py, or call ds_terapipe.initialize"
    entries = importlib.metadata.entry_points(group="torch.backends")
    if "ds_terapipe" not in {entry.name for entry in entries}:
        return "the package is not installed (pip install), only importable; import ds_terapipe in train.py"
    return "PyTorch did not load the entry point; import ds_terapipe in train.py"


def names() -> dict[str, Any]:
    """Per installed package, how many of its private names that are used exist, and which do not."""
    listed = Counter(name.package for name in compat.names())
    gone = {package: compat.missing(package) for package in listed if importlib.util.find_spec(package) is not None}
    return {package: {"found": listed[package] - len(gone[package]), "missing": gone[package]} for package in gone}


def deepspeed_ops() -> list[OpLine]:
    """DeepSpeed's own ops, by the tables of its ``ds_report``."""
    builders = importlib.import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    installed = importlib.import_module("deepspeed.git_version_info").installed_ops
    compatible = importlib.import_module("deepspeed.ops.op_builder.builder").probe_is_compatible
    return [OpLine(name, bool(installed.get(name)), bool(compatible(b, False))) for name, b in builders.items()]


def our_ops() -> list[OpLine]:
    """Our ops, with the reason where one cannot be used and the instruction set that was picked where it can."""
    from ds_terapipe.optim.op.builder import builders
    from ds_terapipe.pipeline.operators import compiled

    lines = []
    for builder in builders():
        usable, remark = builder.status()
        lines.append(OpLine(builder.name, builder.built_ahead(), usable, remark))
    usable = compiled.load() is not None
    return [*lines, OpLine("slices_terapipe", False, usable, "" if usable else "slices run in Python")]


def as_text(data: dict[str, Any]) -> str:
    """The report as lines of text."""
    lines = ["versions", *(f"  {name:<16}{version}" for name, version in data["versions"].items()), ""]
    state = data["hook"]
    where = f"on, wraps {state['wraps']}" if state["on"] else f"off: {state['problem']}"
    lines += [f"hook on deepspeed.initialize: {where}", "", "private names that are used"]
    for package, entry in data["names"].items():
        missing = f", missing: {', '.join(entry['missing'])}" if entry["missing"] else ""
        lines.append(f"  {package:<16}{entry['found']} found{missing}")
    lines += ["", f"{'op':<32}{'installed':<12}{'compatible':<12}"]
    for op in data["ops"]:
        line = f"{op['name']:<32}{_yes(op['installed']):<12}{_yes(op['compatible']):<12}{op['remark']}"
        lines.append(line.rstrip())
    return "\n".join([*lines, *_left(data)])


def _left(data: dict[str, Any]) -> list[str]:
    """Return lines on remains of killed launches."""
    lines = []
    if data.get("removed_locks"):
        lines += ["", "removed", *(f"  {path}" for path in data["removed_locks"])]
    if data["locks"]:
        lines += ["", f"locks of compilations; a launch waits for ever for one that is stale: {REMOVE} removes those"]
        for lock in data["locks"]:
            state = "stale: no process holds it" if lock["stale"] else "held"
            lines.append(f"  {lock['path']}, {lock['age_s'] / 60:.0f} minutes old, {state}")
    if data["buffers"]:
        size = sum(buffer["bytes"] for buffer in data["buffers"])
        lines += [
            "",
            f"DeepSpeed's buffers of launches that have ended, {size / 1e6:.0f} MB of memory; remove the files",
        ]
        lines += [f"  {buffer['path']}" for buffer in data["buffers"]]
    return lines


def _yes(value: bool) -> str:
    return "yes" if value else "no"

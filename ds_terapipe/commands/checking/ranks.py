"""Processes of a checked launch: one for each distinct rank, one after the other."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ds_terapipe.commands.checking.boundary import Boundary
from ds_terapipe.commands.checking.building import Built, stopping
from ds_terapipe.commands.checking.layers import report_of
from ds_terapipe.commands.checking.rank import Report, Signature, Task
from ds_terapipe.commands.checking.untouched import untouched
from ds_terapipe.commands.checking.world import job
from ds_terapipe.errors import ConfigError

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "deepspeed",
    "ds_terapipe.commands.checking.layers",
    "ds_terapipe.optim.json_keys",
]
_IF_NAMED = {"megatron": "ds_terapipe.megatron", "hf": "ds_terapipe.hf", "transformers": "ds_terapipe.hf"}
_LAST_LINES = 12  # of what a script has written


class ScriptEnded(Exception):
    """The script ended without an engine; the text is its last word."""


def check_launch(task: Task) -> list[Report]:
    """Return the report of every stage, from its fullest distinct rank; ``task``: the launch's first rank.

    Replicas are alike, and so are stages of the same layers behind the same boundary, beside the same stages on their
    places: one of them is built. Of tensor-parallel ranks the first is built, of the first stage also the last one.

    Raises:
        ConfigError: the launch's error, or the script's.
    """
    context = _forkserver(task.script[0])
    first = _checked(context, replace(task, signs=True))
    task = replace(task, length=task.length or first.length)
    reports, known = [first], dict[tuple[Signature, Boundary | None, Signature], Report]()
    for stage, place in [*enumerate(first.places)][1:]:
        before = reports[-1].counted and reports[-1].counted.after
        beside = tuple(each for each, of in zip(first.signatures, first.places, strict=True) if of == place)
        key = first.signatures[stage], before, beside
        if key not in known:
            known[key] = _checked(context, replace(task, rank=first.ranks[place], before=before, stage=stage))
        found = known[key]
        part = found.part._replace(place=place, first_layer=first.parts[stage])
        reports.append(replace(found, stage=stage, part=part))
    if first.tensor > 1:
        other = _checked(context, replace(task, rank=first.last_shard))
        reports[0] = max(reports[0], other, key=lambda report: report.kept.weights + report.kept.optimizer)
    return reports


def _forkserver(script: str) -> Any:
    """Return the context of a clean process that has imported what all ranks need, and forks one for each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context, text = multiprocessing.get_context("forkserver"), text_of(script)
    context.set_forkserver_preload(
        [*_PRELOADED, *sorted({module for word, module in _IF_NAMED.items() if word in text})]
    )
    return context


def text_of(script: str) -> str:
    """Return the text of a script. Raises ConfigError where it cannot be read."""
    try:
        return Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ConfigError(
            f"{script}: cannot be read ({problem.strerror or problem}), must be the script of the launch"
        ) from problem


def _checked(context: Any, task: Task) -> Report:
    """Return a rank's report. Raises ConfigError with the error of the launch."""
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", suffix=".log", encoding="utf-8", errors="replace") as log:
        process = context.Process(target=_in_process, args=(task, sender, log.name), daemon=True)
        process.start()
        sender.close()
        try:
            kind, result = receiver.recv()
        except EOFError:
            process.join()
            kind, result = "died", _how(process.exitcode)
        process.join()
        said = log.read()
    if kind == "report":
        report: Report = result
        return report
    raise ConfigError(f"rank {task.rank} of {task.world}: {result or _last_lines(said)}")


def _in_process(task: Task, sender: Connection, log: str) -> None:
    with open(log, "w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        answer: tuple[str, Any] = "report", check_rank(task)
    except ScriptEnded as ended:
        answer = "error", str(ended)
    except BaseException as problem:
        answer = "error", _said(problem, task.script[0])
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send(answer)
    sender.close()
    os._exit(0)  # nothing of the job that it has been in is worth closing


def check_rank(task: Task) -> Report:
    """Run the script as this rank up to its engine, and report what the rank would hold.

    Raises:
        ScriptEnded: the script has ended before it had an engine. Any other error is the launch's.
    """
    warnings.filterwarnings("ignore")
    with job(task.rank, task.world, task.per_node), untouched() as mode:
        try:
            with stopping(task.config):
                _run(task.script)
        except Built as built:
            found = built
        else:
            raise ScriptEnded(f"{Path(task.script[0]).name} has ended and has built no engine")
        return report_of(found, task, mode)


def _run(script: Sequence[str]) -> None:
    sys.argv = list(script)
    sys.path.insert(0, str(Path(script[0]).absolute().parent))
    try:
        runpy.run_path(script[0], run_name="__main__")
    except SystemExit as problem:
        if problem.code not in (0, None):
            raise ScriptEnded(problem.code if isinstance(problem.code, str) else "") from problem


def _said(problem: BaseException, script: str) -> str:
    """An error as its launch prints it last, and the line of the script that it came from."""
    lines = [line.lineno for line in traceback.extract_tb(problem.__traceback__) if line.filename == script]
    where = f" ({Path(script).name}, line {lines[-1]})" if lines else ""
    return f"{''.join(traceback.format_exception_only(problem)).strip()}{where}"


def _how(code: int | None) -> str:
    return f"the process ended by {signal.Signals(-code).name}" if code and code < 0 else f"the process ended ({code})"


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:])

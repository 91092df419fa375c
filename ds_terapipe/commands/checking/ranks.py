"""Processes of a checked launch: one for each distinct rank, one after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ds_terapipe.commands.checking.boundary import Boundary
from ds_terapipe.commands.checking.rank import Report, ScriptEnded, Signature, Task, check_rank
from ds_terapipe.commands.errors import CommandError

_PRELOADED = ["torch", "deepspeed", "ds_terapipe.commands.checking.layers", "ds_terapipe.optim.json_keys"]
_IF_NAMED = {"megatron": "ds_terapipe.megatron", "hf": "ds_terapipe.hf", "transformers": "ds_terapipe.hf"}
_LAST_LINES = 12  # of what a script has written


@dataclass(frozen=True)
class Launch:
    """The launch to check; see `rank.Task`."""

    world: int
    per_node: int
    script: tuple[str, ...]
    config: str | None
    length: int | None


def check_launch(launch: Launch) -> list[Report]:
    """Return the report of every stage, from its fullest distinct rank.

    Replicas are alike, and so are stages of the same layers behind the same boundary: one of them is built. Of
    tensor-parallel ranks the first is built, of the first stage also the last one.

    Raises:
        CommandError: the launch's error, or the script's.
    """
    processes = _Processes(launch)
    first = processes.check(
        Task(0, launch.world, launch.per_node, launch.script, launch.config, launch.length, signs=True)
    )
    reports, length = [first], launch.length or first.length
    known: dict[tuple[Signature, Boundary | None], Report] = {}
    for stage in range(1, first.stages):
        before = reports[-1].after
        key = first.signatures[stage], before
        if key not in known:
            task = Task(first.ranks[stage], launch.world, launch.per_node, launch.script, launch.config, length, before)
            known[key] = processes.check(task)
        reports.append(_as_stage(known[key], stage, first))
    if first.tensor > 1:
        other = processes.check(
            Task(first.last_shard, launch.world, launch.per_node, launch.script, launch.config, length)
        )
        reports[0] = max(reports[0], other, key=lambda report: report.weights + report.optimizer)
    return reports


def _as_stage(report: Report, stage: int, first: Report) -> Report:
    part = report.part._replace(place=stage, first_layer=first.parts[stage])
    return replace(report, stage=stage, part=part)


class _Processes:
    """A clean process that has imported what all ranks need, and forks one for each."""

    def __init__(self, launch: Launch) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        try:
            text = Path(launch.script[0]).read_text(encoding="utf-8", errors="replace")
        except OSError as problem:
            raise CommandError(
                f"{launch.script[0]}: cannot be read ({problem.strerror or problem}), must be the script of the launch"
            ) from problem
        named = {module for word, module in _IF_NAMED.items() if word in text}
        self._context.set_forkserver_preload([*_PRELOADED, *sorted(named)])

    def check(self, task: Task) -> Report:
        """Return a rank's report. Raises CommandError with the error of the launch."""
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile("r", suffix=".log", encoding="utf-8", errors="replace") as log:
            process = self._context.Process(target=_in_process, args=(task, sender, log.name), daemon=True)
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
        raise CommandError(f"rank {task.rank} of {task.world}: {result or _last_lines(said)}")


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

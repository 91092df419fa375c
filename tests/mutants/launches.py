"""Launches that leave something behind: a stopped process, a buffer in shared memory, a lock."""

from __future__ import annotations

from typing import Any

from tests.mutants.harness import Check, Hit, Mutant


def _leaves_them(original: Any, hit: Hit) -> Any:
    def do_nothing(*args: Any) -> None:
        hit()

    return do_nothing


def _sees_none(original: Any, hit: Hit) -> Any:
    def gone(*args: Any) -> set[int]:
        if original(*args):
            hit()
        return set()

    return gone


def _always(original: Any, hit: Hit) -> Any:
    def stale(*args: Any) -> bool:
        if not original(*args):
            hit()
        return True

    return stale


STOPPED = "a stopped process is left to the launcher"
GONE = "a process that is gone is not seen"
NAMES = "buffers in shared memory keep their names"
HELD = "a lock is stale whoever holds it"

MUTANTS = (
    Mutant(
        STOPPED,
        "Survivors do not end a stopped process.",
        ("ds_terapipe.pipeline.transport.processes:Processes.end_stopped",),
        _leaves_them,
        "launches, processes",
    ),
    Mutant(
        GONE,
        "A wait for the store goes on when a rank's process has ended.",
        ("ds_terapipe.pipeline.transport.processes:Processes.gone",),
        _sees_none,
        "launches, processes",
    ),
    Mutant(
        NAMES,
        "The names stay when all ranks have mapped the buffers.",
        ("ds_terapipe.shared_memory:_unlink",),
        _leaves_them,
        "launches, shared memory",
    ),
    Mutant(
        HELD,
        "The lock of a compilation that is going on is removed.",
        ("ds_terapipe.build_locks:is_stale",),
        _always,
        "launches, locks",
    ),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)


def _check(name: str, measure: str, catches: tuple[str, ...], why: str) -> Check:
    return Check(name, measure, (), catches, {other: why for other in _NAMES if other not in catches})


CHECKS = (
    _check(
        "launches, processes",
        "tests.pipeline.test_processes:stopped_is_ended",
        (STOPPED, GONE),
        "has neither a buffer nor a lock",
    ),
    _check("launches, shared memory", "tests.test_shared_memory:names_go", (NAMES,), "no rank dies, or compiles"),
    _check("launches, locks", "tests.test_build_locks:held_one_stays", (HELD,), "starts no rank"),
)

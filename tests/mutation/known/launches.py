"""Defects of what launches leave behind: a stopped process, a buffer in shared memory, a lock."""

from . import Known

_PROCESSES, _REPORT = "tests/pipeline/test_processes.py", "tests/test_report.py"

KNOWN = (
    Known(
        "a stopped process is left to the launcher",
        "pipeline.transport.processes",
        "if rank != self._rank and self._state(rank) == _STOPPED:",
        "if rank != self._rank and self._state(rank) == _STOPPED and False:",
        f"{_PROCESSES} -k stopped_process",
    ),
    Known(
        "a process that is gone is not seen",
        "pipeline.transport.processes",
        "return {rank for rank in self._known if self._state(rank) in _GONE}",
        "return set()",
        f"{_PROCESSES} -k stopped_process",
    ),
    Known(
        "buffers in shared memory keep their names",
        "shared_memory",
        "            os.unlink(path)\n",
        "            pass\n",
        f"{_REPORT} -k engine_needs_no_names",
    ),
    Known(
        "a lock is stale whoever holds it",
        "build_locks",
        "                    if os.readlink(file.path) == real:\n",
        "                    if False:\n",
        f"{_REPORT} -k lock_is_listed",
    ),
    Known(
        "a rank that has failed is waited for while engines are built",
        "pipeline.transport.watchdog",
        "any(position.ended or position == had.get(rank)",
        "any(position == had.get(rank)",
        "tests/pipeline/test_watchdog.py -k building_engines_ends",
    ),
)

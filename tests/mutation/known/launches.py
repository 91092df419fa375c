"""Defects of launches: of the hook, of waits, and of what is left behind: a stopped process, a shared buffer, a lock."""

from . import Known

_PROCESSES, _REPORT = "tests/pipeline/test_processes.py", "tests/test_report.py"
_WATCHDOG = "tests/pipeline/test_watchdog.py"

KNOWN = (
    Known("a stopped process is left to the launcher", "pipeline.transport.guard", "if 0 < limit_s <= silent_s and",
          "if False and", f"{_PROCESSES} -k guard"),
    Known("a process that a debugger holds is killed", "pipeline.transport.guard", " and state[0] == STOPPED",
          ' and state[0] in "Tt"', f"{_PROCESSES} -k stays_stopped"),
    Known("a process that is gone is not seen", "pipeline.transport.processes",
          "return {rank for rank in self._known if self._state(rank) in _GONE}", "return set()",
          f"{_PROCESSES} -k stopped_process"),
    Known("buffers in shared memory keep their names", "shared_memory", "            os.unlink(path)\n",
          "            pass\n", f"{_REPORT} -k engine_needs_no_names"),
    Known("a lock that is held is stale", "build_locks", "                    if os.readlink(file.path) == real:\n",
          "                    if False:\n", f"{_REPORT} -k lock_is_listed"),
    Known("a rank that has failed is waited for while engines are built", "pipeline.transport.positions",
          "any(position.ended or position == had.get(rank)", "any(position == had.get(rank)",
          f"{_WATCHDOG} -k building_engines_ends"),
    Known("a wait for a stale lock is said twice", "build_locks", "        if is_stale(path) is stale:\n",
          "        if True:\n", f"{_REPORT} -k wait_is_said"),
    Known("a stream that goes on is reported", "pipeline.transport.watchdog",
          "since = max(first.since, self._progress)", "since = first.since", f"{_WATCHDOG} -k stream_that_goes_on"),
    Known("time waited within a wait is counted twice", "pipeline.transport.watchdog", "if counts and outer is None:",
          "if counts:", f"{_WATCHDOG} -k time_waited"),
    Known("a store that is lost is asked again", "pipeline.transport.board",
          "        self._lost = self._lost or not _done_within(_READ_WITHIN_S, look)\n"
          "        return None if self._lost else found",
          "        return found if _done_within(_READ_WITHIN_S, look) else None", f"{_WATCHDOG} -k 'lost_store and stopped'"),
    Known("a connection to a store whose host is gone is waited for", "pipeline.transport.board",
          "    caller.join(seconds)\n", "    caller.join()\n", "tests/pipeline/test_processes.py -k host_is_gone"),
    Known("a process ends while a thread is in the store", "pipeline.transport.board",
          "        atexit.register(caller.join, _ANSWERED_WITHIN_S)\n", "        pass\n",
          "tests/pipeline/test_processes.py -k late_has_answered"),
    Known("no hook where torch is imported first", "autoload", "            sys.meta_path.insert(0, _Watch())\n",
          "            pass\n", "tests/test_register.py -k 'import_order and torch'"),
    Known("DeepSpeed's engine class stays replaced", "register",
          "        deepspeed.PipelineEngine = replaced  # type: ignore[attr-defined]\n", "        pass\n",
          "tests/test_register.py -k configuration_is_given"),
    Known("DeepSpeed goes on asking the grid of an engine that was destroyed", "pipeline.teardown",
          "        deepspeed_groups.mpu = None\n", "        pass\n", "tests/pipeline/test_close.py -k 'destroy_undoes and fp32'"),
    Known("a destroyed engine that is collected waits for the device", "pipeline.engine",
          "(self._release,) if ended else (self._release, super().destroy)", "(self._release, super().destroy)",
          "tests/pipeline/test_close.py -k 'destroy_undoes and zero'"),
    Known("one hardware queue beside kernels loaded late", "autoload", '        os.environ.setdefault(LOADING, "EAGER")\n',
          "        pass\n", "tests/test_register.py -k hardware"),
)  # fmt: skip

"""Python under a sanitizer of g++, for modules that are compiled with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT


def run_under(library: str, function: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call ``function``, of a module of the tests, in a process that has the sanitizer's library in front of all others."""
    asked = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    path = asked.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no {library}")
    module, _, name = function.rpartition(".")
    program = f"import os, sys; del os.environ['LD_PRELOAD']; from {module} import {name}; {name}(*sys.argv[1:])"
    env = {**os.environ, "LD_PRELOAD": path, "CXX": "g++", **environment}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)

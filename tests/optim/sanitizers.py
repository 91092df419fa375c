"""Python under a sanitizer of g++, for modules that are compiled with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT


def run_under(library: str, function: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call ``function``, of a module of the tests, in a process that has the sanitizer's library in front of all others."""
    # behind it the C++ library: it looks for the functions of exceptions there before any other is loaded
    asked = [["g++", f"-print-file-name={name}"] for name in (library, "libstdc++.so")]
    paths = [subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in asked]
    if not Path(paths[0]).is_absolute():
        pytest.skip(f"the compiler has no {library}")
    module, _, name = function.rpartition(".")
    program = f"import os, sys; del os.environ['LD_PRELOAD']; from {module} import {name}; {name}(*sys.argv[1:])"
    env = {**os.environ, "LD_PRELOAD": " ".join(paths), "CXX": "g++", **environment}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)

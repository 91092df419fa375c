"""Runs tests in a process of their own, with a changed package."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_tests(arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest, which stops at the first failure; its exit status, None where the time was up, and what it printed.

    ``env`` has ``MUTANT`` or ``MUTANT_LINES``, see hook/sitecustomize.py. At the limit it and all its processes are killed.
    """
    paths = [str(ROOT / "tests" / "mutation" / "hook"), str(ROOT)]
    settings = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments], cwd=ROOT, env=settings,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=limit_s)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return None, process.communicate()[0]

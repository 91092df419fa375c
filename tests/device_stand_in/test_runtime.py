"""The stand-in itself: races, memory, random numbers. Numbers and one queue are test_engine.py's."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from tests.device_stand_in import build as build_module
from tests.device_stand_in.build import CannotBuild, build, cuda_headers

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build: make test-device")
_LIMIT_S = 120


def _headers() -> None:
    try:
        cuda_headers()
    except CannotBuild as error:
        pytest.skip(str(error))


@cache
def _ran(*cases: str, **settings: str) -> dict[str, Any]:
    """Run the cases in one process with these settings and return their results."""
    _headers()
    command = [sys.executable, "-W", "ignore", "-m", "tests.device_stand_in.cases", *cases]
    environment = {**os.environ, **build(), **settings}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _many_queues(case: str) -> Any:
    cases = ("random_numbers", "races", "memory")
    return _ran(*cases, STAND_IN_DELAY_US="3000", STAND_IN_RACES="1", CUDA_DEVICE_MAX_CONNECTIONS="8")[case]


def _one_queue(case: str) -> Any:
    return _ran("races", STAND_IN_RACES="1", CUDA_DEVICE_MAX_CONNECTIONS="1")[case]


@pytest.mark.full
def test_the_sources_compile_without_a_warning(tmp_path):
    _headers()
    assert {"-Wall", "-Wextra", "-Werror"} <= set(build_module.FLAGS)
    environment = build(tmp_path)
    assert os.path.getsize(environment["LD_PRELOAD"]) and (tmp_path / "libcuda.so.1").is_file()


@needs_cuda_build
def test_random_numbers_follow_their_generator():
    assert _many_queues("random_numbers") == [True, False, True, False]


@needs_cuda_build
@pytest.mark.parametrize("queues", [_many_queues, _one_queue])
@pytest.mark.parametrize(("left_out", "race"), [
    ("wait_stream", r"aten.mul.Tensor on stream \d+ reads without waiting for aten.ones.default on .*, which writes"),
    (
        "record_stream",
        r"aten.full.default on .* writes without .* aten.mul.Tensor on .*, which reads by the memory's former owner",
    ),
    ("event", r"aten.add_.Tensor on .* writes without waiting for aten.mul.Tensor on .*, which writes"),
    ("copy's event", r"copy on stream \d+ reads without waiting for aten.add_.Tensor on .*, which writes"),
    ("host's wait", r"aten.add_.Tensor on the host writes without waiting for copy on stream \d+, which writes"),
])  # fmt: skip
def test_what_a_hand_over_leaves_out_is_found(queues, left_out, race):
    assert queues("races")["nothing"] == queues("races")["polled"] == []
    assert any(re.fullmatch(race, found) for found in queues("races")[left_out]), queues("races")[left_out]


@needs_cuda_build
def test_memory_is_counted_as_the_allocator_counts_it():
    counters = _many_queues("memory")
    assert counters["allocated"] == 6 << 20 and counters["reserved"] == counters["used"] == 20 << 20
    assert counters["other"] == 20 << 20 and counters["left"] == 0 and counters["refused"] == 1

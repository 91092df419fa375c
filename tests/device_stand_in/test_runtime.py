"""The stand-in itself finds races. Numbers and one queue are test_engine.py's, memory is that of test_memory_of_steps.py."""

import json
import os
import re
import subprocess
import sys
from functools import cache

import pytest
import torch

from tests.device_stand_in import build as build_module
from tests.device_stand_in.build import CannotBuild, build, cuda_headers


def _headers() -> None:
    try:
        cuda_headers()
    except CannotBuild as error:
        pytest.skip(str(error))


@cache
def races(queues: str) -> dict[str, list[str]]:
    """The races of each hand-over in a process with so many hardware queues."""
    _headers()
    command = [sys.executable, "-W", "ignore", "-m", "tests.device_stand_in.cases"]
    delays = {} if queues == "1" else {"STAND_IN_DELAY_US": "3000"}
    environment = {**os.environ, **build(), **delays, "STAND_IN_RACES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": queues}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
def test_the_sources_compile_without_a_warning(tmp_path):
    _headers()
    assert {"-Wall", "-Wextra", "-Werror"} <= set(build_module.FLAGS)
    assert os.path.getsize(build(tmp_path)["LD_PRELOAD"]) and (tmp_path / "libcuda.so.1").is_file()


@pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build: make test-device")
@pytest.mark.parametrize("queues", ["8", "1"])
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
    found = races(queues)
    assert found["nothing"] == found["polled"] == []
    assert any(re.fullmatch(race, each) for each in found[left_out]), found[left_out]

"""Layers of a live ``PipelineModule``: what building one leaves alone."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_terapipe.elastic.layers import random_states_kept

MEGATRON = "megatron.core.tensor_parallel.random"
CPU = torch.device("cpu")


class Tracker:
    """What megatron-core's, Megatron-DeepSpeed's and DeepSpeed's trackers of random streams have in common."""

    def __init__(self, **states: Tensor) -> None:
        self.states = states
        self.was_set = False

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states, self.was_set = states, True


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = torch.zeros(2), torch.ones(2)
    tracker = Tracker(model=before)
    monkeypatch.setitem(sys.modules, MEGATRON, SimpleNamespace(get_cuda_rng_tracker=lambda: tracker))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with random_states_kept(CPU):
        drawn()
        tracker.states = {"model": after}
    assert drawn() == expected
    assert tracker.states == {"model": before}


def test_a_tracker_that_nobody_uses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, MEGATRON, SimpleNamespace(get_cuda_rng_tracker=lambda: tracker))
    with random_states_kept(CPU):
        drawn()
    assert not tracker.was_set


def test_megatron_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MEGATRON, raising=False)
    with random_states_kept(CPU):
        drawn()
    assert MEGATRON not in sys.modules

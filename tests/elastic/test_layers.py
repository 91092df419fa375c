"""Layers of a live ``PipelineModule``: what building one leaves alone."""

from __future__ import annotations

import gc
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_terapipe.elastic.moves.layers import build, drop_copies, random_states_kept
from ds_terapipe.elastic.optimizer import _nothing_to_collect

MODULES = ("megatron.core.tensor_parallel.random", "deepspeed.runtime.activation_checkpointing.checkpointing")
CPU = torch.device("cpu")


class Tracker:
    """What megatron-core's, Megatron-DeepSpeed's and DeepSpeed's trackers of random streams have in common."""

    def __init__(self, **states: Tensor) -> None:
        self.states_ = states


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = torch.zeros(2), torch.ones(2)
    trackers = [Tracker(model=before), Tracker(model=before, more=after)]
    for name, tracker in zip(MODULES, trackers, strict=True):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(_CUDA_RNG_STATE_TRACKER=tracker))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with random_states_kept(CPU):
        drawn()
        for tracker in trackers:
            tracker.states_["model"] = after
    assert drawn() == expected
    assert [tracker.states_ for tracker in trackers] == [{"model": before}, {"model": before, "more": after}]


def test_megatron_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULES[0], raising=False)
    with random_states_kept(CPU):
        drawn()
    assert MODULES[0] not in sys.modules


class Shared(nn.Module):
    """A layer that uses a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.ones(4))


def test_a_module_that_is_elsewhere_keeps_its_structure_without_its_values() -> None:
    here, there, function = Shared(), Shared(), torch.tanh
    there.out.weight.grad = torch.ones(5, 3)
    shapes = {name: tensor.shape for name, tensor in there.state_dict().items()}
    module: Any = SimpleNamespace(
        _layer_specs=[here, function, there],
        _local_start=0,
        _local_stop=2,
        parameters=here.parameters,
        buffers=here.buffers,
    )
    drop_copies(module)
    assert {tensor.untyped_storage().nbytes() for tensor in there.state_dict().values()} == {4}
    assert there.out.weight is there.table.weight and there.out.weight.grad is None
    assert here.out.weight.untyped_storage().nbytes() == 5 * 3 * 4 and bool(here.scale.all())
    assert build(there, CPU) is there and there.out.weight is there.table.weight
    assert {name: tensor.shape for name, tensor in there.state_dict().items()} == shapes
    assert there.table.weight.untyped_storage().nbytes() == 5 * 3 * 4
    there.table.weight.data.copy_(here.table.weight.data)  # has a place for each element
    assert torch.equal(there.table.weight, here.table.weight)
    build(there, CPU, torch.bfloat16)  # as DeepSpeed has made of the layers that are there
    assert {tensor.dtype for tensor in there.state_dict().values()} == {torch.bfloat16}


def test_a_user_s_frozen_objects_stay_so_and_ours_do_not() -> None:
    before = gc.get_freeze_count()  # 0, from 3.12 on some hundred of the interpreter's own
    with _nothing_to_collect():
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() <= before
    gc.freeze()
    try:
        with _nothing_to_collect():
            pass
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()

"""Layers, their settings and samples go from one shape to another without loss: tests of one process."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_terapipe import ConfigError
from ds_terapipe.elastic import feed
from ds_terapipe.elastic.feed import Ranks, parcels
from ds_terapipe.elastic.moves.layers import random_states_kept
from ds_terapipe.elastic.moves.reshape import check_movable
from ds_terapipe.elastic.moves.transfer import check_structure, holding, sent_of
from ds_terapipe.optim.step_rules import DeviceSteps

RANKS, CPU = st.integers(1, 6), torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(2, width), nn.Dropout(0.1)
        self.register_buffer("count", torch.zeros(2), persistent=False)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(2, base.out_features)


def hooked_weight(kind: str) -> Any:
    return lambda layer: getattr(layer.inner.weight, f"register_{kind}")(lambda gradient: None)


HOOKED, SET = "got 1 hooks on module 5.inner, registered on a live layer", "set on a live layer"
NEW = nn.Parameter(torch.zeros(4, 2))
SET_ON_LIVE: dict[str, tuple[Any, str]] = {
    "lora": (lambda layer: setattr(layer, "inner", Lora(layer.inner)), f"got module 5.inner (Lora), {SET}"),
    "hook": (lambda layer: layer.inner.register_forward_hook(lambda *args: None), HOOKED),
    "hook of a gradient": (hooked_weight("hook"), HOOKED),
    "hook behind a gradient": (hooked_weight("post_accumulate_grad_hook"), HOOKED),
    "another shape": (
        lambda layer: setattr(layer.inner, "weight", NEW),
        f"got parameter 5.inner.weight of shape [4, 2], built as [3, 2], {SET}",
    ),
    "one more": (lambda layer: setattr(layer, "extra", NEW), f"got parameter 5.extra of shape [4, 2], built as none, {SET}"),
    "one fewer": (
        lambda layer: setattr(layer.inner, "bias", None), f"got parameter 5.inner.bias of shape none, built as [3], {SET}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", SET_ON_LIVE)
def test_what_a_spec_does_not_build_is_refused_by_name(change: str) -> None:
    set_on, message = SET_ON_LIVE[change]
    live = Layer()
    set_on(live)
    with pytest.raises(ConfigError) as refused:
        check_structure("5.", Layer(), holding({"5.": live}, torch.optim.SGD(live.parameters(), lr=0.1)))
    text = str(refused.value)
    assert message in text and "\n" not in text and text.startswith("elastic_pipeline.resize.policy: got ")
    assert "must be part of the LayerSpec, use " in text


def test_a_holding_says_what_of_a_layer_may_have_changed() -> None:
    live = Layer()
    optimizer = torch.optim.AdamW([{"params": [live.inner.bias]}, {"params": [live.inner.weight], "lr": 1.0}])
    live.inner.weight.grad, live.cached, live.inner.weight.sequence_parallel = torch.ones(3, 2), torch.ones(1), True
    optimizer.step()
    found = holding({"5.": live}, optimizer)
    weight, bias, count = (found.pieces[f"5.{name}"] for name in ("inner.weight", "inner.bias", "count"))
    assert (weight.group, bias.group, count.group) == (1, 0, None) and "cached" not in found.modules["5."]["settings"]
    assert set(weight.moments) == {"exp_avg", "exp_avg_sq"} and set(weight.values) == {"step"} and not bias.moments
    assert weight.attributes == {"sequence_parallel": True}
    assert holding({"5.": live}, optimizer, ["5."]).pieces["5.inner.bias"].used is False


def test_what_is_on_a_device_is_sent_and_not_described() -> None:
    """The device "meta" stands for a GPU: a description with such a tensor would bring the sender's device along."""
    here, there = torch.zeros(()), torch.zeros((), device="meta")
    assert list(sent_of({"step": here, "moment": torch.zeros(1), "matrix": torch.zeros(2), "rows": (1, 2)})) == [
        "matrix"
    ]
    assert list(sent_of({"step": there, "moment": there, "count": here})) == ["moment", "step"]
    layer = nn.Linear(1, 1, bias=False)
    optimizer: Any = SimpleNamespace(param_groups=[], state={layer.weight: {"step": DeviceSteps(torch.tensor(8.0))}})
    assert holding({"5.": layer}, optimizer).pieces["5.weight"].values == {"step": 7}


@pytest.mark.parametrize("gradient", [None, torch.ones(1)], ids=["unused", "used"])
def test_a_weight_of_one_element_says_whether_it_was_used(gradient: torch.Tensor | None) -> None:
    layer = nn.Module()
    layer.scale, layer.other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.scale.grad, layer.other.grad = gradient, torch.zeros(2)
    optimizer.step()
    pieces = holding({"5.": layer}, optimizer, ["5."]).pieces
    assert pieces["5.scale"].used is (gradient is not None) and pieces["5.other"].used is False


def test_ranks_keep_their_tensor_parallel_parts() -> None:
    topology = ProcessTopology(axes=["pipe", "model", "data"], dims=[2, 2, 1])
    said = 'topology: got "pipe, model, data", must be axes of which the last is "model", use '
    with pytest.raises(ConfigError, match=f"^elastic_pipeline.resize.policy: {said}"):
        check_movable(SimpleNamespace(_topo=topology), SimpleNamespace(), CPU)


def test_building_a_layer_leaves_random_states_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of megatron-core's and DeepSpeed's trackers too, and megatron-core is not imported for it."""
    modules = ("megatron.core.tensor_parallel.random", "deepspeed.runtime.activation_checkpointing.checkpointing")
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, modules[0], raising=False)
        with random_states_kept(CPU):
            pass
        assert modules[0] not in sys.modules
    before, after = torch.zeros(2), torch.ones(2)
    trackers = [SimpleNamespace(states_={"model": before}), SimpleNamespace(states_={"model": before, "more": after})]
    for name, tracker in zip(modules, trackers, strict=True):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(_CUDA_RNG_STATE_TRACKER=tracker))
    drawn = []
    for builds in (False, True):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        with random_states_kept(CPU) if builds else nullcontext():
            if builds:
                random.random(), np.random.rand(), torch.rand(())
            for tracker in trackers if builds else ():
                tracker.states_["model"] = after
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    assert [tracker.states_ for tracker in trackers] == [{"model": before}, {"model": before, "more": after}]


@given(readers=RANKS, replicas=RANKS, each=st.integers(1, 4), size=st.integers(1, 3), now=st.integers(1, 3))
def test_every_replica_gets_its_samples_from_any_readers(readers, replicas, each, size, now):
    """Inputs and labels, in the order in which the readers' replicas would have trained them, in micro-batches as now."""
    samples = readers * replicas * each * size * now
    part, share = samples // readers, samples // replicas
    read = [[torch.arange(r * part + at, r * part + at + size) for at in range(0, part, size)] for r in range(readers)]
    got: dict[Any, list[Any]] = {(role, replica): [] for role in ("inputs", "labels") for replica in range(replicas)}
    for role, reader, first, stop, replica in parcels(samples, readers, replicas):
        assert 0 <= first < stop <= part
        got[role, replica] += feed._cut(read[reader], size, first, stop)
    for (_, replica), pieces in got.items():
        micro_batches = list(feed._regrouped(pieces, now))
        assert {len(each) for each in micro_batches} == {now}
        assert torch.cat(micro_batches).tolist() == list(range(replica * share, (replica + 1) * share))
    alike = parcels(readers * each, readers, replicas, alike=True)  # an evaluation's: all get everything
    for role, replica in got:
        mine = [(p.reader, p.first, p.stop) for p in alike if (p.role, p.replica) == (role, replica)]
        assert mine == [(reader, 0, each) for reader in range(readers)]


def test_what_belongs_to_all_samples_is_handed_on_whole() -> None:
    """Masks of one row, numbers and tuples beside what has a row for each sample."""
    mask = torch.ones(5, 5)
    value = (torch.arange(4), (mask, "text"), torch.zeros(4, 2))
    (cut,) = feed._cut([value], 4, 1, 3)
    assert cut[0].tolist() == [1, 2] and cut[1][0] is mask and cut[1][1] == "text" and cut[2].shape == (2, 2)
    first, second = feed._regrouped([value], 2)
    assert first[0].tolist() == [0, 1] and second[0].tolist() == [2, 3] and second[1][0] is mask


def test_micro_batches_that_cannot_be_divided_or_joined_are_refused() -> None:
    whole, last = ((torch.zeros(2, 3), torch.zeros(5, 5)), torch.zeros(2)), (torch.zeros(1, 3), torch.zeros(1))
    feed._check([whole, whole], 2)
    feed._check([whole, last], None)
    with pytest.raises(
        ConfigError, match="got a micro-batch of 1 samples, must be of 2 where a reshape divides it, use "
    ):
        feed._check([whole, last], 2)
    with pytest.raises(ConfigError, match=r"^the data iterator: got samples of \[3\] beside others"):
        list(feed._regrouped([torch.zeros(1, 3), torch.zeros(1, 4)], 2))


@pytest.mark.parametrize(("stages", "replicas", "tensor"), [(1, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 1)])
def test_inputs_are_with_first_stages_and_labels_with_last_ones(stages: int, replicas: int, tensor: int) -> None:
    where = Ranks(PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=replicas), 2)
    assert (where.stages, where.replicas, where.tensor) == (stages, replicas, tensor)
    for role, stage in (("inputs", 0), ("labels", stages - 1)):
        for replica, shard in [(r, t) for r in range(replicas) for t in range(tensor)]:
            at = where.topology.get_coord(where.at(role, replica, shard))
            assert (at.pipe, at.data, at.model) == (stage, replica, shard)

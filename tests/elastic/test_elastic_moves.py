"""Layers, their settings, parameter groups and samples go from one shape to another without loss: tests of one process."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from ds_terapipe import ConfigError
from ds_terapipe.elastic import redistribute
from ds_terapipe.elastic.moves import reshape
from ds_terapipe.elastic.moves.transfer import check_structure, sent_of, stage_state
from ds_terapipe.elastic.redistribute import parcels
from ds_terapipe.elastic.saved.universal import joined, kind_of, part_of
from ds_terapipe.names import UNUSED
from ds_terapipe.optim.step_rules import DeviceSteps
from ds_terapipe.pipeline.parameter_groups import drop_unused, keep_trained, make_alike, occupy, unused
from tests.pipeline.training import raised
from tests.threads import on_threads

RANKS = st.integers(1, 6)


class Layer(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(2, width), nn.Dropout(0.1)
        self.register_buffer("count", torch.zeros(2), persistent=False)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(2, base.out_features)


HOOKED, SET = "got 1 hooks on module 5.inner, registered on a live layer", "set on a live layer"
NEW = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
SET_ON_LIVE: dict[str, tuple[Any, str]] = {
    "lora": (lambda layer: setattr(layer, "inner", Lora(layer.inner)), f"got module 5.inner (Lora), {SET}"),
    "hook": (lambda layer: layer.inner.register_forward_hook(lambda *args: None), HOOKED),
    "hook of a gradient": (lambda layer: layer.inner.weight.register_hook(lambda gradient: None), HOOKED),
    "another shape": (
        lambda layer: setattr(layer.inner, "weight", NEW),
        f"got parameter 5.inner.weight, [4, 2] of torch.float64, built as [3, 2] of torch.float32, {SET}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("set_on", "message"), SET_ON_LIVE.values(), ids=SET_ON_LIVE)
def test_what_a_spec_does_not_build_is_refused_by_name(set_on: Any, message: str) -> None:
    set_on(live := Layer())
    state = stage_state({"4.": Layer(), "5.": live}, torch.optim.SGD(live.parameters(), lr=0.1))
    check_structure("4.", Layer(), state)  # beside one that has changed
    with pytest.raises(ConfigError) as refused:
        check_structure("5.", Layer(), state)
    text = str(refused.value)
    assert message in text and "\n" not in text and text.startswith("elastic_pipeline.resize.policy: got ")
    assert "must be part of the LayerSpec, use " in text


def test_what_is_on_a_device_is_sent_and_not_described() -> None:
    """The device "meta" stands for a GPU: a description with such a tensor would bring the sender's device along."""
    here, there = torch.zeros(()), torch.zeros((), device="meta")
    assert list(sent_of({"step": here, "moment": torch.zeros(1), "matrix": torch.zeros(2), "rows": (1, 2)})) == ["matrix"]
    assert list(sent_of({"step": there, "moment": there, "count": here})) == ["moment", "step"]
    layer = nn.Linear(1, 1, bias=False)
    state = {"step": DeviceSteps(torch.tensor(8.0)), "factors": [torch.ones(2)]}
    described = stage_state({"5.": layer}, Mock(param_groups=[], state={layer.weight: state})).tensors["5.weight"].values
    assert described["step"] == 7 and described["factors"][0].device == "cpu"


@pytest.mark.parametrize(("dimension", "stride"), [(0, 1), (1, 1), (0, 2)])
def test_tensor_parallel_parts_are_joined_by_megatrons_marks(dimension: int, stride: int) -> None:
    whole = torch.arange(48).view(8, 6)
    halves = [half.chunk(2, dimension) for half in whole.chunk(stride, dimension)]
    parts = [torch.cat(part, dimension) for part in zip(*halves, strict=True)]
    for part in parts:
        part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dimension, stride
    (kind,) = {kind_of(part, True) for part in parts}
    assert kind != kind_of(parts[0], False) and kind != "unknown"
    assert torch.equal(joined([(part, kind) for part in parts]), whole)
    assert all(torch.equal(part_of(whole, kind, rank, 2), part) for rank, part in enumerate(parts))


@given(readers=RANKS, replicas=RANKS, each=st.integers(1, 4), size=st.integers(1, 3), now=st.integers(1, 3))
def test_every_replica_gets_its_samples_from_any_readers(readers, replicas, each, size, now):
    """In the order in which the readers' replicas would have trained them, in micro-batches as now."""
    samples = readers * replicas * each * size * now
    part, share = samples // readers, samples // replicas
    read = [[torch.arange(r * part + at, r * part + at + size) for at in range(0, part, size)] for r in range(readers)]
    got: dict[int, list[Any]] = {replica: [] for replica in range(replicas)}
    rows = [[row for each in of for row in redistribute._rows(each, size)] for of in read]
    for reader, first, stop, replica in parcels(samples, readers, replicas):
        assert 0 <= first < stop <= part
        got[replica] += rows[reader][first:stop]
    for replica, pieces in got.items():
        micro_batches = redistribute._regrouped(pieces, now)
        assert {len(each) for each in micro_batches} == {now}
        assert torch.cat(micro_batches).tolist() == list(range(replica * share, (replica + 1) * share))
    alike = parcels(readers * each, readers, replicas, alike=True)  # an evaluation's: all get everything
    for replica in got:
        mine = [(p.reader, p.first, p.stop) for p in alike if p.replica == replica]
        assert mine == [(reader, 0, each) for reader in range(readers)]


def test_what_belongs_to_all_samples_is_handed_on_whole() -> None:
    """Masks of one row, numbers and tuples beside what has a row or a number for each sample, texts in a dict among these."""
    mask, fields = torch.ones(5, 5), redistribute.Parcel(1, 2, 3, 4)
    of_each = redistribute.Parcel((1, 2, 3, 4), [*torch.arange(4)], fields, (5, None))
    value = (torch.arange(4), (mask, "text"), {"texts": list("abcd"), "names": ["x"], "rows": torch.arange(4)}, of_each)
    first, second = redistribute._regrouped(redistribute._rows(value, 4), 2)
    assert second[3] == redistribute.Parcel((3, 4), [*torch.arange(2, 4)], fields, (5, None)) and second[3]._fields
    assert (first[0].tolist(), second[0].tolist(), second[1][0] is mask) == ([0, 1], [2, 3], True)
    assert [*second[2].values()][:2] == [["c", "d"], ["x"]] and second[2]["rows"].tolist() == [2, 3]


def test_micro_batches_that_cannot_be_divided_are_refused() -> None:
    whole, last = ((torch.zeros(2, 3), torch.zeros(5, 5)), torch.zeros(2)), (torch.zeros(1, 3), torch.zeros(1))
    redistribute._check([whole, whole], 2)
    redistribute._check([whole, last], None)
    others = (last, "micro-batch of 1 samples, must be of 2"), ((whole[0], {"of": [object()]}), "object in a micro-batch, must ")
    for wrong, said in others:
        with pytest.raises(ConfigError, match=f"got a {said}.* where a reshape divides it, use "):
            redistribute._check([whole, wrong], 2)


def with_groups(*settings: tuple[float, float]) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr, "weight_decay": decay} for lr, decay in settings]
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize(("kept", "other"), [(False, [(1.0, 0.0)]), (False, [(1.0, 0.0), (1.0, 0.1)]), (True, [(1.0, 0.0)])])
def test_a_scheduler_for_other_groups_or_their_order_is_refused_on_every_rank(kept: bool, other: Any) -> None:
    optimizers = [with_groups((1.0, 0.1), (1.0, 0.0)), with_groups(*other)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0) for each in optimizers]
    given = [(optimizer, None if kept else scheduler) for optimizer, scheduler in zip(optimizers, schedulers, strict=True)]
    (text,) = {*on_threads(2, lambda rank, gather: raised(lambda: make_alike(*given[rank], gather)))}
    assert text.startswith(f"ConfigError: optimizer: got {len(other)} parameter groups on rank 1 and 2 on all ranks together")
    assert "\n" not in text and [len(each.param_groups) for each in optimizers] == [2, len(other)]


def test_settings_that_differ_between_stages_are_refused_and_an_empty_group_follows() -> None:
    def told(*filled: int) -> Any:
        return [reshape.RankReport(n, 0, Mock(), [({"lr": n}, n in filled)]) for n in range(3)]

    assert reshape._settings(told(1)) == [{"lr": 1}]
    with pytest.raises(ConfigError, match=r"got lr 0 in group 0 on stage 0 and 2 on stage 2, must be .* use groups"):
        reshape._settings(told(0, 2))


def test_frozen_parameters_leave_and_an_empty_group_gets_one_that_nothing_uses() -> None:
    module, names = nn.Linear(2, 2), {}
    module.weight.kind, module.bias.requires_grad = "2-D", False
    gone = unused(module, torch.device("cpu"), names)
    optimizer = torch.optim.AdamW([{"params": [p], "lr": n} for n, p in enumerate((module.weight, module.bias, gone))])
    keep_trained(optimizer)
    drop_unused(optimizer, names)
    occupy(optimizer, module, torch.device("cpu"), names)
    assert [group["lr"] for group in optimizer.param_groups] == [0, 1]
    first, second = ([*group["params"]] for group in optimizer.param_groups)
    assert len(first) == len(second) == 1 and first[0] is module.weight
    assert second[0].requires_grad and names[second[0]] == UNUSED and second[0].numel() == 1 and second[0].kind == "2-D"

"""What goes from one shape to another, and what must not be lost on the way: in one process, with ranks that are threads."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_terapipe import ConfigError, FusedLamb
from ds_terapipe.elastic import feed
from ds_terapipe.elastic.feed import Ranks, parcels
from ds_terapipe.elastic.moves.groups import in_order, refill, release
from ds_terapipe.elastic.moves.reshape import check_movable
from ds_terapipe.elastic.moves.transfer import Holding, Kind, Piece, authority, check_structure, holding, plan, sent_of
from ds_terapipe.optim.step_rules import DeviceSteps
from ds_terapipe.pipeline.parameter_groups import make_alike
from tests.threads import Threads

RANKS = st.integers(1, 6)
KIND = Kind((2,), torch.float32)


# ------------------------------------------------------------------------------------------------------- who sends what


@given(st.lists(st.sets(st.sampled_from("abcdef")).map(sorted), min_size=1, max_size=6), st.data())
def test_every_name_that_a_rank_lacks_comes_once_from_one_that_has_it(wanted, data):
    holders = {
        name: data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), label=name)
        for name in "abcdef"
    }
    moves = plan(wanted, lambda name, target: holders[name])
    assert Counter((m.name, m.target) for m in moves) == Counter(
        (n, t) for t, names in enumerate(wanted) for n in names
    )
    for name, having in holders.items():
        sources = Counter(move.source for move in moves if move.name == name)
        assert set(sources) <= set(having)
        if sources:
            assert max(sources.values()) - min(sources[rank] for rank in having) <= 1, "they take turns"


def test_the_copy_that_was_used_counts_and_else_the_first():
    def held(**used: bool) -> Holding:
        return Holding({name: Piece(KIND, used=yes) for name, yes in used.items()}, {})

    holdings = {0: held(a=False, b=True), 1: held(a=True, b=True, c=False), 2: held(a=True, c=False)}
    assert [authority(name, holdings) for name in "abc"] == [1, 0, 1]


# ------------------------------------------------------------------------------------------------- structure of a layer


class Layer(nn.Module):
    """A layer with a parameter, a buffer and settings."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(2, width), nn.Dropout(0.1)
        self.register_buffer("count", torch.zeros(2), persistent=False)


class Lora(nn.Module):
    """Stands in for a linear layer, with another beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(2, base.out_features)


def accumulation_hooked(layer: Layer) -> None:
    layer.inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def lora(layer: Layer) -> None:
    layer.inner = Lora(layer.inner)


def hooked(layer: Layer) -> None:
    layer.inner.register_forward_hook(lambda *args: None)


def gradient_hooked(layer: Layer) -> None:
    layer.inner.weight.register_hook(lambda gradient: gradient)


def wider(layer: Layer) -> None:
    layer.inner.weight = nn.Parameter(torch.zeros(4, 2))


def more(layer: Layer) -> None:
    layer.extra = nn.Parameter(torch.zeros(4))


def fewer(layer: Layer) -> None:
    layer.inner.bias = None


SET_ON_LIVE = {
    "lora": (lora, "got module 5.inner (Lora), set on a live layer"),
    "hook": (hooked, "got 1 hooks on module 5.inner, registered on a live layer"),
    "hook of a gradient": (gradient_hooked, "got 1 hooks on module 5.inner, registered on a live layer"),
    "hook behind a gradient": (accumulation_hooked, "got 1 hooks on module 5.inner, registered on a live layer"),
    "another shape": (wider, "got parameter 5.inner.weight of shape [4, 2], built as [3, 2], set on a live layer"),
    "one more": (more, "got parameter 5.extra of shape [4], built as none, set on a live layer"),
    "one fewer": (fewer, "got parameter 5.inner.bias of shape none, built as [3], set on a live layer"),
}


def held_by(layer: nn.Module) -> Holding:
    return holding({"5.": layer}, torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize("change", SET_ON_LIVE)
def test_what_a_spec_does_not_build_is_refused_by_name(change):
    set_on, message = SET_ON_LIVE[change]
    live = Layer()
    set_on(live)
    with pytest.raises(ConfigError) as refused:
        check_structure("5.", Layer(), held_by(live))
    text = str(refused.value)
    assert message in text and "\n" not in text and text.startswith("elastic_pipeline.resize.policy: got ")
    assert "must be part of the LayerSpec, use " in text


def test_a_layer_whose_values_and_settings_changed_is_not_refused():
    live = Layer()
    live.drop.p, live.inner.weight.lamb_rows = 0.5, (1, 2)
    live.inner.weight.data.fill_(7)
    live.count += 3
    live.requires_grad_(False)
    check_structure("5.", Layer(), held_by(live))


def test_a_holding_says_all_of_a_layer():
    live = Layer()
    live.drop.p, live.inner.weight.sequence_parallel = 0.5, True
    optimizer = torch.optim.AdamW([{"params": [live.inner.bias]}, {"params": [live.inner.weight], "lr": 1.0}])
    live.inner.weight.grad = torch.ones(3, 2)
    optimizer.step()
    found = holding({"5.": live}, optimizer)
    weight, bias, count = (found.pieces[f"5.{name}"] for name in ("inner.weight", "inner.bias", "count"))
    assert (weight.group, bias.group, count.group) == (1, 0, None)
    assert weight.is_parameter and not count.is_parameter and weight.requires_grad
    assert weight.attributes == {"sequence_parallel": True}
    assert set(weight.moments) == {"exp_avg", "exp_avg_sq"} and set(weight.values) == {"step"} and not bias.moments
    assert found.modules["5.drop"]["settings"]["p"] == 0.5
    assert holding({"5.": live}, optimizer, ["5."]).pieces["5.inner.bias"].used is False


def test_what_is_on_a_device_is_sent_and_not_described():
    """What stands for a GPU here is "meta": a description that has a tensor of it would bring the sender's device along."""
    here, there = torch.zeros(()), torch.zeros((), device="meta")
    state = {"step": here, "moment": torch.zeros(1), "matrix": torch.zeros(2), "rows": (1, 2)}
    assert list(sent_of(state)) == ["matrix"]
    assert list(sent_of({"step": there, "moment": there, "count": here})) == ["moment", "step"]

    class Steps:
        state = {"step": DeviceSteps(torch.tensor(8.0))}

    layer = nn.Linear(1, 1, bias=False)
    optimizer: Any = SimpleNamespace(param_groups=[], state={layer.weight: Steps.state})
    assert holding({"5.": layer}, optimizer).pieces["5.weight"].values == {"step": 7}


def test_a_weight_of_one_element_says_whether_it_was_used():
    for gradient in (None, torch.ones(1)):
        layer = nn.Module()
        layer.scale, layer.other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW(layer.parameters())
        layer.scale.grad, layer.other.grad = gradient, torch.zeros(2)
        optimizer.step()
        pieces = holding({"5.": layer}, optimizer, ["5."]).pieces
        assert pieces["5.scale"].used is (gradient is not None) and pieces["5.other"].used is False


def test_settings_that_a_spec_does_not_build_are_part_of_a_holding():
    live = Layer()
    live.window, live.spans, live.cached = 3, (1, 2), torch.ones(1)
    settings = held_by(live).modules["5."]["settings"]
    assert (settings["window"], settings["spans"]) == (3, (1, 2)) and "cached" not in settings


def test_ranks_keep_their_tensor_parallel_parts():
    topology = ProcessTopology(axes=["pipe", "model", "data"], dims=[2, 2, 1])
    with pytest.raises(ConfigError) as refused:
        check_movable(SimpleNamespace(_topo=topology), SimpleNamespace(), torch.device("cpu"))
    assert str(refused.value).startswith(
        'elastic_pipeline.resize.policy: topology: got "pipe, model, data", must be axes of which the last is "model", use '
    )


# -------------------------------------------------------------------------------------------------- groups of parameters


def optimizer_with(*settings: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": [nn.Parameter(torch.ones(2))], "lr": lr, "weight_decay": decay} for lr, decay in settings]
    )


def test_all_ranks_have_the_same_groups_in_one_order():
    optimizers = [
        optimizer_with((1.0, 0.1), (1.0, 0.0)),
        optimizer_with((1.0, 0.0), (1.0, 0.0), (2.0, 0.1)),
        optimizer_with((2.0, 0.1)),
    ]
    before = [list(optimizer.param_groups) for optimizer in optimizers]
    Threads(3).run(lambda rank, gather: make_alike(optimizers[rank], None, gather))
    wanted = [(1.0, 0.1), (1.0, 0.0), (1.0, 0.0), (2.0, 0.1)]
    for optimizer in optimizers:
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == wanted
        assert all(group["betas"] == (0.9, 0.999) for group in optimizer.param_groups)
    here = [[bool(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    assert here == [[True, True, False, False], [False, True, True, True], [False, False, False, True]]
    for groups, optimizer in zip(before, optimizers, strict=True):
        kept = [group for group in optimizer.param_groups if group["params"]]
        assert all(a is b for a, b in zip(groups, kept, strict=True))


def test_lamb_gets_groups_that_it_can_step_with():
    with_all, with_one = (
        [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs] for lrs in ([1.0, 2.0], [2.0])
    )
    optimizers = [FusedLamb(with_all), FusedLamb(with_one)]
    Threads(2).run(lambda rank, gather: make_alike(optimizers[rank], None, gather))
    assert [[group["lr"] for group in each.param_groups] for each in optimizers] == [[1.0, 2.0]] * 2
    module = nn.Linear(2, 2)
    refill(optimizers[1], module, {"weight": 0, "bias": 1}, {})
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.clone() for parameter in module.parameters()]
    optimizers[1].step()
    assert not any(map(torch.equal, before, module.parameters()))


def test_what_an_optimizer_is_given_where_nothing_is_trained_makes_no_group():
    module, unused = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
    weights = [{"params": [module.weight], "lr": 1.0}, {"params": [], "lr": 2.0}]
    optimizers = [torch.optim.SGD([unused], lr=9.0), torch.optim.SGD(weights, lr=9.0)]
    for optimizer in optimizers:
        in_order(optimizer, module, {})
    Threads(2).run(lambda rank, gather: make_alike(optimizers[rank], None, gather))
    assert [[(len(g["params"]), g["lr"]) for g in each.param_groups] for each in optimizers] == [
        [(0, 1.0), (0, 2.0)],
        [(1, 1.0), (0, 2.0)],
    ]


def test_a_scheduler_for_other_groups_is_refused_on_every_rank():
    optimizers = [optimizer_with((1.0, 0.1), (1.0, 0.0)), optimizer_with((1.0, 0.0))]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0) for each in optimizers]
    errors = Threads(2).run(lambda rank, gather: make_alike(optimizers[rank], schedulers[rank], gather))
    assert len({str(error) for error in errors}) == 1 and isinstance(errors[0], ConfigError)
    text = str(errors[0])
    assert text.startswith(
        "optimizer: got 1 parameter groups on rank 1 and 3 on all ranks together"
    ) or text.startswith("optimizer: got 1 parameter groups on rank 1 and 2 on all ranks together")
    assert "\n" not in text and [len(each.param_groups) for each in optimizers] == [2, 1]


KINDS = {
    "adamw": (lambda groups: torch.optim.AdamW(groups, lr=0.1), 2),
    "momentum": (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), 1),
    "lamb": (lambda groups: FusedLamb(groups, lr=0.1), 2),
}


def stepped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two linear layers of 6 + 3 numbers each, weights and biases in groups of their own, after a step."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0},
    ]
    optimizer = KINDS[kind][0](groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def numbers(optimizer: torch.optim.Optimizer, *parameters: torch.Tensor) -> int:
    return sum(v.nbytes for p in parameters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_leaves_the_optimizer_and_gives_its_moments_back(kind):
    model, optimizer = stepped(kind)
    groups, given_up = list(optimizer.param_groups), numbers(optimizer, *model[0].parameters())
    assert given_up >= 9 * 4 * KINDS[kind][1]
    model[0].requires_grad_(False)
    assert release(optimizer) == given_up and release(optimizer) == 0
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(model[1].weight)], [id(model[1].bias)]]
    assert set(optimizer.state) == set(model[1].parameters())
    before, frozen = model[1].weight.clone(), model[0].weight.clone()
    optimizer.step()  # goes on with the rest, frozen or not there
    assert not torch.equal(model[1].weight, before) and torch.equal(model[0].weight, frozen)
    model[1].requires_grad_(False)
    release(optimizer)
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_gets_other_parameters_with_their_state_and_settings(kind):
    model, optimizer = stepped(kind)
    state, groups, kept = optimizer.state, list(optimizer.param_groups), dict(optimizer.state[model[1].weight])
    gone = numbers(optimizer, *model[0].parameters(), model[1].bias)
    new = nn.Sequential(nn.Linear(4, 5), model[1])
    came = {name: torch.full((5, 4), 2.0) for name in kept if kept[name] is not None and name != "step"}
    came |= {"step": kept["step"]} if "step" in kept else {}
    settings = [{"lr": 0.7, "weight_decay": 0.3}, {"lr": 0.8}]
    group_of = {"0.weight": 1, "1.weight": 0}
    assert refill(optimizer, new, group_of, {"0.weight": came}, settings) == gone
    assert optimizer.state is state and all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(new[1].weight)], [id(new[0].weight)]]
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.7, 0.3), (0.8, 0.0)]
    assert dict(state) == {new[1].weight: kept, new[0].weight: came}
    for parameter in (new[0].weight, new[1].weight):
        parameter.grad = torch.ones_like(parameter)
    before = new[0].weight.clone()
    optimizer.step()
    assert not torch.equal(new[0].weight, before)


def test_names_follow_parameters():
    """Of groups that have names, as `torch.optim` takes them."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    optimizer = torch.optim.SGD([{"params": list(model.named_parameters())}], lr=0.1)
    model[0].requires_grad_(False)
    release(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]
    refill(optimizer, nn.Sequential(model[1]), {"0.bias": 0}, {})
    assert optimizer.param_groups[0]["param_names"] == ["0.bias"]


def test_lamb_keeps_the_names_of_what_stays():
    model, optimizer = stepped("lamb")
    optimizer.set_names({parameter: name for name, parameter in model.named_parameters()})
    model[0].requires_grad_(False)
    release(optimizer)
    optimizer.step()
    assert [layer.name for layer in optimizer.statistics()] == ["1.weight", "1.bias"]


# ------------------------------------------------------------------------------------------------------ micro-batches


def layout(stages: int, replicas: int, tensor: int, micro_batch: int) -> Ranks:
    return Ranks(PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=replicas), micro_batch)


@given(readers=RANKS, replicas=RANKS, each=st.integers(1, 4), size=st.integers(1, 3), now=st.integers(1, 3))
def test_every_replica_gets_its_samples_whoever_reads_them(readers, replicas, each, size, now):
    """Inputs and labels, in the order in which the readers' replicas would have trained them, in micro-batches as now."""
    samples = readers * replicas * each * size * now
    part, share = samples // readers, samples // replicas
    read = [
        [torch.arange(reader * part + at, reader * part + at + size) for at in range(0, part, size)]
        for reader in range(readers)
    ]
    got = {(role, replica): [] for role in ("inputs", "labels") for replica in range(replicas)}
    for role, reader, first, stop, replica in parcels(samples, readers, replicas):
        assert 0 <= first < stop <= part
        got[role, replica] += feed._cut(read[reader], size, first, stop)
    for (_, replica), pieces in got.items():
        micro_batches = list(feed._regrouped(pieces, now))
        assert {len(each) for each in micro_batches} == {now}
        assert torch.cat(micro_batches).tolist() == list(range(replica * share, (replica + 1) * share))


@given(readers=RANKS, replicas=RANKS, each=st.integers(1, 4))
def test_replicas_that_evaluate_alike_get_everything(readers, replicas, each):
    samples = readers * each
    for role in ("inputs", "labels"):
        for replica in range(replicas):
            mine = [
                p for p in parcels(samples, readers, replicas, alike=True) if (p.role, p.replica) == (role, replica)
            ]
            assert [(p.reader, p.first, p.stop) for p in mine] == [(reader, 0, each) for reader in range(readers)]


def test_what_belongs_to_all_samples_is_handed_on_whole():
    """Masks of one row, numbers and tuples beside what has a row for each sample."""
    mask = torch.ones(5, 5)
    value = (torch.arange(4), (mask, "text"), torch.zeros(4, 2))
    (cut,) = feed._cut([value], 4, 1, 3)
    assert cut[0].tolist() == [1, 2] and cut[1][0] is mask and cut[1][1] == "text" and cut[2].shape == (2, 2)
    first, second = feed._regrouped([value], 2)
    assert first[0].tolist() == [0, 1] and second[0].tolist() == [2, 3] and second[1][0] is mask


def test_a_micro_batch_that_is_to_be_divided_has_all_its_samples():
    whole, last = ((torch.zeros(2, 3), torch.zeros(5, 5)), torch.zeros(2)), (torch.zeros(1, 3), torch.zeros(1))
    feed._check([whole, whole], 2)
    feed._check([whole, last], None)
    with pytest.raises(
        ConfigError, match="got a micro-batch of 1 samples, must be of 2 where a reshape divides it, use "
    ):
        feed._check([whole, last], 2)


def test_samples_of_other_shapes_are_not_joined():
    with pytest.raises(ConfigError, match=r"^the data iterator: got samples of \[3\] beside others"):
        list(feed._regrouped([torch.zeros(1, 3), torch.zeros(1, 4)], 2))


@given(
    start=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])),
    tensor=st.sampled_from([1, 2]),
    role=st.sampled_from(["inputs", "labels"]),
)
def test_inputs_are_with_first_stages_and_labels_with_last_ones(start, tensor, role):
    stages, replicas = start
    where = layout(stages, replicas, tensor, 2)
    assert (where.stages, where.replicas, where.tensor) == (stages, replicas, tensor)
    for replica in range(replicas):
        for shard in range(tensor):
            coordinates = where.topology.get_coord(where.at(role, replica, shard))
            assert (coordinates.data, coordinates.model) == (replica, shard)
            assert coordinates.pipe == (0 if role == "inputs" else stages - 1)

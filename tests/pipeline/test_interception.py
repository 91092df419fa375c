"""An engine changes its own modules alone, their copies compute with their own weights, and nothing is left."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_terapipe
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import Interception, _users, defers, not_deferred_line
from ds_terapipe.pipeline.operators.sdpa import Overrides
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from tests.pipeline.attention_layers import DotProductAttention
from tests.pipeline.test_weight_gradients import assert_same, gradients_of_the_whole, run_intercepted, take

WIDTH, ROWS = 6, 12
TOKENS = torch.randint(0, ROWS, (2, 8), generator=torch.Generator().manual_seed(3))


class ParallelLinear(nn.Module):
    """megatron-core's interface: a product behind ``_forward_impl``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.products = nn.Parameter(torch.randn(WIDTH, WIDTH)), 0

    def _forward_impl(self, input: Any, weight: Any, **kwargs: Any) -> Any:
        self.products += 1
        return torch.matmul(input, weight.t())

    def forward(self, x: Any) -> Any:
        others = {"bias": None, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
        return self._forward_impl(input=x, weight=self.weight, **others)


class VocabParallel(nn.Module):
    """megatron-core's embedding: it looks up some rows and zeroes the others' output in place."""

    vocab_start_index, vocab_end_index = 0, 9

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, tokens: Any) -> Any:
        elsewhere = tokens >= self.vocab_end_index
        out = F.embedding(tokens.masked_fill(elsewhere, 0), self.weight)
        out[elsewhere, :] = 0.0
        return out


class Model(nn.Module):
    """One of each kind that is changed: tokens [b, s] to [b, s, WIDTH]."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.table, self.vocabulary = nn.Embedding(ROWS, WIDTH), VocabParallel()
        self.linear, self.parallel, self.core_attention = (
            nn.Linear(WIDTH, WIDTH),
            ParallelLinear(),
            DotProductAttention(1),
        )
        self.recompute = recompute

    def forward(self, tokens: Any) -> Any:
        return checkpoint(self._forward, tokens, use_reentrant=False) if self.recompute else self._forward(tokens)

    def _forward(self, tokens: Any) -> Any:
        hidden = self.parallel(self.linear(self.table(tokens) + self.vocabulary(tokens)))
        rows = hidden.transpose(0, 1).unsqueeze(2)
        return self.core_attention(rows, rows, rows, None).transpose(0, 1)


def sliced(model: nn.Module) -> tuple[set[str], dict[str, torch.Tensor]]:
    """Names of the weights that have no gradient before they are made, and the gradients then."""
    keeper = WeightGradients()
    run_intercepted(model, TOKENS, (3, 1, 4), keeper)
    late = {name for name, p in model.named_parameters() if p.grad is None}
    keeper.make(0)
    return late, take(model)


@pytest.mark.parametrize("recompute", [False, True])
def test_everything_that_is_a_module_is_deferred(recompute: bool) -> None:
    model = Model(recompute).double()
    want, interception = gradients_of_the_whole(model, TOKENS), Interception([model])
    products = model.parallel.products
    late, got = sliced(model)
    assert late == want.keys() and model.parallel.products == products
    assert_same(got, want)
    assert_same(gradients_of_the_whole(model, TOKENS), want)  # outside of slices each is what it was
    assert model.parallel.products > products
    assert interception.adapted == [model.core_attention]
    assert interception.not_deferred(model.named_parameters()) == []
    interception.close()


def state_of(model: nn.Module) -> Any:
    """The state that an interception changes."""
    return [dict(module.__dict__) for module in model.modules()], Overrides._users, len(_users)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_closed_it_leaves_modules_as_they_were(how: str) -> None:
    model = Model()
    before = state_of(model)
    interception = Interception([model, model.linear])
    assert state_of(model)[0] != before[0]
    copy.deepcopy(model)
    for _ in range(2):
        if how == "closed":
            interception.close()
        interception = interception if how == "closed" else None
        gc.collect()
        assert state_of(model) == before


def test_one_that_fails_changes_nothing() -> None:
    class Odd(nn.Linear):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("odd")

    model = Model()
    before = state_of(model)
    with pytest.raises(ValueError, match="odd"):
        Interception([model, Odd(1, 1)])
    gc.collect()
    assert state_of(model) == before


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_of_two_that_is_closed_leaves_modules_as_they_were(first: int) -> None:
    model = Model().double()
    want, before = gradients_of_the_whole(model, TOKENS), state_of(model)
    products = model.parallel.products
    layers = [model.linear, model.table, nn.ModuleDict({"core_attention": model.core_attention})]
    two = [Interception([model]), Interception(layers)]
    two[first].close()
    late, got = sliced(model)
    assert {"linear.weight", "table.weight"} <= late
    assert ("vocabulary.weight" in late) == (first == 1)
    assert_same(got, want)
    two[1 - first].close()
    model.parallel.products = products
    assert state_of(model) == before


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_computes_with_its_own_weights(kind: str) -> None:
    torch.manual_seed(0)
    model = Model().double()
    interception = Interception([model])
    made = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    interception.close()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(-0.5)
    fresh = Model().double()
    fresh.load_state_dict(made.state_dict())
    want = gradients_of_the_whole(fresh, TOKENS)
    assert_same(gradients_of_the_whole(made, TOKENS), want)  # the other one is closed
    mine = Interception([made])
    late, got = sliced(made)
    assert late == want.keys()
    assert_same(got, want)
    mine.close()
    assert [each.keys() for each in state_of(made)[0]] == [each.keys() for each in state_of(Model())[0]]


# ---------------------------------------------------------------------------------------------------- what is not deferred


def bare_head(module: nn.Module, x: Any) -> Any:
    return F.linear(x, module.weight)


@defers
def good_head(module: nn.Module, x: Any) -> Any:
    return deferred_linear(x, module.weight)


class OwnLinear(nn.Linear):
    def forward(self, x: Any) -> Any:
        return x @ self.weight.t() + self.bias


def test_what_is_not_deferred_is_named() -> None:
    table = nn.Embedding(ROWS, WIDTH)
    deferred = {
        "model": Model(),
        "table": table,
        "norm": nn.LayerNorm(2),
        "frozen": OwnLinear(2, 2).requires_grad_(False),
    }
    others = {"own": OwnLinear(2, 2), "heads": nn.MultiheadAttention(4, 2)}
    others |= {"sparse": nn.Embedding(2, 2, sparse=True), "convolution": nn.Conv1d(1, 1, 1)}
    everything = nn.ModuleDict({**deferred, **others})
    named = ["own.weight", "heads.in_proj_weight", "heads.out_proj.weight", "sparse.weight", "convolution.weight"]
    for heads in ([], [good_head], [bare_head], [good_head, bare_head]):
        interception = Interception([everything, *(functools.partial(head, table) for head in heads), F.gelu])
        expected = ["table.weight", *named] if bare_head in heads else named
        assert interception.not_deferred(everything.named_parameters()) == expected
        interception.close()
    said = "weight gradients made slice by slice, not once per micro-batch (as exact, but slower): a, b"
    assert not_deferred_line([]) == "" and not_deferred_line(["a", "b"]) == said
    assert not_deferred_line(list("abcdef")).endswith(": a, b, c, d and 2 more")


def test_a_function_of_a_module_has_its_module_changed_and_what_somebody_else_put_there_stays() -> None:
    table, layer = nn.Embedding(ROWS, WIDTH), nn.Linear(2, 2)
    layer.forward = theirs = lambda x: x  # type: ignore[method-assign]
    interception = Interception([functools.partial(good_head, table), layer])
    assert "forward" in table.__dict__ and layer.forward is theirs
    assert interception.not_deferred(layer.named_parameters()) == ["weight"]
    interception.close()
    assert "forward" not in table.__dict__ and layer.forward is theirs


# ----------------------------------------------------------------------------------------------------- other models' layers

OURS = str(Path(ds_terapipe.__file__).parent)


def our_python(run: Any) -> set[str]:
    """Functions of this package that ``run()`` calls, on whatever way through the dispatcher."""
    found = set()

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found.add(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_layers_of_another_model_run_no_python_of_ours() -> None:
    mine, other = Model(), nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    interception = Interception([mine])

    def attend() -> None:
        x = torch.randn(1, 1, 4, 8, requires_grad=True)
        F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()

    def train_other() -> None:
        other(TOKENS).square().sum().backward()
        F.linear(torch.randn(2, 2), torch.randn(2, 2, requires_grad=True)).sum().backward()

    assert our_python(train_other) == set()
    assert our_python(attend) == {"_sdpa"}, "the one override"
    assert "_linear" in our_python(lambda: mine.linear(torch.randn(2, WIDTH)))
    interception.close()
    assert our_python(attend) == set()

"""What an engine changes in modules: its own ones alone, their copies compute with their own weights, and nothing is left."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_terapipe
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import Interception, _users, defers, not_deferred_line
from ds_terapipe.pipeline.operators.sdpa import Overrides
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import spans
from ds_terapipe.schedule import Unit
from tests.mutants import applied
from tests.mutants.claims import holds

WIDTH, ROWS, TOKENS = 6, 12, 8


class ParallelLinear(nn.Module):
    """megatron-core's interface: a product behind ``_forward_impl``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.products = nn.Parameter(torch.randn(WIDTH, WIDTH)), 0

    def _forward_impl(self, input: Any, weight: Any, **kwargs: Any) -> Any:
        self.products += 1
        return torch.matmul(input, weight.t())

    def forward(self, x: Any) -> Any:
        return self._forward_impl(
            input=x, weight=self.weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
        )


class VocabParallel(nn.Module):
    """megatron-core's embedding: it looks up some rows and zeroes the others' output in place."""

    vocab_start_index, vocab_end_index = 0, 9

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, tokens: Any) -> Any:
        elsewhere = tokens >= self.vocab_end_index
        local = tokens.clone()
        local[elsewhere] = 0
        out = F.embedding(local, self.weight)
        out[elsewhere, :] = 0.0
        return out


class CoreAttention(nn.Module):
    """Megatron's interface: [s, b, heads, d] to [s, b, heads * d]; causal."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_mask_softmax, self.attention_dropout = SimpleNamespace(scale=None), nn.Dropout(0.0)
        self.softmax_scale, self.attn_mask_type = WIDTH**-0.5, SimpleNamespace(name="causal")

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        scores = (q @ k.transpose(-1, -2) * self.softmax_scale).masked_fill(
            torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf")
        )
        out = scores.softmax(-1) @ v
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class Model(nn.Module):
    """One of each kind that is changed: tokens [b, s] to [b, s, WIDTH]."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.table, self.vocabulary = nn.Embedding(ROWS, WIDTH), VocabParallel()
        self.linear, self.parallel, self.core_attention = nn.Linear(WIDTH, WIDTH), ParallelLinear(), CoreAttention()
        self.recompute = recompute

    def forward(self, tokens: Any) -> Any:
        return checkpoint(self._forward, tokens, use_reentrant=False) if self.recompute else self._forward(tokens)

    def _forward(self, tokens: Any) -> Any:
        hidden = self.parallel(self.linear(self.table(tokens) + self.vocabulary(tokens)))
        rows = hidden.transpose(0, 1).unsqueeze(2)
        return self.core_attention(rows, rows, rows).transpose(0, 1)


def tokens() -> torch.Tensor:
    return torch.randint(0, ROWS, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    model(tokens()).square().sum().backward()
    return gradients(model)


def sliced(model: nn.Module, lengths: tuple[int, ...] = (3, 1, 4)) -> tuple[set[str], dict[str, torch.Tensor]]:
    """Names of the weights that have no gradient before they are made, and the gradients then."""
    context, keeper, cuts = SliceContext(), WeightGradients(), spans(lengths)
    context.weight_gradients, outputs = keeper, []
    for index, span in enumerate(cuts):
        with context.forward(Unit(0, index), span):
            context.enter_layer(0)
            outputs.append(model(tokens()[:, span.start : span.stop]))
    for index in reversed(range(len(cuts))):
        with context.backward(Unit(0, index), cuts[index]):
            outputs[index].square().sum().backward()
    late = {name for name, p in model.named_parameters() if p.grad is None}
    keeper.make(0)
    return late, gradients(model)


def close_to(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-12, msg=name)


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(module.__dict__) for module in model.modules()]


@pytest.mark.parametrize("recompute", [False, True])
def test_everything_that_is_a_module_is_deferred(recompute: bool) -> None:
    model = Model(recompute).double()
    want, interception = whole(model), Interception([model])
    products = model.parallel.products
    late, got = sliced(model)
    assert late == want.keys() and model.parallel.products == products
    close_to(got, want)
    close_to(whole(model), want)  # outside of slices each is what it was
    assert model.parallel.products > products
    assert interception.adapted == [model.core_attention]
    assert interception.not_deferred(model.named_parameters()) == []
    interception.close()


def test_closed_it_leaves_modules_as_they_were() -> None:
    model, counts = Model(), (Overrides._users, len(_users))
    before = attributes(model)
    interception = Interception([model, model.linear])
    assert attributes(model) != before
    copy.deepcopy(model)
    interception.close()
    assert attributes(model) == before and (Overrides._users, len(_users)) == counts
    interception.close()
    assert attributes(model) == before and (Overrides._users, len(_users)) == counts


def test_one_that_is_forgotten_is_closed() -> None:
    model, counts = Model(), (Overrides._users, len(_users))
    before = attributes(model)
    interception = Interception([model])
    del interception
    gc.collect()
    assert attributes(model) == before and (Overrides._users, len(_users)) == counts


def test_one_that_fails_changes_nothing() -> None:
    class Odd(nn.Linear):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("odd")

    model, users = Model(), Overrides._users
    before = attributes(model)
    with pytest.raises(ValueError, match="odd"):
        Interception([model, Odd(1, 1)])
    gc.collect()
    assert attributes(model) == before and Overrides._users == users


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_of_two_that_is_closed_leaves_modules_as_they_were(first: int) -> None:
    model = Model().double()
    before, want = attributes(model), whole(model)
    layers = [model.linear, model.table, nn.ModuleDict({"core_attention": model.core_attention})]
    two = [Interception([model]), Interception(layers)]
    two[first].close()
    late, got = sliced(model)
    assert {"linear.weight", "table.weight"} <= late
    assert ("vocabulary.weight" in late) == (first == 1)
    close_to(got, want)
    two[1 - first].close()
    for each in (*before, *(after := attributes(model))):
        each.pop("products", None)
    assert after == before


def other_weights(model: nn.Module) -> nn.Module:
    """Every weight of it is another one now."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    return model


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_computes_with_its_own_weights(kind: str) -> None:
    torch.manual_seed(0)
    model = Model().double()
    interception = Interception([model])
    made = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    interception.close()
    fresh = Model().double()
    fresh.load_state_dict(other_weights(made).state_dict())
    want = whole(fresh)
    close_to(whole(made), want)  # the other one is closed
    before = attributes(Model())
    mine = Interception([made])
    late, got = sliced(made)
    assert late == want.keys()
    close_to(got, want)
    mine.close()
    assert [each.keys() for each in attributes(made)] == [each.keys() for each in before]


def copies_are_their_own(mutant: str | None) -> bool:
    """Whether :func:`test_a_copy_computes_with_its_own_weights` holds under a mutant; for ``tests.mutants``."""
    with applied(mutant):
        return holds(test_a_copy_computes_with_its_own_weights, "deepcopy")


def nothing_is_left(mutant: str | None) -> bool:
    """Whether :func:`test_closed_it_leaves_modules_as_they_were` holds under a mutant; for ``tests.mutants``."""
    with applied(mutant):
        return holds(test_closed_it_leaves_modules_as_they_were)


# ---------------------------------------------------------------------------------------------------- what is not deferred


def bare_head(module: nn.Module, x: Any) -> Any:
    return F.linear(x, module.weight)


@defers
def good_head(module: nn.Module, x: Any) -> Any:
    return deferred_linear(x, module.weight)


class OwnLinear(nn.Linear):
    """Whatever it does with its weight."""

    def forward(self, x: Any) -> Any:
        return x @ self.weight.t() + self.bias


def test_what_is_not_deferred_is_named() -> None:
    table, model = nn.Embedding(ROWS, WIDTH), Model()
    everything = nn.ModuleDict(
        {
            "model": model,
            "table": table,
            "own": OwnLinear(2, 2),
            "heads": nn.MultiheadAttention(4, 2),
            "frozen": OwnLinear(2, 2).requires_grad_(False),
            "sparse": nn.Embedding(2, 2, sparse=True),
            "norm": nn.LayerNorm(2),
            "convolution": nn.Conv1d(1, 1, 1),
        }
    )
    named = ["own.weight", "heads.in_proj_weight", "heads.out_proj.weight", "sparse.weight", "convolution.weight"]
    for heads, expected in (
        ([], named),
        ([good_head], named),
        ([bare_head], ["table.weight", *named]),
        ([good_head, bare_head], ["table.weight", *named]),
    ):
        layers = [everything, *(functools.partial(head, table) for head in heads), F.gelu]
        interception = Interception(layers)
        assert interception.not_deferred(everything.named_parameters()) == expected
        interception.close()


def test_a_function_of_a_module_has_its_module_changed() -> None:
    table = nn.Embedding(ROWS, WIDTH)
    interception = Interception([functools.partial(good_head, table)])
    assert "forward" in table.__dict__
    interception.close()
    assert "forward" not in table.__dict__


def test_the_line_of_what_is_not_deferred() -> None:
    assert not_deferred_line([]) == ""
    assert not_deferred_line(["a", "b"]) == (
        "weight gradients made slice by slice, not once per micro-batch (as exact, but slower): a, b"
    )
    assert not_deferred_line(list("abcdef")).endswith(": a, b, c, d and 2 more")


def test_what_somebody_else_put_there_stays() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    theirs = layer.forward
    interception = Interception([layer])
    assert layer.forward is theirs and interception.not_deferred(layer.named_parameters()) == ["weight"]
    interception.close()
    assert layer.forward is theirs


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
        other(tokens()).square().sum().backward()
        F.linear(torch.randn(2, 2), torch.randn(2, 2, requires_grad=True)).sum().backward()

    assert our_python(train_other) == set()
    assert our_python(attend) == {"_sdpa"}, "the one override"
    assert "_linear" in our_python(lambda: mine.linear(torch.randn(2, WIDTH)))
    interception.close()
    assert our_python(attend) == set()

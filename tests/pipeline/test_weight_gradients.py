"""Weight gradients made once per micro-batch: the same gradients, hooks and memory as one backward of the whole."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.operators.weight_gradients import OfLinear, WeightGradients
from ds_terapipe.pipeline.slicing import spans
from ds_terapipe.schedule import Unit

TOKENS, FEATURES, ROWS = 24, 6, 11
UNEVEN = (5, 1, 10, 8)


class Net(nn.Module):
    """Its first weight is used twice; inputs ask for a gradient, as between stages."""

    def __init__(self, recompute=False):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES, bias=False)
        self.norm, self.recompute = nn.LayerNorm(FEATURES), recompute

    def forward(self, x):
        return checkpoint(self._forward, x, use_reentrant=False) if self.recompute else self._forward(x)

    def _forward(self, x):
        return self.first(self.norm(self.second(F.gelu(self.first(x))))) + 1


def two_linears(bias=True):
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=bias), nn.GELU(), nn.Linear(8, FEATURES, bias=bias))


class Table(nn.Module):
    """An embedding, looked up twice, and a linear layer on it."""

    def __init__(self, recompute=False, **options):
        super().__init__()
        self.table, self.linear = nn.Embedding(ROWS, FEATURES, **options), nn.Linear(FEATURES, FEATURES)
        self.recompute = recompute

    def forward(self, tokens):
        return checkpoint(self._forward, tokens, use_reentrant=False) if self.recompute else self._forward(tokens)

    def _forward(self, tokens):
        return self.linear(self.table(tokens)) * self.table((tokens + 1) // 2)


class Tied(Table):
    """A head that is the embedding's table, by ``product``."""

    def __init__(self, product):
        super().__init__()
        self.product = product

    def forward(self, tokens):
        return self.product(torch.tanh(super().forward(tokens)), self.table.weight)


class ExtraBias(nn.Module):
    """A bias that is made of something else."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(FEATURES, FEATURES)), nn.Parameter(torch.randn(FEATURES))

    def forward(self, x):
        return deferred_linear(x, self.weight, self.bias * 2)


class Shift(nn.Module):
    """A bias that takes a gradient of one row for its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.randn(FEATURES))

    def forward(self, x):
        return self.shift[None, None] + self.linear(x)


class Inplace(Table):
    """Writes into what its layers hand on."""

    def forward(self, tokens):
        hidden = self.table(tokens)
        hidden[..., 0] = 0.0
        return self.linear(self.linear(hidden).relu_()).add_(hidden)


class TiedLinears(nn.Module):
    """One weight in several layers, with a bias in every second."""

    def __init__(self, uses):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=bool(i % 2)) for i in range(uses))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def weight_normed():
    net = two_linears()
    nn.utils.parametrizations.weight_norm(net[0])
    return net


def partly_frozen(name):
    net = two_linears()
    for layer in (net[0], net[2]):
        getattr(layer, name).requires_grad_(False)
    return net


# name: a model, and its matrices whose gradients are made slice by slice
NORMED = "0.parametrizations.weight.original"
LAYERS = {
    "a weight twice": (Net, []),
    "recomputed": (lambda: Net(recompute=True), []),
    "linear": (two_linears, []),
    "linear without bias": (lambda: two_linears(False), []),
    "embedding": (Table, []),
    "embedding with a padding index from the end": (lambda: Table(padding_idx=-1), []),
    "embedding scaled by frequency": (lambda: Table(scale_grad_by_freq=True), []),
    "embedding with a largest norm": (lambda: Table(max_norm=0.5), ["table.weight"]),
    "sparse embedding": (lambda: Table(sparse=True), ["table.weight"]),
    "recomputed embedding": (lambda: Table(recompute=True), []),
    "tied": (lambda: Tied(deferred_linear), []),
    "tied, a bare product": (lambda: Tied(F.linear), ["table.weight"]),
    "tied twice": (lambda: TiedLinears(2), []),
    "tied three times": (lambda: TiedLinears(3), []),
    "weight norm": (weight_normed, [NORMED + "0", NORMED + "1"]),
    "trained bias": (lambda: partly_frozen("weight"), []),
    "trained weight": (lambda: partly_frozen("bias"), []),
    "a bias made of another": (ExtraBias, ["weight"]),
    "a bias of one row": (Shift, []),
    "written in place": (Inplace, []),
}


def made(name):
    """A model in fp64 and inputs [3, TOKENS, ...], of the first two such that ask for a gradient."""
    torch.manual_seed(0)
    net = LAYERS[name][0]().double()
    if isinstance(net, Table):
        return net, torch.randint(0, ROWS, (3, TOKENS))
    return net, torch.randn(3, TOKENS, FEATURES, dtype=torch.float64, requires_grad=isinstance(net, Net))


def take(net):
    """The gradients, which the net has no longer."""
    taken = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in taken.items()}


def gradients_of_the_whole(net, x):
    net(x).square().sum().backward()
    return take(net)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-12, msg=name)


def run_sliced(net, x, lengths, keeper, after=lambda index: None):
    """Forward and backward of one micro-batch, x [b, tokens, ...], in slices; ``after(index)`` is called behind a backward."""
    interception = Interception([net])
    run_intercepted(net, x, lengths, keeper, after)
    interception.close()


def run_intercepted(net, x, lengths, keeper, after=lambda index: None):
    context, slices, outputs = SliceContext(), spans(tuple(lengths)), []
    context.weight_gradients = keeper
    for index, span in enumerate(slices):
        with context.forward(Unit(0, index), span):
            context.enter_layer(0)
            outputs.append(net(x[:, span.start : span.stop]))
    for index in reversed(range(len(slices))):
        with context.backward(Unit(0, index), slices[index]):
            outputs[index].square().sum().backward()
        after(index)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_gradients_of_the_whole_once_per_micro_batch(name):
    net, x = made(name)
    want, keeper, calls = gradients_of_the_whole(net, x), WeightGradients(), []
    matrices = {n for n, p in net.named_parameters() if p.dim() >= 2 and p.requires_grad}
    deferred = matrices - set(LAYERS[name][1])
    for lengths in (UNEVEN, (12, 12), (1,) * TOKENS):  # each micro-batch starts from nothing
        run_sliced(net, x, lengths, keeper)
        assert {n for n in matrices if net.get_parameter(n).grad is not None} == set(LAYERS[name][1])
        weights = [net.get_parameter(n) for n in sorted(deferred)]
        hooks = [weight.register_post_accumulate_grad_hook(calls.append) for weight in weights]
        keeper.make(0)
        keeper.make(0)  # nothing is left to make
        assert sorted(map(id, calls)) == sorted(map(id, weights)) and keeper.kept_bytes == 0
        for hook in hooks:
            hook.remove()
        calls.clear()
        assert_same(take(net), want)


@pytest.mark.parametrize("name", ["linear", "embedding", "tied"])
@pytest.mark.parametrize("late", [False, True])
def test_a_part_is_that_of_its_slices(name, late):
    """Made right behind the slice's backward, or behind all of them."""
    (net, x), keeper, parts = made(name), WeightGradients(), {}

    def make(index):
        keeper.make(0, index)
        parts[index] = take(net)

    run_sliced(net, x, UNEVEN, keeper, (lambda index: None) if late else make)
    for index in (3, 2, 1, 0) if late else ():
        make(index)
    for index, span in enumerate(spans(UNEVEN)):
        assert_same(parts[index], gradients_of_the_whole(net, x[:, span.start : span.stop]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[300], [128, 128], [1, 2, 200, 5], [40] * 7, [127, 1]])
def test_any_lengths_are_all_in_the_products(lengths, dtype):
    torch.manual_seed(0)
    keeper, layer = WeightGradients(), nn.Linear(4, 5, dtype=dtype)
    pairs = [(torch.randn(n, 4, dtype=dtype), torch.randn(n, 5, dtype=dtype)) for n in lengths]
    with keeper.backward(Unit(0, 0)):
        for pair in pairs:
            keeper.keep(OfLinear(), (layer.weight, layer.bias), pair)
    keeper.make(0)
    inputs, gradient = (torch.cat([pair[i] for pair in pairs]).double() for i in range(2))
    # in 16 bits rounded once at the end: the nearest number to the sum
    for got, want in ((layer.weight, gradient.t() @ inputs), (layer.bias, gradient.sum(0))):
        torch.testing.assert_close(got.grad.double(), want, atol=1e-4, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("which", [0, 1])
def test_tensors_that_were_written_into_are_refused(which):
    keeper, layer = WeightGradients(), nn.Linear(4, 4)
    for _ in range(2):
        kept = torch.randn(3, 4), torch.randn(3, 4)
        with keeper.backward(Unit(0, 0)):
            keeper.keep(OfLinear(), (layer.weight, layer.bias), kept)
    kept[which].add_(1)
    with pytest.raises(RuntimeError, match=r"token_pipeline.weight_gradients: .* modified in place"):
        keeper.make(0)
    assert layer.weight.grad is None


def one_slice(net, keeper, x):
    """A context and what the net makes of the first of two slices in it."""
    context, (span, _), interception = SliceContext(), spans((6, 6)), Interception([net])
    context.weight_gradients = keeper
    try:
        with context.forward(Unit(0, 0), span):
            context.enter_layer(0)
            return context.backward(Unit(0, 0), span), net(x)
    finally:
        interception.close()


class Penalised(Net):
    def forward(self, x):
        out = super().forward(x)
        return out + torch.autograd.grad(out.sum(), x, retain_graph=True)[0].sum()


def test_what_autograd_would_refuse_or_no_backward_would_make_is_an_error():
    net, x = Net(), torch.randn(1, 6, FEATURES, requires_grad=True)
    going_back, output = one_slice(net, WeightGradients(), x)
    with torch.no_grad():
        net.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), going_back:
        output.sum().backward()
    going_back, output = one_slice(net, WeightGradients(), x)
    with going_back:
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()
    with pytest.raises(RuntimeError, match=r'^token_pipeline.weight_gradients: got "micro_batch" and .* use "slice"$'):
        one_slice(Penalised(), WeightGradients(), x)


def test_what_is_kept_does_not_hold_the_graph():
    keeper, x = WeightGradients(), torch.randn(1, 6, FEATURES, requires_grad=True)
    going_back, output = one_slice(Net(), keeper, x * 1)
    with going_back:
        output.sum().backward()
    received = weakref.ref(x)
    del x, output
    gc.collect()
    assert keeper.kept_bytes > 0 and received() is None


def test_one_layers_gradients_are_there_at_a_time(monkeypatch):
    seen, make = [], OfLinear.__call__

    def spy(rule, parameters, operands):
        gradients = make(rule, parameters, operands)
        assert not [ref for ref in seen if ref() is not None], "the gradients of another layer are still there"
        seen.extend(weakref.ref(gradient.untyped_storage()) for gradient in gradients)
        return gradients

    net, keeper = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4))), WeightGradients()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # else the first gradient is taken as it is
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [6] * 4, keeper)
    monkeypatch.setattr(OfLinear, "__call__", spy)
    keeper.make(0)
    assert len(seen) == 8 and all(parameter.grad.any() for parameter in net.parameters())


def test_whole_sequences_and_copies_that_autocast_makes_take_no_part():
    (net, x), keeper = made("linear"), WeightGradients()
    run_sliced(net, x, [TOKENS], keeper)
    assert len(take(net)) == 4
    net, x = net.float(), x.float()
    want = gradients_of_the_whole(net, x)
    with torch.autocast("cpu", torch.bfloat16):
        run_sliced(net, x, [12, 12], keeper)
    assert keeper.kept_bytes == 0
    for name, gradient in take(net).items():
        torch.testing.assert_close(gradient, want[name], rtol=5e-2, atol=5e-2 * float(want[name].abs().max()))

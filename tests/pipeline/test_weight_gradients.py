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
from tests.mutants import applied

TOKENS, FEATURES = 24, 6


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES, bias=False)
        self.norm, self.recompute = nn.LayerNorm(FEATURES), recompute

    def forward(self, x):
        if self.recompute:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x):
        x = self.norm(self.second(F.gelu(self.first(x))))
        return self.first(x) + 1  # the first weight once more in the same slice


def gradients_of_the_whole(net, x):
    net(x).square().sum().backward()
    return take(net)


def take(net):
    taken = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return taken


def run_sliced(net, x, lengths, keeper, after=lambda index: None):
    """Forward and backward of one micro-batch, x [b, tokens, ...], in slices; ``after(index)`` is called behind a backward."""
    context, interception = SliceContext(), Interception([net])
    context.weight_gradients = keeper
    slices, outputs = spans(tuple(lengths)), []
    for index, span in enumerate(slices):
        with context.forward(Unit(0, index), span):
            context.enter_layer(0)
            outputs.append(net(x[:, span.start : span.stop]))
    for index in reversed(range(len(slices))):
        with context.backward(Unit(0, index), slices[index]):
            outputs[index].square().sum().backward()
        after(index)
    interception.close()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", [[12, 12], [5, 1, 10, 8], [1] * TOKENS])
def test_same_gradients_as_the_whole(lengths, recompute):
    torch.manual_seed(0)
    # inputs that ask for a gradient, as between stages: the first layer, with its bias, is deferred too
    net, x = Net(recompute).double(), torch.randn(3, TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    want = gradients_of_the_whole(net, x)
    keeper = WeightGradients()
    for _ in range(2):  # the second micro-batch starts from nothing
        run_sliced(net, x, lengths, keeper)
        assert net.second.weight.grad is None  # nothing of the weights has been made yet
        assert net.norm.weight.grad is not None
        keeper.make(0)
        for name, gradient in take(net).items():
            torch.testing.assert_close(gradient, want[name], rtol=1e-12, atol=1e-12, msg=name)


def test_longer_sequences_and_other_batches_follow():
    torch.manual_seed(0)
    net, keeper = Net().double(), WeightGradients()
    for batch, tokens in ((1, 8), (2, 16), (1, 4)):
        x = torch.randn(batch, tokens, FEATURES, dtype=torch.float64)
        want = gradients_of_the_whole(net, x)
        run_sliced(net, x, [tokens // 4] * 4, keeper)
        keeper.make(0)
        for name, gradient in take(net).items():
            torch.testing.assert_close(gradient, want[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[300], [128, 128], [1, 2, 200, 5], [40] * 7, [127, 1], [130, 3]])
def test_any_lengths_are_all_in_the_products(lengths, dtype):
    torch.manual_seed(0)
    keeper, layer = WeightGradients(), nn.Linear(4, 5, dtype=dtype)
    pairs = [(torch.randn(n, 4, dtype=dtype), torch.randn(n, 5, dtype=dtype)) for n in lengths]
    with keeper.backward(Unit(0, 0)):
        for inputs, gradient in pairs:
            keeper.keep(OfLinear(), (layer.weight, layer.bias), (inputs, gradient))
    keeper.make(0)
    inputs, gradient = (torch.cat([pair[i] for pair in pairs]).double() for i in range(2))
    # in 16 bits rounded once at the end: the nearest number to the sum
    torch.testing.assert_close(
        layer.weight.grad.double(), gradient.t() @ inputs, atol=1e-4, rtol=torch.finfo(dtype).eps
    )
    torch.testing.assert_close(layer.bias.grad.double(), gradient.sum(0), atol=1e-4, rtol=torch.finfo(dtype).eps)


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


def test_what_is_kept_does_not_hold_the_graph():
    net, keeper = Net(), WeightGradients()
    x = torch.randn(1, 6, FEATURES, requires_grad=True)
    context, interception = SliceContext(), Interception([net])
    context.weight_gradients = keeper
    span, _ = spans((6, 6))
    with context.forward(Unit(0, 0), span):
        context.enter_layer(0)
        output = net(x * 1)
    interception.close()
    with context.backward(Unit(0, 0), span):
        output.sum().backward()
    received = weakref.ref(x)
    del x, output
    gc.collect()
    assert keeper.kept_bytes > 0 and received() is None


@pytest.mark.parametrize("lengths", [[2, 2, 1], [1] * 5])
def test_a_bias_that_takes_a_gradient_of_one_row_for_its_own(lengths):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.shift = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.randn(FEATURES))

        def forward(self, x):
            return self.shift[None, None] + self.linear(x)

    net, keeper, x = Shift(), WeightGradients(), torch.randn(1, 5, FEATURES, requires_grad=True)
    want = gradients_of_the_whole(net, x)
    run_sliced(net, x, lengths, keeper)
    keeper.make(0)
    for name, gradient in take(net).items():
        torch.testing.assert_close(gradient, want[name], msg=name)


def test_inputs_of_several_layers_are_kept_once():
    keeper, inputs = WeightGradients(), torch.randn(3, 4)
    with keeper.backward(Unit(0, 0)):
        for layer in (nn.Linear(4, 2), nn.Linear(4, 5)):
            keeper.keep(OfLinear(), (layer.weight, layer.bias), (inputs, torch.randn(3, layer.out_features)))
    assert keeper.kept_bytes == 4 * 3 * (4 + 2 + 5)
    keeper.make(0)
    assert keeper.kept_bytes == 0


def test_two_micro_batches_on_their_way_back_are_kept_apart():
    torch.manual_seed(0)
    net, keeper = Net().double(), WeightGradients()
    xs = [torch.randn(1, 12, FEATURES, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    want = [gradients_of_the_whole(net, x)["second.weight"] for x in xs]
    context, cut, interception = SliceContext(), spans((6, 6)), Interception([net])
    context.weight_gradients = keeper
    outputs = {}
    for m, x in enumerate(xs):
        for span in cut:
            with context.forward(Unit(m, cut.index(span)), span):
                context.enter_layer(0)
                outputs[m, span] = net(x[:, span.start : span.stop])
    for m, span in ((0, cut[1]), (1, cut[1]), (1, cut[0]), (0, cut[0])):
        with context.backward(Unit(m, cut.index(span)), span):
            outputs[m, span].square().sum().backward()
    interception.close()
    both = keeper.kept_bytes
    for m in (1, 0):
        keeper.make(m)
        torch.testing.assert_close(take(net)["second.weight"], want[m], rtol=1e-12, atol=1e-12)
        assert keeper.kept_bytes == (both // 2 if m else 0)


def one_slice(net, keeper):
    """A context and what the net makes of the first of two slices in it."""
    context, (span, _) = SliceContext(), spans((6, 6))
    context.weight_gradients = keeper
    x, interception = torch.randn(1, 6, FEATURES, requires_grad=True), Interception([net])
    try:
        with context.forward(Unit(0, 0), span):
            context.enter_layer(0)
            return context, span, x, net(x)
    finally:
        interception.close()


def test_a_weight_that_changed_before_its_backward_is_an_error():
    net, keeper = Net(), WeightGradients()
    context, span, _, output = one_slice(net, keeper)
    with torch.no_grad():
        net.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), context.backward(Unit(0, 0), span):
        output.sum().backward()


def test_a_gradient_of_a_gradient_is_an_error():
    net, keeper = Net(), WeightGradients()
    context, span, x, output = one_slice(net, keeper)
    with context.backward(Unit(0, 0), span):
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_a_model_that_differentiates_itself_is_refused():
    class Penalised(Net):
        def forward(self, x):
            out = super().forward(x)
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            return out + gradient

    with pytest.raises(RuntimeError, match=r'^token_pipeline.weight_gradients: got "micro_batch" and .* use "slice"$'):
        one_slice(Penalised(), WeightGradients())


def test_hooks_on_gradients_run_once_per_micro_batch():
    net, keeper, calls = Net(), WeightGradients(), []
    net.second.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [6] * 4, keeper)
    assert not calls
    keeper.make(0)
    assert len(calls) == 1
    keeper.make(0)  # nothing is left to make
    assert len(calls) == 1


def test_one_layers_gradients_are_there_at_a_time(monkeypatch):
    made, make = [], OfLinear.__call__

    def spy(rule, parameters, operands):
        gradients = make(rule, parameters, operands)
        assert not [ref for ref in made if ref() is not None], "the gradients of another layer are still there"
        made.extend(weakref.ref(gradient.untyped_storage()) for gradient in gradients)
        return gradients

    net, keeper = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4))), WeightGradients()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # else the first gradient is taken as it is
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [6] * 4, keeper)
    monkeypatch.setattr(OfLinear, "__call__", spy)
    keeper.make(0)
    assert len(made) == 8 and all(parameter.grad.any() for parameter in net.parameters())


@pytest.mark.parametrize("uses", [2, 3])
def test_a_tied_weights_gradient_is_the_sum_of_its_uses(uses):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=bool(i % 2)) for i in range(uses))
            for layer in self.layers[1:]:
                layer.weight = self.layers[0].weight

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    net, keeper, calls, x = (
        Tied().double(),
        WeightGradients(),
        [],
        torch.randn(1, TOKENS, FEATURES, dtype=torch.float64),
    )
    weight = net.layers[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(None))
    run_sliced(net, x, [6] * 4, keeper)
    keeper.make(0)
    assert len(calls) == 1
    taken = weight.grad
    net.zero_grad()
    net(x).square().sum().backward()
    assert (taken - weight.grad).norm() <= 1e-12 * weight.grad.norm()


def test_frozen_weights_and_whole_sequences_take_no_part():
    net, keeper = Net(), WeightGradients()
    net.second.weight.requires_grad_(False)
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [TOKENS], keeper)
    assert net.first.weight.grad is not None and net.second.weight.grad is None
    net.zero_grad()
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [6] * 4, keeper)
    keeper.make(0)
    assert net.first.weight.grad is not None and net.second.weight.grad is None


# ---------------------------------------------------------------------------------------------------- what layers there are

ROWS = 11


class TwoLinears(nn.Module):
    """The first layer gets what asks for no gradient."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8, bias=bias), nn.Linear(8, FEATURES, bias=bias)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


class Table(nn.Module):
    """An embedding, looked up twice, and a linear layer on it."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.linear = nn.Embedding(ROWS, FEATURES, **options), nn.Linear(FEATURES, FEATURES)

    def forward(self, tokens):
        return self.linear(self.table(tokens)) * self.table((tokens + 1) // 2)


class Tied(Table):
    """A head that is the embedding's table, by ``product``."""

    def __init__(self, product):
        super().__init__()
        self.product = product

    def forward(self, tokens):
        return self.product(torch.tanh(super().forward(tokens)), self.table.weight)


class Checkpointed(Table):
    def forward(self, tokens):
        return checkpoint(super().forward, tokens, use_reentrant=False)


class ExtraBias(nn.Module):
    """A bias that is made of something else."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(FEATURES, FEATURES)), nn.Parameter(torch.randn(FEATURES))

    def forward(self, x):
        return deferred_linear(x, self.weight, self.bias * 2)


def weight_normed():
    net = TwoLinears(True)
    nn.utils.parametrizations.weight_norm(net.first)
    return net


def partly_frozen(name):
    net = TwoLinears(True)
    for layer in (net.first, net.last):
        getattr(layer, name).requires_grad_(False)
    return net


class Autocast(TwoLinears):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


# name: a model, and its matrices whose gradients are made slice by slice
LAYERS = {
    "linear": (lambda: TwoLinears(True), []),
    "linear without bias": (lambda: TwoLinears(False), []),
    "embedding": (Table, []),
    "embedding with a padding index": (lambda: Table(padding_idx=3), []),
    "embedding with a padding index from the end": (lambda: Table(padding_idx=-1), []),
    "embedding scaled by frequency": (lambda: Table(scale_grad_by_freq=True), []),
    "embedding with a largest norm": (lambda: Table(max_norm=0.5), ["table.weight"]),
    "sparse embedding": (lambda: Table(sparse=True), ["table.weight"]),
    "recomputed embedding": (Checkpointed, []),
    "tied": (lambda: Tied(deferred_linear), []),
    "tied, a bare product": (lambda: Tied(F.linear), ["table.weight"]),
    "weight norm": (
        weight_normed,
        ["first.parametrizations.weight.original0", "first.parametrizations.weight.original1"],
    ),
    "trained bias": (lambda: partly_frozen("weight"), []),
    "trained weight": (lambda: partly_frozen("bias"), []),
    "a bias made of another": (ExtraBias, ["weight"]),
}


def inputs_of(net):
    """[3, TOKENS] indices or [3, TOKENS, FEATURES] numbers that ask for no gradient."""
    random = torch.Generator().manual_seed(1)
    if isinstance(net, Table):
        return torch.randint(0, ROWS, (3, TOKENS), generator=random)
    return torch.randn(3, TOKENS, FEATURES, generator=random, dtype=torch.float64)


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def far_off(mutant, name="embedding"):
    """How far the gradients of such layers are from the whole's under a mutant, in tolerances; for ``tests.mutants``."""
    torch.manual_seed(0)
    net, keeper = LAYERS[name][0]().double(), WeightGradients()
    x = inputs_of(net)
    want = gradients_of_the_whole(net, x)
    with applied(mutant):
        run_sliced(net, x, [5, 1, 10, 8], keeper)
        keeper.make(0)
    got = take(net)
    return (
        max(float((dense(got[n]) - dense(g)).norm() / dense(g).norm()) for n, g in want.items() if g is not None)
        / 1e-10
    )


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_gradients_of_the_whole(name):
    assert far_off(None, name) <= 1


@pytest.mark.parametrize("name", LAYERS)
def test_only_what_is_not_deferred_has_a_gradient_before_its_time(name):
    make, slow = LAYERS[name]
    net, keeper = make().double(), WeightGradients()
    run_sliced(net, inputs_of(net), [12, 12], keeper)
    matrices = {n for n, p in net.named_parameters() if p.dim() >= 2 and p.grad is not None}
    assert matrices == set(slow)
    trained = [n for n, p in net.named_parameters() if p.dim() >= 2 and p.requires_grad]
    keeper.make(0)
    assert all(net.get_parameter(n).grad is not None for n in trained)


def test_under_autocast_a_copy_is_multiplied_and_autograd_makes_its_gradient():
    torch.manual_seed(0)
    net, keeper = Autocast(True), WeightGradients()
    x = inputs_of(net).float()
    want = gradients_of_the_whole(net, x)
    run_sliced(net, x, [12, 12], keeper)
    assert keeper.kept_bytes == 0
    for name, gradient in take(net).items():
        torch.testing.assert_close(gradient, want[name], rtol=5e-2, atol=5e-2 * float(want[name].abs().max()))


@pytest.mark.parametrize("name", ["linear", "embedding", "embedding scaled by frequency", "tied"])
@pytest.mark.parametrize("at", [[3, 1, 0], [2, 0], [3, 2, 1, 0]])
def test_gradients_of_a_part_of_the_slices(name, at):
    torch.manual_seed(0)
    net, keeper, parts = LAYERS[name][0]().double(), WeightGradients(), []
    x = inputs_of(net)
    want = gradients_of_the_whole(net, x)

    def make(index):
        if index in at:
            before = keeper.kept_bytes
            keeper.make(0, index)
            parts.append(before - keeper.kept_bytes)
            weight = net.first.weight if isinstance(net, TwoLinears) else net.linear.weight
            assert weight.grad is not None

    run_sliced(net, x, [5, 1, 10, 8], keeper, make)
    assert len(parts) == len(at) and all(part > 0 for part in parts) and keeper.kept_bytes == 0
    for n, gradient in take(net).items():
        torch.testing.assert_close(gradient, want[n], rtol=1e-10, atol=1e-12, msg=n)


@pytest.mark.parametrize("late", [False, True])
def test_a_part_is_that_of_its_slices(late):
    """Made right behind the slice's backward, or behind all of them."""
    torch.manual_seed(0)
    net, keeper, parts = TwoLinears(True).double(), WeightGradients(), {}
    x, cuts = inputs_of(net), spans((5, 1, 10, 8))

    def make(index):
        keeper.make(0, index)
        parts[index] = take(net)

    run_sliced(net, x, [5, 1, 10, 8], keeper, lambda index: None if late else make(index))
    for index in reversed(range(len(cuts) if late else 0)):
        make(index)
    for index, span in enumerate(cuts):
        want = gradients_of_the_whole(net, x[:, span.start : span.stop])
        for n, gradient in parts[index].items():
            torch.testing.assert_close(gradient, want[n], rtol=1e-10, atol=1e-12, msg=n)


class Inplace(nn.Module):
    """Writes into what its layers hand on."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, tokens):
        hidden = self.table(tokens)
        hidden[..., 0] = 0.0
        up = self.up(hidden).relu_()
        return self.down(up).add_(hidden)


def test_models_may_write_into_what_a_deferred_layer_returns():
    torch.manual_seed(0)
    net, keeper = Inplace().double(), WeightGradients()
    tokens = torch.randint(11, (2, 24))
    net(tokens).square().sum().backward()
    want = take(net)
    context, interception = SliceContext(), Interception([net])
    context.weight_gradients = keeper
    outs = []
    for index, span in enumerate(spans((10, 14))):
        with context.forward(Unit(0, index), span):
            outs.append(net(tokens[:, span.start : span.stop]))
    for index in (1, 0):
        with context.backward(Unit(0, index), spans((10, 14))[index]):
            outs[index].square().sum().backward()
    keeper.make(0)
    interception.close()
    for n, gradient in take(net).items():
        torch.testing.assert_close(gradient, want[n], rtol=1e-10, atol=1e-12, msg=n)

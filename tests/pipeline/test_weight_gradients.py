"""Weight gradients made once per micro-batch: the same gradients, hooks and memory as one backward of the whole."""

import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.operators import compiled
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.gradient_sums import GradientSums
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import spans
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.schedule import Unit

pytestmark = pytest.mark.usefixtures("operators")

TOKENS, FEATURES, ROWS = 24, 6, 11
UNEVEN = (5, 1, 10, 8)


def net_of(forward, recompute=False, **parts):
    net = nn.Module()
    for name, part in parts.items():
        setattr(net, name, part)
    run = partial(forward, net)
    net.forward = partial(checkpoint, run, use_reentrant=False) if recompute else run
    return net


def twice(recompute=False):
    first, second = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES, bias=False)
    parts = {"first": first, "second": second, "norm": nn.LayerNorm(FEATURES)}
    return net_of(lambda net, x: net.first(net.norm(net.second(F.gelu(net.first(x))))) + 1, recompute, **parts)


def linears(change=lambda first: first):
    return nn.Sequential(change(nn.Linear(FEATURES, 8)), nn.GELU(), nn.Linear(8, FEATURES))


def looked_up(net, tokens):
    return net.linear(net.table(tokens)) * net.table((tokens + 1) // 2)


def table(forward=looked_up, **options):
    parts = {"table": nn.Embedding(ROWS, FEATURES, **options), "linear": nn.Linear(FEATURES, FEATURES)}
    return net_of(forward, **parts)


def tied(product):
    """A head that is the embedding's table, by ``product``."""
    return table(lambda net, tokens: product(torch.tanh(looked_up(net, tokens)), net.table.weight))


def in_place(net, tokens):
    """Writes into what its layers hand on."""
    hidden = net.table(tokens)
    hidden[..., 0] = 0.0
    return net.linear(net.linear(hidden).relu_()).add_(hidden)


def tied_linears():
    """One weight in several layers, with a bias in every second."""
    net = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=bool(i % 2)) for i in range(3)))
    for layer in net[1:]:
        layer.weight = net[0].weight
    return net


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return 2 * result.as_subclass(torch.Tensor) if func is F.linear else result


def doubled(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Doubled))
    return linear


# name: a model, and its matrices whose gradients are made slice by slice
NORMED = "0.parametrizations.weight.original"
LAYERS = {
    "a weight twice": (twice, []), "recomputed": (lambda: twice(recompute=True), []),
    "linear": (linears, []), "embedding": (table, []),
    "embedding with a padding index from the end": (lambda: table(padding_idx=-1), []),
    "embedding scaled by frequency": (lambda: table(scale_grad_by_freq=True), []),
    "embedding with a largest norm": (lambda: table(max_norm=0.5), ["table.weight"]),
    "sparse embedding": (lambda: table(sparse=True), ["table.weight"]), "tied": (lambda: tied(deferred_linear), []),
    "tied, a bare product": (lambda: tied(F.linear), ["table.weight"]), "tied three times": (tied_linears, []),
    "weight norm": (lambda: linears(nn.utils.parametrizations.weight_norm), [NORMED + "0", NORMED + "1"]),
    "a class with a linear layer of its own": (lambda: linears(doubled), ["0.weight"]),
    # that takes a gradient of one row for its own
    "a bias of one row": (lambda: net_of(lambda net, x: net.shift[None, None] + net.linear(x),
                          linear=nn.Linear(FEATURES, FEATURES), shift=nn.Parameter(torch.randn(FEATURES))), []),
    "written in place": (lambda: table(in_place), []),
    "complex": (lambda: net_of(lambda net, x: torch.view_as_real(net.linear(torch.complex(x, x))),
                linear=nn.Linear(FEATURES, FEATURES, dtype=torch.complex128)), ["linear.weight"]),
}  # fmt: skip


def made(name):
    """A model in fp64 and inputs [1 or 3, TOKENS, ...], of the first two such that ask for a gradient, as between stages."""
    torch.manual_seed(0)
    net = LAYERS[name][0]().double()
    if hasattr(net, "table"):
        return net, torch.randint(0, ROWS, (3, TOKENS))
    return net, torch.randn(
        1 if hasattr(net, "shift") else 3, TOKENS, FEATURES, dtype=torch.float64, requires_grad=hasattr(net, "norm")
    )


def take(net):
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
        assert keeper.kept_bytes or not deferred
        kept = (t for layer in keeper._layers[0].values() for t in layer.tensors())
        assert not any((t._base if t._is_view() else t).grad_fn for t in kept), "graphs are held"
        weights = [net.get_parameter(n) for n in sorted(deferred)]
        hooks = [weight.register_post_accumulate_grad_hook(calls.append) for weight in weights]
        keeper.make(0)
        keeper.make(0)  # nothing is left to make
        assert sorted(map(id, calls)) == sorted(map(id, weights)) and keeper.kept_bytes == 0
        for hook in hooks:
            hook.remove()
        calls.clear()
        assert_same(take(net), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 2, 200, 5], [40] * 7])
def test_any_lengths_are_all_in_the_products(lengths, dtype):
    torch.manual_seed(0)
    keeper, layer, idle = WeightGradients(), nn.Linear(4, 5, dtype=dtype), nn.Linear(4, 5, dtype=dtype)
    x, *values = (torch.randint(-2, 3, shape).to(dtype) for shape in ((1, sum(lengths), 4), (5, 4), (5,)))
    for parameter, value in zip(layer.parameters(), values, strict=True):
        parameter.data = value  # small integers: all but the sums is exact
    run_sliced(net_of(lambda net, x: layer(x) + idle(x[:, :0]).sum(), layer=layer, idle=idle), x, lengths, keeper)
    keeper.make(0)
    assert not idle.weight.grad.any()  # an expert without tokens
    inputs, gradient = x[0].double(), 2 * layer(x)[0].double()
    # in 16 bits rounded once at the end: the nearest number to the sum
    for got, want in ((layer.weight, gradient.t() @ inputs), (layer.bias, gradient.sum(0))):
        torch.testing.assert_close(got.grad.double(), want, atol=1e-4, rtol=torch.finfo(dtype).eps / 2)


def test_one_layers_gradients_are_there_at_a_time():
    net, keeper, seen = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4))), WeightGradients(), []

    def spy(layer, gradient):
        others = [ref for other, ref in seen if other is not layer and ref() is not None]
        assert not others, "the gradients of another layer are still there"
        seen.append((layer, weakref.ref(gradient.untyped_storage())))

    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [6] * 4, keeper)
    for layer in net:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)  # else the first gradient is taken as it is
            parameter.register_hook(partial(spy, layer))
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


def test_gradients_that_are_no_sum_over_slices_wait_for_the_last_part():
    (net, x), keeper = made("embedding scaled by frequency"), WeightGradients()
    want = gradients_of_the_whole(net, x)
    run_sliced(net, x, UNEVEN, keeper, lambda index: index == 2 or keeper.make(0, index))
    assert keeper.kept_bytes == 0
    assert_same(take(net), want)


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


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_an_operand_that_is_written_into_before_its_product_is_an_error(which):
    x, keeper, held = torch.randn(1, 4, FEATURES, requires_grad=True), WeightGradients(), []
    if which == "gradient":
        x.register_hook(lambda gradient: (held.pop().mul_(2), None)[1])
    net = net_of(lambda net, x: ((y := net.linear(x)), y.register_hook(held.append))[0], linear=nn.Linear(FEATURES, 5))
    run_sliced(net, x, [2, 2], keeper, lambda index: index or which == "gradient" or x.detach().add_(1))
    with pytest.raises(RuntimeError, match="modified in place during the backward pass"):
        keeper.make(0)


def test_linear_layers_run_in_cpp_unless_modes_watch_python():
    for mode, here in ((nullcontext(), compiled.load() is not None), (BaseTorchFunctionMode(), False)):
        with mode:
            output = one_slice(linears(), WeightGradients(), torch.randn(1, 6, FEATURES))[1]
        assert output.grad_fn.name().startswith("torch::") == here


def test_what_autograd_would_refuse_or_no_backward_would_make_is_an_error():
    net, x = twice(), torch.randn(1, 6, FEATURES, requires_grad=True)
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
        one_slice(net_of(lambda net, x: torch.autograd.grad(net.inner(x).sum(), x)[0], inner=net), WeightGradients(), x)


def test_the_end_of_another_stage_on_the_place_rounds_no_sum_of_16_bits():
    stage = Stage(0, [nn.Linear(1, 1), nn.Linear(1, 1, dtype=torch.bfloat16)], 0, gradients=None)
    stage.begin(StepBatch(), None, weights_apart=False)
    (mine, other), slices = stage._summed, [1.0, 2.0**-9, 2.0**-9, 2.0**-9]  # each of the last three is lost beside 1
    for others_end in (0, 1, 3):
        sums = GradientSums()
        for number, gradient in enumerate(slices):
            mine.grad, other.grad = torch.full_like(mine, gradient), torch.ones_like(other)
            sums.put_aside([mine])
            if number < others_end:
                sums.give_back([other])
                assert mine.grad is None and other.grad is not None
        sums.give_back([mine])
        assert mine.grad is not None and mine.grad.item() == torch.tensor(sum(slices)).bfloat16().item() > 1

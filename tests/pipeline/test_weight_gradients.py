"""Weight gradients made once per micro-batch: the same gradients, hooks and memory as one backward of the whole."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_terapipe.pipeline.context import SliceContext
from ds_terapipe.pipeline.interception import Overrides, adapt_parallel_linears
from ds_terapipe.pipeline.spans import spans
from ds_terapipe.pipeline.weight_gradients import WeightGradients

TOKENS, FEATURES = 24, 6


@pytest.fixture(autouse=True)
def _overrides():
    Overrides.acquire()
    yield
    Overrides.release()


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
        return F.linear(x, self.first.weight) + 1  # the first weight once more in the same slice


def gradients_of_the_whole(net, x):
    net(x).square().sum().backward()
    return take(net)


def take(net):
    taken = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return taken


def run_sliced(net, x, lengths, keeper):
    context = SliceContext()
    context.weight_gradients = keeper
    slices = spans(tuple(lengths))
    outputs = []
    for span in slices:
        with context.forward(0, span):
            context.enter_layer(0)
            outputs.append(net(x[:, span.start : span.stop]))
    for span, output in reversed(list(zip(slices, outputs, strict=True))):
        with context.backward(0, span):
            output.square().sum().backward()


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
    with keeper.backward(0):
        for inputs, gradient in pairs:
            keeper.keep(layer.weight, layer.bias, inputs, gradient)
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
        with keeper.backward(0):
            keeper.keep(layer.weight, layer.bias, *kept)
    kept[which].add_(1)
    with pytest.raises(RuntimeError, match=r"token_pipeline.weight_gradients: .* modified in place"):
        keeper.make(0)
    assert layer.weight.grad is None


def test_what_is_kept_does_not_hold_the_graph():
    net, keeper = Net(), WeightGradients()
    x = torch.randn(1, 6, FEATURES, requires_grad=True)
    context = SliceContext()
    context.weight_gradients = keeper
    span, _ = spans((6, 6))
    with context.forward(0, span):
        context.enter_layer(0)
        output = net(x * 1)
    with context.backward(0, span):
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
    with keeper.backward(0):
        for layer in (nn.Linear(4, 2), nn.Linear(4, 5)):
            keeper.keep(layer.weight, layer.bias, inputs, torch.randn(3, layer.out_features))
    assert keeper.kept_bytes == 4 * 3 * (4 + 2 + 5)
    keeper.make(0)
    assert keeper.kept_bytes == 0


def test_two_micro_batches_on_their_way_back_are_kept_apart():
    torch.manual_seed(0)
    net, keeper = Net().double(), WeightGradients()
    xs = [torch.randn(1, 12, FEATURES, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    want = [gradients_of_the_whole(net, x)["second.weight"] for x in xs]
    context, cut = SliceContext(), spans((6, 6))
    context.weight_gradients = keeper
    outputs = {}
    for m, x in enumerate(xs):
        for span in cut:
            with context.forward(m, span):
                context.enter_layer(0)
                outputs[m, span] = net(x[:, span.start : span.stop])
    for m, span in ((0, cut[1]), (1, cut[1]), (1, cut[0]), (0, cut[0])):
        with context.backward(m, span):
            outputs[m, span].square().sum().backward()
    both = keeper.kept_bytes
    for m in (1, 0):
        keeper.make(m)
        torch.testing.assert_close(take(net)["second.weight"], want[m], rtol=1e-12, atol=1e-12)
        assert keeper.kept_bytes == (both // 2 if m else 0)


def one_slice(net, keeper):
    """A context and what the net makes of the first of two slices in it."""
    context, (span, _) = SliceContext(), spans((6, 6))
    context.weight_gradients = keeper
    x = torch.randn(1, 6, FEATURES, requires_grad=True)
    with context.forward(0, span):
        context.enter_layer(0)
        return context, span, x, net(x)


def test_a_weight_that_changed_before_its_backward_is_an_error():
    net, keeper = Net(), WeightGradients()
    context, span, _, output = one_slice(net, keeper)
    with torch.no_grad():
        net.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), context.backward(0, span):
        output.sum().backward()


def test_a_gradient_of_a_gradient_is_an_error():
    net, keeper = Net(), WeightGradients()
    context, span, x, output = one_slice(net, keeper)
    with context.backward(0, span):
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


def test_frozen_weights_and_whole_sequences_take_no_part():
    net, keeper = Net(), WeightGradients()
    net.second.weight.requires_grad_(False)
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [TOKENS], keeper)
    assert net.first.weight.grad is not None and net.second.weight.grad is None
    net.zero_grad()
    run_sliced(net, torch.randn(1, TOKENS, FEATURES), [6] * 4, keeper)
    keeper.make(0)
    assert net.first.weight.grad is not None and net.second.weight.grad is None


def test_outside_a_slice_linear_is_what_it_was():
    net, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    net(x).sum().backward()
    torch.testing.assert_close(net.weight.grad, x.sum(0).expand(4, 4))


def test_the_linear_layers_of_megatron_core_defer_too():
    class ParallelLinear(nn.Module):  # megatron-core's interface: a product behind ``_forward_impl``
        def __init__(self):
            super().__init__()
            self.weight, self.products = nn.Parameter(torch.randn(FEATURES, FEATURES)), 0

        def _forward_impl(self, input, weight, **kwargs):
            self.products += 1
            return torch.matmul(input, weight.t())

        def forward(self, x):
            return self._forward_impl(
                input=x, weight=self.weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
            )

    net, keeper = ParallelLinear(), WeightGradients()
    x = torch.randn(1, TOKENS, FEATURES, requires_grad=True)
    want = gradients_of_the_whole(net, x)
    adapt_parallel_linears(net)
    adapt_parallel_linears(net)
    run_sliced(net, x, [6] * 4, keeper)
    assert net.weight.grad is None
    keeper.make(0)
    torch.testing.assert_close(take(net)["weight"], want["weight"])
    assert net.products == 1  # outside slices it still runs itself
    net(x)
    assert net.products == 2

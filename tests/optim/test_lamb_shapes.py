"""Every size, offset and order of memory, and parameters that come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.op import segments
from tests.optim.checks import RATIO_TOLERANCE, STEP_TOLERANCE
from tests.optim.oracle import Oracle, Settings, ratio_error, step_error

SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 65535, 65536, 65537)
BACKENDS = ("auto", "plain")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def compare(params: list[Parameter], backend: str, gradient: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
    """Two steps of the op from these parameters are the oracle's."""
    optimizer = FusedLamb(params, lr=0.01, max_grad_norm=1.0, backend=backend)
    oracle = Oracle(Settings(max_grad_norm=1.0))
    torch.manual_seed(0)
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in params]
        grads = [gradient(parameter.detach()) for parameter in params]
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        expected, ratios = oracle.step(before, grads)
        for three in zip(before, params, expected, strict=True):
            assert step_error(*three) <= STEP_TOLERANCE, tuple(three[0].shape)
        for layer, ratio in zip(optimizer.statistics(), ratios, strict=True):
            assert ratio_error(layer.trust_ratio, ratio) <= RATIO_TOLERANCE


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_sizes_at_odd_offsets(offset: int, backend: str) -> None:
    """Parameters that begin anywhere in their memory; what lies around them stays as it is."""
    torch.manual_seed(offset)
    stores = [torch.randn(size + offset + 5) for size in SIZES]
    around = [store.clone() for store in stores]
    compare([Parameter(store[offset : offset + size]) for store, size in zip(stores, SIZES, strict=True)], backend)
    for store, was, size in zip(stores, around, SIZES, strict=True):
        assert torch.equal(store[:offset], was[:offset]) and torch.equal(store[offset + size :], was[offset + size :])
        assert size == 0 or not torch.equal(store, was)


ORDERS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(33, 7).t(),
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "with gaps": lambda: torch.randn(33, 14)[:, ::2],
    "with gaps and transposed": lambda: torch.randn(33, 14)[:, ::2].t(),
    "dimensions of one": lambda: torch.randn(1, 9, 1).transpose(0, 1),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(3, 0, 2),
}


@pytest.mark.parametrize("gradients", ["contiguous", "reversed", "alike"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_memory(order: str, gradients: str, backend: str) -> None:
    def gradient(parameter: Tensor) -> Tensor:
        if gradients == "contiguous":
            return torch.randn(parameter.shape)
        if gradients == "reversed":
            dimensions = tuple(range(parameter.dim()))[::-1]
            return torch.randn([parameter.shape[d] for d in dimensions]).permute(dimensions)
        return torch.randn_like(parameter)

    torch.manual_seed(5)
    compare([Parameter(ORDERS[order]()), Parameter(torch.randn(5))], backend, gradient)


def test_ten_thousand_tensors(backend: str) -> None:
    """The first step of each, where M / sqrt(V) is g / |g|."""
    torch.manual_seed(0)
    count = 10_000 if backend == "auto" else 1_000
    weights, grads = torch.randn(count, 3), torch.rand(count, 3) + 0.5
    params = [Parameter(row.clone()) for row in weights]
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = gradient
    optimizer = FusedLamb(params, lr=0.01, backend=backend)
    optimizer.step()
    weights, grads = weights.double(), grads.double()
    update = grads / (grads + 1e-6) + 0.01 * weights
    ratios = torch.linalg.vector_norm(weights, dim=1) / torch.linalg.vector_norm(update, dim=1)
    expected = weights - 0.01 * ratios[:, None] * update
    assert step_error(weights, torch.stack([parameter.detach() for parameter in params]), expected) <= STEP_TOLERANCE
    got = torch.tensor([layer.trust_ratio for layer in optimizer.statistics()], dtype=torch.float64)
    assert ((got - ratios).abs() / ratios).max() <= RATIO_TOLERANCE


def test_parameters_without_gradients_are_left_alone(backend: str) -> None:
    """No decay, no state; and the steps of each parameter are its own."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(50)) for _ in range(3)]
    alone = [Parameter(parameter.detach().clone()) for parameter in params]
    optimizer = FusedLamb(params, backend=backend)
    single = [FusedLamb([parameter], backend=backend) for parameter in alone]
    start = params[2].detach().clone()
    for present in ((0,), (0, 1), (1,), (0, 1)):
        for i in range(3):
            params[i].grad = torch.randn(50) if i in present else None
            alone[i].grad = params[i].grad
        optimizer.step()
        for i in present:
            single[i].step()
    assert [optimizer.state[parameter].get("step") for parameter in params] == [3, 3, None]
    assert "exp_avg" not in optimizer.state[params[2]] and torch.equal(params[2], start)
    for one, other in zip(params, alone, strict=True):
        assert torch.equal(one, other)


def test_gradients_and_parameters_may_move_in_memory(backend: str) -> None:
    torch.manual_seed(0)
    steady, moving = Parameter(torch.randn(300)), Parameter(torch.zeros(300))
    moving.data.copy_(steady.data)
    first, second = FusedLamb([steady], backend=backend), FusedLamb([moving], backend=backend)
    held = []
    for _ in range(3):
        gradient = torch.randn(300)
        steady.grad = gradient
        held.append(torch.zeros(301))
        moving.grad = held[-1][1:].copy_(gradient)
        moving.data = moving.data.clone()
        state = second.state[moving]
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].clone()
            state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()
        first.step()
        second.step()
    assert torch.equal(steady, moving)


def test_fused_attention_as_three_layers(backend: str) -> None:
    """Rows in turns of 3, 2 and 1 for two heads: the steps of query, key and value are those of matrices of their own."""
    torch.manual_seed(0)
    fused, bias = Parameter(torch.randn(12, 5)), Parameter(torch.randn(12))
    turns = torch.tensor([0, 0, 0, 1, 1, 2] * 2)
    parts = [Parameter(p.detach()[turns == part].clone()) for p in (fused, bias) for part in range(3)]
    fused.lamb_rows = bias.lamb_rows = (3, 2, 1)
    optimizer = FusedLamb([fused, bias], split_qkv=True, backend=backend)
    apart = FusedLamb(parts, backend=backend)
    for transposed in (False, True):
        fused.grad, bias.grad = torch.randn(12, 5), torch.randn(12)
        for i, part in enumerate(parts):
            part.grad = (fused.grad, bias.grad)[i // 3][turns == i % 3]
        if transposed:
            fused.grad = fused.grad.t().contiguous().t()
        optimizer.step()
        apart.step()
        for i, part in enumerate(parts):
            # The op may round sums of norms in another order; a unit of fp32 of the parameters is 1e-7.
            torch.testing.assert_close((fused, bias)[i // 3][turns == i % 3], part, rtol=0, atol=3e-7)
    names = [layer.name for layer in optimizer.statistics()]
    assert names == [f"group0.{p}[{part}]" for p in (0, 1) for part in range(3)]
    assert len({layer.trust_ratio for layer in optimizer.statistics()}) == 6


@pytest.mark.parametrize("rows", [(3, 2), (0, 12), (), 12, (1.5, 4.5)])
def test_rows_that_do_not_fit_are_refused(rows: object) -> None:
    parameter = Parameter(torch.randn(12, 5))
    parameter.lamb_rows = rows
    with pytest.raises(ConfigError, match=r"optimizer.params.split_qkv: got lamb_rows"):
        FusedLamb([parameter], split_qkv=True)
    FusedLamb([parameter])


def test_nothing_to_split_is_refused() -> None:
    parameter = Parameter(torch.randn(12, 5))
    parameter.grad = torch.ones(12, 5)
    with pytest.raises(ConfigError, match=r"optimizer.params.split_qkv: got true"):
        FusedLamb([parameter], split_qkv=True).step()


@settings(max_examples=100, deadline=None)
@given(
    pattern=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    repeats=st.integers(1, 3),
    row=st.integers(1, 5),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_runs_give_each_element_its_sub_layer(
    pattern: list[int], repeats: int, row: int, cuts: tuple[float, float]
) -> None:
    shape = (sum(pattern) * repeats, row)
    total = shape[0] * row
    start, stop = sorted(int(cut * total) for cut in cuts)
    whose = [layer for layer, rows in enumerate(pattern) for _ in range(rows * row)] * repeats
    found: list[int] = []
    for layer, offset, length in segments.runs(shape, tuple(pattern), start, stop - start):
        assert offset == len(found) and length > 0
        found += [layer] * length
    assert found == whose[start:stop]


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
)
def test_a_tensor_that_fills_its_memory_is_known(shape: list[int], order: list[int], steps: list[int]) -> None:
    order = [d for d in order if d < len(shape)]
    base = torch.zeros([shape[d] * steps[d] for d in order])
    whole = base[tuple(slice(None, None, steps[d]) for d in order)]
    tensor = whole.permute([order.index(d) for d in range(len(shape))])
    places = {sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) for index in _indices(tensor.shape)}
    expected = places == set(range(tensor.numel()))
    assert segments.fills_memory(tensor) == expected


def _indices(shape: torch.Size) -> list[tuple[int, ...]]:
    indices: list[tuple[int, ...]] = [()]
    for size in shape:
        indices = [(*index, i) for index in indices for i in range(size)]
    return indices

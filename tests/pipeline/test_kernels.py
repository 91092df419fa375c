"""The rectangular attention kernels: each against the formula in double precision, and which of them is chosen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.pipeline.operators import kernels
from ds_terapipe.pipeline.operators.kernels import (
    Attention,
    Call,
    CpuFlash,
    CudaEfficient,
    CudaFlash,
    Formula,
    causal_mask,
    choose,
    choose_on_cuda,
)
from tests.pipeline import cuda_attention
from tests.pipeline.cuda_attention import can_efficient, can_flash, formula

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
KERNELS = [(kernel, dtype) for kernel in (CpuFlash, Formula) for dtype in TOLERANCE]
CUDA = [
    (CudaFlash, torch.bfloat16),
    (CudaFlash, torch.float16),
    (CudaEfficient, torch.float32),
    (CudaEfficient, torch.bfloat16),
]


@pytest.fixture
def aten(request, monkeypatch):
    """What CUDA's kernels call; others call what is there."""
    stand_in = cuda_attention.Aten()
    if request.node.callspec.params.get("kernel") not in (CpuFlash, Formula):
        monkeypatch.setattr(kernels, "_ATEN", stand_in)
    return stand_in


def reference(q, k, v, mask, scale, window):
    """Row r sees columns up to columns - rows + r, a window of them, or what the additive mask leaves."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    visible = cuda_attention.lower_right(q, k, None if window is None else window - 1) if mask is None else mask
    return formula(q, k, v, visible, scale).transpose(1, 2)


def drawn(heads, length, d=8, dtype=torch.float64, seed=0):
    return torch.randn(2, heads, length, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def compare(kernel, dtype, rows, columns, kv_heads=2, groups=1, d=8, mask=None, scale=None, window=None):
    """Output and gradients of a kernel, which gets narrow views of longer buffers, against autograd of the formula."""
    q, grad = (drawn(kv_heads * groups, rows, d, dtype, seed) for seed in range(2))
    k, v = (drawn(kv_heads, columns + 5, d, dtype, seed)[:, :, :columns] for seed in range(2, 4))
    additive = None if mask is None else mask.to(dtype)
    call, before = Call(0.0, scale, window=window), [t.clone() for t in (q, k, v, grad)]
    out, saved, kept = kernel.forward(q, k, v, additive, call)
    got = kernel.backward(grad, saved, kept, k, v, additive, call)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, grad), before, strict=True)), "inputs are written to"
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = reference(*leaves, None if mask is None else mask.double(), scale, window)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    assert out.dtype == dtype
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *got[:3]), (expected, *gradients), strict=True):
        assert a.shape == b.shape and torch.isfinite(a).all()
        error = float((a.double() - b.detach()).norm() / b.detach().norm().clamp(min=0.1))  # with one column dq is zero
        assert error <= TOLERANCE[dtype], (name, error)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS + CUDA)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("rows", "columns", "window"), [(6, 6, None), (1, 9, None), (33, 70, None), (7, 10, 4), (6, 6, 2), (5, 12, 1)]
)
def test_causal_means_lower_right_and_a_window_to_the_left(kernel, dtype, rows, columns, window, groups, aten):
    compare(kernel, dtype, rows, columns, groups=groups, window=window, scale=0.2)
    name = {CudaFlash: "flash", CudaEfficient: "efficient"}.get(kernel)
    assert aten.calls == ([] if name is None else [name, f"{name} backward"])
    assert aten.masked == (2 if kernel is CudaEfficient and window is not None else 0), "causal needs no mask"


@pytest.mark.parametrize(("kernel", "dtype"), [(k, t) for k, t in KERNELS + CUDA if k is not CudaFlash])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 6), (2, 6)])
def test_explicit_masks_of_all_shapes_with_rows_that_see_nothing(kernel, shape, dtype, aten):
    hidden = torch.rand(*shape, 5, 12, generator=torch.Generator().manual_seed(3)) < 0.5
    hidden[..., 2, :] = True
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    compare(kernel, dtype, 5, 12, groups=3, mask=mask)
    compare(kernel, dtype, 5, 12, kv_heads=6, mask=mask)
    assert aten.masked == (4 if kernel is CudaEfficient else 0)


@settings(max_examples=40)
@given(
    st.sampled_from([CpuFlash, Formula]), st.integers(1, 40), st.integers(0, 60), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 20), st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_any_rectangle(kernel, rows, context, kv_heads, groups, d, dtype):
    compare(kernel, dtype, rows, rows + context, kv_heads, groups, d)


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_a_mask_that_are_cut_out_of_longer_ones_are_aligned(groups, aten):
    longer = torch.randn(1, 1, 101, 101)
    for columns in (80, 96, 90):
        compare(CudaEfficient, torch.float32, 5, columns, groups=groups, mask=longer[..., 7:12, :columns])


@pytest.mark.parametrize(("rows", "columns", "window"), [(6, 6, None), (1, 9, 3), (4, 9, None), (4, 9, 3)])
def test_attention_of_keys_that_are_all_there(rows, columns, window):
    leaves = [t.requires_grad_() for t in (drawn(6, rows), drawn(2, columns), drawn(2, columns, seed=1))]
    grad, call = drawn(6, rows, seed=2), Call(0.0, 0.3, window=window)
    both = [Attention.apply(*leaves, call), reference(*leaves, None, 0.3, window)]
    got, expected = ((out, *torch.autograd.grad(out, leaves, grad)) for out in both)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm().clamp(min=0.1)


HALVES, SINGLE, MASK = (torch.bfloat16, torch.float16), (torch.float32,), torch.zeros(1, 1, 8, 24)
WINDOW = Call(0.0, None, window=9)
CHOICES = {
    "a square": ({"columns": 8}, HALVES, CudaFlash),
    "a square, fp32": ({"columns": 8}, SINGLE, CudaEfficient),
    "a rectangle": ({}, HALVES, CudaFlash),
    "a rectangle, fp32": ({}, SINGLE, CudaEfficient),
    "one row": ({"rows": 1}, HALVES, CudaFlash),
    "grouped heads": ({"kv_heads": 2}, HALVES, CudaFlash),
    "grouped heads, fp32": ({"kv_heads": 2}, SINGLE, CudaEfficient),
    "a window": ({"call": WINDOW}, HALVES, CudaFlash),
    "a window, fp32": ({"call": WINDOW}, SINGLE, CudaEfficient),
    "dropout": ({"call": Call(0.1, None)}, HALVES, CudaFlash),
    "a mask": ({"mask": MASK}, HALVES + SINGLE, CudaEfficient),
    "a mask, grouped": ({"kv_heads": 2, "mask": MASK}, HALVES, CudaEfficient),
    "heads of 256": ({"d": 256}, HALVES, CudaFlash),
    "larger heads": ({"d": 512}, HALVES, CudaEfficient),
    "heads of 20": ({"d": 20}, HALVES + SINGLE, Formula),
    "other values": ({"value": 32}, HALVES + SINGLE, Formula),
    "fp64": ({}, (torch.float64,), Formula),
    "without flash": ({"flash": lambda params: False}, HALVES, CudaEfficient),
    "without both": ({"flash": lambda params: False, "efficient": lambda params: False}, HALVES + SINGLE, Formula),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_on_cuda(name):
    given, dtypes, wanted = CHOICES[name]
    given = {"rows": 8, "columns": 24, "kv_heads": 4, "d": 64, "call": Call(0.0, None)} | given
    for dtype in dtypes:
        q = torch.zeros(1, 4, given["rows"], given["d"], dtype=dtype)
        k, v = (
            torch.zeros(1, given["kv_heads"], given["columns"], d, dtype=dtype)
            for d in (given["d"], given.get("value", given["d"]))
        )
        can = given.get("flash", can_flash), given.get("efficient", can_efficient)
        assert choose_on_cuda(q, k, v, given.get("mask"), given["call"], *can) is wanted, dtype


def test_a_mask_is_kept_for_the_next_call_on_the_host_alone():
    arguments = (4, 9, 1, torch.float32)
    host, device = torch.device("cpu"), torch.device("meta")
    assert causal_mask(*arguments, host) is causal_mask(*arguments, host)
    assert causal_mask(*arguments, device) is not causal_mask(*arguments, device), "it would take a device's memory"


def test_the_fused_kernel_is_chosen_wherever_it_can_run():
    q, k, mask = torch.rand(1, 4, 3, 8), torch.rand(1, 2, 9, 8), torch.zeros(3, 9)
    for dtype in TOLERANCE:
        assert choose(q.to(dtype), k.to(dtype), k.to(dtype), None, Call(0.0, None)) is CpuFlash
    assert choose(q, k, k, mask, Call(0.0, None)) is CpuFlash
    assert choose(q, k, k, None, Call(0.1, None)) is Formula, "it has no dropout"
    assert choose(q, k, k[..., :6], None, Call(0.0, None)) is Formula, "it wants values as wide as keys"
    assert choose(q, k, k, mask.requires_grad_(), Call(0.0, None)) is Formula, "it gives its mask no gradient"

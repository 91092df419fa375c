"""The rectangular attention kernels: each against the formula in double precision, and which of them is chosen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_terapipe.pipeline.operators import kernels
from ds_terapipe.pipeline.operators.kernels import (
    Call,
    CpuFlash,
    CudaEfficient,
    CudaFlash,
    Formula,
    causal_mask,
    choose,
    choose_on_cuda,
    fold_groups,
)
from tests.pipeline import cuda_attention

KERNELS = {"flash": CpuFlash, "formula": Formula}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, window: int | None = None
) -> Tensor:
    """Row r sees columns up to columns - rows + r, a window of them, or what the additive mask leaves."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    own = k.shape[2] - q.shape[2] + row
    hidden = (column > own) | (column <= own - (k.shape[2] if window is None else window))
    scores = scores.masked_fill(hidden, -math.inf) if mask is None else scores + mask
    empty = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def compare(
    kernel, dtype, rows, columns, kv_heads=2, groups=1, d=8, mask=None, scale=None, window=None, seed=0
) -> None:
    """Output and gradients of a kernel, which gets narrow views of longer buffers, against autograd of the formula."""
    random = torch.Generator().manual_seed(seed)

    def draw(heads, length):
        return torch.randn(2, heads, length, d, generator=random, dtype=torch.float64).to(dtype)

    q, grad = draw(kv_heads * groups, rows), draw(kv_heads * groups, rows)
    k, v = (draw(kv_heads, columns + 5)[:, :, :columns] for _ in range(2))
    additive = None if mask is None else mask.to(dtype)
    call = Call(0.0, scale, window=window)
    out, saved, kept = kernel.forward(q, k, v, additive, call)
    got = kernel.backward(grad, saved, kept, k, v, additive, call)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = reference(*leaves, None if mask is None else mask.double(), scale, window)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    assert out.dtype == dtype and out.shape == q.shape
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *got[:3]), (expected, *gradients), strict=True):
        assert a.shape == b.shape and torch.isfinite(a).all()
        error = float((a.double() - b.detach()).norm() / b.detach().norm().clamp(min=0.1))  # with one column dq is zero
        assert error <= TOLERANCE[dtype], (name, error)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (4, 11), (1, 9), (1, 1), (33, 70)])
def test_causal_means_lower_right(kernel, rows, columns, dtype):
    compare(kernel, dtype, rows, columns)
    compare(kernel, dtype, rows, columns, kv_heads=1, groups=3, scale=0.2)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 6), (2, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_explicit_masks_of_all_shapes_with_rows_that_see_nothing(kernel, shape, dtype):
    hidden = torch.rand(*shape, 5, 12, generator=torch.Generator().manual_seed(3)) < 0.5
    hidden[..., 2, :] = True
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    compare(kernel, dtype, 5, 12, kv_heads=2, groups=3, mask=mask)
    compare(kernel, dtype, 5, 12, kv_heads=6, groups=1, mask=mask)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([CpuFlash, Formula]), st.integers(1, 40), st.integers(0, 60), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 20), st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_any_rectangle(kernel, rows, context, kv_heads, groups, d, dtype):
    compare(kernel, dtype, rows, rows + context, kv_heads, groups, d)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize(("rows", "columns", "window"), [(6, 6, 2), (6, 6, 5), (1, 9, 3), (7, 10, 4), (5, 12, 1)])
@pytest.mark.parametrize("groups", [1, 3])
def test_windows(kernel, rows, columns, window, groups):
    compare(kernel, torch.float64, rows, columns, kv_heads=2, groups=groups, window=window)


CUDA = [
    (CudaFlash, torch.bfloat16),
    (CudaFlash, torch.float16),
    (CudaEfficient, torch.float32),
    (CudaEfficient, torch.bfloat16),
]


@pytest.mark.parametrize(("kernel", "dtype"), CUDA)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("rows", "columns", "window"), [(6, 6, None), (4, 11, None), (1, 9, None), (7, 10, 4), (6, 6, 2)]
)
def test_the_calls_of_cudas_kernels(kernel, dtype, rows, columns, window, groups, monkeypatch):
    aten = cuda_attention.Aten()
    monkeypatch.setattr(kernels, "_ATEN", aten)
    compare(kernel, dtype, rows, columns, kv_heads=2, groups=groups, window=window, scale=0.2)
    name = "flash" if kernel is CudaFlash else "efficient"
    assert aten.calls == [name, f"{name} backward"]
    assert aten.masked == (2 if kernel is CudaEfficient and window is not None else 0), (
        "causal needs no mask, groups neither"
    )


def test_rows_of_a_mask_that_are_cut_out_of_longer_ones_are_aligned(monkeypatch):
    aten = cuda_attention.Aten()
    monkeypatch.setattr(kernels, "_ATEN", aten)
    longer = torch.randn(1, 1, 101, 101)
    for columns in (80, 96, 90):
        compare(CudaEfficient, torch.float32, 5, columns, kv_heads=2, groups=1, mask=longer[..., 7:12, :columns])
        compare(CudaEfficient, torch.float32, 5, columns, kv_heads=2, groups=2, mask=longer[..., 7:12, :columns])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (1, 9), (4, 9)])
def test_attention_of_keys_that_are_all_there(rows, columns, window):
    random = torch.Generator().manual_seed(0)
    draw = lambda heads, length: torch.randn(2, heads, length, 8, generator=random, dtype=torch.float64)  # noqa: E731
    leaves = [t.requires_grad_() for t in (draw(6, rows), draw(2, columns), draw(2, columns))]
    grad = draw(6, rows)
    out = kernels.Attention.apply(*leaves, Call(0.0, 0.3, window=window))
    expected = reference(*leaves, None, 0.3, window)
    got = torch.autograd.grad(out, leaves, grad)
    for a, b in zip((out, *got), (expected, *torch.autograd.grad(expected, leaves, grad)), strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm().clamp(min=0.1)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 6), (2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_explicit_masks_on_cuda(shape, dtype, monkeypatch):
    aten = cuda_attention.Aten()
    monkeypatch.setattr(kernels, "_ATEN", aten)
    hidden = torch.rand(*shape, 5, 12, generator=torch.Generator().manual_seed(3)) < 0.5
    hidden[..., 2, :] = True
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    compare(CudaEfficient, dtype, 5, 12, kv_heads=2, groups=3, mask=mask)
    compare(CudaEfficient, dtype, 5, 12, kv_heads=6, groups=1, mask=mask)
    assert aten.masked == 4


HALVES, SINGLE = (torch.bfloat16, torch.float16), (torch.float32,)
CHOICES = {
    "a square": ({}, HALVES, CudaFlash),
    "a square, fp32": ({}, SINGLE, CudaEfficient),
    "a rectangle": ({"columns": 24}, HALVES, CudaFlash),
    "a rectangle, fp32": ({"columns": 24}, SINGLE, CudaEfficient),
    "one row": ({"rows": 1, "columns": 24}, HALVES, CudaFlash),
    "grouped heads": ({"columns": 24, "kv_heads": 2}, HALVES, CudaFlash),
    "grouped heads, fp32": ({"columns": 24, "kv_heads": 2}, SINGLE, CudaEfficient),
    "a window": ({"columns": 24, "call": Call(0.0, None, window=9)}, HALVES, CudaFlash),
    "a window, fp32": ({"columns": 24, "call": Call(0.0, None, window=9)}, SINGLE, CudaEfficient),
    "dropout": ({"columns": 24, "call": Call(0.1, None)}, HALVES, CudaFlash),
    "a mask": ({"columns": 24, "mask": torch.zeros(1, 1, 8, 24)}, HALVES + SINGLE, CudaEfficient),
    "a mask, grouped": ({"columns": 24, "kv_heads": 2, "mask": torch.zeros(1, 1, 8, 24)}, HALVES, CudaEfficient),
    "heads of 256": ({"d": 256}, HALVES, CudaFlash),
    "larger heads": ({"d": 512}, HALVES, CudaEfficient),
    "heads of 20": ({"d": 20}, HALVES + SINGLE, Formula),
    "other values": ({"value": 32}, HALVES + SINGLE, Formula),
    "fp64": ({}, (torch.float64,), Formula),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_on_cuda(name):
    given, dtypes, wanted = CHOICES[name]
    given = {"rows": 8, "columns": 8, "kv_heads": 4, "d": 64, "call": Call(0.0, None), "mask": None} | given
    for dtype in dtypes:
        q = torch.zeros(1, 4, given["rows"], given["d"], dtype=dtype)
        k, v = (
            torch.zeros(1, given["kv_heads"], given["columns"], d, dtype=dtype)
            for d in (given["d"], given.get("value", given["d"]))
        )
        chosen = choose_on_cuda(
            q, k, v, given["mask"], given["call"], cuda_attention.can_flash, cuda_attention.can_efficient
        )
        assert chosen is wanted, dtype


def test_a_device_that_has_neither_runs_the_formula():
    q = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16)
    no = lambda params: False  # noqa: E731
    assert choose_on_cuda(q, q, q, None, Call(0.0, None), no, no) is Formula
    assert choose_on_cuda(q, q, q, None, Call(0.0, None), no, cuda_attention.can_efficient) is CudaEfficient


def test_grouped_heads_are_rows_of_their_key_head():
    q = torch.rand(2, 6, 5, 4)
    folded = fold_groups(q, 2)
    assert folded.shape == (2, 2, 15, 4)
    assert torch.equal(folded[:, 1, 5:10], q[:, 4])
    assert fold_groups(q, 6) is q


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 7), (1, 20)])
def test_the_causal_mask_is_aligned_and_repeated_for_every_group(rows, columns, groups):
    mask = causal_mask(rows, columns, groups, torch.float32, torch.device("cpu"))
    assert mask.shape == (groups * rows, columns)
    for row in range(groups * rows):
        visible = (mask[row] == 0).nonzero().flatten().tolist()
        assert visible == list(range(columns - rows + row % rows + 1))
    assert mask.stride(0) % 16 == 0, "CUDA's memory-efficient kernel loads aligned rows"


def test_a_mask_is_kept_for_the_next_call():
    arguments = (4, 9, 1, torch.float32, torch.device("cpu"))
    assert causal_mask(*arguments) is causal_mask(*arguments)
    on_device = (*arguments[:4], torch.device("meta"))
    assert causal_mask(*on_device) is not causal_mask(*on_device), "kept, it would take a device's memory"


def test_the_fused_kernel_is_chosen_wherever_it_can_run():
    q, k = torch.rand(1, 4, 3, 8), torch.rand(1, 2, 9, 8)
    mask = torch.zeros(3, 9)
    for dtype in TOLERANCE:
        assert choose(q.to(dtype), k.to(dtype), k.to(dtype), None, Call(0.0, None)) is CpuFlash
    assert choose(q, k, k, mask, Call(0.0, None)) is CpuFlash
    assert choose(q, k, k, None, Call(0.1, None)) is Formula, "it has no dropout"
    assert choose(q, k, k[..., :6], None, Call(0.0, None)) is Formula, "it wants values as wide as keys"
    assert choose(q, k, k, mask.requires_grad_(), Call(0.0, None)) is Formula, "it gives its mask no gradient"


def test_no_kernel_touches_its_inputs():
    q, k, v, grad = (torch.rand(1, 2, 5, 8) for _ in range(4))
    before = [t.clone() for t in (q, k, v, grad)]
    for kernel in KERNELS.values():
        _, saved, kept = kernel.forward(q, k, v, None, Call(0.0, None))
        kernel.backward(grad, saved, kept, k, v, None, Call(0.0, None))
        assert all(torch.equal(a, b) for a, b in zip((q, k, v, grad), before, strict=True))
    assert kernels.choose(q, k, v, None, Call(0.0, None)) is CpuFlash

"""The rectangular attention kernels: each against the formula in double precision, and which of them is chosen.

CUDA's operators have a stand-in here, as strict as ``aten/src/ATen/native/transformers/cuda`` of PyTorch 2.13: what their checks
refuse is an error, what they compute is the formula. Their tensors are [b, rows, heads, d].
"""

import math
from functools import partial

import pytest
import torch

from ds_terapipe.pipeline.operators import cudnn_attention, kernels
from ds_terapipe.pipeline.operators.cudnn_attention import CudaCudnn
from ds_terapipe.pipeline.operators.kernels import Call, CpuFlash, CudaEfficient, CudaFlash, Formula
from tests.pipeline.test_attention import whole

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
HALVES, LOWER_RIGHT = (torch.bfloat16, torch.float16), 2
KERNELS = [(kernel, dtype) for kernel in (CpuFlash, Formula) for dtype in TOLERANCE]
KERNELS += [(CudaFlash, dtype) for dtype in HALVES]
KERNELS += [(CudaEfficient, dtype) for dtype in (torch.float32, torch.bfloat16)]


def lower_right(rows, columns, window):
    """Added to scores: row r sees columns up to columns - rows + r, no more than ``window`` of them."""
    own, column = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)
    hidden = (column > own) | (column <= own - (columns if window is None else window))
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


def expected(grad, q, k, v, added, scale):
    """Output and gradients of the formula, in fp64."""
    return whole(q, k, v, grad, visible=torch.tensor(True), bias=added.double(), scale=scale)


class Aten:
    """The six operators. ``calls`` are the names of those that ran, ``masked`` how many of them read a bias."""

    def __init__(self):
        self.calls, self.masked = [], 0

    def _run(self, name, q, k, v, added, scale, grad=None):
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        self.calls.append(name)
        q, k, v, grad = (None if t is None else t.transpose(1, 2) for t in (q, k, v, grad))
        of_output = torch.zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
        out, *gradients = expected(of_output, q, k, v, added, scale)
        found = (out,) if grad is None else gradients
        return tuple(t.to(q.dtype).transpose(1, 2) for t in found)

    def _flash_attention_forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, debug_mask, *, scale, window_size_left
    ):
        assert q.dtype in HALVES and (max_q, max_k) == (q.shape[1], k.shape[1]) and q.shape[3] % 8 == 0
        assert q.shape[2] % k.shape[2] == 0 and dropout_p == 0.0 and is_causal and not debug_mask
        (out,) = self._run("flash", q, k, v, self._causal(q, k, window_size_left), scale)
        return out, torch.zeros(q.shape[0], q.shape[2], max_q), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def _flash_attention_backward(
        self, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale, window_size_left
    ):
        assert grad.shape == out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], max_q)
        return self._run("flash backward", q, k, v, self._causal(q, k, window_size_left), scale, grad)

    def _efficient_attention_forward(
        self, q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout_p, mask_type, compute_log_sumexp, *, scale
    ):
        assert compute_log_sumexp and dropout_p == 0.0
        (out,) = self._run("efficient", q, k, v, self._visible(q, k, v, bias, mask_type), scale)
        return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1]), *[torch.zeros(1)] * 2, q.shape[1], k.shape[1]

    def _efficient_attention_backward(
        self, grad, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, dropout_p, seed, offset, mask_type,
        bias_requires_grad, *, scale,
    ):  # fmt: skip
        assert grad.shape == out.shape == q.shape and (max_q, max_k) == (q.shape[1], k.shape[1])
        return *self._run("efficient backward", q, k, v, self._visible(q, k, v, bias, mask_type), scale, grad), None

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, keeps_sums, dropout_p, is_causal, debug_mask, *, scale):
        assert bias is None and keeps_sums and dropout_p == 0.0 and not debug_mask
        self.calls.append("cudnn")
        scores, value = self._upper_left(q, k, is_causal, scale), v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        sums = scores.logsumexp(-1, keepdim=True)
        out = ((scores - sums).exp() @ value).to(q.dtype)
        return out, sums.float(), None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad, q, k, v, out, sums, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale
    ):
        assert bias is None and (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
        self.calls.append("cudnn backward")
        key, value = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        weights, of_out = (self._upper_left(q, k, is_causal, scale) - sums.double()).exp(), grad.double()
        of_scores = weights * (of_out @ value.mT - (of_out * out.double()).sum(-1, keepdim=True)) * scale
        of_key, of_value = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (of_scores.mT @ q.double(), weights.mT @ of_out))
        return tuple(t.to(q.dtype) for t in (of_scores @ key, of_key, of_value))

    def _upper_left(self, q, k, is_causal, scale):
        """Scores of heads-first tensors of 16 bits; a causal mask is aligned to the upper left, and no key is alone."""
        assert q.dtype in HALVES and k.shape[2] > 1 and q.stride(-1) == k.stride(-1) == 1
        scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        return scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf) if is_causal else scores

    def _causal(self, q, k, left):
        return lower_right(q.shape[1], k.shape[1], None if left is None else left + 1)

    def _visible(self, q, k, v, bias, mask_type):
        assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
        if bias is None:
            assert mask_type == LOWER_RIGHT
            return self._causal(q, k, None)
        self.masked += 1
        assert mask_type == 0 and bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert bias.dtype == q.dtype
        starts = [stride for size, stride in zip(bias.shape, bias.stride(), strict=True) if size > 1][:-1]
        assert bias.stride(-1) == 1 and not any(s % 16 for s in (bias.storage_offset(), *starts)), "loaded in vectors"
        return bias


@pytest.fixture
def aten(request, monkeypatch):
    """Functions that CUDA's kernels call; other devices have their own."""
    stand_in = Aten()
    if request.node.callspec.params.get("kernel") not in (CpuFlash, Formula):
        monkeypatch.setattr(kernels, "_ATEN", stand_in)
    return stand_in


def drawn(heads, length, d=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, d, generator=generator, dtype=torch.float64).to(dtype)


def compare(kernel, dtype, rows, columns, kv_heads=2, groups=1, mask=None, scale=None, window=None):
    """Output and gradients of a kernel, which gets narrow views of longer buffers, against autograd of the formula."""
    q, grad = (drawn(kv_heads * groups, rows, 8, dtype, seed) for seed in range(2))
    k, v = (drawn(kv_heads, columns + 5, 8, dtype, seed)[:, :, :columns] for seed in range(2, 4))
    additive = None if mask is None else mask.to(dtype)
    call, before = Call(0.0, scale, window=window), [t.clone() for t in (q, k, v, grad)]
    out, saved, kept = kernel.forward(q, k, v, additive, call)
    got = kernel.backward(grad, saved, kept, k, v, additive, call)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, grad), before, strict=True)), "inputs are written to"
    added = lower_right(rows, columns, window) if mask is None else mask
    assert out.dtype == dtype
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *got[:3]), expected(grad, q, k, v, added, scale), strict=True):
        assert a.shape == b.shape and torch.isfinite(a).all()
        error = float((a.double() - b).norm() / b.norm().clamp(min=0.1))  # with one column dq is zero
        assert error <= TOLERANCE[dtype], (name, error)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("rows", "columns", "window"), [(6, 6, None), (1, 9, None), (33, 70, None), (7, 10, 4), (6, 6, 2), (5, 12, 1)]
)
def test_causal_means_lower_right_and_a_window_to_the_left(kernel, dtype, rows, columns, window, groups, aten):
    compare(kernel, dtype, rows, columns, groups=groups, window=window, scale=0.2)
    name = {CudaFlash: "flash", CudaEfficient: "efficient"}.get(kernel)
    assert aten.calls == ([] if name is None else [name, f"{name} backward"])
    assert aten.masked == (2 if kernel is CudaEfficient and window is not None else 0), "causal needs no mask"


@pytest.mark.parametrize(("kernel", "dtype"), [(k, t) for k, t in KERNELS if k is not CudaFlash])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 6), (2, 6)])
def test_explicit_masks_of_all_shapes_with_rows_that_see_nothing(kernel, shape, dtype, aten):
    hidden = torch.rand(*shape, 5, 12, generator=torch.Generator().manual_seed(3)) < 0.5
    hidden[..., 2, :] = True
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    compare(kernel, dtype, 5, 12, groups=3, mask=mask)
    row, wide = mask[..., :1, :].expand(mask.shape), torch.zeros(*mask.shape[:3], 35)[..., 3:15].copy_(mask)
    for view in (row, wide, torch.zeros(1, 1, 5, 32)[..., 3:15]):  # no stride of rows, unaligned ones, an odd offset
        compare(kernel, dtype, 5, 12, kv_heads=6, mask=view.to(dtype) if dtype == torch.float32 else view)
    compare(kernel, dtype, 5, 12, kv_heads=6, mask=mask)
    assert aten.masked == (10 if kernel is CudaEfficient else 0)


MASK, WINDOW = torch.zeros(1, 1, 8, 24), Call(0.0, None, window=9)
# what is other than usual, what PyTorch says of flash and of the efficient kernel, the choice
CHOICES = {
    "flash": ({}, True, True, CudaFlash), "a window": ({"call": WINDOW}, True, True, CudaFlash),
    "dropout": ({"call": Call(0.1, None)}, True, True, CudaFlash),
    "a mask": ({"kv_heads": 2, "mask": MASK, "rows": 16}, True, True, CudaEfficient),
    "without flash, grouped": ({"kv_heads": 2}, False, True, CudaEfficient),
    "without flash, a window": ({"kv_heads": 2, "call": WINDOW, "rows": 16}, False, True, CudaEfficient),
    "heads of 20": ({"d": 20}, True, True, Formula), "other values": ({"value": 32}, True, True, Formula),
    "without both": ({}, False, False, Formula),
}  # fmt: skip


@pytest.mark.parametrize(("given", "flash", "efficient", "wanted"), CHOICES.values(), ids=CHOICES)
def test_the_choice_on_cuda(given, flash, efficient, wanted, monkeypatch):
    given = {"kv_heads": 4, "d": 64, "call": Call(0.0, None), "mask": None} | given

    def can(answer, grouped, params):
        """PyTorch refuses causal rectangles, and heads that are grouped without its being told or in the efficient kernel."""
        assert not params.is_causal and params.attn_mask is None and params.dropout == given["call"].dropout_p
        assert params.query.shape[1] == params.key.shape[1] == params.value.shape[1] or (grouped and params.enable_gqa)
        assert grouped or params.query.shape[2] == given.get("rows", 8), "not as it will be run"
        return answer

    q, k = torch.zeros(1, 4, 8, given["d"]), torch.zeros(1, given["kv_heads"], 24, given["d"])
    v = k if "value" not in given else k[..., : given["value"]]
    monkeypatch.setattr(kernels, "can_use_flash_attention", partial(can, flash, True))
    monkeypatch.setattr(kernels, "can_use_efficient_attention", partial(can, efficient, False))
    assert kernels.choose_on_cuda(q, k, v, given["mask"], given["call"]) is wanted


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (33, 70), (2, 9), (40, 43)])
def test_cudnn_sees_the_keys_before_the_rows_and_then_is_causal(rows, columns, groups, dtype, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_ATEN", stand_in := Aten())
    compare(CudaCudnn, dtype, rows, columns, groups=groups, scale=0.2)
    calls = 1 if rows == columns else 2
    assert stand_in.calls == ["cudnn"] * calls + ["cudnn backward"] * calls


# what is other than usual, the choice without cuDNN, what PyTorch would run, the choice
PREFERRED = {
    "cudnn": ({}, CudaFlash, 3, CudaCudnn), "PyTorch would run flash": ({}, CudaFlash, 1, CudaFlash),
    "flash cannot run": ({}, CudaEfficient, 3, CudaEfficient), "a window": ({"call": WINDOW}, CudaFlash, 3, CudaFlash),
    "dropout": ({"call": Call(0.1, None)}, CudaFlash, 3, CudaFlash),
    "short slices": ({"least": 2**13 * 5 + 1}, CudaFlash, 3, CudaFlash),
    "slices that just pay": ({"least": 2**13 * 5}, CudaFlash, 3, CudaCudnn), "one row": ({"rows": 1}, CudaFlash, 3, CudaFlash),
    "one key before the rows": ({"before": 1}, CudaFlash, 3, CudaFlash),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kernel", "backend", "wanted"), PREFERRED.values(), ids=PREFERRED)
def test_cudnn_where_pytorch_would_run_it_and_for_so_many_shapes(given, kernel, backend, wanted, monkeypatch):
    given = {"rows": 8, "before": 16, "call": Call(0.0, None), "least": 0} | given
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v, enable_gqa: backend if enable_gqa else None)
    monkeypatch.setattr(cudnn_attention, "_shapes", set())
    monkeypatch.setattr(cudnn_attention, "_MAX_SHAPES", 2)
    monkeypatch.setattr(cudnn_attention, "_LEAST_WORK", given["least"])

    def choice(before):
        q, k = torch.zeros(1, 4, given["rows"], 64), torch.zeros(1, 2, given["rows"], 64)
        return cudnn_attention.preferred(kernel, q, k, k, given["call"], before)

    assert choice(given["before"]) is wanted
    assert [choice(before) for before in (32, 48, 64)][2] is kernel, "a third shape"
    assert choice(given["before"]) is wanted

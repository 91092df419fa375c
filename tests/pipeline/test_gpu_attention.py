"""The attention of slices on CUDA: the fused kernels, what they compute and what they do not allocate."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.operators import cudnn_attention
from ds_terapipe.pipeline.operators.attention import slice_attention
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.document_attention import CudaVarlen
from ds_terapipe.pipeline.slicing import spans
from ds_terapipe.schedule import Unit
from tests.pipeline.test_attention import PARTS, causal, sliced, tensors, whole
from tests.pipeline.training import difference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [40, 3, 64, 1, 20]
TOTAL = sum(LENGTHS)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-3, torch.float64: 1e-10}


def check(dtype, mask=None, scale=None, **shape):
    """Slices on the GPU against the whole sequence in double precision."""
    values = tensors(total=TOTAL, dtype=dtype, **shape)
    with torch.device("cuda"):
        on_device = None if mask is None else mask.cuda()
        got = sliced(*(t.cuda() for t in values), LENGTHS, mask=on_device, scale=scale)
    assert all(t.is_cuda and t.dtype == dtype and torch.isfinite(t).all() for t in got)
    assert_close([t.cpu() for t in got], whole(*values, visible=mask, scale=scale))


def assert_close(got, wanted):
    for name, a, b in zip(PARTS, got, wanted, strict=True):
        assert difference(a, b) <= TOLERANCE[a.dtype], (name, difference(a, b))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "d"), [(4, 64), (2, 64), (1, 32), (4, 20)])
def test_causal_slices(dtype, kv_heads, d, monkeypatch):
    check(dtype, kv_heads=kv_heads, d=d)
    check(dtype, kv_heads=kv_heads, d=d, scale=0.07)
    monkeypatch.setattr(cudnn_attention, "_LEAST_WORK", 0)
    check(dtype, kv_heads=kv_heads, d=d, scale=0.07)


def test_cudnn_runs_where_pytorch_prefers_it(operators, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_LEAST_WORK", 0)
    q, k, v, grad = (t.cuda() for t in tensors(total=TOTAL, dtype=torch.bfloat16, d=64))
    wanted = torch._fused_sdp_choice(q, k, v, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value
    with profile(activities=[ProfilerActivity.CPU]) as trace, torch.device("cuda"):
        sliced(q, k, v, grad, LENGTHS)
    assert any("cudnn_attention" in event.key for event in trace.key_averages()) == wanted


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.bfloat16, 30), (torch.float32, None)])
def test_causal_slices_of_packed_documents(dtype, window, monkeypatch):
    """Documents that end in slices and with them, one for both rows and two; a kernel of variable lengths for 16 bits."""
    calls, run = [], CudaVarlen.forward
    monkeypatch.setattr(CudaVarlen, "forward", lambda *args: calls.append(args[-1]) or run(*args))
    numbers = torch.repeat_interleave(torch.tensor([1, 2, 3, 0, 4]), torch.tensor([40, 30, 9, 5, TOTAL - 84]))
    for rows in (numbers.expand(2, -1), torch.stack([numbers, torch.ones_like(numbers)])):
        visible = (rows[:, None, None] == rows[:, None, :, None]) & (rows[:, None, None] > 0)
        visible = visible & causal(TOTAL).triu(-TOTAL if window is None else 1 - window)
        q, k, v, grad = tensors(total=TOTAL, dtype=dtype, kv_heads=2, d=64)
        grad = grad * (rows > 0)[:, None, :, None]
        with torch.device("cuda"):
            given = (t.cuda() for t in (q, k, v, grad))
            got = sliced(*given, LENGTHS, window=window, is_causal=True, documents=Documents.of(rows))
        got = [got[0].cpu() * (rows > 0)[:, None, :, None], *(t.cpu() for t in got[1:])]
        assert_close(got, whole(q, k, v, grad, visible=visible))
    assert bool(calls) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_explicit_masks(dtype, kv_heads):
    check(dtype, mask=causal(TOTAL, 5), kv_heads=kv_heads, d=64)
    padded = causal(TOTAL, 5).expand(2, 1, TOTAL, TOTAL).clone()
    padded[1, ..., :7] = False  # rows that see nothing
    check(dtype, mask=padded, kv_heads=kv_heads, d=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "masked"), [(4, False), (2, False), (4, True)])
def test_dropout_is_the_same_in_forward_and_backward(dtype, kv_heads, masked):
    q, k, v, grad = (t.cuda() for t in tensors(total=TOTAL, kv_heads=kv_heads, d=64, dtype=dtype))
    mask = causal(TOTAL, 5).cuda() if masked else None

    def drawn(dropout_p):
        torch.cuda.manual_seed(3)
        with torch.device("cuda"):
            return sliced(q, k, v, grad, LENGTHS, mask=mask, dropout_p=dropout_p)

    (out, _, _, dv), again, kept = drawn(0.3), drawn(0.3)[0], drawn(0.0)[0]
    assert torch.equal(out, again) and difference(out, kept) > 0.05
    # for one drawn mask the output is linear in v: <grad, out> is <dv, v> only if backward drew the same
    products = grad.double() * out.double()
    assert abs(products.sum() - (dv.double() * v.double()).sum()) / products.norm() < 0.05


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_score_matrix_and_no_copy_of_the_cache(dtype, kv_heads):
    # so many rows that flash does not split keys, whose parts it would keep in fp32
    heads, d, total, length = 8, 64, 131072, 2048
    context, item = SliceContext(), torch.finfo(dtype).bits // 8
    tiles = spans((total - 2 * length, length, length))

    def peak(work):
        torch.cuda.reset_peak_memory_stats()
        before, result = torch.cuda.memory_allocated(), work()
        return result, torch.cuda.max_memory_allocated() - before

    def attend(span):
        shapes = [(1, h, span.length, d) for h in (heads, kv_heads, kv_heads)]
        leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
        with context.forward(Unit(0, 0), span):
            context.enter_layer(0)
            return peak(lambda: slice_attention(context, *leaves))

    with torch.no_grad():
        attend(tiles[0])
        attend(tiles[1])
    out, used = attend(tiles[2])
    scores, cache = heads * length * total * item, kv_heads * total * d * item
    bias = heads // kv_heads * length * total * item if dtype == torch.float32 and kv_heads < heads else 0
    assert used < min(scores, cache) / 2 + 2.1 * bias, (used, scores, cache)
    with context.backward(Unit(0, 0), tiles[2]):
        _, used = peak(lambda: out.backward(torch.ones_like(out)))
    gradients = 4 * kv_heads * total * d * 4  # dK, dV of the context, and their sums, at most in fp32
    assert used < gradients + scores / 4 + 2.1 * bias

"""Attention in slices against the whole sequence at once: outputs, gradients, and what is kept in memory."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._C._profiler import _EventType
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.documents import COUNTED_PADDING, PADDING, Documents
from ds_terapipe.pipeline.operators import buffers, compiled, kernels
from ds_terapipe.pipeline.operators.attention import slice_attention
from ds_terapipe.pipeline.operators.buffers import AttentionState
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.slicing import Span, spans
from ds_terapipe.schedule import Unit
from tests.pipeline.training import difference

pytestmark = pytest.mark.usefixtures("operators")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
PARTS = ("out", "dq", "dk", "dv")


def tensors(heads=4, kv_heads=4, total=13, d=8, dv=None, batch=2, dtype=torch.float64):
    """q, k, v and the gradient of the output, random; ``batch`` None leaves the dimension out."""
    g, lead = torch.Generator().manual_seed(0), () if batch is None else (batch,)
    shapes = [(heads, total, d), (kv_heads, total, d), (kv_heads, total, dv or d), (heads, total, dv or d)]
    return [torch.randn(*lead, *shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def causal(total: int, document: int | None = None) -> Tensor:
    """True: may attend; ``document``: and not across the boundaries of documents of so many tokens."""
    number = torch.arange(total) // (document or total)
    return torch.ones(total, total, dtype=torch.bool).tril() & (number[:, None] == number)


def forward(context, span, rows, *args, **options):
    """The output of a slice, and the leaves of its q, k, v."""
    leaves = [t[..., span.start : span.stop, :].detach().requires_grad_() for t in rows]
    with context.forward(Unit(0, 0), span):
        context.enter_layer(0)
        return slice_attention(context, *leaves, *args, **options), leaves


def backward(context, span, out, grad):
    with context.backward(Unit(0, 0), span):
        out.backward(grad[..., span.start : span.stop, :])


def sliced(q, k, v, grad, lengths, mask=None, scale=None, dropout_p=0.0, documents=None, **options):
    """Forward slice by slice, backward in reverse order; returns output, dq, dk, dv as whole sequences."""
    context, cut = SliceContext(), spans(tuple(lengths))
    context.documents_of = {} if documents is None else {0: documents}
    masks = [mask(span) if callable(mask) else mask for span in cut]
    done = [forward(context, s, (q, k, v), m, dropout_p, scale, **options) for s, m in zip(cut, masks, strict=True)]
    for span, (out, _) in zip(reversed(cut), reversed(done), strict=True):
        backward(context, span, out, grad)
    context.check_step()
    gradients = [torch.cat([leaves[i].grad for _, leaves in done], dim=-2) for i in range(3)]
    return torch.cat([out.detach() for out, _ in done], dim=-2), *gradients


def formula(q, k, v, visible=None, bias=None, scale=None, keep=None, dropout_p=0.0, softcap=None):
    """The whole sequence by the textbook formula; ``keep`` is the mask that dropout drew."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(groups, dim=-3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else q.shape[-1] ** -0.5)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~(causal(q.shape[-2]) if visible is None else visible), -math.inf)
    scores = scores if bias is None else scores + bias
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights if keep is None else weights * keep / (1 - dropout_p)) @ v


def whole(q, k, v, grad, **options):
    """Output, dq, dk, dv of :func:`formula` in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = formula(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def assert_same(got, expected):
    tolerance = TOLERANCE[got[0].dtype]
    for name, a, b in zip(PARTS, got, expected, strict=True):
        if not b.any():
            # One position: its score changes nothing, and what a kernel leaves there is a rounding of something of dv's size.
            assert float(a.double().norm()) <= tolerance * float(expected[-1].norm()), name
        else:
            assert difference(a, b) <= tolerance, (name, difference(a, b))


@st.composite
def cases(draw, dtypes=tuple(TOLERANCE)):
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    kv_heads, groups, d = (draw(st.integers(1, most)) for most in (3, 3, 9))
    shape = {"heads": kv_heads * groups, "kv_heads": kv_heads, "total": sum(lengths), "d": d}
    shape |= {"dv": draw(st.sampled_from([d, d, d + 1])), "batch": draw(st.sampled_from([None, 1, 2]))}
    # of heads of size one, gradients can cancel to a rounding of fp32: the same shapes in fp64, whose tolerance is narrower
    dtype = draw(st.sampled_from([torch.float64] if d == 1 else dtypes))
    shared = draw(st.sampled_from([(), (), (1,), (1, 2)]))  # keys, values of all samples
    given = [t[:1] if n in shared and t.dim() == 4 else t for n, t in enumerate(tensors(**shape, dtype=dtype))]
    return given, lengths, draw(st.sampled_from([None, 0.3]))


@settings(max_examples=100)
@given(cases(), st.integers(1, 12) | st.none(), st.sampled_from([None, 0.7]), st.booleans())
def test_any_shape_slicing_window_and_soft_cap_equal_the_whole_sequence(case, window, softcap, masked):
    (given, lengths, scale), total = case, sum(case[1])
    mask = causal(total, 5) if masked else None
    visible = (causal(total) if mask is None else mask).triu(-total if window is None else 1 - window)
    got = sliced(*given, lengths, mask=mask, scale=scale, is_causal=True, window=window, softcap=softcap)
    assert_same(got, whole(*given, scale=scale, visible=visible, softcap=softcap))


@st.composite
def packings(draw):
    """Shapes, slicings, and numbers of each token's document: documents, padding between and inside them."""
    given, lengths, scale = draw(cases([torch.float64]))  # as above: a window may leave one token that sees two
    total, rows = sum(lengths), given[0].shape[0] if given[0].dim() == 4 else 1
    marks = st.sampled_from([PADDING, COUNTED_PADDING, 1, 2, 2, 3])
    kinds = [st.just([1] * total), st.lists(st.integers(1, 4), min_size=total, max_size=total).map(sorted)]
    kinds += [st.lists(marks, min_size=total, max_size=total), kinds[1].map(lambda n: [0 if x == 4 else x for x in n])]
    numbers = torch.tensor([draw(draw(st.sampled_from(kinds))) for _ in range(rows)])
    return given, lengths, scale, numbers[:1].expand(rows, -1) if draw(st.booleans()) else numbers


@settings(max_examples=150)
@given(packings(), st.integers(1, 12) | st.none(), st.sampled_from([None, 0.7]))
def test_tokens_of_packed_documents_see_their_own_document_alone(case, window, softcap):
    (q, k, v, grad), lengths, scale, numbers = case
    asked = (numbers != PADDING)[:, None, :, None].reshape(numbers.shape[0], 1, -1, 1)
    asked = asked if q.dim() == 4 else asked[0]
    of_keys, of_rows = numbers[:, None, None], numbers[:, None, :, None]
    visible = causal(q.shape[-2]).triu(-q.shape[-2] if window is None else 1 - window)
    visible = visible & (of_keys > 0) & ((of_keys == of_rows) | (of_rows <= 0))
    expected = whole(q, k, v, grad * asked, scale=scale, visible=visible if q.dim() == 4 else visible[0], softcap=softcap)
    got = sliced(q, k, v, grad * asked, lengths, scale=scale, is_causal=True, window=window, softcap=softcap,
                 documents=Documents.of(numbers))  # fmt: skip
    assert_same((got[0] * asked, *got[1:]), (expected[0] * asked, *expected[1:]))


def test_a_slice_whose_backward_is_over_awaits_no_recomputation():
    k, v = tensors(total=6)[1:3]
    state, first, last = AttentionState(k, v, 6), Span(0, 4, 6), Span(4, 6, 6)
    for span in (first, last):
        rows = [each[..., span.start : span.stop, :] for each in (k, v)]
        assert not state.awaits(*rows, span), "before its forward"
        state.write(*rows, span)
    assert state.awaits(*rows, last)
    state.gradients.add(k.clone(), v.clone(), 4, 6, 0)
    assert not state.awaits(*rows, last) and state.awaits(k[..., :4, :], v[..., :4, :], first)


def test_calls_run_in_cpp_unless_no_kernel_has_them_or_modes_watch_python(monkeypatch):
    def in_cpp(mode=nullcontext, **options):
        with mode():
            out, _ = forward(SliceContext(), Span(0, 4, 13), tensors()[:3], **options)
        return out.grad_fn.name().startswith("torch::")

    found = [in_cpp(), in_cpp(window=2), in_cpp(softcap=1.0), in_cpp(mask=causal(13)), in_cpp(BaseTorchFunctionMode)]
    monkeypatch.setattr(kernels, "is_kept", lambda *_: False)
    assert [*found, in_cpp()] == [here := compiled.load() is not None, here, False, False, False, False]


class SeenKeys(TorchDispatchMode):
    """Mode that notes the storages of keys and values that a forward kernel reads, and the number of keys."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.seen.append((*(each.untyped_storage().data_ptr() for each in args[1:3]), args[1].shape[2]))
        return func(*args, **(kwargs or {}))


def test_kernels_read_views_of_one_buffer_and_no_key_before_a_window():
    for window, columns in ((None, [4, 5, 13]), (3, [4, 3, 10])):
        with SeenKeys() as mode:
            mode.seen = []
            sliced(*tensors(), [4, 1, 8], window=window, is_causal=True)
        assert [each[2] for each in mode.seen] == columns and len({each[:2] for each in mode.seen}) == 1


MASKS = {
    "[S, S]": lambda m: m, "[1, 1, S, S]": lambda m: m[None, None], "[b, 1, S, S]": lambda m: m.expand(2, 1, *m.shape),
    "[b, h, S, S]": lambda m: m.expand(2, 4, *m.shape),
    "cut already": lambda m: lambda span: m[span.start : span.stop, : span.stop],
    "rows cut already": lambda m: lambda span: m[span.start : span.stop],
}  # fmt: skip


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("form", MASKS)
def test_explicit_masks_are_cut_by_rows_and_columns(form, additive, kv_heads):
    given, visible = tensors(kv_heads=kv_heads), causal(13, 5)
    mask = torch.zeros(13, 13, dtype=torch.float64).masked_fill(~visible, -math.inf) if additive else visible
    assert_same(sliced(*given, [4, 1, 6, 2], mask=MASKS[form](mask)), whole(*given, visible=visible))


def test_a_mask_of_one_row_is_every_querys():
    padding = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 1] = False
    got, rows = forward(SliceContext(), Span(0, 4, 6), tensors(total=6)[:3], padding)
    assert difference(got, F.scaled_dot_product_attention(*rows, padding[..., :4])) < 1e-10


@pytest.mark.parametrize(("kv_heads", "size"), [(4, (4, 13, 13)), (4, (1, 13, 13)), (2, (4, 13, 13))])
def test_a_learned_bias_gets_its_gradient(kv_heads, size):
    q, k, v, grad = tensors(kv_heads=kv_heads)
    visible = causal(13, 5)
    hidden = torch.zeros(13, 13, dtype=q.dtype).masked_fill(~visible, -math.inf)
    bias = torch.randn(size, dtype=q.dtype, requires_grad=True)
    got = sliced(q, k, v, grad, [5, 5, 3], mask=bias + hidden)
    leaf = bias.detach().clone().requires_grad_()
    formula(q, k, v, visible, leaf).backward(grad)
    assert difference(bias.grad, leaf.grad) < 1e-10
    assert_same(got, whole(q, k, v, grad, visible=visible, bias=bias.detach()))


OTHERS = {(4, 4): "mask of 4 x 4 for tokens 4 to 8 of 13", (3, 13): "of 3 x 13 for", (13, 13): r"later tokens .*\(layer 0\)"}


@pytest.mark.parametrize("shape", OTHERS)
def test_a_mask_of_other_rows_or_columns_or_that_shows_later_tokens_is_an_error(shape):
    with pytest.raises(ConfigError, match=OTHERS[shape]):
        sliced(*tensors(), [4, 4, 5], mask=lambda span: None if span.start == 0 else torch.ones(*shape).bool())


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_dropout_draws_the_same_mask_in_forward_and_backward(kv_heads):
    given = tensors(kv_heads=kv_heads, total=7)
    torch.manual_seed(11)
    keep, before = torch.zeros(2, 4, 7, 7, dtype=torch.bool), torch.get_rng_state()
    for span in spans((3, 2, 2)):
        rows = (2, kv_heads, 4 // kv_heads * span.length, span.stop)
        part = F.dropout(torch.ones(rows, dtype=torch.float64), 0.4) != 0
        keep[:, :, span.start : span.stop, : span.stop] = part.reshape(2, 4, span.length, span.stop)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    got = sliced(*given, [3, 2, 2], dropout_p=0.4)
    assert torch.equal(torch.get_rng_state(), after), "backward must leave the random state alone"
    assert 0 < keep[:, :, -1].sum() < keep[:, :, -1].numel()
    assert_same(got, whole(*given, keep=keep, dropout_p=0.4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_key_gradients_are_summed_in_a_wide_type(dtype):
    made, ones, share = (compiled.load() or buffers).KeyGradients(6), torch.ones(1, 2, 6, 4, dtype=dtype), 3 * 2**-10
    made.add(ones, ones.clone(), 5, 6, 0)  # it takes these two over
    for start, stop in ((4, 5), (0, 4)):  # in bf16 such a share that is added to one is lost, two are not
        small = torch.full((1, 2, stop, 4), share, dtype=dtype)
        dk, dv = made.add(small, small, start, stop, 0)
    assert all(torch.equal(d, small) for d in made.add(small, small, 0, 4, 0)), "of a second call: its share alone"
    assert all(d.dtype == dtype and (d == torch.full_like(d, 1 + 2 * share)).all() and (d > 1).all() for d in (dk, dv))


def allocations(function) -> list[int]:
    """Sizes in bytes of what ``function`` allocates, inside operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events, sizes = list(profile.profiler.kineto_results.experimental_event_tree()), [0]
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            sizes.append(event.extra_fields.alloc_size)
    return sizes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("kv_heads", "dv"), [(2, 64), (1, 64), (2, 32)])
def test_no_slice_copies_the_keys_and_values_so_far(kv_heads, dv, masked):
    total, length = 2048, 16
    *rows, grad = tensors(heads=2, kv_heads=kv_heads, total=total, d=64, dv=dv, dtype=torch.float32)
    mask = causal(total, 5) if masked else None
    context, cache, outs = SliceContext(), 2 * kv_heads * total * dv * 4, []
    half, late = Span(length, total // 2, total), Span(total // 2, total // 2 + length, total)
    first = Span(0, length, total)
    outs += [forward(context, span, rows, mask)[0] for span in (first, half)]
    assert max(allocations(lambda: outs.append(forward(context, late, rows, mask)[0]))) < cache / 3, "half a context"
    backward(context, late, outs.pop(), grad)  # makes the gradient buffers
    backward(context, half, outs[1], grad)
    assert max(allocations(lambda: backward(context, first, outs[0], grad))) < cache / 16, "a slice without context"

"""Lengths of slices, and the dimensions of tensors that are cut."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.inspection.sequence_dims import LEAST_TOKENS, SequenceProbe, probe_spans
from ds_terapipe.pipeline.slicing import WHOLE, Span, TensorCut, part_of, plan_cuts, slice_lengths, spans

B, S, H = 2, 12, 5
ROW, MASK, LONG, FLOAT, BOOL = TensorCut(row=1), TensorCut(2, 3), torch.int64, torch.float32, torch.bool
TOKENS = torch.zeros(B, S, dtype=LONG)


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 4))
def test_equal_slices_spread_the_remainder_and_given_ones_are_kept(total, slices, multiple):
    slices, total = min(slices, total), total * multiple
    lengths = slice_lengths(total, slices, multiple)
    assert sum(lengths) == total and len(lengths) == slices and not any(length % multiple for length in lengths)
    assert max(lengths) - min(lengths) <= multiple and list(lengths) == sorted(lengths, reverse=True)
    uneven = tuple(multiple * (length + number) for number, length in enumerate(lengths))
    assert slice_lengths(sum(uneven), list(uneven), multiple) == uneven
    assert spans(uneven) == tuple(Span(a, b, sum(uneven)) for a, b in pairwise([0, *accumulate(uneven)]))


@pytest.mark.parametrize(("slices", "ranks", "message"), [
    ([4, 4], 1, "got [4, 4], which add up to 8 tokens, must add up to the sequence length 12, use e.g. 2"),
    (13, 1, "got 13, must be at most the sequence length 12, use e.g. 8"),
    (5, 3, "got 5, must be at most the sequence length 12 / 3 ranks that share it, use e.g. 4"),
    ([5, 1, 6], 3, "got [5, 1, 6], must be multiples of 3, the tensor-parallel ranks that share the tokens of a slice "
                   "(sequence_parallel), use e.g. [6, 6]"),
])  # fmt: skip
def test_lengths_that_do_not_fit_are_errors(slices, ranks, message):
    with pytest.raises(ConfigError, match=re.escape(f"token_pipeline.slices: {message}")):
        slice_lengths(S, slices, ranks)


TABLE = {
    "tokens": ((B, S), LONG, ROW), "a loss mask": ((B, S), FLOAT, ROW), "features": ((B, S, H), FLOAT, ROW),
    "an attention bias of each head": ((B, 4, S, S), FLOAT, MASK), "one attention mask for all": ((1, 1, S, S), BOOL, MASK),
    "a square bool mask": ((B, S, S), BOOL, TensorCut(row=1, column=2)),
    "an additive square mask without batch": ((S, S), FLOAT, TensorCut(row=0, column=1)),
    "key padding": ((B, 1, 1, S), BOOL, TensorCut(column=3)), "key padding without heads": ((B, 1, S), BOOL, TensorCut(column=2)),
    "something of each row": ((B, 1, S, H), FLOAT, TensorCut(row=2)), "a scalar": ((), FLOAT, WHOLE),
    "what has no such dimension": ((B, 3, H, 7), FLOAT, WHOLE),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "cut"), TABLE.values(), ids=TABLE)
def test_the_rule_beside_tokens(shape, dtype, cut):
    assert plan_cuts((TOKENS, torch.zeros(shape, dtype=dtype)), None, "inputs") == (S, (ROW, cut))
    assert plan_cuts((torch.zeros(shape, dtype=dtype), TOKENS), None, "inputs") == (S, (cut, ROW))


def test_a_batch_may_be_as_large_as_the_sequence_which_without_whole_numbers_is_that_of_the_floats():
    tokens = torch.zeros(S, S, dtype=LONG)
    assert plan_cuts((tokens,), None, "inputs") == (S, (ROW,))
    assert plan_cuts((tokens, torch.ones(S, S)), None, "labels") == (S, (ROW, ROW))
    assert plan_cuts((tokens, torch.ones(S, 1, S, S, dtype=BOOL)), None, "inputs") == (S, (ROW, MASK))
    assert plan_cuts((torch.zeros(B, S),), None, "labels") == (S, (ROW,))
    assert plan_cuts((torch.zeros(B, S), torch.zeros(B, H, 3)), None, "labels") == (S, (ROW, WHOLE))


AMBIGUOUS = {
    "no tensor is [batch, sequence]": (torch.zeros(B, S, H),), "hidden size as long": (TOKENS, torch.zeros(B, S, S)),
    "the last of three": (TOKENS, torch.zeros(B, H, S)), "rows and a later dimension": (TOKENS, torch.zeros(B, S, 3, S)),
}  # fmt: skip


@pytest.mark.parametrize("tensors", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_is_ambiguous_names_cut_and_the_tensor(tensors):
    shape = re.escape(str(list(tensors[-1].shape)))
    message = rf'token_pipeline.cut: got none, inputs\[{len(tensors) - 1}\] \(\w+ {shape}\) .* "cut": {{"inputs"'
    with pytest.raises(ConfigError, match=message):
        plan_cuts(tensors, None, "inputs")


def test_an_explicit_cut_settles_it():
    features = torch.zeros(B, S, S)
    for given_cut, second in [([1, 1], ROW), ([1, [1, 2]], TensorCut(1, 2)), ([1, 2], TensorCut(row=2))]:
        assert plan_cuts((TOKENS, features), given_cut, "inputs") == (S, (ROW, second))
    assert plan_cuts((TOKENS, features), [None, 2], "inputs") == (S, (WHOLE, TensorCut(row=2)))
    assert plan_cuts((features[..., :7],), [2], "labels") == (7, (TensorCut(row=2),))


@pytest.mark.parametrize(("given_cut", "message"), [
    ([1], ": got 1 entries, must be one for each of the 2 tensors, use null"),
    ([1, 3], "[1]: got 3, must be a dimension from 1 to 2 of its shape [2, 12, 5]"),
    ([None, None], ": got [null, null], which are dimensions of no tokens"),
    ([1, 2], ": got [1, 2], which are dimensions of [5, 12] tokens"),
])  # fmt: skip
def test_an_explicit_cut_that_does_not_fit_is_an_error(given_cut, message):
    with pytest.raises(ConfigError, match=re.escape(f"token_pipeline.cut.inputs{message}")):
        plan_cuts((TOKENS, torch.zeros(B, S, H)), given_cut, "inputs")


CAUSAL, KEYS = torch.ones(S, S, dtype=BOOL).tril(), torch.arange(S)
FORMS = [lambda seen: seen, lambda seen: ~seen, lambda seen: seen.long(), lambda seen: -1e9 * ~seen - 1e9 * ~seen.all(0)]


@pytest.mark.parametrize("given_cut", [None, [1, [2, 3]]])
@pytest.mark.parametrize("form", FORMS, ids=["visible", "hidden", "numbers", "added"])
def test_a_mask_that_is_causal_in_the_first_micro_batch_must_stay_so(form, given_cut):
    def read(followed, *masks):
        for mask in masks:
            plan_cuts((TOKENS, form(mask).expand(B, 1, S, S)), given_cut, "inputs", followed)

    followed, prefix = {}, CAUSAL | (KEYS < 4)
    read(followed, CAUSAL & (KEYS < 9), CAUSAL)  # padding
    with pytest.raises(ConfigError, match=r"got a mask, inputs\[1\], by which tokens see later ones"):
        read(followed, prefix)
    read({}, prefix, CAUSAL, prefix)  # its slices are compared
    read({}, torch.ones_like(CAUSAL), prefix)  # beside is_causal


@pytest.mark.parametrize("lengths", [(S,), (7, 4, 1)], ids=["uncut", "cut"])
def test_a_layer_that_writes_into_its_slice_changes_no_other(lengths):
    """Neither the micro-batch nor a slice that has the same columns of a mask."""
    values, cuts = (torch.randn(B, S), torch.randn(B, 1, S, S), torch.randn(B, H)), (ROW, MASK, WHOLE)
    before = [value.clone() for value in values]
    for span in spans(lengths):
        for part in part_of(values, cuts, span):
            part.zero_()
    assert all(torch.equal(value, was) for value, was in zip(values, before, strict=True))


SHORT, LONGER = LEAST_TOKENS, 100  # sequences that are looked at in slices of two tokens and one, and of two and three


def probe(make: Callable[[int, int], Any], layout: str = "auto", total: int = LONGER) -> tuple[TensorCut, ...]:
    """The cuts of a boundary whose tensors are ``make(tokens of the slice, tokens so far)``."""
    recorder = SequenceProbe(layout, first_layer=3)
    for span in probe_spans(total):
        recorder.begin_slice(span)
        recorder.record(make(span.length, span.stop))
        recorder.record(torch.zeros(4, span.length))
    (cuts,) = recorder.result().layers
    return cuts


BSH, SBH = TensorCut(row=1), TensorCut(row=0)


@pytest.mark.parametrize("total", [SHORT, 4, 5, LONGER])
@pytest.mark.parametrize(("make", "cuts"), [
    (lambda s, c: torch.zeros(4, s, 7), (BSH,)), (lambda s, c: torch.zeros(s, 4, 7), (SBH,)),
    # a batch as large as a slice, or as both
    *((lambda s, c, b=b: torch.zeros(b, s, 7), (BSH,)) for b in (1, 2, 3, 5)),
    *((lambda s, c, b=b: torch.zeros(s, b, 8 - b), (SBH,)) for b in (1, 2, 3, 5)),
    (lambda s, c: (torch.zeros(s, 4, 7), torch.zeros(4, 1, s, c).bool()), (SBH, TensorCut(row=2, column=3))),
    (lambda s, c: (torch.zeros(s, 4, 7), torch.zeros(4, 1, 1, c)), (SBH, TensorCut(column=3))),
    (lambda s, c: (torch.zeros(4, s, 7), torch.zeros(4, 7), torch.zeros(())), (BSH, TensorCut(), TensorCut())),
])  # fmt: skip
def test_two_slice_lengths_tell_the_sequence(make, cuts, total):
    assert probe(make, total=total) == cuts
    first, second = probe_spans(total)  # begins with several tokens and stays in the sequence
    assert (first.start, first.stop, second.start) == (0, 2, 2) and second.stop <= total
    assert second.length == (3 if total >= 5 else 1)


@pytest.mark.parametrize(("layout", "cut"), [("auto", None), ("bsh", BSH), ("sbh", SBH)])
def test_a_layout_settles_ties_alone(layout, cut):
    # a Megatron model is [b, s, h] behind its embedding and [s, b, h] from there on
    assert probe(lambda s, c: torch.zeros(4, s, 7), layout) == (BSH,)
    assert probe(lambda s, c: torch.zeros(s, 4, 7), layout) == (SBH,)
    says = r'layout: got "auto", but the input of layer 3 grows .* dimensions \[0, 1\]'
    with nullcontext() if cut else pytest.raises(ConfigError, match=says):
        assert probe(lambda s, c: torch.zeros(s, s, 7), layout) == (cut,)


@pytest.mark.parametrize(("make", "message"), [
    (lambda s, c: torch.zeros(4, 2 * s, 7), r"has shape \[4, 4, 7\] for a slice of 2 tokens and \[4, 6, 7\]"),
    (lambda s, c: tuple(torch.zeros(4, s) for _ in range(s)), "is 2 tensors for one slice and 3 for the next"),
    (lambda s, c: (torch.zeros(4, s), None), "layer 3 gets a tuple with NoneType, not tensors"),
    (lambda s, c: {"hidden": torch.zeros(4, s)}, "layer 3 gets dict, not tensors|can't be cut"),
])  # fmt: skip
def test_what_follows_no_slice_is_a_model_that_cannot_be_cut(make, message):
    with pytest.raises(ConfigError, match=message):
        probe(make)

"""Where the sequence is in the tensors between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.inspection.sequence_dims import LEAST_TOKENS, SequenceProbe, check_outputs, probe_spans
from ds_terapipe.pipeline.slicing import TensorCut

B, H = 4, 7
SHORT, LONG = LEAST_TOKENS, 100  # sequences that are looked at in slices of two tokens and one, and of two and three


def probe(make: Callable[[int, int], Any], layout: str = "auto", total: int = LONG) -> tuple[TensorCut, ...]:
    """The cuts of a boundary whose tensors are ``make(tokens of the slice, tokens so far)``."""
    recorder = SequenceProbe(layout, first_layer=3)
    for span in probe_spans(total):
        recorder.begin_slice(span)
        recorder.record(make(span.length, span.stop))
        recorder.record(torch.zeros(B, span.length))
    (cuts,) = recorder.result().layers
    return cuts


BSH, SBH = TensorCut(row=1), TensorCut(row=0)


@pytest.mark.parametrize("total", [SHORT, 4, 5, LONG])
@pytest.mark.parametrize(
    ("make", "cuts"),
    [
        (lambda s, c: torch.zeros(B, s, H), (BSH,)),
        (lambda s, c: torch.zeros(s, B, H), (SBH,)),
        (lambda s, c: torch.zeros(B, s), (BSH,)),
        # a batch as large as a slice, or as both
        *((lambda s, c, b=b: torch.zeros(b, s, H), (BSH,)) for b in (1, 2, 3, 5)),
        *((lambda s, c, b=b: torch.zeros(s, b, 8 - b), (SBH,)) for b in (1, 2, 3, 5)),
        (lambda s, c: torch.zeros(B, 4, s, H), (TensorCut(row=2),)),
        (lambda s, c: (torch.zeros(B, s, H), torch.zeros(B, s).long()), (BSH, BSH)),
        (lambda s, c: (torch.zeros(s, B, H), torch.zeros(B, 1, s, c).bool()), (SBH, TensorCut(row=2, column=3))),
        (lambda s, c: (torch.zeros(s, B, H), torch.zeros(B, 1, 1, c)), (SBH, TensorCut(column=3))),
        (lambda s, c: (torch.zeros(B, s, H), torch.zeros(B, H), torch.zeros(())), (BSH, TensorCut(), TensorCut())),
    ],
)
def test_two_slice_lengths_tell_the_sequence(make, cuts, total):
    assert probe(make, total=total) == cuts
    first, second = probe_spans(total)  # begins with several tokens and stays in the sequence
    assert (first.start, first.stop, second.start) == (0, 2, 2) and second.stop <= total
    assert second.length == (3 if total >= 5 else 1)


@pytest.mark.parametrize("layout", ["auto", "bsh", "sbh"])
def test_a_layout_settles_ties_alone(layout):
    # a Megatron model is [b, s, h] behind its embedding and [s, b, h] from there on
    assert probe(lambda s, c: torch.zeros(B, s, H), layout) == (BSH,)
    assert probe(lambda s, c: torch.zeros(s, B, H), layout) == (SBH,)
    if layout == "auto":
        says = r'layout: got "auto", but the input of layer 3 grows .* dimensions \[0, 1\]'
        with pytest.raises(ConfigError, match=says):
            probe(lambda s, c: torch.zeros(s, s, H))
    else:
        assert probe(lambda s, c: torch.zeros(s, s, H), layout) == ((BSH,) if layout == "bsh" else (SBH,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, c: torch.zeros(B, 2 * s, H), r"has shape \[4, 4, 7\] for a slice of 2 tokens and \[4, 6, 7\]"),
        (lambda s, c: torch.zeros(B, c - s, H), r"has shape \[4, 0, 7\] for a slice of 2 tokens and \[4, 2, 7\]"),
        (lambda s, c: torch.zeros(B, *([s] if s > 2 else []), H), "has 2 dimensions for a slice of 2 tokens and 3 for"),
        (lambda s, c: tuple(torch.zeros(B, s) for _ in range(s)), "is 2 tensors for one slice and 3 for the next"),
        (lambda s, c: {"hidden": torch.zeros(B, s)}, "layer 3 gets dict, not tensors|can't be cut"),
    ],
)
def test_what_follows_no_slice_is_a_model_that_cannot_be_cut(make, message):
    with pytest.raises(ConfigError, match=message):
        probe(make)


def test_outputs_must_follow_the_tokens():
    check_outputs((BSH, TensorCut()))
    for cuts in ((), (TensorCut(),), (BSH, TensorCut(row=2, column=3))):
        with pytest.raises(ConfigError, match="outputs do not follow the tokens"):
            check_outputs(cuts)

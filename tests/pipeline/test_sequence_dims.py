"""Where the sequence is in the tensors between layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.inspection.sequence_dims import LEAST_TOKENS, SequenceProbe, check_outputs, probe_spans
from ds_terapipe.pipeline.slicing import TensorCut
from tests.pipeline.attention_layers import DocumentMask
from tests.pipeline.models import HIDDEN, Block, Embedding, Head, mean_loss, micro_batch
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

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


class Transpose(nn.Module):
    """Between [b, s, h] and [s, b, h]."""

    def forward(self, hidden):
        return hidden.transpose(0, 1).contiguous()


class SequenceFirst(Block):
    def forward(self, hidden):
        return super().forward(hidden.transpose(0, 1)).transpose(0, 1).contiguous()


class MaskedEmbedding(Embedding):
    """(tokens, positions, mask) to (hidden, mask), which travel together."""

    def forward(self, inputs):
        return super().forward(inputs[:2]), inputs[2]


class MaskedHead(Head):
    def forward(self, inputs):
        return super().forward(inputs[0])


def masked_batch(seed: int, length: int, batch: int):
    (tokens, positions), targets = micro_batch(seed, length, batch, masked=False)
    document = torch.arange(length) // 7
    mask = torch.ones(length, length, dtype=torch.bool).tril() & (document[:, None] == document)
    return (tokens, positions, mask.expand(batch, 1, length, length).contiguous()), targets


plain_batch = partial(micro_batch, masked=False)
SBH_LAYERS = (Embedding, Transpose, *[SequenceFirst] * 4, Transpose, Head)
# layers, micro-batches, tokens, sequences, slices
MODELS = {
    "sequence first": (SBH_LAYERS, plain_batch, 24, 2, 5),
    "sequence as long as the hidden size": ((Embedding, *[Block] * 4, Head), plain_batch, HIDDEN, 2, 5),
    "sequence first, slices as long as the batch": (SBH_LAYERS, plain_batch, 12, 3, 4),
    "a mask travels along": ((MaskedEmbedding, *[DocumentMask] * 4, MaskedHead), masked_batch, 24, 2, [5, 9, 1, 9]),
}


def train_all(rank: int, world_size: int) -> dict[str, float]:
    """For each model: by how much losses and gradients of this stage differ from those of one process."""
    result = {}
    for name, (kinds, make, length, batch, slices) in MODELS.items():
        specs, steps = [LayerSpec(kind) for kind in kinds], [[make(m, length, batch) for m in range(2)]]
        expected = train_plain(specs, mean_loss, steps, lambda p: torch.optim.SGD(p, lr=0.2), dtype=torch.float64)
        how = {"batch": batch, "dtype": torch.float64, "stages": world_size}
        engine = build_engine(specs, mean_loss, token_pipeline={"slices": slices}, **how)
        got = train(engine, steps)
        gradients = worst(got.gradients[0], expected.gradients[0])
        result[name] = max(abs(got.losses[0] / expected.losses[0] - 1) / 1e3, gradients)
        engine.destroy()
    return result


differences = launched(train_all, 2)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_each_layout_train_on_two_stages_as_on_one_process(name, differences):
    assert max(rank[name] for rank in differences) <= 1e-10

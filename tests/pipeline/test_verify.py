"""Models that compute something else when their sequence is cut train no step; others are left as they were."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Sequence
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.inspection import first_batch
from ds_terapipe.pipeline.inspection.verify import TOLERANCE, _corresponding, undisturbed, verify_stage
from ds_terapipe.pipeline.layer_range import LayerRange
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.interception import Overrides
from ds_terapipe.pipeline.slicing import Span, TensorCut, spans
from tests.mutants import applied
from tests.mutants.claims import holds
from tests.pipeline.attention_layers import Attention, EncoderLayer
from tests.pipeline.models import HIDDEN, Block, Embedding, Head, mean_loss, micro_batch, token_losses
from tests.pipeline.training import build_engine
from tests.spawn import launched, run_ranks

STEPS = [[micro_batch(10 * step + m, masked=False) for m in range(2)] for step in range(3)]


class CountedPositions(Embedding):
    """Makes its positions itself."""

    def forward(self, inputs):
        tokens, _ = inputs
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


class HandWritten(Attention):
    """softmax(q k^T) v, written out."""

    def mix(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


class HandWrittenIn16Bits(HandWritten):
    """The same, computed in bf16 inside a model of fp32."""

    def forward(self, hidden):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(hidden).float()


class Rotary(Attention):
    """Rotary positions from 0, made inside the layer."""

    def mix(self, q, k, v):
        angles = torch.outer(torch.arange(q.shape[2]), 1 / torch.arange(1, q.shape[3] // 2 + 1))
        q, k = (x * torch.cat([angles, angles], -1).cos() for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Table(nn.Module):
    """Adds the first rows of a table of positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 48, HIDDEN))

    def forward(self, hidden):
        return hidden + self.table[:, : hidden.shape[1]]


class SquareMask(Attention):
    """Causal by a mask of the tokens that are there."""

    def mix(self, q, k, v):
        mask = torch.tril(torch.ones(48, 48))[: q.shape[2], : q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.log())


class HandWrittenBehindZeros(HandWritten):
    """Its output projection starts at zero: nothing of the difference leaves the layer."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)


class NeedsWeights(nn.Module):
    """``nn.MultiheadAttention`` that returns its weights computes them by hand."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, hidden):
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        return hidden + self.attention(hidden, hidden, hidden, attn_mask=mask, is_causal=True)[0]


class Bert(nn.TransformerEncoderLayer):
    """Bidirectional."""

    def __init__(self):
        super().__init__(HIDDEN, 4, 2 * HIDDEN, dropout=0.0, batch_first=True)


class BertWithMask(Attention):
    """Bidirectional, with an explicit mask that hides nothing."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(q.shape[2], 24, dtype=torch.bool)[:, : k.shape[2]]
        )


class PaddingMask(Attention):
    """Bidirectional over all tokens but the padded ones."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[0], 1, 1, 24, dtype=torch.bool))


class Convolution(nn.Module):
    """Causal, over four tokens."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 4)

    def forward(self, hidden):
        return hidden + self.conv(F.pad(hidden.transpose(1, 2), (3, 0))).transpose(1, 2)


class MeanOverTokens(nn.Module):
    def forward(self, hidden):
        return hidden + hidden.mean(1, keepdim=True)


class Pooled(Head):
    def forward(self, hidden):
        return super().forward(hidden.mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, hidden):
        return self.rnn(hidden)[0]


class LastToken(nn.Module):
    """Lets every token see the last one, through a function no module stands for."""

    def forward(self, hidden):
        return hidden - 0.1 * hidden[:, -1:]


def with_middle(layer: type, embedding: type = Embedding, head: type = Head) -> list[LayerSpec]:
    return [LayerSpec(kind) for kind in (embedding, Block, Block, layer, Block, head)]


# What an error says of the line to change.
FROM_0, START = (
    r".*; it numbers the tokens .* from 0 at test_verify\.py:\d+",
    r"ds_terapipe\.current_span\(\), \"start\", 0",
)
BY_HAND = r".*; it writes causal attention out at test_verify\.py:\d+ \(return scores.*, is_causal=True\)$"
CHANGED = {
    "positions": (
        with_middle(Block, CountedPositions),
        rf"layer 0 \(\w+\), module 0\.positions,{FROM_0} .*arange.*{START}",
    ),
    "rotary": (with_middle(Rotary), rf"the input of layer 3 \(\w+\), module 3\.out,{FROM_0} \(angles = .*{START}"),
    "table": (with_middle(Table), rf"the output of layer 3 \(\w+\)(, module 3,)? differs{FROM_0} .*table\[.*{START}"),
    "square mask": (
        with_middle(SquareMask),
        r"an attention mask of 3 x 3 for tokens 2 to 5 .*layer 3.*, use is_causal=True in",
    ),
    "hand-written": (with_middle(HandWritten), rf"the input of layer 3 \(\w+\), module 3\.out,{BY_HAND}"),
    "hand-written in 16 bits": (
        with_middle(HandWrittenIn16Bits),
        rf"the input of layer 3 \(\w+\), module 3\.out,{BY_HAND}",
    ),
    "behind zeros": (with_middle(HandWrittenBehindZeros), r"the input of layer 3 \(\w+\), module 3\.out,"),
    "needs weights": (with_middle(NeedsWeights), r"layer 3 \(\w+\), module 3\.attention,"),
    "bert": (with_middle(Bert), r"attention that is not causal \(layer 3"),
    "bert with a mask": (with_middle(BertWithMask), r"an attention mask of 3 x 3 for tokens 2 to 5 of 24 \(layer 3"),
    "padding mask": (with_middle(PaddingMask), r"the input of layer 3 \(\w+\), module 3\.out,"),
    "convolution": (with_middle(Convolution), r"the output of layer 3 \(\w+\), module 3\.conv,"),
    "mean": (with_middle(MeanOverTokens), r"the output of layer 3 \(\w+\)(, module 3,)? differs"),
    "pooling": (with_middle(Block, head=Pooled), r"outputs do not follow the tokens"),
    "recurrent": (with_middle(Recurrent), r"the output of layer 3 \(\w+\), module 3\.rnn,"),
    "last token": (with_middle(LastToken), r"the output of layer 3 \(\w+\)(, module 3,)? differs"),
}
UNCUT = ("hand-written", "bert", "recurrent", "pooling")
WITH_AMOUNT = set(CHANGED) - {"bert", "bert with a mask", "square mask", "pooling"}


def refusals(rank: int, world_size: int) -> dict[str, tuple[str, bool, str]]:
    """For each model: what this rank raises, whether its weights are as they were, what one slice does."""
    result = sliced(rank, world_size, tuple(CHANGED))
    for name in UNCUT:
        loss = mean_loss if name != "pooling" else pooled_loss
        engine = build_engine(CHANGED[name][0], loss, token_pipeline={"slices": 1}, stages=world_size)
        trained = math.isfinite(float(engine.train_batch(iter(STEPS[0]))))
        engine.destroy()
        result[name] = (*result[name][:2], "trained" if trained else "not finite")
    return result


def sliced(rank: int, world_size: int, names: Sequence[str]) -> dict[str, tuple[str, bool, str]]:
    result = {}
    for name in names:
        specs, _ = CHANGED[name]
        engine = build_engine(specs, mean_loss, token_pipeline={"slices": [7, 2, 9, 1, 5]}, stages=world_size)
        before = copy.deepcopy(engine.module.state_dict())
        try:
            engine.train_batch(iter(STEPS[0]))
            said = "trained"
        except ConfigError as error:
            said = str(error)
        same = all(torch.equal(value, before[key]) for key, value in engine.module.state_dict().items())
        same = same and all(p.grad is None or not p.grad.any() for p in engine.module.parameters())
        engine.destroy()
        result[name] = (said, same and engine.global_steps == 0, "")
    return result


def pooled_loss(logits, targets):
    return F.cross_entropy(logits, targets[:, 0])


said = launched(refusals, 2)


@pytest.mark.parametrize("name", CHANGED)
def test_every_rank_names_the_module_and_no_step_is_trained(name, said):
    for rank in said:
        message, untouched, _ = rank[name]
        assert message.startswith("token_pipeline.slices: got a model that can't be cut: "), message
        assert re.search(CHANGED[name][1], message), message
        assert "\n" not in message and untouched
        if name in WITH_AMOUNT:
            assert "differs by" in message and "(tokens " in message, message
    assert said[0][name][0] == said[1][name][0]


def models_are_refused(mutant: str | None, *names: str) -> bool:
    """Whether this holds for each of these models under a mutant; for ``tests.mutants``."""
    found = run_ranks(sliced, 2, names, mutant=mutant)
    return all(holds(test_every_rank_names_the_module_and_no_step_is_trained, name, found) for name in names)


@pytest.mark.parametrize("name", UNCUT)
def test_one_slice_is_always_fine(name, said):
    assert [rank[name][2] for rank in said] == ["trained", "trained"]


@torch.jit.script
def scripted_dropout_add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, training: bool) -> torch.Tensor:
    """As Megatron's fused bias, dropout and residual."""
    return residual + F.dropout(x + bias, p=0.5, training=training)


class Busy(Attention):
    """Every kind of dropout, statistics, counters and random numbers: what a look at the model might disturb."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.frozen_dropout = nn.Dropout(0.3)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen_dropout.eval()
        return self

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)

    def forward(self, hidden):
        self.calls += 1
        self.replaced = self.replaced + random.random() + float(numpy.random.rand()) + torch.rand(1)
        hidden = F.alpha_dropout(F.dropout(super().forward(hidden), 0.1, self.training), 0.1, self.training)
        hidden = self.frozen_dropout(self.dropout(hidden))
        return scripted_dropout_add(hidden, self.bias, hidden, self.training)


BUSY = [LayerSpec(kind) for kind in (Embedding, Busy, Busy, EncoderLayer, Head)]


def with_and_without(rank: int, world_size: int) -> list[dict]:
    """The same training with and without a look at the model: all that it leaves behind."""
    left = []
    for verify in (True, False, True):
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(5)
        engine = build_engine(
            BUSY,
            mean_loss,
            token_pipeline={"slices": [7, 2, 9, 1, 5], "verify": verify},
            stages=1,
            module={"seed_layers": False},  # else every layer starts with its own seed, whatever happened before
        )
        losses = [float(engine.train_batch(iter(step))) for step in STEPS]
        state = dict(engine.module.state_dict(), torch=torch.get_rng_state())
        modes = {name: module.training for name, module in engine.module.named_modules()}
        left.append(
            {
                "state": {name: value.tolist() for name, value in state.items()},
                "modes": modes,
                "numbers": (random.random(), float(numpy.random.rand()), losses),
            }
        )
        engine.destroy()
    return left


def test_a_run_with_verify_is_the_run_without_bit_for_bit():
    first, without, again = run_ranks(with_and_without, 1)[0]
    assert not first["modes"]["1.frozen_dropout"] and first["modes"]["1.dropout"]
    for one in (first, again):  # the second time all scripts have been differentiated and optimised
        assert one["numbers"] == without["numbers"] and one["modes"] == without["modes"]
        assert [name for name, value in one["state"].items() if value != without["state"][name]] == []
    assert first["state"]["1.calls"][0] > 0


class Narrow(Attention):
    """A device that has memory for so many tokens of a layer."""

    most = 24
    longest = 0

    def forward(self, hidden):
        Narrow.longest = max(Narrow.longest, hidden.shape[1])
        if hidden.shape[1] > Narrow.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {hidden.shape[1]} tokens")
        return super().forward(hidden)


class NarrowMean(Narrow):
    """The same, and mixes tokens."""

    def forward(self, hidden):
        return super().forward(hidden) + hidden.mean(1, keepdim=True)


class WholeMask(Attention):
    """Keeps a mask of all tokens, as Megatron-DeepSpeed does, which attention of fewer of them does not fit."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(24, 24, dtype=torch.bool).tril())


class LateMean(nn.Module):
    """Mixes tokens, but none of the first twelve."""

    def forward(self, hidden):
        return hidden + hidden.mean(1, keepdim=True) * (hidden.shape[1] > 12)


class SumOfTokens:
    """The mean loss, as a sum over tokens."""

    def __call__(self, logits, targets):
        return self.token_sum(logits, targets) / self.token_weight(targets)

    def token_sum(self, logits, targets):
        return token_losses(logits, targets).sum()

    def token_weight(self, targets):
        return torch.tensor(float(targets.numel()))


LONG = {
    # model, tokens that fit, loss, what is said; the sequences have 24 tokens, of which at first 12 are looked at
    "fits": (Narrow, 12, mean_loss, "trained"),
    "a loss of tokens": (Narrow, 12, SumOfTokens(), "trained"),
    "does not fit": (
        Narrow,
        10,
        mean_loss,
        "token_pipeline.verify: got true, must be false where 12 tokens of a layer",
    ),
    "a mask of all": (WholeMask, 24, mean_loss, "trained"),
    "changed": (
        MeanOverTokens,
        24,
        mean_loss,
        "token_pipeline.slices: got a model that can't be cut: the output of layer 3",
    ),
    # what was found at the beginning counts, not that the rest does not fit
    "changed, does not fit": (
        NarrowMean,
        12,
        mean_loss,
        "token_pipeline.slices: got a model that can't be cut: the output",
    ),
    "changed late": (LateMean, 24, mean_loss, "trained"),
    "labels": (
        Block,
        24,
        lambda outputs, labels: mean_loss(outputs, labels[:, 1:]),
        "the data iterator: got labels that",
    ),
}


def long_ones(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    first_batch.LONGEST, found = 12, {}
    for name, (kind, most, loss, _) in LONG.items():
        Narrow.most, Narrow.longest = most, 0
        engine = build_engine(with_middle(kind), loss, token_pipeline={"slices": [7, 2, 9, 1, 5]}, stages=world_size)
        try:
            engine.train_batch(iter(STEPS[0]))
            said = "trained"
        except ConfigError as error:
            said = str(error)
        engine.destroy()
        found[name] = said, Narrow.longest
    return found


long_sequences = launched(long_ones, 2)


@pytest.mark.parametrize("name", LONG)
def test_of_long_sequences_the_beginning_is_looked_at(name, long_sequences):
    for found in long_sequences:
        said, longest = found[name]
        assert said.startswith(LONG[name][3]), said
        assert longest <= 12 or name.endswith("does not fit")
    assert max(found["fits"][1] for found in long_sequences) == 12


@given(st.lists(st.integers(1, 400), min_size=2, max_size=12))
def test_the_beginning_is_shared_as_the_whole_is(lengths):
    whole = spans(tuple(lengths))
    with mock.patch.object(first_batch, "LONGEST", 100):
        part = first_batch.verified(whole)
    total = whole[-1].stop
    assert part == whole if total <= 100 else part[-1].stop == 100 and {span.total for span in part} == {100}
    assert [span.start for span in part] == [0, *(span.stop for span in part[:-1])] and all(
        span.length for span in part
    )
    if total > 100:
        inner = {min(max(round(100 * span.stop / total), 1), 99) for span in whole[:-1]}
        assert {span.stop for span in part} == {*inner, 100} and len(part) > 1


@pytest.fixture
def context():
    Overrides.acquire()
    yield SliceContext()
    Overrides.release()


def look(context, layers, inputs, cuts, lengths=(7, 2, 9, 1, 5)):
    """Verify a stage of ``layers``; the first layer's inputs are cut by ``cuts``, the others' [b, s, h]."""
    root = nn.Sequential(*layers)
    stage = LayerRange(layers, 4, context.enter_layer, context.leave_layer)
    per_layer = [cuts] + [(TensorCut(row=1),)] * (len(layers) - 1)
    with undisturbed(root, context):
        return verify_stage(root, stage, context, inputs, per_layer, spans(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_good_models_pass_in_every_dtype(dtype, context):
    torch.manual_seed(0)
    layers = [Embedding(), Block(), Busy(), Block(), EncoderLayer(), Head()]
    layers = [layer.to(dtype) for layer in layers]
    for layer in layers[1:]:  # away from the initial weights, where all is small
        for parameter in layer.parameters():
            parameter.data.mul_(3)
    (inputs, _) = STEPS[0][0]
    look(context, layers, inputs, (TensorCut(row=1),) * 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_threshold_of_each_dtype_is_between_rounding_and_a_change(dtype, context):
    class Scaled(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.change = change

        def forward(self, hidden):
            return hidden if hidden.shape[1] == 24 else hidden * (1 + self.change)

    hidden = torch.randn(2, 24, HIDDEN, dtype=torch.float64).to(dtype)
    look(context, [Scaled(TOLERANCE[dtype] / 4)], hidden, (TensorCut(row=1),))
    with pytest.raises(
        ConfigError, match=r"the output of layer 4 \(\w+\), module 0, differs by \d\.\de-\d+ between slice and whole"
    ):
        look(context, [Scaled(TOLERANCE[dtype] * 4)], hidden, (TensorCut(row=1),))


def test_one_wrong_token_of_many_is_found(context):
    class Wrong(nn.Module):
        def forward(self, tokens):
            return tokens + (torch.arange(tokens.shape[1]) == 3) if tokens.shape[1] == 4 else tokens

    with pytest.raises(ConfigError, match=r"differs by 1\.0e\+00 .* \(tokens 60 to 64\)"):
        look(context, [Wrong()], torch.zeros(1, 64).long(), (TensorCut(row=1),), (60, 4))


def differences_are_found(mutant: str | None) -> bool:
    """Whether the test before and the next one hold under a mutant; for ``tests.mutants``."""
    Overrides.acquire()
    try:
        with applied(mutant):
            found = holds(test_one_wrong_token_of_many_is_found, SliceContext())
            return holds(test_other_modules_for_a_slice_than_for_all_are_found, SliceContext()) and found
    finally:
        Overrides.release()


def test_other_modules_for_a_slice_than_for_all_are_found(context):
    class Skips(Head):
        def forward(self, hidden):
            return super().forward(hidden) if hidden.shape[1] > 5 else self.norm(hidden)

    with pytest.raises(
        ConfigError, match=r"layer 4 \(\w+\) calls other modules for tokens 7 to 9 than for the whole sequence"
    ):
        look(context, [Skips()], torch.randn(2, 24, HIDDEN), (TensorCut(row=1),))


def test_sequence_first_layers_around_batch_first_modules_pass(context):
    class SequenceFirst(nn.Module):
        """[s, b, h] outside, an embedding-like module in [b, s, h] and one in [b * s, h] inside."""

        def __init__(self):
            super().__init__()
            self.batch_first, self.flat = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, hidden):
            inner = self.batch_first(hidden.transpose(0, 1))
            return self.flat(inner.reshape(-1, HIDDEN)).view_as(inner).transpose(0, 1)

    hidden = torch.randn(24, 2, HIDDEN)
    look(context, [SequenceFirst()], hidden, (TensorCut(row=0),))
    with pytest.raises(
        ConfigError, match=r"the output of layer 4 \(\w+\), module batch_first,|layer 4 \(\w+\), module 0\.batch_first,"
    ):
        layer = SequenceFirst()
        layer.batch_first.register_forward_hook(lambda module, args, out: out * out.shape[1])
        look(context, [layer], hidden, (TensorCut(row=0),))


@pytest.mark.parametrize("order", ["b s h", "s b h", "b h s", "bs h", "sb h", "b a s c", "h"])
def test_the_part_that_a_slice_must_be_is_found_in_any_layout(order):
    b, span = 3, Span(4, 9, 12)
    sizes = {"b": (b, b), "s": (12, 5), "c": (12, 9), "h": (12, 12), "a": (2, 2), "bs": (36, 15), "sb": (36, 15)}
    names = order.split()
    whole = torch.rand([sizes[name][0] for name in names])
    part = whole
    for d, name in enumerate(names):
        if name == "s":
            part = part.narrow(d, 4, 5)
        elif name == "c":
            part = part.narrow(d, 0, 9)
        elif name in ("bs", "sb"):
            shape, inner = ((b, 12), d + 1) if name == "bs" else ((12, b), d)
            part = part.unflatten(d, shape).narrow(inner, 4, 5).flatten(d, d + 1)
    candidates = [piece for piece, _ in _corresponding(whole, part, span, b)]
    assert any(torch.equal(piece, part) for piece in candidates) and len(candidates) <= 2


def test_unknown_shapes_and_types_have_no_counterpart():
    span = Span(4, 9, 12)
    for part in (torch.rand(3, 6), torch.rand(3, 5, 1), torch.rand(3, 5).double()):
        assert not list(_corresponding(torch.rand(3, 12), part, span, 3))

"""Models that compute something else when their sequence is cut train no step; others are left as they were."""

import copy
import io
import math
import random
import re
import warnings
from contextlib import redirect_stdout
from functools import partial
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ds_terapipe.errors import ConfigError
from ds_terapipe.job import error_of
from ds_terapipe.pipeline.inspection import first_batch
from ds_terapipe.pipeline.inspection.differences import TOLERANCE, difference
from ds_terapipe.pipeline.inspection.sequence_dims import SequenceDims
from ds_terapipe.pipeline.inspection.verify import undisturbed, verify_stage
from ds_terapipe.pipeline.layer_range import LayerRange
from ds_terapipe.pipeline.loss import MicroBatchLoss
from ds_terapipe.pipeline.slicing import TensorCut, spans
from tests.pipeline.attention_layers import Attention, EncoderLayer, way
from tests.pipeline.models import HIDDEN, Block, Embedding, Head, MaskedTokenLoss, mean_loss, micro_batch, steps_of
from tests.pipeline.training import build_engine
from tests.spawn import launched

STEPS = [[micro_batch(10 * step + m, masked=False) for m in range(2)] for step in range(3)]
SLICES = {"slices": [7, 2, 9, 1, 5]}


class CountedPositions(Embedding):
    def forward(self, inputs):
        tokens, _ = inputs
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


def hand_written(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


HandWritten = way(hand_written)
mask_of = lambda n: create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")  # noqa: E731
whole_graph = torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.sin, (x,)), backend="eager", fullgraph=True)
Flex = way(lambda q, k, v: flex_attention(q, k, v, block_mask=mask_of(q.shape[2])))
Bert = type("Bert", (EncoderLayer,), {"forward": nn.TransformerEncoderLayer.forward})


def masked(make):
    """Attention with an explicit mask [.., rows, columns] made of q and k."""
    return way(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q, k).bool()))


SquareMask = masked(lambda q, k: torch.ones(48, 48).tril()[: q.shape[2], : q.shape[2]])
# of all tokens, as Megatron-DeepSpeed keeps it, which attention of fewer of them does not fit
WholeMask = masked(lambda q, k: torch.ones(24, 24).tril())


def layer(forward, **parts):
    """A layer of a forward function of it and hidden states, and of parts that it makes."""

    def make(self):
        nn.Module.__init__(self)
        for name, part in parts.items():
            setattr(self, name, part())

    return type("Layer", (nn.Module,), {"__init__": make, "forward": forward})


# causal, over four tokens
Convolution = layer(
    lambda self, hidden: hidden + self.conv(F.pad(hidden.transpose(1, 2), (3, 0))).transpose(1, 2),
    conv=lambda: nn.Conv1d(HIDDEN, HIDDEN, 4),
)
rotary_cache = lambda self, x: (setattr(self, "most", max(vars(self).get("most", 0), x.shape[1])), x * self.most)[1]  # noqa: E731
Pooled = type("Pooled", (Head,), {"forward": lambda self, hidden: Head.forward(self, hidden.mean(1))})
# a gradient is changed in its backward pass
hooked = lambda change: layer(lambda self, x: ((y := x * 1.0).requires_grad and y.register_hook(partial(change, y)), y)[1])  # noqa: E731
gated = lambda change, gate: layer(lambda self, x: change(x, self.gate), gate=lambda: nn.Parameter(torch.full((1,), gate)))  # noqa: E731
Penalty = gated(lambda x, gate: x + hooked(lambda w, g: g + w)()(gate), 1.0)
MeanOverTokens = gated(lambda x, gate: x + gate * x.mean(1, keepdim=True), 1e-6)  # as a scale of layers begins


def with_middle(layer, embedding=Embedding, head=Head):
    return [LayerSpec(kind) for kind in (embedding, Block, Block, layer, Block, head)]


# what an error says of the line to change
FROM_0 = r".*; it numbers the tokens .* from 0 at test_verify\.py:\d+"
START = r"ds_terapipe\.current_span\(\), \"start\", 0"
BY_HAND = r".*; it writes causal attention out at test_verify\.py:\d+ \(return scores.*, is_causal=True\)$"
INPUT, OUTPUT = r"the input of layer 3 \(\w+\), module 3\.out,", r"the output of layer 3 \(\w+\)"
CHANGED = {
    "positions": (with_middle(Block, CountedPositions), rf"layer 0 \(\w+\), module 0\.positions,{FROM_0} .*arange.*{START}"),
    "square mask": (with_middle(SquareMask), r"an attention mask of 3 x 3 for tokens 2 to 5 .*layer 3.*, use is_causal=True in"),
    "hand-written": (with_middle(HandWritten), INPUT + BY_HAND),
    "flex": (with_middle(Flex), INPUT + r".*\); it calls flex_attention at test_verify\.py:\d+ .*, is_causal=True\)$"),
    "bert": (with_middle(Bert), r"attention that is not causal \(layer 3"),
    "padding mask": (with_middle(masked(lambda q, k: torch.ones(q.shape[0], 1, 1, 24))), INPUT),
    "convolution": (with_middle(Convolution), OUTPUT + r", module 3\.conv,"),
    "random": (with_middle(layer(lambda self, x: x + torch.randn_like(x))), OUTPUT + r".* random numbers or has a state; use"),
    "mean": (with_middle(MeanOverTokens), OUTPUT + "(, module 3,)? differs"),
    "in training": (with_middle(layer(lambda self, x: x + x.mean(1, True) * self.training)), OUTPUT + "(, module 3,)? differs"),
    "dynamic rotary": (with_middle(layer(rotary_cache)), OUTPUT + "(, module 3,)? differs"),
    "clipped gradient": (with_middle(hooked(lambda x, g: g / g.norm())), r"the gradient of the input of layer 3 .* differs"),
    "auxiliary loss": (with_middle(hooked(lambda x, g: g + 1e-6 * x / x.numel())), r"the gradient of the input of layer 3 "),
    "penalty of weights": (with_middle(Penalty), r"the gradient of the parameter gate of layer 3 .* differs"),
    "pooling": (with_middle(Block, head=Pooled), r"outputs do not follow the tokens"),
}
UNCUT, WITHOUT_AMOUNT = ("hand-written", "bert"), ("bert", "square mask", "pooling")


def said_of(specs, loss, slices=SLICES, evaluates=False):
    """Error of the first step, and whether it left weights, gradients and the count of steps alone."""
    engine, masked = build_engine(specs, loss, token_pipeline=slices), isinstance(loss, ShiftedSum)
    before = copy.deepcopy(engine.module.state_dict())
    if evaluates:
        engine.eval_batch(iter(STEPS[1]))
    torch.set_warn_always(True)
    warnings.filterwarnings("error", "Converting a tensor with requires_grad")
    try:
        said = "trained" if math.isfinite(float(engine.train_batch(iter(steps_of(1, 2, masked=masked)[0])))) else "not finite"
    except ConfigError as error:
        said = str(error)
    same = all(torch.equal(value, before[key]) for key, value in engine.module.state_dict().items())
    same = same and all(p.grad is None or not p.grad.any() for p in engine.module.parameters())
    engine.destroy()
    return said, same and engine.global_steps == 0


class Narrow(Attention):
    """A device that has memory for so many tokens of a layer."""

    most = 24
    longest = 0

    def forward(self, hidden):
        Narrow.longest = max(Narrow.longest, hidden.shape[1])
        if hidden.shape[1] > Narrow.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {hidden.shape[1]} tokens")
        return super().forward(hidden)


ShiftedSum = type("ShiftedSum", (MaskedTokenLoss,), {"token_sum": lambda self, y, labels: (
    MaskedTokenLoss.token_sum(self, y[:, :-1], tuple(each[:, :-1] for each in labels)))})  # fmt: skip
CANT, NO_MEMORY = "token_pipeline.slices: got a model that can't be cut: the output of layer 3", "does not fit"
LONG = {
    # model, tokens that fit, loss, what is said; of 24 tokens 12 are looked at first
    "fits": (Narrow, 12, mean_loss, "trained"),
    NO_MEMORY: (Narrow, 10, mean_loss, "token_pipeline.verify: got true, must be false where 12 tokens of a layer"),
    "a mask of all": (WholeMask, 24, mean_loss, "trained"),
    "changed": (MeanOverTokens, 24, mean_loss, CANT),
    "no sum, without each slice's last token": (Block, 24, ShiftedSum(), "loss_fn: got "),
}


def worker(rank, world_size):
    """Of each model: what is said, whether it was left alone; of long sequences also the longest seen. Some train uncut."""
    cut = {name: said_of(specs, mean_loss, evaluates=name == "in training") for name, (specs, _) in CHANGED.items()}
    assert [said_of(CHANGED[name][0], mean_loss, {"slices": 1})[0] for name in UNCUT] == ["trained"] * len(UNCUT)
    long: dict = {}
    with mock.patch.object(first_batch, "LONGEST", 12):
        for name, (kind, most, loss, _) in LONG.items():
            Narrow.most, Narrow.longest = most, 0
            long[name] = said_of(with_middle(kind), loss)[0], Narrow.longest
    return cut, long


ranks = launched(worker, 2, timeout=180)


@pytest.mark.parametrize("name", CHANGED)
def test_every_rank_names_the_module_and_no_step_is_trained(name, ranks):
    for cut, _ in ranks:
        message, untouched = cut[name]
        assert message.startswith("token_pipeline.slices: got a model that can't be cut: "), message
        assert re.search(CHANGED[name][1], message), message
        assert "\n" not in message and untouched
        assert name in WITHOUT_AMOUNT or ("differs by" in message and "(tokens " in message), message
        assert message == ranks[0][0][name][0]


@pytest.mark.parametrize("name", LONG)
def test_of_long_sequences_the_beginning_is_looked_at(name, ranks):
    for _, found in ranks:
        said, longest = found[name]
        assert said.startswith(LONG[name][3]), said
        assert longest <= 12 or name.endswith(NO_MEMORY)
    assert max(found["fits"][1] for _, found in ranks) == 12


@torch.jit.script
def scripted_dropout_add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, training: bool) -> torch.Tensor:
    """Fused bias, dropout and residual, as in Megatron."""
    return residual + F.dropout(x + bias, p=0.5, training=training)


class Busy(Attention):
    """Every kind of dropout, statistics, counters and random numbers: what a look at the model might disturb."""

    def __init__(self):
        super().__init__()
        self.dropout, self.frozen_dropout = nn.Dropout(0.3), nn.Dropout(0.3)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("table", None)  # a cache that grows
        self.longest = self.count = 0

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen_dropout.eval()
        return self

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)

    def forward(self, hidden):
        self.calls, self.count = self.calls.add_(1), self.count + 1
        if hidden.shape[1] > self.longest:
            self.longest, self.table = hidden.shape[1], torch.ones(hidden.shape[1])
        self.replaced = self.replaced + random.random() + float(numpy.random.rand()) + torch.rand(1)
        hidden = F.alpha_dropout(F.dropout(super().forward(hidden), 0.1, self.training), 0.1, self.training)
        hidden = F.feature_alpha_dropout(F.dropout1d(hidden, 0.1, self.training), 0.1, self.training, inplace=True)
        hidden = self.frozen_dropout(self.dropout(hidden))
        hidden.requires_grad and hidden.register_hook(lambda gradient: gradient * 0.9)
        return scripted_dropout_add(hidden, self.bias, hidden, self.training)


class CountedLoss:
    calls = 0

    def __call__(self, logits, targets):
        self.calls += 1
        loss = mean_loss(logits, targets) * self.calls
        return loss + torch.autograd.grad(loss, logits, create_graph=True)[0].norm()


# features that are no tokens, as of an image if they vary, and outputs with samples and tokens in one dimension
Prefixed = type("Prefixed", (Embedding,), {"forward": lambda self, x: (
    Embedding.forward(self, x[:2]) + x[2].mean(1, True) + x[2].std() * torch.arange(x[0].shape[1])[:, None])})  # fmt: skip
Flat = type("Flat", (Head,), {"forward": lambda self, hidden: Head.forward(self, hidden).flatten(0, 1)})
# samples and features of steps of 24 tokens, whether these vary, and what is said of each
LATER = [
    ((1, 7, False), "None"),
    ((1, 7, True), r"token_pipeline\.slices: got a model that can't be cut: the output of layer 0 .* numbers the tokens"),
    ((1, 24, False), r"token_pipeline\.cut: got none, inputs\[2\] \(float32 \[1, 24, 32\]\) has 24 in dimension 1"),
    ((2, 7, False), r"the model: got outputs of shape \[24, 53\] for 12 tokens, must have as many in dimension 0"),
]


def later():
    specs, flat_loss = with_middle(Block, Prefixed, Flat), lambda outputs, y: mean_loss(outputs.view(*y.shape, -1), y)
    engine, said = build_engine(specs, flat_loss, token_pipeline={"slices": 2}, stages=1), []
    for (samples, features, vary), _ in LATER:
        x, y = micro_batch(0, batch=samples, masked=False)
        step = [((*x, (torch.randn if vary else torch.ones)(samples, features, HIDDEN)), y)] * 2
        said.append(str(error_of(lambda step=step: engine.train_batch(iter(step)))))
    return said


def with_and_without(rank, world_size):
    """All that the same training leaves behind with, without and again with a look at the model; errors of later steps."""
    left, out = [], io.StringIO()
    for verify in (True, False, True):
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(5)
        engine = build_engine(
            [LayerSpec(kind) for kind in (Embedding, Busy, Busy, EncoderLayer, Head)], CountedLoss(), stages=1,
            token_pipeline={**SLICES, "verify": verify},
            module={"seed_layers": False},  # else every layer starts with its own seed, whatever happened before
        )  # fmt: skip
        with redirect_stdout(out):
            losses = [float(engine.train_batch(iter(step))) for step in STEPS]
        state = dict(engine.module.state_dict(), torch=torch.get_rng_state())
        modes = {name: module.training for name, module in engine.module.named_modules()}
        numbers = random.random(), float(numpy.random.rand()), losses
        left.append(({name: value.tolist() for name, value in state.items()}, modes, numbers))
        engine.destroy()
    return left, out.getvalue(), later()


def test_a_run_with_verify_is_the_run_without_bit_for_bit(verified):
    first, without, again = verified[0][0]
    assert first == without == again  # the second time all scripts have been differentiated and optimised
    state, modes, _ = first
    assert not modes["1.frozen_dropout"] and modes["1.dropout"] and state["1.calls"][0] > 0
    assert verified[0][1].count("once per slice, not once per micro-batch: 1.calls, 1.count, 1.replaced, 2.calls and 2 more") == 2


def test_a_later_step_whose_tensors_follow_the_tokens_otherwise_is_refused(verified):
    assert all(re.match(message, said) for said, (_, message) in zip(verified[0][2], LATER, strict=True)), verified[0][2]


verified = launched(with_and_without, 1)


def look(context, layers, inputs, lengths=(7, 2, 9, 1, 5), row=1, **trains):
    """Verify a stage of ``layers``; the first layer's inputs are cut in dimension ``row``, the others' [b, s, h]."""
    root, stage = nn.Sequential(*layers), LayerRange(layers, 4, context.enter_layer, context.leave_layer)
    cuts = [(TensorCut(row=row),) * (len(inputs) if isinstance(inputs, tuple) else 1)]
    with undisturbed({context: root}):
        dims = SequenceDims((*cuts, *[(TensorCut(row=1),)] * (len(layers) - 1)), (TensorCut(row=1),))
        return verify_stage(root, stage, context, inputs, dims, spans(lengths), **trains)


def changing(total, change):
    """A layer that computes something else of fewer than all tokens."""
    return layer(lambda self, hidden: hidden if hidden.shape[1] == total else change(hidden))()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_threshold_of_each_dtype_is_between_rounding_and_a_change_or_wrong_positions(dtype, context):
    hidden = torch.randn(2, 24, HIDDEN, dtype=torch.float64).to(dtype)
    rounded = lambda x, only: x * (1 + TOLERANCE[dtype] / 4 * (x.dtype in only))  # noqa: E731
    look(context, [changing(24, partial(rounded, only=(dtype,)))], hidden)
    said = r"the output of layer 4 \(\w+\), module 0, differs by \d\.\de-\d+ between slice and whole"
    with pytest.raises(ConfigError, match=said):
        look(context, [changing(24, lambda x: x * (1 + TOLERANCE[dtype] * 4))], hidden)
    if dtype.itemsize == 2:  # what is no rounding is there in fp32 too
        with pytest.raises(ConfigError, match=said):
            look(context, [changing(24, partial(rounded, only=(dtype, torch.float32)))], hidden)
        with pytest.raises(ConfigError, match="the gradient of the parameter gate of layer 4"):
            look(context, [Penalty().to(dtype)], hidden, trains=True)
    assert [difference(torch.ones(n, dtype=dtype), torch.zeros(n, dtype=dtype), None) for n in (0, 1, 2)] == [0, 1, 1]
    steps = torch.arange(24)[:, None].to(dtype) / 500  # within the threshold of bf16
    with pytest.raises(ConfigError, match=said + r".*from 0 at test_verify\.py"):
        look(context, [layer(lambda self, x: x + steps[: x.shape[1]] * x)()], hidden)


@pytest.mark.parametrize(("row", "shape"), [(1, (2, 24, HIDDEN)), (0, (24, 2, HIDDEN))])
def test_modules_within_a_layer_may_get_all_samples_tokens_in_one_dimension(row, shape, context):
    def flat(more):
        inner = layer(lambda self, rows: whole_graph(rows) + more * (len(rows) < 48))
        return layer(lambda self, hidden: self.inner(hidden.flatten(0, 1)).view_as(hidden), inner=inner)()

    look(context, [flat(0)], torch.randn(shape), row=row)
    with pytest.raises(ConfigError, match=r"the output of layer 4 \(\w+\), module 0\.inner, differs"):
        look(context, [flat(1)], torch.randn(shape), row=row)
    # as an expert that is left out where it has no tokens
    expert = layer(lambda self, x: self.inner(x) if x.numel() > 5 * 2 * HIDDEN else x, inner=nn.Identity)
    look(context, [expert()], torch.randn(shape), row=row)


def test_one_wrong_token_of_many_is_found(context):
    third = changing(64, lambda tokens: tokens + (torch.arange(tokens.shape[1]) == 3) * (tokens.shape[1] == 4))
    with pytest.raises(ConfigError, match=r"differs by 1\.0e\+00 .* \(tokens 60 to 64\)"):
        look(context, [third], torch.zeros(1, 64).long(), (60, 4))


def test_a_loss_whose_terms_cancel_is_rounding_and_another_sum_or_an_auxiliary_loss_of_each_slice_is_refused():
    for whole, sums, refused in ((3e-8, -2e-8, False), (2.0, 2.0001, False), (2.0, 2.01, True), (1e-3, 1.01e-3, True)):
        assert (error_of(lambda a=whole, b=sums: first_batch._check_sums(a, b, torch.float32)) is not None) == refused
    loss = MicroBatchLoss(sum, None, None, (TensorCut(row=0), TensorCut()), spans((1, 2)))
    loss.add((torch.zeros(1), torch.tensor(2.0)))
    with pytest.raises(ConfigError, match=r"an output of one number, 2 for a slice and 2\.1 for another, must"):
        loss.add((torch.zeros(2), torch.tensor(2.1)))

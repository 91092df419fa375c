"""Layers that call causal attention in all the ways that models call it. Hidden states are [b, s, HIDDEN]."""

import math
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ds_terapipe.pipeline.documents import Documents
from tests.pipeline.models import HEADS, HIDDEN

SIZE = HIDDEN // HEADS
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default])
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def without_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hugging Face's call: ``is_causal`` for several queries only."""
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)


def split(hidden: Tensor, heads: int) -> Tensor:
    """[b, s, heads * SIZE] to [b, heads, s, SIZE]."""
    return hidden.unflatten(-1, (heads, SIZE)).transpose(1, 2)


class Attention(nn.Module):
    """Residual attention. Subclasses (`way`) mix q, k and v otherwise, or call it otherwise."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.k = nn.Linear(HIDDEN, self.kv_heads * SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, self.kv_heads * SIZE)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def qkv(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(hidden)
        return split(self.q(normed), HEADS), split(self.k(normed), self.kv_heads), split(self.v(normed), self.kv_heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(self.mix(*self.qkv(hidden)).transpose(1, 2).flatten(2))


def way(mix: Mix, **attributes: Any) -> type[Attention]:
    return type("Way", (Attention,), {"mix": lambda self, q, k, v: mix(q, k, v), **attributes})


def twice(call: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = call(q, k, v)
    return call(first, k * 0.5, first + v)


INNER, REENTRANT = (partial(checkpoint, attend, use_reentrant=reentrant) for reentrant in (False, True))


@torch.jit.script
def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """TorchScript; with operators around the call for its fuser and its own differentiation."""
    return F.scaled_dot_product_attention(q * 0.9, k + 0.0, torch.tanh(v), is_causal=True) * 2.0


def causal_mask(hidden: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], dtype=hidden.dtype)


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        normed, mask = self.norm(hidden), causal_mask(hidden)
        return hidden + self.attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]


class EncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer``, causal; in eval it has a fused fast path of its own."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden, src_mask=causal_mask(hidden), is_causal=True)


AttnMaskType = Enum("AttnMaskType", "padding causal")


class ScaleMaskSoftmax(nn.Module):
    """Softmax like Megatron's ``FusedScaleMaskSoftmax``: scores * scale (None: 1), causal mask, softmax."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale, self.window_size = scale, None

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if mask is None else mask
        return (scores if self.scale is None else scores * self.scale).masked_fill(hidden, -10000.0).softmax(-1)


class CoreAttention(nn.Module):
    """Stands for Megatron-DeepSpeed's class; layer 1 without query-key layer scaling."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.attn_mask_type, self.norm_factor = AttnMaskType.causal, math.sqrt(SIZE) * layer_number
        softmax = ScaleMaskSoftmax(None if layer_number == 1 else layer_number)
        self.scale_mask_softmax, self.attention_dropout = softmax, nn.Dropout(0.0)

    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        scores = torch.einsum("sbhd,tbhd->bhst", query_layer, key_layer) / self.norm_factor
        weights = self.attention_dropout(self.scale_mask_softmax(scores, attention_mask))
        return torch.einsum("bhst,tbhd->sbhd", weights, value_layer).flatten(2)


class DotProductAttention(CoreAttention):
    """Stands for megatron-core 0.16's class: same attributes, same tensors, query-key layer scaling."""

    def __init__(self, layer_number: int) -> None:
        super().__init__(layer_number)
        self.softmax_scale, self.softmax_offset = 1 / self.norm_factor, None

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        key, value = (t.repeat_interleave(query.shape[2] // t.shape[2], dim=2) for t in (key, value))
        return super().forward(query, key, value, attention_mask)


class CoreLayer(Attention):
    """A layer as in megatron-core, sequence first inside; no mask."""

    kv_heads, core = 2, DotProductAttention

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.Module()
        self.self_attention.core_attention = self.core(3)
        self.state = SimpleNamespace(mask=None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.self_attention.core_attention(q, k, v, None, attn_mask_type=AttnMaskType.causal)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3) for t in self.qkv(hidden))
        return hidden + self.out(self.attend(q, k, v).transpose(0, 1))


class MegatronLayer(CoreLayer):
    """A layer as in Megatron-DeepSpeed: one causal mask (True: hidden) for the whole run, recomputed core attention."""

    kv_heads, core = HEADS, CoreAttention

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.state.mask is None or torch.is_inference_mode_enabled():  # then it is a tensor without versions
            self.state.mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
        return checkpoint(self.self_attention.core_attention, q, k, v, self.state.mask, use_reentrant=True)


def deepspeeds(interval: int, reentrant: bool) -> dict[str, Any]:
    """Options of an engine whose layers DeepSpeed checkpoints."""
    # a reentrant checkpoint of the embedding would cut it off: its inputs are whole numbers
    module = {
        "activation_checkpoint_interval": interval,
        "checkpointable_layers": ["Attention", "Way", "Head"] if reentrant else None,
    }
    return {"config": {"pipeline": {"use_reentrant": reentrant}}, "module": module}


# a layer, and options of the engine
WAYS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "from-imported": (Attention, {}),
    "two key heads for four, own scale": (way(partial(attend, scale=0.3, enable_gqa=True), kv_heads=2), {}),
    "without a flag for one token": (way(without_flag), {}), "two calls": (way(partial(twice, attend)), {}),
    "two checkpoints": (way(partial(twice, INNER)), {}),
    "checkpoints over the same keys, reentrant": (way(lambda q, k, v: REENTRANT(REENTRANT(q, k, v) + q, k, v)), {}),
    "a selective checkpoint": (way(partial(INNER, context_fn=SELECTIVE)), {}), "TorchScript": (way(scripted), {}),
    "nn.MultiheadAttention": (MultiheadAttention, {}), "nn.TransformerEncoderLayer": (EncoderLayer, {}),
    "megatron-core": (CoreLayer, {}), "Megatron-DeepSpeed": (MegatronLayer, {}),
    "DeepSpeed's checkpoints": (Attention, deepspeeds(1, True)),
    "two checkpoints in DeepSpeed's": (way(partial(twice, INNER)), deepspeeds(1, False)),
    "two checkpoints in DeepSpeed's, reentrant": (way(partial(twice, INNER)), deepspeeds(2, True)),
}  # fmt: skip


def seen_by(documents: Documents, cut: Any) -> Tensor:
    """Keys that the tokens of slices read, [b, S, S]."""
    seen = torch.zeros(len(documents.runs), documents.total, documents.total, dtype=torch.bool)
    for span in cut:
        layout = documents.layout(span)
        for row in layout.rows:
            here = seen[row.rows, span.start : span.stop, layout.first : span.stop]
            if row.mask is not None:
                here[:] = row.mask[0]
                continue
            ends, keys = (each.tolist() for each in row.cumulative(torch.device("cpu")))
            for number, (start, stop, first, padding) in enumerate(row.segments()):
                here[:, start:stop, first : row.before + stop] = not padding
                assert ends[number : number + 2] == [start, stop] and row.first + keys[number] == first
                assert row.first + keys[number + 1] == row.before + stop
    return seen.tril()

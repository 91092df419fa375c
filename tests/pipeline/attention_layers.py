"""Layers that call causal attention in all the ways that models call it. Hidden states are [b, s, HIDDEN]."""

from __future__ import annotations

import math
from enum import Enum
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from tests.pipeline.models import HEADS, HIDDEN

SIZE = HIDDEN // HEADS


def split(hidden: Tensor, heads: int = HEADS) -> Tensor:
    """[b, s, heads * SIZE] to [b, heads, s, SIZE]."""
    return hidden.unflatten(-1, (heads, SIZE)).transpose(1, 2)


def join(mixed: Tensor) -> Tensor:
    """Inverse of :func:`split`."""
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Residual attention through a from-imported SDPA; the others change how it is called."""

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
        return split(self.q(normed)), split(self.k(normed), self.kv_heads), split(self.v(normed), self.kv_heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(join(self.mix(*self.qkv(hidden))))


class Grouped(Attention):
    """Two key heads for four query heads, own scale."""

    kv_heads = 2

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


class OneByOne(Attention):
    """Each sequence of the batch by itself, without a batch dimension: many calls in a layer."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([F.scaled_dot_product_attention(*one, is_causal=True) for one in zip(q, k, v, strict=True)])


class TwoCalls(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = super().mix(q, k, v)
        return super().mix(first, k * 0.5, first + v)


class InnerCheckpoint(Attention):
    """A checkpoint of the layer's own around attention alone."""

    reentrant = False

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(super().mix, q, k, v, use_reentrant=self.reentrant)


class TwoCheckpoints(InnerCheckpoint):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = super().mix(q, k, v)
        return super().mix(first, k * 0.5, first + v)


class SharedKeys(InnerCheckpoint):
    """Two checkpointed calls over the same keys and values: recomputed keys fit both."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(super().mix(q, k, v) + q, k, v)


class BlockCheckpoint(Attention):
    """A checkpoint around the whole layer."""

    reentrant = False

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


class SharedKeysInOneCheckpoint(BlockCheckpoint):
    """Two calls over the same keys and values, recomputed together."""

    reentrant = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(super().mix(q, k, v) + q, k, v)


class NestedCheckpoints(InnerCheckpoint):
    """A checkpoint in a checkpoint: attention is recomputed twice."""

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)


@torch.jit.script
def scripted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """TorchScript; with operators around the call for its fuser and its own differentiation."""
    return F.scaled_dot_product_attention(q * 0.9, k + 0.0, torch.tanh(v), is_causal=True) * 2.0


class Scripted(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scripted_attention(q, k, v)


class DocumentMask(Attention):
    """An explicit mask, made from what the layers hand on: (hidden, mask [b, 1, s, context + s])."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        mixed = F.scaled_dot_product_attention(*self.qkv(hidden), attn_mask=mask)
        return hidden + self.out(join(mixed)), mask


class MultiheadAttention(nn.Module):
    """``nn.MultiheadAttention``, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], dtype=hidden.dtype)
        mixed, _ = self.attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)
        return hidden + mixed


class EncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer``, causal; in eval it has a fused fast path of its own."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], dtype=hidden.dtype)
        return super().forward(hidden, src_mask=mask, is_causal=True)


class AttnMaskType(Enum):
    padding = 1
    causal = 2


class ScaleMaskSoftmax(nn.Module):
    """As Megatron's ``FusedScaleMaskSoftmax``: scores * scale, causal mask, softmax."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.window_size = scale, None

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if mask is None else mask
        return (scores * self.scale).masked_fill(hidden, -10000.0).softmax(-1)


class DotProductAttention(nn.Module):
    """Stands for megatron-core 0.16's class: same attributes, same tensors, query-key layer scaling."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.attn_mask_type = AttnMaskType.causal
        self.softmax_scale, self.softmax_offset = 1 / math.sqrt(SIZE) / layer_number, None
        self.scale_mask_softmax, self.attention_dropout = ScaleMaskSoftmax(layer_number), nn.Dropout(0.0)

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        groups = query.shape[2] // key.shape[2]
        key, value = (t.repeat_interleave(groups, dim=2) for t in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.softmax_scale
        weights = self.attention_dropout(self.scale_mask_softmax(scores, attention_mask))
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


class CoreAttention(nn.Module):
    """Stands for Megatron-DeepSpeed's class."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.attn_mask_type, self.norm_factor = AttnMaskType.causal, math.sqrt(SIZE) * layer_number
        self.scale_mask_softmax, self.attention_dropout = ScaleMaskSoftmax(layer_number), nn.Dropout(0.0)

    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        scores = torch.einsum("sbhd,tbhd->bhst", query_layer, key_layer) / self.norm_factor
        weights = self.attention_dropout(self.scale_mask_softmax(scores, attention_mask))
        return torch.einsum("bhst,tbhd->sbhd", weights, value_layer).flatten(2)


class CoreLayer(Attention):
    """A layer as in megatron-core, sequence first inside; no mask."""

    kv_heads = 2
    layer_number = 3

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.Module()
        self.self_attention.core_attention = DotProductAttention(self.layer_number)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.self_attention.core_attention(q, k, v, None, attn_mask_type=AttnMaskType.causal)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3) for t in self.qkv(hidden))
        return hidden + self.out(self.attend(q, k, v).transpose(0, 1))


class MegatronLayer(CoreLayer):
    """A layer as in Megatron-DeepSpeed: one causal mask (True: hidden) for the whole run, recomputed core attention."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.self_attention.core_attention = CoreAttention(self.layer_number)
        self.state = SimpleNamespace(mask=None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.state.mask is None:
            self.state.mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
        return checkpoint(self.self_attention.core_attention, q, k, v, self.state.mask, use_reentrant=True)


def reentrant(way: type[Attention]) -> type[Attention]:
    """The same with reentrant checkpoints."""
    return type(f"{way.__name__}Reentrant", (way,), {"reentrant": True})


_WAYS = (
    Attention, Grouped, OneByOne, TwoCalls, InnerCheckpoint, reentrant(InnerCheckpoint), TwoCheckpoints,
    reentrant(TwoCheckpoints), SharedKeys, reentrant(SharedKeys), SharedKeysInOneCheckpoint, BlockCheckpoint,
    reentrant(BlockCheckpoint), NestedCheckpoints, Scripted, MultiheadAttention, EncoderLayer, CoreLayer, MegatronLayer,
)  # fmt: skip
WAYS = {way.__name__: way for way in _WAYS}

"""megatron-core's ``core_attention`` through PyTorch's scaled dot product attention, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn import functional as F

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.operators.random_streams import TorchStates


class _Attention(nn.Module):
    """``softmax(scale * q k^T) v`` with the interface of megatron-core's ``DotProductAttention``, which needs CUDA.

    Heads are grouped if there are fewer keys than queries. ``apply_query_key_layer_scaling`` changes nothing: the softmax is
    computed in fp32 anyway.
    """

    mask_types: tuple[AttnMaskType, ...]
    kind: str  # of attention, for errors
    refuses: str  # with what it must be instead, for errors
    is_bidirectional: bool  # which refusals/ refuses where sequences are cut

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if attn_mask_type not in self.mask_types or attention_type != "self":
            raise ConfigError(
                f"core_attention: got a {attention_type} attention with mask {attn_mask_type.name}, must be {self.kind} "
                "self-attention"
            )
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.group: Any = None if pg_collection is None else pg_collection.tp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend to the visible keys.

        Args:
            query: [s, b, heads, d].
            key: [s, b, groups, d].
            value: [s, b, groups, d].
            attention_mask: bool, broadcast to [b, heads, s, s]; True: hidden.

        Returns:
            [s, b, heads * d].
        """
        others = attention_bias, packed_seq_params, None if self.is_bidirectional else attention_mask
        if any(other is not None for other in others):
            raise ConfigError(f"core_attention: got {self.refuses}")
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        shared = dropout > 0.0 and self.group is not None and self.group.size() > 1
        with _random_numbers_of(self.group.rank(), q.device) if shared else nullcontext():
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=dropout,
                is_causal=not self.is_bidirectional,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, scale={self.softmax_scale}"


@contextmanager
def _random_numbers_of(shard: int, device: torch.device) -> Iterator[None]:
    """Seed the default generators for the heads of one tensor-parallel rank.

    They stay alike on all of these ranks, for dropout of what each has whole. megatron-core's tracker, which serves for
    this there, needs CUDA.
    """
    seed = int(torch.randint(2**62, ())) + shard
    states = TorchStates(device)
    for generator in states.generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        states.restore()


class CausalAttention(_Attention):
    """Attention to the keys up to each query."""

    mask_types, kind, is_bidirectional = (AttnMaskType.causal,), "causal", False
    refuses = "a mask, a bias or packed sequences, must be plain causal attention"


class BidirectionalAttention(_Attention):
    """Attention to all keys, or all that are no padding."""

    mask_types, kind, is_bidirectional = (AttnMaskType.padding, AttnMaskType.no_mask), "bidirectional", True
    refuses = "a bias or packed sequences, must be attention over whole sequences"


class Norm:
    """The norm that ``config.normalization`` names, as megatron-core builds it, in the dtype of the model's parameters."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        """Make it; with sequence parallelism each rank applies its weights to its own tokens."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class HeadNorm:
    """The norm of a head's queries or keys; that of ``qk_l2_norm`` has no weights, and computes as megatron-core's ``L2Norm``."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        """Make it."""
        if config.qk_l2_norm:
            return nn.RMSNorm(hidden_size, eps=eps, elementwise_affine=False)
        return Norm(config, hidden_size, eps)


def rotary_embedding(rotary: Any, start: int, length: int, device: torch.device) -> Tensor:
    """Rotary angles of positions ``[start, start + length)``: [length, 1, 1, d].

    megatron-core's ``RotaryEmbedding.forward`` wants CUDA; the frequencies that it starts from do not.
    """
    rotary.inv_freq = rotary.inv_freq.to(device)
    angles = rotary.get_freqs_non_repeated(length, start)
    pair = (
        torch.repeat_interleave(angles, 2, dim=-1) if rotary.rotary_interleaved else torch.cat((angles, angles), dim=-1)
    )
    return pair[:, None, None, :]

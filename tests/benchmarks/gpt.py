"""The model that every column of the token pipeline benchmark trains, in plain PyTorch, one module per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; ``sequence`` in tokens; ``family``: ``"gpt"``, this one, or ``"llama"``, that of llama.py."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 1024
    sequence: int = 1024
    family: str = "gpt"

    @property
    def modules(self) -> int:
        """Number of layer modules: the embedding, the blocks, the head."""
        return self.layers + 2


QUICK = Shape(layers=2, hidden=64, heads=4, vocabulary=128, sequence=128)


def _initialise(module: nn.Module, index: int) -> None:
    """Weights that depend on the layer's index alone: the same for every partition of the model."""
    generator = torch.Generator().manual_seed(1000 + index)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)


class Embedding(nn.Module):
    """(tokens [b, s], positions [b, s]) -> [b, s, hidden]."""

    def __init__(self, shape: Shape, index: int):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        _initialise(self, index)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.tokens(tokens) + self.positions(positions)


class Block(nn.Module):
    """Pre-norm transformer block, [b, s, hidden] -> [b, s, hidden].

    The rows of ``qkv`` are ordered (head, q|k|v, head size), as Megatron's are, so a contiguous part of them is a set
    of whole heads: tensor parallelism replaces the four linear layers and changes nothing else.
    """

    causal = True

    def __init__(self, shape: Shape, index: int):
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.norm1 = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.norm2 = nn.LayerNorm(shape.hidden)
        self.fc1 = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.fc2 = nn.Linear(4 * shape.hidden, shape.hidden)
        _initialise(self, index)
        for linear in (self.qkv, self.proj, self.fc1, self.fc2):
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, -1, 3, self.head_size)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden))))


class Head(nn.Module):
    """[b, s, hidden] -> logits [b, s, vocabulary]."""

    def __init__(self, shape: Shape, index: int):
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        self.linear = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        _initialise(self, index)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden))


class TokenLoss:
    """Mean cross-entropy over all tokens; also as a sum over tokens and its weight, for slices."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.token_sum(logits, labels) / self.token_weight(labels)

    def token_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")

    def token_weight(self, labels: Tensor) -> Tensor:
        return torch.tensor(float(labels.numel()))


def layer_class(shape: Shape, index: int) -> Callable[[Shape, int], nn.Module]:
    """Class of layer module ``index`` (0 is the embedding, the last the head), called with shape and index."""
    if index == 0:
        return Embedding
    return Head if index == shape.modules - 1 else Block


def stage(shape: Shape, stage_index: int, stages: int) -> nn.Sequential:
    """Equally many layer modules per stage: with two, half of the blocks each, and the embedding or the head."""
    if shape.modules % stages:
        raise ValueError(f"{shape.modules} layer modules are not divisible by {stages} stages")
    each = shape.modules // stages
    return nn.Sequential(
        *(layer_class(shape, index)(shape, index) for index in range(stage_index * each, (stage_index + 1) * each))
    )


def batch(shape: Shape, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same random batch for every column: tokens, positions and labels, each [sequences, sequence]."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(shape.vocabulary, (sequences, shape.sequence + 1), generator=generator)
    positions = torch.arange(shape.sequence).expand(sequences, -1).contiguous()
    return text[:, :-1].contiguous(), positions, text[:, 1:].contiguous()

"""Parameter lists of BERT and GPT, tensor by tensor, for timing optimizers without the models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

CLASSES = ("embedding", "feed-forward", "attention", "biases and norms")


class Parameter(NamedTuple):
    """One tensor. ``kind`` is one of ``CLASSES``; the square matrices of the heads count as attention's."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _matrix(name: str, rows: int, columns: int, kind: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (rows, columns), kind)
    yield Parameter(f"{name}.bias", (rows,), "biases and norms")


def _norm(name: str, width: int) -> Iterator[Parameter]:
    for part in ("weight", "bias"):
        yield Parameter(f"{name}.{part}", (width,), "biases and norms")


def bert(layers: int, hidden: int, vocabulary: int = 30522, positions: int = 512) -> list[Parameter]:
    """BERT for pre-training (Devlin et al., arXiv 1810.04805): tied output embedding, both heads, separate q, k, v."""
    out = [
        Parameter("embeddings.word", (vocabulary, hidden), "embedding"),
        Parameter("embeddings.position", (positions, hidden), "embedding"),
        Parameter("embeddings.token_type", (2, hidden), "embedding"),
        *_norm("embeddings.norm", hidden),
    ]
    for layer in range(layers):
        for part in ("query", "key", "value", "output"):
            out += _matrix(f"layer.{layer}.attention.{part}", hidden, hidden, "attention")
        out += _norm(f"layer.{layer}.attention.norm", hidden)
        out += _matrix(f"layer.{layer}.intermediate", 4 * hidden, hidden, "feed-forward")
        out += _matrix(f"layer.{layer}.output", hidden, 4 * hidden, "feed-forward")
        out += _norm(f"layer.{layer}.output.norm", hidden)
    out += _matrix("pooler", hidden, hidden, "attention")
    out += [Parameter("head.bias", (vocabulary,), "biases and norms")]
    out += _matrix("head.transform", hidden, hidden, "attention")
    out += _norm("head.norm", hidden)
    out += [
        Parameter("next_sentence.weight", (2, hidden), "biases and norms"),  # small as these
        Parameter("next_sentence.bias", (2,), "biases and norms"),
    ]
    return out


def gpt(layers: int, hidden: int, vocabulary: int = 50304, positions: int = 2048) -> list[Parameter]:
    """GPT as Megatron has it: fused q, k, v, tied output embedding, learned positions."""
    out = [
        Parameter("embeddings.word", (vocabulary, hidden), "embedding"),
        Parameter("embeddings.position", (positions, hidden), "embedding"),
    ]
    for layer in range(layers):
        out += _norm(f"layer.{layer}.attention.norm", hidden)
        out += _matrix(f"layer.{layer}.attention.qkv", 3 * hidden, hidden, "attention")
        out += _matrix(f"layer.{layer}.attention.projection", hidden, hidden, "attention")
        out += _norm(f"layer.{layer}.feed_forward.norm", hidden)
        out += _matrix(f"layer.{layer}.feed_forward.in", 4 * hidden, hidden, "feed-forward")
        out += _matrix(f"layer.{layer}.feed_forward.out", hidden, 4 * hidden, "feed-forward")
    return [*out, *_norm("final_norm", hidden)]


MODELS = {
    "tiny": lambda: bert(2, 64, vocabulary=1000, positions=32),
    "bert-base": lambda: bert(12, 768),
    "bert-large": lambda: bert(24, 1024),
    "gpt-1.3b": lambda: gpt(24, 2048),
}


def count(parameters: Sequence[Parameter]) -> int:
    """Elements of all."""
    return sum(one.elements for one in parameters)


def of_class(parameters: Sequence[Parameter], kind: str) -> list[int]:
    """Places in the list of the parameters of a class."""
    return [place for place, one in enumerate(parameters) if one.kind == kind]

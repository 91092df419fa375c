"""Models of the columns: a GPT in plain PyTorch, one module per layer, and Hugging Face's Llama by ``ds_terapipe.hf``."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

SEED = 7


class Shape(NamedTuple):
    """Sizes of the model; ``sequence`` in tokens; ``family``: "gpt", "llama" or "vit", of which every position sees all."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 1024
    sequence: int = 1024
    family: str = "gpt"
    bf16: bool = False


QUICK = Shape(layers=4, hidden=64, heads=4, vocabulary=128, sequence=128)


def initialise(module: nn.Module, seed: int) -> None:
    """Matrices that depend on the seed alone, and no biases: the same for every partition of the model."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def decay_groups(parameters: Iterable[nn.Parameter], decay: float = 0.01) -> list[dict[str, Any]]:
    """Weight decay on matrices only, as BERT is trained."""
    parameters = list(parameters)
    matrices, others = ([one for one in parameters if (one.dim() > 1) == wanted] for wanted in (True, False))
    return [{"params": some, "weight_decay": each} for some, each in ((matrices, decay), (others, 0.0)) if some]


class Embedding(nn.Module):
    """(tokens [b, s], positions [b, s]) to [b, s, hidden]."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        initialise(self, index)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.tokens(tokens) + self.positions(positions)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.head_size, self.causal = shape.hidden // shape.heads, shape.family == "gpt"
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv, self.proj = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.fc1, self.fc2 = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)
        initialise(self, index)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, -1, 3, self.head_size)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = self.attention(query, key, value)
        hidden = hidden + self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden))))

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each tensor [b, heads, s, head size]."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


class Head(nn.Module):
    """[b, s, hidden] to logits [b, s, vocabulary]; of images [b, classes]."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.norm, self.pools = nn.LayerNorm(shape.hidden), shape.family == "vit"
        self.linear = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        initialise(self, index)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden.mean(1) if self.pools else hidden))


class TokenLoss:
    """Mean cross entropy over all tokens, in the form that the engine runs per slice."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.token_sum(logits, labels) / self.token_weight(labels)

    def token_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")

    def token_weight(self, labels: Tensor) -> Tensor:
        return torch.tensor(float(labels.numel()))


def layers(shape: Shape, *, first: type = Embedding, block: type = Block, last: type = Head, seed: int = 0) -> list[Any]:
    """The layer modules, as a list of ``LayerSpec``; weights depend on seed and place."""
    return [LayerSpec(kind, shape, seed + index) for index, kind in enumerate((first, *[block] * shape.layers, last))]


def plain(specs: Iterable[Any]) -> nn.Sequential:
    """The model of :func:`layers` in one piece."""
    return nn.Sequential(*(spec.build() for spec in specs))


class Workload(NamedTuple):
    """A model, and a batch of so many micro-batches of one sequence, the same for every column."""

    shape: Shape
    sequences: int

    def micro_batches(self) -> list[tuple[Any, Tensor]]:
        """((tokens, positions), labels), each tensor [1, sequence]; of a Llama (tokens, labels), which are the same."""
        shape = (self.sequences, 1, self.shape.sequence + (self.shape.family == "gpt"))
        text = torch.randint(self.shape.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
        if self.shape.family == "llama":
            return [(tokens, tokens) for tokens in text]
        positions = torch.arange(self.shape.sequence).unsqueeze(0)
        return [((tokens[:, :-1].contiguous(), positions), tokens[:, 1:].contiguous()) for tokens in text]


def llama_pipeline(shape: Shape, stages: int) -> Any:
    """A ``PipelineModule`` of Hugging Face's Llama with two key heads and equally many layers on each stage."""
    from transformers import LlamaConfig

    from ds_terapipe import hf

    config = LlamaConfig(
        num_hidden_layers=shape.layers, hidden_size=shape.hidden, intermediate_size=8 * shape.hidden // 3 // 16 * 16,
        num_attention_heads=shape.heads, num_key_value_heads=2, vocab_size=shape.vocabulary,
        max_position_embeddings=shape.sequence,
    )  # fmt: skip
    each = [shape.layers // stages] * stages
    return hf.pipeline(config, num_stages=stages, layers_per_stage=each, seed=SEED, dynamic_shape=False)

"""A small GPT on ``F.scaled_dot_product_attention``, losses of several kinds, and data: shared by the engine's tests."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, POSITIONS = 53, 32, 4, 48
SEED = 1234


class Embedding(nn.Module):
    """(tokens, positions), each [b, s], to hidden states [b, s, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.tokens(tokens) + self.positions(positions)


class Tokens(nn.Module):
    """Token embedding that can be tied: hands the positions on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, HIDDEN).normal_(std=0.3))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, positions = inputs
        return F.embedding(tokens, self.weight), positions


class Scaled(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(HIDDEN).normal_(1.0, 0.3))  # of the head's use alone


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, positions = inputs
        return hidden + self.table(positions)


class Block(nn.Module):
    """A pre-norm Transformer layer on ``F.scaled_dot_product_attention``; no key biases (their gradient is zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, _ = hidden.shape
        q, k, v = (
            part.view(b, s, HEADS, HIDDEN // HEADS).transpose(1, 2)
            for part in self.qkv(self.before_attention(hidden)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(b, s, HIDDEN))
        return hidden + self.down(F.gelu(self.up(self.before_mlp(hidden))))


def trains(kind: type[nn.Module], which: Callable[[nn.Parameter], bool]) -> type[nn.Module]:
    """A layer of which those parameters are trained."""

    def init(self: Any) -> None:
        kind.__init__(self)
        for parameter in self.parameters():
            parameter.requires_grad_(which(parameter))

    return type(kind.__name__, (kind,), {"__init__": init})


FrozenEmbedding, FrozenBlock = (trains(kind, lambda parameter: False) for kind in (Embedding, Block))


class Head(nn.Module):
    """Hidden states to logits [b, s, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.project(self.norm(hidden))


def tied_logits(tokens: Tokens, hidden: Tensor) -> Tensor:
    return hidden * getattr(tokens, "gain", 1.0) @ tokens.weight.t()


def gpt(blocks: int = 4) -> list[Any]:
    return [LayerSpec(Embedding), *(LayerSpec(Block) for _ in range(blocks)), LayerSpec(Head)]


def tied_gpt(blocks: int = 4, tokens: type[Tokens] = Tokens) -> list[Any]:
    return [
        TiedLayerSpec("tokens", tokens), LayerSpec(Positions), *(LayerSpec(Block) for _ in range(blocks)),
        LayerSpec(nn.LayerNorm, HIDDEN), TiedLayerSpec("tokens", tokens, forward_fn=tied_logits),
    ]  # fmt: skip


class WritingEmbedding(Embedding):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        inputs[0].add_(1).remainder_(VOCABULARY)
        return super().forward(inputs)


class WritingBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(0.9))


def writing_gpt(blocks: int = 4) -> list[Any]:
    return [LayerSpec(WritingEmbedding), *(LayerSpec(WritingBlock) for _ in range(blocks)), LayerSpec(Head)]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return token_losses(logits, targets).mean()


def masked_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over the unmasked tokens: the denominator depends on the data."""
    targets, mask = labels
    losses = token_losses(logits, targets)
    return (losses * mask).sum() / mask.sum()


def focused_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """No sum over tokens: a smooth maximum over the tokens of each sequence."""
    targets, mask = labels
    losses = token_losses(logits, targets)
    return losses.masked_fill(mask == 0, float("-inf")).logsumexp(dim=1).mean()


class MaskedTokenLoss:
    """:func:`masked_loss` in the form that the engine runs per slice."""

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        return self.token_sum(logits, labels) / self.token_weight(labels)

    def token_sum(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        targets, mask = labels
        return (token_losses(logits, targets) * mask).sum()

    def token_weight(self, labels: tuple[Tensor, Tensor]) -> Tensor:
        return labels[1].sum()


def micro_batch(seed: int, length: int = 24, batch: int = 2, masked: bool = True) -> tuple[Any, Any]:
    """((tokens, positions), (targets, mask)) or ((tokens, positions), targets), each [batch, length]."""
    random = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (batch, length + 1), generator=random)
    positions = torch.arange(length).expand(batch, length).contiguous()
    mask = (torch.rand(batch, length, generator=random) < 0.7).float()
    mask[:, -1] = 1.0
    targets = text[:, 1:].contiguous()
    return (text[:, :-1].contiguous(), positions), ((targets, mask) if masked else targets)


def steps_of(steps: int, micro_batches: int, **shape: Any) -> list[list[Any]]:
    """``micro_batches`` different micro-batches for each of ``steps`` steps."""
    return [[micro_batch(1000 * s + m, **shape) for m in range(micro_batches)] for s in range(steps)]


class Plain(nn.Module):
    """The layers of a PipelineModule in one process, with its parameter names and its seeds (``seed_layers``)."""

    def __init__(self, specs: Sequence[Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.functions: list[Callable[[Any], Any]] = []
        for index, spec in enumerate(specs):
            torch.manual_seed(SEED + index)
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                module = self.tied_modules[spec.key]
                self.functions.append(module if spec.forward_fn is None else partial(spec.forward_fn, module))
                continue
            layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)
            self.functions.append(layer)

    def forward(self, inputs: Any) -> Any:
        for function in self.functions:
            inputs = function(inputs)
        return inputs

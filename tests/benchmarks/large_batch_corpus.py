"""The text of the large-batch benchmark: the sources of Python's standard library, as bytes, with masked positions.

A sample is 64 bytes that follow one another in one file. As in BERT, 15 % of the positions (10 of 64) must be
predicted: of these 80 % show [MASK], 10 % another byte and 10 % the byte itself.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SEQUENCE = 64
PREDICTED = 10
MASK = 256
VOCABULARY = 257
VALIDATION_SHARE = 16  # one file in so many is held out
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Batch:
    """Tokens [b, 64] as the model sees them; the places to predict, as indices into the b * 64 tokens; their bytes."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Corpus:
    """Samples [n, 64] of bytes (uint8), of the files to train on and of those held out."""

    training: Tensor
    validation: Tensor
    fingerprint: str


@cache
def load_corpus(root: str | None = None) -> Corpus:
    """The standard library below ``root`` (default: of the running Python), split by file name.

    Raises:
        ValueError: fewer than 64 samples in a part.
    """
    top = Path(root or sysconfig.get_paths()["stdlib"])
    training, validation, digest = [], [], hashlib.sha256()
    for path in sorted(top.rglob("*.py")):
        name = path.relative_to(top)
        if _NOT_THE_LIBRARY.intersection(name.parts):
            continue
        content = path.read_bytes()
        digest.update(content)
        held_out = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big") % VALIDATION_SHARE == 0
        (validation if held_out else training).append(content)
    parts = _samples(training), _samples(validation)
    if any(len(part) < 64 for part in parts):
        raise ValueError(
            f"corpus: got {len(parts[0])} and {len(parts[1])} samples below {top}, must be 64 or more each"
        )
    return Corpus(*parts, digest.hexdigest()[:16])


def _samples(files: Iterable[bytes]) -> Tensor:
    """Whole samples of each file, its rest left out: [n, 64]."""
    whole = b"".join(content[: len(content) // SEQUENCE * SEQUENCE] for content in files)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, SEQUENCE)


class MaskedSamples:
    """``count`` samples in an order, and with masks, that depend on ``seed`` alone and not on the size of the batches.

    With more samples than ``text`` has, the text is seen again under other masks.
    """

    def __init__(self, text: Tensor, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        passes = -(-count // len(text))
        order = torch.cat([torch.randperm(len(text), generator=generator) for _ in range(passes)])[:count]
        self._bytes = text[order]
        self._places = torch.rand(count, SEQUENCE, generator=generator).topk(PREDICTED, dim=1).indices
        what = torch.rand(count, PREDICTED, generator=generator)
        labels = self._bytes.gather(1, self._places).long()
        other = torch.randint(256, (count, PREDICTED), generator=generator)
        shown = torch.where(what < 0.8, MASK, torch.where(what < 0.9, other, labels))
        self._labels, self._shown = labels.to(torch.int16), shown.to(torch.int16)

    def __len__(self) -> int:
        return len(self._bytes)

    def batch(self, start: int, size: int) -> Batch:
        """Samples ``start`` to ``start + size``."""
        part = slice(start, start + size)
        places = self._places[part]
        tokens = self._bytes[part].long().scatter(1, places, self._shown[part].long())
        offsets = torch.arange(len(places)).unsqueeze(1) * SEQUENCE
        return Batch(tokens, (places + offsets).flatten(), self._labels[part].flatten().long())

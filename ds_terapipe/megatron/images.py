"""Images from a folder with a folder for each class. Needs Pillow, which nothing else here does."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.data import SPLITS, Batch, SampleIterator, parts_of

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Labelled(NamedTuple):
    """A file and the number of its class, in the order of the folders' names."""

    path: str
    label: int


class ImageFolder:
    """The images of a folder with a folder for each class.

    Attributes:
        classes: names of the folders.
        images: of each class the files, in the order of their names.

    Raises:
        ConfigError: Pillow is missing, there is no such folder, or there are not two folders with images in it.
    """

    def __init__(self, folder: str) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise ConfigError(f"--data: got {folder}, must be read with Pillow, use pip install pillow")
        self.folder, root = folder, Path(folder)
        found = {path.name: _images(path) for path in sorted(root.iterdir()) if path.is_dir()} if root.is_dir() else {}
        self.classes = [name for name, files in found.items() if files]
        if len(self.classes) < 2:
            raise ConfigError(
                f"--data: got {folder}, which has {len(self.classes)} folders with images, must have one for each class, "
                "use e.g. images with images/cat/1.png and images/dog/1.png"
            )
        self.images = [[Labelled(file, label) for file in found[name]] for label, name in enumerate(self.classes)]

    def split(self, parts: str, seed: int) -> list[list[Labelled]]:
        """The images for training, validation and test: of each class the same shares, drawn with ``seed``.

        Args:
            parts: their weights, ``"969,30,1"``.
            seed: decides which image is where.

        Raises:
            ConfigError: they are none.
        """
        weights = parts_of(parts)
        edges = [0.0, *accumulate(weight / sum(weights) for weight in weights)]
        found: list[list[Labelled]] = [[] for _ in SPLITS]
        for label, images in enumerate(self.images):
            order = np.random.default_rng((seed, label)).permutation(len(images))
            bounds = [round(edge * len(images)) for edge in edges]
            for part, (start, stop) in zip(found, pairwise(bounds), strict=True):
                part += [images[index] for index in sorted(order[start:stop])]
        return found


def _images(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


class Images:
    """Samples (pixels [channels, height, width], label): every epoch has each image once, in its own order.

    Args:
        images: which ones.
        samples: how many; more than there are images take several epochs.
        size: height and width that an image is brought to.
        channels: 3 for colours, 1 for grey.
        seed: of the orders.
    """

    def __init__(
        self, images: Sequence[Labelled], samples: int, size: tuple[int, int], channels: int, seed: int
    ) -> None:
        self._images, self._samples, self._size, self._channels = list(images), samples, size, channels
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(self._images))
        )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Raises ConfigError for a file that is no image, or a part of one."""
        epoch, place = divmod(index, len(self._images))
        path, label = self._images[self._order(epoch)[place]]
        return self._read(path), label

    def _read(self, path: str) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as file:
                image = file.convert("RGB" if self._channels == 3 else "L")
        except Exception as error:  # Pillow raises SyntaxError, too, and what it decompresses with
            why = " ".join(str(error).split())
            raise ConfigError(
                f"--data: got {path}, must be an image that Pillow reads ({why}), use another file or none"
            ) from error
        pixels = np.asarray(image.resize(self._size[::-1]), dtype=np.float32).reshape(*self._size, self._channels)
        return torch.from_numpy(pixels / 127.5 - 1.0).permute(2, 0, 1).contiguous()


def image_datasets(
    folder: ImageFolder,
    *,
    samples: Sequence[int],
    size: tuple[int, int],
    channels: int = 3,
    split: str = "969,30,1",
    seed: int = 1234,
) -> list[Any]:
    """Images for training, validation and test.

    Args:
        folder: where they are.
        samples: wanted numbers; 0 makes None.
        size: height and width in pixels.
        channels: 3 or 1.
        split: parts of each class for the three, by weight.
        seed: seed of the split, and of the order.

    Raises:
        ConfigError: the split is none, or leaves no images where some are wanted.
    """
    parts = folder.split(split, seed)
    for name, part, wanted in zip(SPLITS, parts, samples, strict=True):
        if wanted and not part:
            got = f"{split}, which leaves no image of {folder.folder}"
            raise ConfigError(f"--split: got {got} for {name}, use e.g. 80,20,0")
    return [
        Images(part, wanted, size, channels, seed) if wanted else None
        for part, wanted in zip(parts, samples, strict=True)
    ]


class ImageBatches(SampleIterator):
    """Micro-batches (images [b, channels, height, width] fp32 from -1 to 1, labels [b] int64)."""

    def batch(self, samples: Sequence[Any]) -> Batch:
        pixels, labels = zip(*samples, strict=True)
        return torch.stack(pixels), torch.tensor(labels)

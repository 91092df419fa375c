"""Images from folders: what is where, in which order, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("PIL")

from PIL import Image

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.images import ImageBatches, ImageFolder, Images, image_datasets
from tests.megatron.test_arguments import SPLIT, SPLITS


def write(folder: Path, classes: dict[str, int]) -> str:
    """Images of one colour; the n-th of a class is of grey 10 n, its first pixel red."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", (6, 4), (10 * number,) * 3)
            image.putpixel((0, 0), (255, 0, 0))
            image.save(folder / name / f"{number}.png")
    return str(folder)


def test_pixels_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    folder = ImageFolder(write(tmp_path / "images", {"dog": 2, "cat": 3}))
    assert folder.classes == ["cat", "dog"] and [len(files) for files in folder.images] == [3, 2]
    images = Images(folder.images[1], 2, (4, 6), 3, seed=1)
    pixels, labels = next(ImageBatches(images, 2))
    assert pixels.shape == (2, 3, 4, 6) and pixels.dtype == torch.float32 and labels.tolist() == [1, 1]
    assert pixels[0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert sorted(pixels[:, 0, 3, 5].tolist()) == pytest.approx([-1.0, 10 / 127.5 - 1.0])
    grey = Images(folder.images[1], 2, (2, 2), 1, seed=1)
    assert next(ImageBatches(grey, 2))[0].shape == (2, 1, 2, 2)


def test_every_epoch_has_each_image_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    folder = ImageFolder(write(tmp_path / "images", {"cat": 8, "dog": 8}))
    everything = [file for files in folder.images for file in files]
    images = Images(everything, 48, (2, 2), 3, seed=1)
    assert len(images) == 48
    seen = [(float(pixels[0, 1, 1]), label) for pixels, label in (images[index] for index in range(48))]
    epochs = [seen[start : start + 16] for start in (0, 16, 32)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 16 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = Images(everything, 48, (2, 2), 3, seed=1)
    assert [again[index][1] for index in (40, 3)] == [seen[40][1], seen[3][1]]


def test_classes_are_split_alike(tmp_path: Path) -> None:
    folder = ImageFolder(write(tmp_path / "images", {"cat": 10, "dog": 20}))
    parts = folder.split("80,20,0", seed=1)
    assert [[sum(file.label == each for file in part) for each in (0, 1)] for part in parts] == [
        [8, 16],
        [2, 4],
        [0, 0],
    ]
    assert len({file.path for part in parts for file in part}) == 30
    assert folder.split("80,20,0", seed=1) == parts != folder.split("80,20,0", seed=2)
    train, valid, test = image_datasets(folder, samples=[50, 6, 0], size=(4, 4), split="80,20,0")
    assert (len(train), len(valid), test) == (50, 6, None)
    message = r"--split: got 100,0,0, which leaves no image of .* for validation, use e\.g\. 80,20,0"
    with pytest.raises(ConfigError, match=message):
        image_datasets(folder, samples=[50, 6, 0], size=(4, 4), split="100,0,0")


def test_folders_and_splits_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = ImageFolder(write(tmp_path / "images", {"cat": 2, "dog": 2}))
    for split in SPLITS:
        with pytest.raises(ConfigError) as refused:
            image_datasets(folder, samples=[1, 0, 0], size=(4, 4), split=split)
        assert str(refused.value) == SPLIT.format(split)
    (tmp_path / "empty" / "dog").mkdir(parents=True)
    write(tmp_path / "empty", {"cat": 1})
    for where, found in ((tmp_path / "empty", 1), (tmp_path / "nothing", 0)):
        with pytest.raises(
            ConfigError, match=rf"--data: got .*, which has {found} folders with images, must have one for"
        ):
            ImageFolder(str(where))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    folder = ImageFolder(write(tmp_path / "images", {"cat": 1, "dog": 1}))
    file = Path(folder.images[0][0].path)
    whole = file.read_bytes()
    for broken in (b"no image", b"", whole[:40], whole[:-24], whole.replace(b"\rIDAT", b"\2IDAT")):
        file.write_bytes(broken)
        message = r"^--data: got .*cat/0\.png, must be an image that Pillow reads \(.*\), use another file or none$"
        with pytest.raises(ConfigError, match=message):
            Images(folder.images[0], 1, (2, 2), 3, seed=1)[0]


def test_without_pillow_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^--data: got images, must be read with Pillow, .*, use pip install pillow$"
    ):
        ImageFolder("images")

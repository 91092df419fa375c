"""Which samples a replica reads and where they come from: texts of GPT, sentences of BERT, images; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_terapipe import cli
from ds_terapipe.commands import prepare_data
from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron import GPTPipeline, bert_data
from ds_terapipe.megatron.bert_data import BertBatches, WordPieces, bert_datasets
from ds_terapipe.megatron.data import BatchIterator, Vocabulary, blend_of, gpt_datasets, parts_of
from ds_terapipe.megatron.images import ImageBatches, ImageFolder, Images, image_datasets
from ds_terapipe.megatron.layers import GPTLayer
from ds_terapipe.pipeline.slicing import Span
from tests.pipeline.attention_layers import seen_by

SEQ = 48
SENTENCES, FOX = "the {} fox\njumps over\n\n  the lazy dog \nand sleeps {}\n", "{}: the quick brown fox\n" * 4


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One process: megatron-core asks for its rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(folder: Path, *options: str, text: str = SENTENCES) -> str:
    """20 files of text, and one of a single line, prepared; the prefix of what was made."""
    (folder / "text").mkdir(exist_ok=True)
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(text.replace("{}", str(number)) * 10)
    (folder / "text" / "one.txt").write_text("a single line, which is no document for BERT")
    prefix = str(folder / "corpus")
    where = ["--input", str(folder / "text"), "--output-prefix", prefix]
    assert cli.main(["prepare-data", *where, *options]) == 0
    return prefix


def write_images(folder: Path, classes: dict[str, int]) -> str:
    """Images of one colour; the n-th of a class is of grey 10 n, its first pixel red."""
    images = pytest.importorskip("PIL.Image")
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = images.new("RGB", (6, 4), (10 * number,) * 3)
            image.putpixel((0, 0), (255, 0, 0))
            image.save(folder / name / f"{number}.png")
    return str(folder)


def test_a_split_is_three_numbers_or_fewer() -> None:
    for split in ("a,b", "0,0,0", "80,-20,0", "25,25,25,25", "1e3,1,1"):
        with pytest.raises(ConfigError) as refused:
            parts_of(split)
        rule = "must be one to 3 numbers of 0 or more, not all 0, use e.g. 969,30,1"
        assert str(refused.value) == f'--split: got "{split}", {rule}'
    assert [parts_of(text) for text in ("1", "9, 1", "0.5,.5,0")] == [[1, 0, 0], [9, 1, 0], [0.5, 0.5, 0]]


# ------------------------------------------------------------------------------------------------------------------- texts


class Counting:
    """A dataset whose sample ``i`` consists of tokens ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        value = torch.full((4,), index)
        return {"tokens": value, "labels": value + 1, "position_ids": torch.arange(4), "loss_mask": torch.ones(4)}


def tokens(batches: BatchIterator, micro_batches: int) -> list[list[int]]:
    """The samples of so many micro-batches."""
    return [next(batches)[0][0][:, 0].tolist() for _ in range(micro_batches)]


@pytest.mark.parametrize(("replicas", "micro_batches", "size"), [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 1, 2)])
def test_a_global_batch_is_the_same_in_every_layout(replicas: int, micro_batches: int, size: int) -> None:
    for step in range(3):
        found = []
        for replica in range(replicas):
            batches = BatchIterator(Counting(100), size, replica=replica, replicas=replicas, consumed=8 * step)
            found += [sample for micro_batch in tokens(batches, micro_batches) for sample in micro_batch]
        assert sorted(found) == list(range(8 * step, 8 * step + 8))


def test_a_replica_goes_on_where_it_would_have_been_and_starts_again_at_the_end() -> None:
    through = BatchIterator(Counting(100), 2, replica=1, replicas=2)
    assert tokens(through, 7)[-1:] == tokens(BatchIterator(Counting(100), 2, replica=1, replicas=2, consumed=24), 1)
    assert tokens(BatchIterator(Counting(3), 2), 3) == [[0, 1], [2, 0], [1, 2]]


def test_datasets_are_text_shifted_by_one_and_name_what_they_have_not(tmp_path: Path) -> None:
    prefix = write(tmp_path, text=FOX)
    given = {"vocab_size": 257, "seq_length": SEQ, "split": "90,10,0"}
    train, valid, test = gpt_datasets([prefix], samples=[50, 5, 0], seed=3, **given)
    assert len(train) >= 50 and len(valid) >= 5 and test is None
    (text, positions), (labels, mask) = next(BatchIterator(train, 3))
    assert text.shape == positions.shape == labels.shape == mask.shape == (3, SEQ)
    assert text.dtype == positions.dtype == labels.dtype == torch.int64 and mask.dtype == torch.float32
    assert torch.equal(text[:, 1:], labels[:, :-1]) and torch.equal(positions[0], torch.arange(SEQ))
    assert b"quick brown" in bytes(token for token in text.flatten().tolist() if token < 256)
    assert Vocabulary(257).eod == prepare_data.END_OF_DOCUMENT
    with pytest.raises(ConfigError, match=r"got 90,10,0, which leaves none of the 21 documents of .* for test"):
        gpt_datasets([prefix], samples=[4, 2, 1], **given)
    with pytest.raises(ConfigError, match=r"--data-path: got .*nothing, but there is no .*\.bin and no .*\.idx"):
        gpt_datasets([str(tmp_path / "nothing")], samples=[1, 1, 1], **given)
    train, *_ = gpt_datasets([prefix], samples=[50, 0, 0], **{**given, "vocab_size": 100})
    with pytest.raises(ConfigError, match=r"--vocab-size: got 100, must be above every token of the data, \d{3} among"):
        for _ in range(50):
            next(BatchIterator(train, 1))


def test_documents_of_a_sample_are_those_of_megatron_core(tmp_path: Path) -> None:
    prefix, given = write(tmp_path, text=FOX), {"vocab_size": 257, "seq_length": 4 * SEQ, "samples": [9, 0, 0]}
    end = Vocabulary(257).eod
    train, *_ = gpt_datasets([prefix], **given, reset_position_ids=True, eod_mask_loss=True)
    (text, positions), (_, mask) = next(BatchIterator(train, 3))
    documents = GPTPipeline.documents_of.fget(SimpleNamespace(document_end=end))((text, positions))
    seen = seen_by(documents, [Span(0, 4 * SEQ, 4 * SEQ)])
    for row, tokens in enumerate(text):
        hidden, loss_mask, expected = _get_ltor_masks_and_position_ids(tokens, end, True, True, True, True)
        assert torch.equal(seen[row], ~hidden[0]) and torch.equal(mask[row], loss_mask)
        assert torch.equal(positions[row], expected)
    assert (positions[:, 1:] == 0).any() and (mask == 0).any()
    with pytest.raises(
        ConfigError, match="--reset-attention-mask: got a model without token_pipeline, must have that key"
    ):
        GPTLayer.forward(SimpleNamespace(_several=True), text)


def test_new_data_at_an_old_prefix_gets_a_new_index(tmp_path: Path) -> None:
    arguments = {"vocab_size": 257, "seq_length": SEQ, "samples": [10, 0, 0], "split": "1,0,0"}
    gpt_datasets([write(tmp_path, text="old old old old old old old\n")], **arguments)
    train, *_ = gpt_datasets([write(tmp_path, text="new\n")], **arguments)
    text = bytes(token for i in range(len(train)) for token in train[i]["tokens"].tolist() if token < 256)
    assert b"new" in text and b"old" not in text


def test_weights_are_above_0(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    rule = "must be a weight above 0 before each prefix, use e.g. 0.3 data/a 0.7 data/b"
    for paths, got in {"0 A 1 A": "0", "1 A nan A": "nan", "2 A -1 A": "-1", "A A 1 A": prefix}.items():
        with pytest.raises(ConfigError) as caught:
            blend_of([prefix if word == "A" else word for word in paths.split()])
        assert str(caught.value) == f'--data-path: got "{got}", {rule}'
    assert blend_of(["0.5", prefix, "1e-3", prefix]) == ([prefix, prefix], [0.5, 1e-3])
    assert blend_of([prefix, prefix]) == ([prefix, prefix], None)


# --------------------------------------------------------------------------------------------------------------- sentences


def made(prefix: str, **changes: Any) -> list[Any]:
    settings = {"vocabulary": WordPieces.of_bytes(), "seq_length": SEQ, "samples": [60, 10, 0], "split": "80,20,0"}
    return bert_datasets([prefix], **{**settings, **changes})


def test_samples_are_two_sentences_whose_masked_tokens_are_labels(tmp_path: Path) -> None:
    train, valid, test = made(write(tmp_path, "--split-sentences"), short_seq_prob=0.5)
    assert len(train) >= 60 and len(valid) >= 10 and test is None
    (tokens, types, padding), (labels, mask, order) = next(BertBatches({SEQ: train}, 40))
    assert {tensor.shape for tensor in (tokens, types, padding, labels, mask)} == {(40, SEQ)} and order.shape == (40,)
    assert {tensor.dtype for tensor in (tokens, types, padding, labels, mask, order)} == {torch.int64}
    assert order.tolist() == [train[index]["is_random"] for index in range(40)]
    assert set(order.tolist()) == set(types.flatten().tolist()) == set(padding.flatten().tolist()) == {0, 1}
    assert (tokens[padding == 0] == 0).all() and (types[padding == 0] == 0).all() and (mask[padding == 0] == 0).all()
    vocabulary = WordPieces.of_bytes()
    for row in range(40):
        text = tokens[row].where(mask[row] == 0, labels[row])[padding[row] == 1]
        assert text[0] == vocabulary.cls and text[-1] == vocabulary.sep and (text == vocabulary.sep).sum() == 2
        first, second = bytes(text[1:-1].clamp(max=255).tolist()).split(b"\xff")
        assert first and second and set(first + second) <= set(b"thefoxjumpsovrlazydgnp0123456789 "), (first, second)
    assert 0.1 < mask.sum() / padding.sum() < 0.2
    assert (tokens[mask == 1] == vocabulary.mask).float().mean() > 0.6


def test_a_vocabulary_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "the", "##x", "[SEP]", "[CLS]", "[MASK]"]))
    found = WordPieces.read(str(file))
    assert (found.cls, found.sep, found.mask, found.pad, found.vocab_size) == (4, 3, 5, 0, 6)
    assert found.inv_vocab[2] == "##x"
    for lines, missing in (
        (["[PAD]", "[SEP]", "[CLS]"], r"without \[MASK\]"),
        (["a", "[PAD]", "[SEP]", "[CLS]", "[MASK]"], r"without \[PAD\] in its first line"),
    ):
        file.write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=rf"--vocab-file: got .*vocab\.txt {missing}.*, use that of the data"):
            WordPieces.read(str(file))
    with pytest.raises(ConfigError, match=r"--vocab-file: got /nowhere, which cannot be read"):
        WordPieces.read("/nowhere")


def test_data_without_sentences_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    message = r"--split: got 80,20,0, which leaves none of the 21 documents of .* with two sentences of at most 512 tokens each"
    with pytest.raises(ConfigError, match=message + " for training"):
        made(prefix)


def test_lines_are_sentences() -> None:
    longest = prepare_data.LONGEST_SENTENCE
    assert prepare_data.split_sentences(b"a b\n\n  c\r\n \nd") == [b"a b", b"c", b"d"]
    assert [len(part) for part in prepare_data.split_sentences(b"x" * (2 * longest + 1))] == [longest, longest, 1]
    assert WordPieces.of_bytes().vocab_size == prepare_data.SENTENCE_VOCABULARY
    assert longest == bert_data.LONGEST_SENTENCE


# ------------------------------------------------------------------------------------------------------------------ images


def test_pixels_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    folder = ImageFolder(write_images(tmp_path / "images", {"dog": 2, "cat": 3}))
    assert folder.classes == ["cat", "dog"] and [len(files) for files in folder.images] == [3, 2]
    images = Images(folder.images[1], 2, (4, 6), 3, seed=1)
    pixels, labels = next(ImageBatches(images, 2))
    assert pixels.shape == (2, 3, 4, 6) and pixels.dtype == torch.float32 and labels.tolist() == [1, 1]
    assert pixels[0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert sorted(pixels[:, 0, 3, 5].tolist()) == pytest.approx([-1.0, 10 / 127.5 - 1.0])
    grey = Images(folder.images[1], 2, (2, 2), 1, seed=1)
    assert next(ImageBatches(grey, 2))[0].shape == (2, 1, 2, 2)


def test_every_epoch_has_each_image_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    folder = ImageFolder(write_images(tmp_path / "images", {"cat": 8, "dog": 8}))
    everything = [file for files in folder.images for file in files]
    images = Images(everything, 48, (2, 2), 3, seed=1)
    assert len(images) == 48
    seen = [(float(pixels[0, 1, 1]), label) for pixels, label in (images[index] for index in range(48))]
    epochs = [seen[start : start + 16] for start in (0, 16, 32)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 16 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_classes_are_split_alike(tmp_path: Path) -> None:
    folder = ImageFolder(write_images(tmp_path / "images", {"cat": 10, "dog": 20}))
    parts = folder.split("80,20,0", seed=1)
    assert [[sum(file.label == each for file in part) for each in (0, 1)] for part in parts] == [
        [8, 16],
        [2, 4],
        [0, 0],
    ]
    assert len({file.path for part in parts for file in part}) == 30
    assert folder.split("80,20,0", seed=1) == parts != folder.split("80,20,0", seed=2)
    message = r"--split: got 100,0,0, which leaves no image of .* for validation, use e\.g\. 80,20,0"
    with pytest.raises(ConfigError, match=message):
        image_datasets(folder, samples=[50, 6, 0], size=(4, 4), split="100,0,0")


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dog").mkdir()
    write_images(tmp_path, {"cat": 1})
    with pytest.raises(ConfigError, match=r"--data: got .*, which has 1 folders with images, must have one for"):
        ImageFolder(str(tmp_path))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    folder = ImageFolder(write_images(tmp_path / "images", {"cat": 1, "dog": 1}))
    file = Path(folder.images[0][0].path)
    whole = file.read_bytes()
    for broken in (b"", whole[:-24], whole.replace(b"\rIDAT", b"\2IDAT")):
        file.write_bytes(broken)
        message = r"^--data: got .*cat/0\.png, must be an image that Pillow reads \(.*\), use another file or none$"
        with pytest.raises(ConfigError, match=message):
            Images(folder.images[0], 1, (2, 2), 3, seed=1)[0]

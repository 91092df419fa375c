"""Which samples a replica reads and where they come from: texts of GPT, sentences of BERT, images; and what is refused."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_terapipe import cli
from ds_terapipe.commands.preparing import dataset, tokens as encodings
from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron import GPTPipeline, bert_data
from ds_terapipe.megatron.bert_data import BertBatches, WordPieces, bert_datasets
from ds_terapipe.megatron.data import BatchIterator, Vocabulary, blend_of, gpt_datasets, parts_of
from ds_terapipe.megatron.images import ImageBatches, ImageFolder, Images, image_datasets
from ds_terapipe.megatron.layers import GPTLayer
from ds_terapipe.pipeline.slicing import Span
from tests.pipeline.attention_layers import seen_by
from tests.spawn import in_background

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


def write_images(folder: Path, classes: dict[str, int], **colours: tuple[int, int, int]) -> str:
    """Images of one colour, of the class or for the n-th grey 10 n; the first pixel is red."""
    images = pytest.importorskip("PIL.Image")
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = images.new("RGB", (6, 4), colours.get(name, (10 * number,) * 3))
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


def counting(length: int) -> list[dict[str, torch.Tensor]]:
    """A dataset whose sample ``i`` consists of tokens ``i``."""
    others = {"position_ids": torch.arange(4), "loss_mask": torch.ones(4)}
    return [{"tokens": torch.full((4,), n), "labels": torch.full((4,), n + 1), **others} for n in range(length)]


def tokens(batches: BatchIterator, micro_batches: int) -> list[list[int]]:
    return [next(batches)[0][0][:, 0].tolist() for _ in range(micro_batches)]


@pytest.mark.parametrize(("replicas", "micro_batches", "size"), [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 1, 2)])
def test_a_global_batch_is_the_same_in_every_layout(replicas: int, micro_batches: int, size: int) -> None:
    for step in range(3):
        found = []
        for replica in range(replicas):
            batches = BatchIterator(counting(100), size, replica=replica, replicas=replicas, consumed=8 * step)
            found += [sample for micro_batch in tokens(batches, micro_batches) for sample in micro_batch]
        assert sorted(found) == list(range(8 * step, 8 * step + 8))


def test_a_replica_goes_on_where_it_would_have_been_and_starts_again_at_the_end() -> None:
    through = BatchIterator(counting(100), 2, replica=1, replicas=2)
    assert tokens(through, 7)[-1:] == tokens(BatchIterator(counting(100), 2, replica=1, replicas=2, consumed=24), 1)
    assert tokens(BatchIterator(counting(3), 2), 3) == [[0, 1], [2, 0], [1, 2]]


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
    assert Vocabulary(257).eod == encodings.END_OF_DOCUMENT
    with pytest.raises(ConfigError, match=r"got 90,10,0, which leaves none of the 21 documents of .* for test"):
        gpt_datasets([prefix], samples=[4, 2, 1], **given)
    with pytest.raises(ConfigError, match=r"--data-path: got .*nothing, but there is no .*\.bin and no .*\.idx"):
        gpt_datasets([str(tmp_path / "nothing")], samples=[1, 1, 1], **given)
    train, *_ = gpt_datasets([prefix], samples=[50, 0, 0], **{**given, "vocab_size": 256})
    with pytest.raises(ConfigError, match="--vocab-size: got 256, must be above every token of the data, 256 among"):
        for _ in range(50):
            next(BatchIterator(train, 1))


def save_tokenizer(folder: Path, words: dict[str, int]) -> list[str]:
    """A tokenizer of words; its file asks for one token at most, and for an end before each text. The arguments for it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("</s> $A", special_tokens=[("</s>", 2)])
    made.enable_truncation(1)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    return ["--tokenizer", str(folder / "tokenizer.json"), "--append-eod"]


@pytest.mark.parametrize("size", [257, 5, 70_001])
def test_files_are_those_of_megatron_core(tmp_path, size, monkeypatch, capsys):
    monkeypatch.setattr(dataset, "TELL_AFTER_S", 0)
    monkeypatch.setattr(dataset, "TELL_EVERY_S", 0)
    (tmp_path / "in").mkdir()
    lines = '{"more": "big the", "text": "the fox"}\n{"text": "", "more": "fox"}\n'
    (tmp_path / "in" / "a.json").write_text(lines)
    (tmp_path / "in" / "b.txt").write_text("big fox")
    words = {"[UNK]": 0, "the": 1, "</s>": 2, "fox": 3, "big": size - 1}
    options = save_tokenizer(tmp_path, words) if size != 257 else []
    builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=DType.optimal_dtype(size))
    for text in ("the fox", "big the", "fox", "big fox"):
        row = [words[word] for word in [*text.split(), "</s>"]] if options else [*text.encode(), 256]
        builder.add_document(np.array(row), [len(row)])
    builder.finalize(f"{tmp_path}/theirs.idx")
    where = ["--input", f"{tmp_path}/in", "--json-keys", "text", "more", "--output-prefix", f"{tmp_path}/ours"]
    assert cli.main(["prepare-data", *where, *options]) == 0
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    said = capsys.readouterr()
    assert f"--vocab-size {size} {'--eod-id 2 ' if options else ''}(padded" in said.out
    assert "100%, 4 documents, " in said.err and " documents/s, " in said.err


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from ds_terapipe import cli
from ds_terapipe.commands.preparing import texts

texts.PIECE, left, folder = 64, [0], Path(sys.argv[1])

def counted(owner, name):
    def call(*args, was=getattr(owner, name)):
        left[0] -= 1
        return was(*args) if left[0] else os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, call)

for place in (IndexedDatasetBuilder, "add_document"), (os, "fsync"), (os, "remove"), (os, "replace"):
    counted(*place)

def prepared(workers, dies_at=0):
    left[0], pid = dies_at, os.fork()
    if pid == 0:
        where = ["--input", f"{folder}/lines.jsonl", "--output-prefix", f"{folder}/out/data"]
        os._exit(cli.main(["prepare-data", *where, "--workers", workers]))
    return os.waitpid(pid, 0)[1], {path.name: path.read_bytes() for path in folder.glob("out/*")}

old, new = {"data.bin": b"old", "data.idx": b"older"}, prepared("1")[1]
for point in map(int, sys.argv[2:]):
    for name, content in old.items():
        (folder / "out" / name).write_bytes(content)
    status, found = prepared("2", point)
    assert status == signal.SIGKILL and ("data.idx" not in found or found.items() >= old.items() or found == new), point
    assert prepared("2") == (0, new) and len(new) == 2, point
"""


def killed(points: Sequence[int]) -> str:
    """Return what is wrong where runs are killed at each document and each step of the end; none outlives its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lines.jsonl").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(12)))
        command = [sys.executable, "-c", KILLED, folder, *map(str, points)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                _, errors = process.communicate(timeout=60 + 20 * len(points))  # its output ends with the last worker
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return errors if process.returncode else ""


few = in_background(f"{__name__}:killed", 2, lambda: killed((5, 15, 18)))


@pytest.mark.parametrize("points", ["few", pytest.param(range(1, 21), marks=pytest.mark.full)], ids=str)
def test_a_run_that_is_killed_leaves_a_whole_dataset_or_none(few: str, points: Any) -> None:
    """Any number of workers gives the same files."""
    assert not (few if points == "few" else killed(points))


def test_documents_of_a_sample_are_those_of_megatron_core(tmp_path: Path) -> None:
    prefix, given = write(tmp_path, text=FOX), {"vocab_size": 257, "seq_length": 4 * SEQ, "samples": [9, 0, 0]}
    end = ord(" ")
    train, *_ = gpt_datasets([prefix], **given, eod_id=end, reset_position_ids=True, eod_mask_loss=True)
    (text, positions), (_, mask) = next(BatchIterator(train, 3))
    documents = GPTPipeline.documents_of.fget(SimpleNamespace(document_end=end))((text, positions))
    seen = seen_by(documents, [Span(0, 4 * SEQ, 4 * SEQ)])
    for row, tokens in enumerate(text):
        hidden, loss_mask, expected = _get_ltor_masks_and_position_ids(tokens, end, True, True, True, True)
        assert torch.equal(seen[row], ~hidden[0]) and torch.equal(mask[row], loss_mask)
        assert torch.equal(positions[row], expected)
    assert (positions[:, 1:] == 0).any() and (mask == 0).any()
    with pytest.raises(ConfigError, match="--reset-attention-mask: got a model without token_pipeline, must have that key"):
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


def made(prefix: str, **changes: Any) -> list[Any]:
    settings = {"vocabulary": WordPieces.of_bytes(), "seq_length": SEQ, "samples": [60, 10, 0], "split": "80,20,0"}
    return bert_datasets([prefix], **{**settings, **changes})


def test_samples_are_two_sentences_whose_masked_tokens_are_labels(tmp_path: Path) -> None:
    train, valid, test = made(write(tmp_path, "--split-sentences"), short_seq_prob=0.5)
    assert len(train) >= 60 and len(valid) >= 10 and test is None and not train.config.masking_use_geometric_distribution
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


def test_lines_are_sentences_and_data_without_are_refused(tmp_path: Path) -> None:
    message = r"--split: got 80,20,0, which leaves none of the 21 documents of .* with two sentences of at most 512 tokens each"
    with pytest.raises(ConfigError, match=message + " for training"):
        made(write(tmp_path))
    longest = encodings.LONGEST_SENTENCE
    assert encodings.lines(b"a b\n\n  c\r\n \nd") == [b"a b", b"c", b"d"]
    assert [len(part) for part in encodings.sentence_pieces(b"x" * (2 * longest + 1))] == [longest, longest, 1]
    assert WordPieces.of_bytes().vocab_size == encodings.SENTENCE_VOCABULARY
    assert longest == bert_data.LONGEST_SENTENCE


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
    images = Images([file for files in folder.images for file in files], 48, (2, 2), 3, seed=1)
    assert len(images) == 48
    seen = [(float(pixels[0, 1, 1]), label) for pixels, label in (images[index] for index in range(48))]
    epochs = [seen[start : start + 16] for start in (0, 16, 32)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 16 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_classes_are_split_alike(tmp_path: Path) -> None:
    folder = ImageFolder(write_images(tmp_path / "images", {"cat": 10, "dog": 20}))
    parts = folder.split("80,20,0", seed=1)
    assert [[sum(file.label == n for file in part) for n in (0, 1)] for part in parts] == [[8, 16], [2, 4], [0, 0]]
    assert len({file.path for part in parts for file in part}) == 30
    assert folder.split("80,20,0", seed=1) == parts != folder.split("80,20,0", seed=2)
    message = r"--split: got 100,0,0, which leaves no image of .* for validation, use e\.g\. 80,20,0"
    with pytest.raises(ConfigError, match=message):
        image_datasets(folder, samples=[50, 6, 0], size=(4, 4), split="100,0,0")


def test_folders_without_images_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dog").mkdir()
    with pytest.raises(ConfigError, match=r"--data: got .*, which has 1 folders with images, must have one for"):
        ImageFolder(write_images(tmp_path, {"cat": 1}))
    folder = ImageFolder(write_images(tmp_path / "images", {"cat": 1, "dog": 1}))
    file = Path(folder.images[0][0].path)
    whole = file.read_bytes()
    for broken in (b"", whole[:-24], whole.replace(b"\rIDAT", b"\2IDAT")):
        file.write_bytes(broken)
        message = r"^--data: got .*cat/0\.png, must be an image that Pillow reads \(.*\), use another file or none$"
        with pytest.raises(ConfigError, match=message):
            Images(folder.images[0], 1, (2, 2), 3, seed=1)[0]

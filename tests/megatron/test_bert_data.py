"""BERT's samples: two sentences and their masks, as megatron-core's dataset makes them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_terapipe import cli
from ds_terapipe.commands import prepare_data
from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron import bert_data
from ds_terapipe.megatron.bert_data import BertBatches, WordPieces, bert_datasets

SEQ = 48


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One process: megatron-core asks for its rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(folder: Path, *options: str, text: str = "the {} fox\njumps over\n\n  the lazy dog \nand sleeps {}\n") -> str:
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(text.replace("{}", str(number)) * 10)
    (folder / "text" / "one.txt").write_text("a single line, which is no document for BERT")
    prefix = str(folder / "corpus")
    where = ["--input", str(folder / "text"), "--output-prefix", prefix]
    assert cli.main(["prepare-data", *where, *options]) == 0
    return prefix


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


def test_another_length_is_another_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path, "--split-sentences")
    batches = BertBatches({length: made(prefix, seq_length=length)[0] for length in (32, SEQ)}, 2)
    assert next(batches)[0][0].shape == (2, SEQ)
    batches.set_seq_length(32)
    (tokens, _, padding), _ = next(batches)
    assert tokens.shape == (2, 32) and (tokens == WordPieces.of_bytes().sep).sum() == 4 and padding.all(dim=1).any()
    with pytest.raises(ValueError, match=r"seq_length: got 64, must be one of the datasets' \[32, 48\], use 48"):
        batches.set_seq_length(64)


def test_a_vocabulary_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "the", "##x", "[SEP]", "[CLS]", "[MASK]"]))
    found = WordPieces.read(str(file))
    assert (found.cls, found.sep, found.mask, found.pad, found.vocab_size) == (4, 3, 5, 0, 6)
    assert found.inv_vocab[2] == "##x"
    for lines, missing in (
        (["[PAD]", "[SEP]", "[CLS]"], r"without \[MASK\]"),
        (["a", "[PAD]", "[SEP]", "[CLS]", "[MASK]"], r"without \[PAD\] in its first line"),
        ([], r"without \[CLS\]"),
    ):
        file.write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=rf"--vocab-file: got .*vocab\.txt {missing}.*, use that of the data"):
            WordPieces.read(str(file))
    with pytest.raises(ConfigError, match=r"--vocab-file: got /nowhere, which cannot be read"):
        WordPieces.read("/nowhere")
    file.write_bytes("\n".join(["[PAD]", "[SEP]", "[CLS]", "[MASK]", "caf\u00e9"]).encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"--vocab-file: got .*vocab\.txt, which cannot be read \(no UTF-8\), must have"
    ):
        WordPieces.read(str(file))


def test_data_without_sentences_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    message = r"--split: got 80,20,0, which leaves none of the 21 documents of .* with two sentences of at most 512 tokens each"
    with pytest.raises(ConfigError, match=message + " for training"):
        made(prefix)
    with pytest.raises(ConfigError, match=r"--data-path: got nothing, but there is no nothing\.bin"):
        made("nothing")


def test_documents_with_long_sentences_do_not_count() -> None:
    class Dataset:
        document_indices = np.array([0, 2, 3, 6, 8])
        sequence_lengths = np.array([5, 512, 9, 5, 513, 5, 1, 1])

    assert bert_data._has_sentences(Dataset()).tolist() == [True, False, False, True]


def test_lines_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longest = prepare_data.LONGEST_SENTENCE
    assert prepare_data.split_sentences(b"a b\n\n  c\r\n \nd") == [b"a b", b"c", b"d"]
    assert [len(part) for part in prepare_data.split_sentences(b"x" * (2 * longest + 1))] == [longest, longest, 1]
    write(tmp_path, "--split-sentences")
    out = capsys.readouterr().out
    assert "20 documents" in out and "--model bert (padded: 384)" in out
    assert WordPieces.of_bytes().vocab_size == prepare_data.SENTENCE_VOCABULARY
    assert longest == bert_data.LONGEST_SENTENCE

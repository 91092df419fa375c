"""Which samples a replica reads, and where the datasets come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from ds_terapipe import cli
from ds_terapipe.commands import prepare_data
from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.data import BatchIterator, Vocabulary, blend_of, gpt_datasets

SEQ = 32


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


def write(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number}: {text}\n" * 40)
    prefix = str(folder.parent / "data" / "corpus")
    assert cli.main(["prepare-data", "--input", str(folder), "--pattern", "*.txt", "--output-prefix", prefix]) == 0
    return prefix


def test_datasets_are_text_shifted_by_one_and_name_what_they_have_not(tmp_path: Path) -> None:
    prefix = write(tmp_path / "text", "the quick brown fox")
    given = {"vocab_size": 257, "seq_length": SEQ, "split": "90,10,0"}
    train, valid, test = gpt_datasets([prefix], samples=[50, 5, 0], seed=3, **given)
    assert len(train) >= 50 and len(valid) >= 5 and test is None
    (text, positions), (labels, mask) = next(BatchIterator(train, 3))
    assert text.shape == positions.shape == labels.shape == mask.shape == (3, SEQ)
    assert text.dtype == positions.dtype == labels.dtype == torch.int64 and mask.dtype == torch.float32
    assert torch.equal(text[:, 1:], labels[:, :-1]) and torch.equal(positions[0], torch.arange(SEQ))
    assert b"quick brown" in bytes(token for token in text.flatten().tolist() if token < 256)
    assert Vocabulary(257).eod == prepare_data.END_OF_DOCUMENT
    with pytest.raises(ConfigError, match=r"got 90,10,0, which leaves none of the 20 documents of .* for test"):
        gpt_datasets([prefix], samples=[4, 2, 1], **given)
    with pytest.raises(ConfigError, match=r"--data-path: got .*nothing, but there is no .*\.bin and no .*\.idx"):
        gpt_datasets([str(tmp_path / "nothing")], samples=[1, 1, 1], **given)
    train, *_ = gpt_datasets([prefix], samples=[50, 0, 0], **{**given, "vocab_size": 100})
    with pytest.raises(ConfigError, match=r"--vocab-size: got 100, must be above every token of the data, \d{3} among"):
        for _ in range(50):
            next(BatchIterator(train, 1))


def test_new_data_at_an_old_prefix_gets_a_new_index(tmp_path: Path) -> None:
    arguments = {"vocab_size": 257, "seq_length": SEQ, "samples": [10, 0, 0], "split": "1,0,0"}
    gpt_datasets([write(tmp_path / "text", "old old old old old old old")], **arguments)
    train, *_ = gpt_datasets([write(tmp_path / "text", "new")], **arguments)
    text = bytes(token for i in range(len(train)) for token in train[i]["tokens"].tolist() if token < 256)
    assert b"new" in text and b"old" not in text


def test_weights_are_above_0(tmp_path: Path) -> None:
    prefix = write(tmp_path / "text", "weighed")
    rule = "must be a weight above 0 before each prefix, use e.g. 0.3 data/a 0.7 data/b"
    for paths, got in {
        "0 A 1 A": "0", "0 A": "0", "1 A nan A": "nan", "1 A -1 A": "-1", "2 A -1 A": "-1", "1 A inf A": "inf",
        "1e308 A 1e308 A": "1e308", "1e-320 A 1e300 A": "1e-320", "A A 1 A": prefix,
    }.items():  # fmt: skip
        words = [prefix if word == "A" else word for word in paths.split()]
        with pytest.raises(ConfigError) as caught:
            gpt_datasets(words, vocab_size=257, seq_length=SEQ, samples=[4, 0, 0], split="1,0,0")
        assert str(caught.value) == f'--data-path: got "{got}", {rule}'
    assert blend_of(["0.5", prefix, "1e-3", prefix]) == ([prefix, prefix], [0.5, 1e-3])
    assert blend_of([prefix, prefix]) == ([prefix, prefix], None)

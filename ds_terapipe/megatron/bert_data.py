"""BERT's samples from Megatron's indexed datasets, by megatron-core's own class: two sentences, of which tokens are masked."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.data import Batch, SampleIterator, build

LONGEST_SENTENCE = 512  # megatron-core leaves out a document with a longer one: LONG_SENTENCE_LEN of its helpers.cpp
SPECIAL = ("[CLS]", "[SEP]", "[MASK]")
PADDING = "[PAD]"


@dataclass(frozen=True)
class WordPieces:
    """The tokenizer's interface for the dataset.

    Attributes:
        inv_vocab: the token of each id; one that goes on with a word begins with ``##``.
        cls, sep, mask: ids of the tokens that begin a sample, end a sentence and stand for another token.
    """

    inv_vocab: Mapping[int, str]
    cls: int
    sep: int
    mask: int
    pad: int = 0  # megatron-core marks padding with this id, which has to be 0 for that

    @classmethod
    def read(cls, path: str) -> WordPieces:
        """A vocabulary of BERT's, one token a line.

        Raises:
            ConfigError: no such file, none of UTF-8, or it lacks a special token.
        """
        try:
            tokens = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no UTF-8"
            raise ConfigError(
                f"--vocab-file: got {path}, which cannot be read ({why}), must have a token a line, "
                "use that of the data"
            ) from error
        missing = [token for token in SPECIAL if token not in tokens]
        if missing or tokens[:1] != [PADDING]:
            raise ConfigError(
                f"--vocab-file: got {path} without {' '.join(missing) or PADDING + ' in its first line'}, must be a vocabulary "
                f"of BERT's, {PADDING} first, use that of the data"
            )
        return cls(dict(enumerate(tokens)), *(tokens.index(token) for token in SPECIAL))

    @classmethod
    def of_bytes(cls) -> WordPieces:
        """Return the pieces of ``ds_terapipe prepare-data --split-sentences``: bytes 1 to 255, special tokens."""
        return cls(dict(enumerate([PADDING, *map(chr, range(1, 256)), *SPECIAL])), 256, 257, 258)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.inv_vocab)

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Part of the name of the dataset's cache in megatron-core."""
        written = zlib.crc32("\n".join(self.inv_vocab.values()).encode())
        return OrderedDict({"class": type(self).__name__, "vocab_size": self.vocab_size, "tokens": written})


def bert_datasets(
    data_path: Sequence[str],
    *,
    vocabulary: WordPieces,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    **arguments: Any,
) -> list[Any]:
    """megatron-core's BERT datasets for training, validation and test, as ``pretrain_bert.py`` sets them. Every process calls it.

    Args:
        data_path: as for `build`; documents are several sentences, all of at most 512 tokens.
        vocabulary: of the data.
        mask_prob: share of tokens to predict.
        short_seq_prob: share of samples that are shorter than ``seq_length``.
        arguments: further ones of `build`.
    """
    return build(
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
        data_path,
        tokenizer=vocabulary,
        usable=_has_sentences,
        having=f"with two sentences of at most {LONGEST_SENTENCE} tokens each ",
        masking_probability=mask_prob,
        short_sequence_probability=short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
        **arguments,
    )


def _has_sentences(dataset: IndexedDataset) -> np.ndarray:
    starts, lengths = np.asarray(dataset.document_indices), np.asarray(dataset.sequence_lengths)
    # how many sentences before each place are too long
    long = np.concatenate([[0], np.cumsum(lengths > LONGEST_SENTENCE)])
    having: np.ndarray = (np.diff(starts) >= 2) & (long[starts[1:]] == long[starts[:-1]])
    return having


class BertBatches(SampleIterator):
    """Micro-batches ((tokens, types, padding mask), (labels, loss mask, order)): [b, seq_length] int64, but order [b].

    Args:
        dataset: megatron-core's datasets, each by the length of its samples. A sample is made for a length, so that both its
            sentences end where it does: another length, which the schedule ``MixedBatch`` asks for, is another dataset.
        arguments: of :class:`~ds_terapipe.megatron.data.SampleIterator`.
    """

    def __init__(self, dataset: Mapping[int, Any], *arguments: Any, **more: Any) -> None:
        self._of_length = dict(dataset)
        super().__init__(self._of_length[max(self._of_length)], *arguments, **more)

    def set_seq_length(self, seq_length: int) -> None:
        """Switch to samples of so many tokens.

        Raises:
            ValueError: there is no dataset of this length.
        """
        if seq_length not in self._of_length:
            lengths = sorted(self._of_length)
            raise ValueError(f"seq_length: got {seq_length}, must be one of the datasets' {lengths}, use {lengths[-1]}")
        self.dataset = self._of_length[seq_length]

    def batch(self, samples: Sequence[Any]) -> Batch:
        names = ("text", "types", "padding_mask", "labels", "loss_mask", "is_random")
        stacked = (torch.from_numpy(np.stack([np.asarray(sample[name]) for sample in samples])) for name in names)
        tokens, types, padding, labels, mask, order = (tensor.long() for tensor in stacked)
        return (tokens, types, padding), (labels, mask, order)

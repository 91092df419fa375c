"""Batches from Megatron's indexed datasets, by position in the run and nothing else."""

from __future__ import annotations

import math
import os
import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list

from ds_terapipe.errors import ConfigError, bad_value

Batch = tuple[Any, Any]
SPLITS = ("training", "validation", "test")


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's interface for a dataset of token ids: ids are below ``vocab_size``; ``end`` or the last ends a document."""

    vocab_size: int
    end: int | None = None

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self.vocab_size - 1 if self.end is None else self.end

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Part of the name of the dataset's cache in megatron-core."""
        return OrderedDict({"class": type(self).__name__, "vocab_size": self.vocab_size})


def gpt_datasets(
    data_path: Sequence[str], *, vocab_size: int, eod_id: int | None = None, **arguments: Any
) -> list[Any]:
    """megatron-core's GPT datasets for training, validation and test. Every process calls it.

    Args:
        data_path: prefix of a ``.bin`` and ``.idx`` file, or weight, prefix, weight, prefix, ...
        vocab_size: number of token ids, before padding.
        eod_id: token that ends a document, default the last.
        arguments: of `build`, and settings of megatron-core's ``GPTDatasetConfig``: by default it does not reset position
            ids at the ends of documents, and their tokens count in the loss.
    """
    given = {"reset_position_ids": False, "eod_mask_loss": False, **arguments}
    return build(
        GPTDataset, GPTDatasetConfig, data_path, tokenizer=Vocabulary(vocab_size, eod_id), usable=_has_tokens,
        reset_attention_mask=False, create_attention_mask=False,  # the model finds documents by their last tokens
        **given,
    )  # fmt: skip


def parts_of(split: str) -> list[float]:
    """Parse the weights of training, validation and test in ``969,30,1``; missing ones are 0.

    megatron-core takes every digit that it finds, so that ``80,-20,0`` would be 80, 20 and 0.

    Raises:
        ConfigError: they are no such numbers.
    """
    parts = [part.strip() for part in split.split(",")]
    numbers = [float(part) for part in parts if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", part)]
    if len(numbers) < len(parts) or len(parts) > len(SPLITS) or not 0 < sum(numbers) < math.inf:
        rule = f"one to {len(SPLITS)} numbers of 0 or more, not all 0"
        raise bad_value("--split", split, rule, "e.g. 969,30,1")
    return numbers + [0.0] * (len(SPLITS) - len(numbers))


def blend_of(data_path: Sequence[str]) -> Any:
    """Prefixes and weights as megatron-core wants them.

    Raises:
        ConfigError: a weight is none, or there is no dataset at a prefix.
    """
    _check_weights(data_path)
    blend = get_blend_from_list(list(data_path))
    for prefix in blend[0]:
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)]
        if missing:
            raise ConfigError(
                f"--data-path: got {prefix}, but there is no {' and no '.join(missing)}, "
                f"write them with e.g. ds_terapipe prepare-data --output-prefix {prefix}"
            )
    return blend


def _check_weights(data_path: Sequence[str]) -> None:
    """Refuse weights that megatron-core's assertions refuse without a word.

    As there, every second word is a weight where their number is even and one of them is a number.
    """
    words = data_path[::2] if len(data_path) % 2 == 0 else []
    weights = [_number(word) for word in words]
    if all(weight is None for weight in weights):
        return
    total = sum(weight for weight in weights if weight is not None and 0 < weight < math.inf)
    for word, weight in zip(words, weights, strict=True):
        if weight is None or not 0 < weight < math.inf or not 0 < weight / total <= 1:
            raise bad_value("--data-path", word, "a weight above 0 before each prefix", "e.g. 0.3 data/a 0.7 data/b")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def build(
    kind: type,
    config_kind: type,
    data_path: Sequence[str],
    *,
    tokenizer: Any,
    usable: Callable[[IndexedDataset], np.ndarray],
    having: str = "",
    seq_length: int,
    samples: Sequence[int],
    split: str = "969,30,1",
    seed: int = 1234,
    cache_path: str | None = None,
    needed: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> list[Any]:
    """megatron-core's datasets of a kind for training, validation and test. Every process calls it.

    Args:
        kind, config_kind: of megatron-core's classes, and the class of its configuration.
        data_path: prefix of a ``.bin`` and ``.idx`` file, or weight, prefix, weight, prefix, ...
        tokenizer: what the configuration takes for one.
        usable: which documents of a dataset samples can be drawn from, for megatron-core never ends drawing from none.
        having: their content, for errors.
        seq_length: tokens in a sample, padding included.
        samples: wanted numbers of training, validation and test samples; 0 builds none. Their order depends on them.
        split: parts of the documents for the three, by weight.
        seed: of the order of samples, and of masks.
        cache_path: where the index of samples is kept, default ``cache`` beside the data.
        needed: whether this process reads data; the others get None.
        settings: further ones of the configuration.

    Returns:
        Three datasets, None where no samples are wanted or this process needs none.

    Raises:
        ConfigError: the split is none, there is no dataset at a prefix, or it has no usable document for a split that is wanted.
    """
    parts_of(split)
    blend = blend_of(data_path)
    config = config_kind(
        random_seed=seed, sequence_length=seq_length, blend=blend, split=split, tokenizer=tokenizer,
        path_to_cache=cache_path or cache_path_of(blend[0]), **settings,
    )  # fmt: skip
    config.split_matrix = [part if wanted else None for part, wanted in zip(config.split_matrix, samples, strict=True)]
    for prefix in blend[0]:
        found = usable(IndexedDataset(prefix))
        for name, part, wanted in zip(SPLITS, config.split_matrix, samples, strict=True):
            bounds = [round(edge * len(found)) for edge in part or (0, 0)]
            if wanted and not found[bounds[0] : bounds[1]].any():
                raise ConfigError(
                    f"--split: got {split}, which leaves none of the {len(found)} documents of {prefix} {having}"
                    f"for {name}, use e.g. 90,10,0"
                )
    return list(BlendedMegatronDatasetBuilder(kind, list(samples), needed, config).build())


def _has_tokens(dataset: IndexedDataset) -> np.ndarray:
    return np.asarray(dataset.sequence_lengths) > 0


def cache_path_of(prefixes: Sequence[str]) -> str:
    """A folder beside the data whose name changes with it, so that no index outlives the data it was made for."""
    index = Path(prefixes[0] + ".idx")
    written = [os.stat(prefix + ".idx") for prefix in prefixes]
    version = "-".join(f"{state.st_size:x}.{state.st_mtime_ns:x}" for state in written)
    return str(index.parent / "cache" / f"{index.stem}-{version}"[:200])


class SampleIterator(Iterator[Batch]):
    """Micro-batches for one data parallel replica.

    A global batch is a run of consecutive samples, whatever the layout: its k-th micro-batch of replica r is the
    (k * replicas + r)-th piece of ``micro_batch_size`` samples. Past the last sample it starts again at the first.

    Args:
        dataset: samples by index.
        micro_batch_size: samples of a micro-batch, or a function that returns the size of the next one.
        replica, replicas: of this process, and in all.
        consumed: samples of all replicas that have been used before.
    """

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int | Callable[[], int],
        *,
        replica: int = 0,
        replicas: int = 1,
        consumed: int = 0,
    ) -> None:
        self.dataset = dataset
        self._size = micro_batch_size if callable(micro_batch_size) else lambda: micro_batch_size
        self.replica, self.replicas, self.consumed = replica, replicas, consumed

    def __next__(self) -> Batch:
        """(inputs, labels) of a micro-batch."""
        size = self._size()
        start = self.consumed + self.replica * size
        picked = [self.dataset[index % len(self.dataset)] for index in range(start, start + size)]
        self.consumed += self.replicas * size
        return self.batch(picked)

    @abstractmethod
    def batch(self, samples: Sequence[Any]) -> Batch:
        """Return the model's batch of these samples: (inputs, labels), each a tensor or a tuple of them."""


class BatchIterator(SampleIterator):
    """Micro-batches of megatron-core's ``GPTDataset``, ((tokens, position ids), (labels, loss mask)), each [b, seq_length]."""

    _seq_length: int | None = None

    def set_seq_length(self, seq_length: int) -> None:
        """From now on only the first ``seq_length`` tokens of each sample, as the schedule ``MixedBatch`` asks for.

        Raises:
            ValueError: the samples are shorter.
        """
        longest = len(self.dataset[0]["tokens"])
        if seq_length > longest:
            raise ValueError(
                f"seq_length: got {seq_length}, must be at most {longest}, the samples' own, use --seq-length {seq_length}"
            )
        self._seq_length = seq_length

    def batch(self, samples: Sequence[Any]) -> Batch:
        tokens, positions, labels, mask = (
            torch.stack([sample[name][: self._seq_length] for sample in samples])
            for name in ("tokens", "position_ids", "labels", "loss_mask")
        )
        self._check_ids(max(int(tokens.max()), int(labels.max())))
        return (tokens, positions), (labels, mask)

    def _check_ids(self, largest: int) -> None:
        """Refuse token ids outside the vocabulary: an embedding on a GPU would abort the process."""
        tokenizer = getattr(getattr(self.dataset, "config", None), "tokenizer", None)
        if tokenizer is not None and largest >= tokenizer.vocab_size:
            must = f"above every token of the data, {largest} among them"
            raise bad_value("--vocab-size", tokenizer.vocab_size, must, "what prepare-data said")

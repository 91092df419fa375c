"""Texts become tokens: bytes, or by a ``tokenizer.json`` of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy

from ds_terapipe.errors import ConfigError

END_OF_DOCUMENT = 256
BYTE_VOCABULARY = 257
SENTENCE_VOCABULARY = 259  # bytes and BERT's special tokens, as ds_terapipe/megatron/bert_data.py numbers them
LONGEST_SENTENCE = 512  # megatron-core leaves out documents with a longer one
UINT16_VOCABULARY = 65500  # megatron-core's DType.optimal_dtype; a worker imports neither it nor PyTorch


@dataclass(frozen=True)
class Encoding:
    """The way from texts to tokens, small enough to be sent to a worker with each piece.

    Attributes:
        vocab_size: token ids are below it.
        end: token that ends a document, None for none.
        sentences: whether a document is the lines of a text, as BERT's are.
        tokenizer: path of a ``tokenizer.json``; None makes each byte a token.
    """

    vocab_size: int
    end: int | None
    sentences: bool = False
    tokenizer: str | None = None

    @property
    def dtype(self) -> Any:
        """Type of the stored tokens, which megatron-core takes for a vocabulary of this size."""
        return numpy.uint16 if self.vocab_size < UINT16_VOCABULARY else numpy.int32

    def documents(self, texts: Iterable[bytes]) -> list[list[Any]]:
        """The sequences of tokens of each text; texts without tokens are left out, and those of one sentence."""
        parts = [lines(text) if self.sentences else [text] for text in texts]
        encoded = iter(self._encode([part for each in parts for part in each]))
        made = []
        for each in parts:
            found = [row for row in islice(encoded, len(each)) if len(row)]
            if self.sentences:
                found = [piece for row in found for piece in sentence_pieces(row)]
            if len(found) < 1 + self.sentences:
                continue
            if self.end is not None:
                found[-1] = numpy.append(found[-1], self.dtype(self.end))
            made.append(found)
        return made

    def _encode(self, parts: list[bytes]) -> list[Any]:
        if self.tokenizer is None:
            return [numpy.frombuffer(part, dtype=numpy.uint8).astype(self.dtype) for part in parts]
        texts = [part.decode() for part in parts]
        try:
            encoded = load(self.tokenizer).encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the package raises no other class
            raise ConfigError(
                f"--tokenizer: got {self.tokenizer} ({short(error)}), must have tokens for every text, use another one"
            ) from error
        return [numpy.array(found.ids, dtype=self.dtype) for found in encoded]


def lines(text: bytes) -> list[bytes]:
    """The lines that have a word, without the blanks around them."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def sentence_pieces(tokens: Any) -> list[Any]:
    """A sentence in pieces that BERT's dataset takes."""
    return [tokens[start : start + LONGEST_SENTENCE] for start in range(0, len(tokens), LONGEST_SENTENCE)]


def encoding_of(tokenizer: str | None, sentences: bool, append_eod: str | None) -> Encoding:
    """Make the encoding that the arguments ask for.

    Args:
        tokenizer: path of a ``tokenizer.json``, None for bytes, whose documents always end with a token of their own.
        sentences: whether documents are for BERT; they have no end.
        append_eod: token that ends a document; "" takes the ``eos_token`` beside the tokenizer, None none.

    Raises:
        ConfigError: the tokenizer cannot be read or has no such token, or an end is asked for where there is none.
    """
    if append_eod is not None and sentences:
        raise ConfigError("--append-eod: got it beside --split-sentences, must be without, use one of them")
    if tokenizer is None:
        if append_eod:
            raise ConfigError(
                f'--append-eod: got "{append_eod}", must be a token of --tokenizer, use it without a token for bytes'
            )
        return Encoding(SENTENCE_VOCABULARY, None, True) if sentences else Encoding(BYTE_VOCABULARY, END_OF_DOCUMENT)
    ids = load(tokenizer).get_vocab(with_added_tokens=True)
    end = None if append_eod is None else _end(append_eod or _eos_token(tokenizer), ids, tokenizer)
    return Encoding(max(ids.values(), default=0) + 1, end, sentences, tokenizer)


@lru_cache(maxsize=1)
def load(file: str) -> Any:
    """Read a tokenizer, which then neither cuts nor pads, whatever its file says.

    Raises:
        ConfigError: no package ``tokenizers``, or the file is none of its.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"tokenizers is missing ({error}): pip install ds_terapipe[hf]") from error
    try:
        found = Tokenizer.from_file(file)
    except Exception as error:  # the package raises no other class
        raise ConfigError(
            f"--tokenizer: got {file} ({short(error)}), must be a file of tokenizers, use tokenizer.json"
        ) from error
    found.no_truncation()
    found.no_padding()
    return found


def _end(token: str, ids: dict[str, int], tokenizer: str) -> int:
    if token not in ids:
        raise ConfigError(
            f'--append-eod: got "{token}", must be a token of {tokenizer}, use e.g. --append-eod "<|endoftext|>"'
        )
    return ids[token]


def _eos_token(tokenizer: str) -> str:
    """The ``eos_token`` of the ``tokenizer_config.json`` beside a tokenizer, "" without."""
    try:
        found = json.loads(Path(tokenizer).with_name("tokenizer_config.json").read_text(encoding="utf-8"))
        token = found.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(token["content"] if isinstance(token, dict) else token or "")


def short(error: BaseException) -> str:
    """The text of another package's error in one line."""
    return " ".join(str(error).split())[:100]

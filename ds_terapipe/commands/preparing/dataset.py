"""A Megatron dataset on the disk: whole or absent, whenever the process ends."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence

from ds_terapipe.commands.preparing.texts import Piece, Reader
from ds_terapipe.commands.preparing.workers import in_order
from ds_terapipe.errors import ConfigError

TELL_AFTER_S = TELL_EVERY_S = 5.0


def write_dataset(reader: Reader, pieces: Sequence[Piece], workers: int, prefix: str) -> tuple[int, int]:
    """Write the documents of all pieces with megatron-core's own builder.

    Returns:
        Numbers of documents and tokens, ends of documents included.

    Raises:
        ConfigError: no megatron-core, no document, an input that is not as it must be, or nowhere to write.
    """
    from tqdm import tqdm

    builder_class = _indexed_dataset_builder()
    documents = tokens = 0
    told = tqdm(
        total=sum(piece.stop - piece.start for piece in pieces),
        desc="prepare-data",
        bar_format="{desc}: {percentage:.0f}%{postfix}, {elapsed} so far, {remaining} left",
        delay=TELL_AFTER_S,
        mininterval=TELL_EVERY_S,
    )
    encoded = contextlib.closing(in_order(reader, pieces, workers))
    with both_or_neither(prefix) as (bin_path, idx_path), told, encoded as found:
        builder = builder_class(bin_path, dtype=reader.encoding.dtype)
        began = time.monotonic()
        with builder.data_file:
            for piece in found:
                begin = 0
                for lengths in piece.lengths:
                    builder.add_document(piece.tokens[begin : begin + sum(lengths)], lengths)
                    begin += sum(lengths)
                tokens += begin
                documents += len(piece.lengths)
                rate = documents / max(time.monotonic() - began, 1e-9)
                told.set_postfix_str(f"{documents:,} documents, {rate:,.0f} documents/s", refresh=False)
                told.update(piece.size)
            if not documents:
                files = len({piece.path for piece in pieces})
                raise ConfigError(f"--input: none of {files} files has text in it, use text files")
            builder.finalize(idx_path)
    return documents, tokens


def _indexed_dataset_builder() -> type:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as error:
        raise ConfigError(f"megatron-core is missing ({error}): pip install ds_terapipe[megatron]") from error
    builder: type = IndexedDatasetBuilder
    return builder


@contextlib.contextmanager
def both_or_neither(prefix: str) -> Iterator[tuple[str, str]]:
    """Temporary names for ``prefix.bin`` and ``prefix.idx``; renamed at the end, removed after an error.

    A dataset is there once its index is. An old index goes before its tokens are replaced, and the new one comes last.
    """
    names = [f"{prefix}.bin", f"{prefix}.idx"]
    temporary = [f"{name}.{socket.gethostname()}.{os.getpid()}.tmp" for name in names]
    folder = os.path.dirname(os.path.abspath(prefix))
    try:
        os.makedirs(folder, exist_ok=True)
        for name in names:
            _remove_leftovers(name)
        yield temporary[0], temporary[1]
        for source in temporary:
            _sync(source)
        with contextlib.suppress(FileNotFoundError):
            os.remove(names[1])
        for source, target in zip(temporary, names, strict=True):
            _sync(folder)
            os.replace(source, target)
        _sync(folder)
    except OSError as error:
        raise ConfigError(f"--output-prefix: cannot write {prefix}.bin and .idx ({error.strerror or error})") from error
    finally:
        for source in temporary:
            if os.path.exists(source):
                os.remove(source)


def _remove_leftovers(name: str) -> None:
    """Remove the temporary files that killed processes of this machine have left."""
    for leftover in glob.glob(f"{glob.escape(f'{name}.{socket.gethostname()}')}.*.tmp"):
        process = leftover.split(".")[-2]
        if process.isdigit() and not os.path.exists(f"/proc/{process}"):
            os.remove(leftover)


def _sync(path: str) -> None:
    """Have a file or a folder on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

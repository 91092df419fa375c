"""``ds_terapipe prepare-data``: Megatron datasets from text files."""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ds_terapipe.commands.errors import CommandError
from ds_terapipe.commands.output import add_json, show
from ds_terapipe.commands.progress import progress

END_OF_DOCUMENT = 256
BYTE_VOCABULARY = 257
SENTENCE_VOCABULARY = 259  # bytes and BERT's special tokens, as ds_terapipe/megatron/bert_data.py numbers them
LONGEST_SENTENCE = 512  # megatron-core leaves out documents with a longer one
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

EXAMPLE = """\
example:
  ds_terapipe prepare-data --output-prefix data/python      the sources of Python's standard library
  ds_terapipe prepare-data --input book.txt notes/ --output-prefix data/books
  deepspeed train.py --data-path data/books --vocab-size 257 ...
  ds_terapipe prepare-data --split-sentences --output-prefix data/sentences
  deepspeed train.py --model bert --data-path data/sentences ...
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the parser of ``ds_terapipe``."""
    parser = commands.add_parser(
        "prepare-data",
        help="write Megatron .bin and .idx files from text files",
        description="Write a Megatron dataset from text files. A token is a byte of the file; a document is a file, "
        f"ended by token {END_OF_DOCUMENT}, so --vocab-size is {BYTE_VOCABULARY}. For BERT it is the lines of a file.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files or folders (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--pattern", default=None, help='names to take from folders, e.g. "*.txt" (default: all text files)'
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="for BERT: a document is the lines of a file that are not empty, in pieces of at most "
        f"{LONGEST_SENTENCE} bytes, without an end; files of one line are left out",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="for the padded vocabulary that is reported (default: %(default)s, as train.py's)",
    )
    add_json(parser)
    parser.set_defaults(run=prepare_data)


def prepare_data(options: argparse.Namespace) -> None:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``, both or neither.

    Raises:
        CommandError: an input that is missing or is JSON in lines, nothing to write, nowhere to write it (the figures of
            ``--json`` among it), or no megatron-core.
    """
    multiple = options.make_vocab_size_divisible_by
    if multiple < 1:
        raise CommandError(f"--make-vocab-size-divisible-by: got {multiple}, must be a positive number, use e.g. 128")
    with progress("looking for files"):
        files = find_files(options.input, options.pattern)
    documents, tokens = write_dataset(files, options.output_prefix, options.split_sentences)
    vocabulary = SENTENCE_VOCABULARY if options.split_sentences else BYTE_VOCABULARY
    padded = -(-vocabulary // multiple) * multiple
    data = {
        "data_path": options.output_prefix,
        "documents": documents,
        "tokens": tokens,
        "vocab_size": vocabulary,
        "padded_vocab_size": padded,
    }
    model = "--model bert" if options.split_sentences else f"--vocab-size {vocabulary}"
    text = (
        f"wrote {options.output_prefix}.bin and .idx: {documents:,} documents, {tokens:,} tokens; "
        f"train with --data-path {options.output_prefix} {model} (padded: {padded})"
    )
    show(options, text, data)


def find_files(inputs: Sequence[str] | None, pattern: str | None) -> list[Path]:
    """The files to read, in an order that depends on their names only.

    Raises:
        CommandError: an input that does not exist, or no file at all.
    """
    if not inputs:
        root = Path(sysconfig.get_path("stdlib"))
        found = root.rglob(pattern or "*.py")
        files = [path for path in found if not NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    else:
        files = []
        for name in inputs:
            path = Path(name)
            if not path.exists():
                raise CommandError(f"--input: got {name}, which does not exist, use a text file or a folder of them")
            files += [file for file in path.rglob(pattern or "*") if file.is_file()] if path.is_dir() else [path]
    if not files:
        raise CommandError(
            f"--input: no file matches {pattern or '*'} in {' '.join(inputs or ['the standard library'])}"
        )
    return sorted(set(files))


def write_dataset(files: Sequence[Path], prefix: str, sentences: bool = False) -> tuple[int, int]:
    """Write the files' bytes with megatron-core's own builder, whole or, for BERT, as ``sentences``.

    Returns:
        Numbers of documents and tokens, ends of documents included. Empty and binary files are left out, those of one
        sentence too where these count.

    Raises:
        CommandError: as :func:`prepare_data`.
    """
    import numpy
    from tqdm import tqdm

    builder_class = _indexed_dataset_builder()
    documents = tokens = 0
    with _both_or_neither(prefix) as (bin_path, idx_path):
        builder = builder_class(bin_path, dtype=numpy.uint16)
        try:
            for path in tqdm(files, unit="file", desc="prepare-data", delay=5, mininterval=5):
                text = _read(path)
                if not text or b"\0" in text:
                    continue
                if _is_json_lines(path, text):
                    raise CommandError(
                        f"--input: got {path}, a document in each line of JSON, must be text files, of which each is a document "
                        "as it is, write the texts into files, or leave it out with --pattern"
                    )
                parts = split_sentences(text) if sentences else [text]
                if sentences and len(parts) < 2:
                    continue
                document = numpy.frombuffer(b"".join(parts), dtype=numpy.uint8).astype(numpy.uint16)
                if not sentences:
                    document = numpy.append(document, END_OF_DOCUMENT)
                builder.add_document(document, [len(part) for part in parts] if sentences else [len(document)])
                documents += 1
                tokens += len(document)
            if not documents:
                raise CommandError(f"--input: none of {len(files)} files has text in it, use text files")
            builder.finalize(idx_path)
        finally:
            builder.data_file.close()
    return documents, tokens


def split_sentences(text: bytes) -> list[bytes]:
    """The lines that have a word, without the blanks around them, in pieces that BERT's dataset takes."""
    lines = [line.strip() for line in text.splitlines()]
    return [line[start : start + LONGEST_SENTENCE] for line in lines for start in range(0, len(line), LONGEST_SENTENCE)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"--input: cannot read {path} ({error.strerror})") from error


def _is_json_lines(path: Path, text: bytes) -> bool:
    """Whether a file is JSON lines, by its name, or by its first two lines; a file of one object is plain text."""
    if path.suffix in (".jsonl", ".ndjson"):
        return True
    if path.suffix != ".json":
        return False
    first, _, rest = text.partition(b"\n")
    return _is_object(first) and _is_object(rest.partition(b"\n")[0])


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _indexed_dataset_builder() -> type:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as error:
        raise CommandError(f"megatron-core is missing ({error}): pip install ds_terapipe[megatron]") from error
    builder: type = IndexedDatasetBuilder
    return builder


@contextmanager
def _both_or_neither(prefix: str) -> Iterator[tuple[str, str]]:
    """Temporary names for ``prefix.bin`` and ``prefix.idx``; renamed at the end, removed after an error."""
    names = [f"{prefix}.bin", f"{prefix}.idx"]
    temporary = [f"{name}.{os.getpid()}.tmp" for name in names]
    try:
        os.makedirs(os.path.dirname(os.path.abspath(prefix)), exist_ok=True)
        yield temporary[0], temporary[1]
        for source, target in zip(temporary, names, strict=True):
            os.replace(source, target)
    except OSError as error:
        raise CommandError(
            f"--output-prefix: cannot write {prefix}.bin and .idx ({error.strerror or error})"
        ) from error
    finally:
        for name in temporary:
            if os.path.exists(name):
                os.remove(name)

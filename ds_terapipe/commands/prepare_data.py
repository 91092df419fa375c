"""Write Megatron .bin and .idx files from text files or JSON lines.

Write a Megatron dataset. A document is a text file, or the text in a line of a .jsonl file. Without --tokenizer a token
is a byte, and token 256 ends a document. --vocab-size is then 257.

example:
  ds_terapipe prepare-data --output-prefix data/python      the sources of Python's standard library
  ds_terapipe prepare-data --input book.txt notes/ --output-prefix data/books
  deepspeed train.py --data-path data/books --vocab-size 257
  ds_terapipe prepare-data --input web.jsonl --tokenizer tokenizer.json --append-eod --workers 8 --output-prefix data/web
  ds_terapipe prepare-data --split-sentences --output-prefix data/sentences
  deepspeed train.py --model bert --data-path data/sentences
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ds_terapipe.commands.output import check_positive, show
from ds_terapipe.commands.preparing.dataset import write_dataset
from ds_terapipe.commands.preparing.texts import Reader, pieces_of
from ds_terapipe.commands.preparing.tokens import LONGEST_SENTENCE, encoding_of
from ds_terapipe.commands.progress import progress
from ds_terapipe.errors import ConfigError, bad_value

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files or folders (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--pattern", default=None, help='pattern of the files to read from folders, e.g. "*.txt" (default: all files)'
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a .jsonl file's objects whose texts are documents, in this order (default: text)",
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json of a Hugging Face tokenizer (default: bytes)"
    )
    parser.add_argument(
        "--append-eod",
        nargs="?",
        const="",
        metavar="TOKEN",
        help="end each document with this token (default: eos_token of the tokenizer_config.json beside the tokenizer)",
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="write sentences for BERT: the lines of a text, in pieces of at most "
        f"{LONGEST_SENTENCE} tokens. Texts of one line are left out",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes (default: 1). Their number does not change the files",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="divisor of the padded vocabulary that the command prints (default: %(default)s, as in train.py)",
    )


def run(options: argparse.Namespace) -> None:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``, both or neither."""
    check_positive(options, ("make_vocab_size_divisible_by", "workers"))
    encoding = encoding_of(options.tokenizer, options.split_sentences, options.append_eod)
    with progress("looking for files"):
        pieces = pieces_of(find_files(options.input, options.pattern))
    reader = Reader(encoding, tuple(options.json_keys))
    documents, tokens = write_dataset(reader, pieces, options.workers, options.output_prefix)
    vocabulary, multiple = encoding.vocab_size, options.make_vocab_size_divisible_by
    padded = -(-vocabulary // multiple) * multiple
    end = encoding.end if options.tokenizer else None
    data = {
        "data_path": options.output_prefix,
        "documents": documents,
        "tokens": tokens,
        "vocab_size": vocabulary,
        "padded_vocab_size": padded,
        **({} if end is None else {"eod": end}),
    }
    model = f"--vocab-size {vocabulary}" + ("" if end is None else f" --eod-id {end}")
    if options.split_sentences:
        model = "--model bert" + (" --vocab-file and the tokenizer's vocabulary" if options.tokenizer else "")
    text = (
        f"wrote {options.output_prefix}.bin and .idx: {documents:,} documents, {tokens:,} tokens; "
        f"train with --data-path {options.output_prefix} {model} (padded: {padded})"
    )
    show(options, text, data)


def find_files(inputs: Sequence[str] | None, pattern: str | None) -> list[Path]:
    """The files to read, in an order that depends on their names only.

    Raises:
        ConfigError: an input that does not exist, or no file at all.
    """
    if not inputs:
        root = Path(sysconfig.get_path("stdlib"))
        found = _matching(root, pattern or "*.py")
        files = [path for path in found if not NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    else:
        files = []
        for name in inputs:
            path = Path(name)
            if not path.exists():
                raise ConfigError(f"--input: got {name}, which does not exist, use a text file or a folder of them")
            files += _matching(path, pattern or "*") if path.is_dir() else [path]
    if not files:
        raise ConfigError(
            f"--input: no file matches {pattern or '*'} in {' '.join(inputs or ['the standard library'])}"
        )
    return sorted(set(files))


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in folder.rglob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise bad_value("--pattern", pattern, f"a pattern of file names ({error})", 'e.g. "*.txt"') from error

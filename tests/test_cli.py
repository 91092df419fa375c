"""The command ``ds_terapipe prepare-data``, and the help of every command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from ds_terapipe import cli
from ds_terapipe.commands import prepare_data
from tests.test_cli_plan import run


def prepared(capsys, given: Path, prefix: Path, *arguments: object) -> tuple[int, str, str]:
    return run(capsys, "prepare-data", "--input", given, "--output-prefix", prefix, *arguments)


def test_files_are_written_as_tokens_of_their_bytes(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    for name, content in [
        ("b.txt", "zwölf\n".encode()), ("sub/a.txt", b"one"), ("empty.txt", b""), ("c.json", b'{"of": "sources"}\n'),
        ("binary.dat", b"\x00\x01"),
    ]:  # fmt: skip
        (tmp_path / name).write_bytes(content)
    prefix = tmp_path / "out" / "corpus"
    status, out, _ = prepared(capsys, tmp_path, prefix, "--json", tmp_path / "said")
    said = {"data_path": str(prefix), "documents": 3, "tokens": 31, "vocab_size": 257, "padded_vocab_size": 384}
    assert status == 0 and json.loads((tmp_path / "said").read_text()) == said
    assert "3 documents, 31 tokens" in out and "--vocab-size 257 (padded: 384)" in out
    dataset = IndexedDataset(str(prefix))
    expected = [[*"zwölf\n".encode(), 256], [*b'{"of": "sources"}\n', 256], [*b"one", 256]]
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    assert dataset[0].dtype == np.uint16 and dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["corpus.bin", "corpus.idx"]


def test_without_input_the_standard_library_is_taken_without_its_tests():
    files = prepare_data.find_files(None, None)
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files} and len(files) > 300
    assert not [path for path in files if "site-packages" in path.parts or path.name == "test_argparse.py"]
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)


@pytest.mark.parametrize(
    ("given", "prefix", "message"),
    [
        ("missing.txt", "out/x", "missing.txt, which does not exist, use a text file"),
        ("blank.txt", "old", "none of 1 files has text in it"),
        ("lines.jsonl", "out/x", "lines.jsonl, a document in each line of JSON, must be text files, of"),
        ("text.txt", "text.txt/corpus", "--output-prefix: cannot write"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(tmp_path, capsys, given, prefix, message):
    (tmp_path / "blank.txt").write_bytes(b"")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "old.bin").write_bytes(b"old")
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    status, _, err = prepared(capsys, tmp_path / given, tmp_path / prefix)
    assert status == 1 and err.startswith("ds_terapipe prepare-data: error: ") and message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("out/*")) and (tmp_path / "old.bin").read_bytes() == b"old"


def test_every_commands_help_has_an_example_and_figures_can_be_had_as_json(capsys):
    (commands,) = [a.choices for a in cli.build_parser()._actions if isinstance(a.choices, dict)]
    for command in commands:
        with pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        out = capsys.readouterr().out
        assert end.value.code == 0 and "--json FILE" in out, command
        assert out.split("example:")[1].split()[:2] == ["ds_terapipe", command], command

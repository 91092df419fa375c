"""The command ``ds_terapipe prepare-data``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_terapipe import cli
from ds_terapipe.commands import prepare_data


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["prepare-data", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_writes_bytes_as_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    (tmp_path / "b.txt").write_bytes("zwölf\n".encode())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"one")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "c.json").write_text('{"of": "sources"}\n')
    (tmp_path / "binary.dat").write_bytes(b"\x00\x01")
    prefix = str(tmp_path / "out" / "corpus")
    status, out, _ = run(capsys, "--input", str(tmp_path), "--output-prefix", prefix, "--json", str(tmp_path / "said"))
    assert status == 0
    said = {"data_path": prefix, "documents": 3, "tokens": 31, "vocab_size": 257, "padded_vocab_size": 384}
    assert json.loads((tmp_path / "said").read_text()) == said
    assert "3 documents, 31 tokens" in out and "--vocab-size 257 (padded: 384)" in out
    dataset = indexed.IndexedDataset(prefix)
    expected = [[*"zwölf\n".encode(), 256], [*b'{"of": "sources"}\n', 256], [*b"one", 256]]
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    assert dataset[0].dtype == np.uint16 and dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["corpus.bin", "corpus.idx"]


def test_takes_the_standard_library_without_its_tests() -> None:
    files = prepare_data.find_files(None, None)
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names and len(files) > 300
    assert not [path for path in files if "site-packages" in path.parts or path.name == "test_argparse.py"]
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{tmp}/missing.txt"], "missing.txt, which does not exist, use a text file"),
        (["--input", "{tmp}/empty"], "no file matches *"),
        (["--input", "{tmp}/blank.txt"], "none of 1 files has text in it"),
        (
            ["--input", "{tmp}/lines.jsonl"],
            "lines.jsonl, a document in each line of JSON, must be text files, of which each",
        ),
        (["--input", "{tmp}/loose.json"], "loose.json, a document in each line of JSON, must be"),
        (["--input", "{tmp}"], "lines.jsonl, a document in each line of JSON, must be"),
        (["--input", "{tmp}", "--make-vocab-size-divisible-by", "0"], "got 0, must be a positive number, use e.g. 128"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    pytest.importorskip("megatron.core")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_bytes(b"")
    for name in ("lines.jsonl", "loose.json"):
        (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    status, _, err = run(capsys, *arguments, "--output-prefix", str(tmp_path / "out" / "x"))
    assert status == 1 and err.startswith("ds_terapipe prepare-data: error: ") and message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("out/*")), "nothing is left of a failed run"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core")
    (tmp_path / "a.txt").write_text("text")
    status, _, err = run(
        capsys, "--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "a.txt" / "corpus")
    )
    assert status == 1 and "--output-prefix: cannot write" in err and err.count("\n") == 1


def test_an_old_dataset_survives_a_failed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core")
    prefix = tmp_path / "corpus"
    (tmp_path / "corpus.bin").write_bytes(b"old")
    (tmp_path / "blank.txt").write_bytes(b"")
    assert run(capsys, "--input", str(tmp_path / "blank.txt"), "--output-prefix", str(prefix))[0] == 1
    assert (tmp_path / "corpus.bin").read_bytes() == b"old"


def test_without_megatron_core_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.indexed_dataset", None)
    (tmp_path / "a.txt").write_text("text")
    status, _, err = run(capsys, "--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "x"))
    assert status == 1 and "pip install ds_terapipe[megatron]" in err


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("plan", "plan --model gpt3-13b --cluster"),
        ("simulate", "simulate --stages 4"),
        ("prepare-data", "prepare-data --output-prefix data/python"),
        ("report", "report --json report.json"),
        ("reproduce-paper", "reproduce-paper --json paper.json"),
        ("trace", "trace "),
        ("shapes", "shapes history.jsonl --output shapes.svg"),
        ("export", "export checkpoints/global_step100 model --dtype bf16"),
    ],
)
def test_help_has_an_example_and_figures_can_be_had_as_json(
    capsys: pytest.CaptureFixture[str], command: str, example: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "--json FILE" in out
    assert f"ds_terapipe {example}" in out.split("example:")[1]


def test_every_command_is_known_to_the_test_above() -> None:
    parser = cli.build_parser()
    (commands,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    assert set(commands) == {
        "plan",
        "simulate",
        "prepare-data",
        "report",
        "reproduce-paper",
        "trace",
        "shapes",
        "export",
    }

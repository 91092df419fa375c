"""The commands ``ds_terapipe prepare-data`` and ``same-loss``, and the help of every command."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_terapipe import cli
from ds_terapipe.commands import prepare_data
from ds_terapipe.commands.preparing import texts
from ds_terapipe.names import SAME_LOSS
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
    expected = [*"zwölf\n".encode(), 256, *b'{"of": "sources"}\n', 256, *b"one", 256]
    assert np.fromfile(f"{prefix}.bin", np.uint16).tolist() == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["corpus.bin", "corpus.idx"]


def test_without_input_the_standard_library_is_taken_without_its_tests():
    files = prepare_data.find_files(None, None)
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files} and len(files) > 300
    assert not [path for path in files if "site-packages" in path.parts or path.name == "test_argparse.py"]
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)


@pytest.mark.parametrize(("given", "prefix", "message", "arguments"), [
    ("missing.txt", "out/x", "missing.txt, which does not exist, use a text file", ()),
    ("blank.txt", "old", "none of 1 files has text in it", ()),
    ("text.txt", "text.txt/corpus", "--output-prefix: cannot write", ()),
    ("/proc/self/mem", "old", "--input: cannot read /proc/self/mem (Input/output error)", ()),
    ("broken.jsonl", "old", "broken.jsonl:4 (Unterminated string", ()),
    ("lines.jsonl", "old", "lines.jsonl:2, another value", ()),
    ("keys.jsonl", "old", "--json-keys: got body, no key of {}/keys.jsonl:1, must be", ("--json-keys", "body")),
    ("keys.jsonl", "old", "--json-keys: got text, no text of {}/keys.jsonl:2, must be", ()),
    ("half.JSONL", "old", "half.JSONL:1, half a surrogate pair in text", ()),
    ("text.txt", "old", "--tokenizer: got {}/text.txt (", ("--tokenizer", "{}/text.txt")),
    ("text.txt", "old", "--tokenizer: got {}/words.json (WordLevel error: Missing", ("--tokenizer", "{}/words.json")),
    ("text.txt", "old", "--workers: got 0, must be a positive number", ("--workers", 0)),
    ("text.txt", "old", "--append-eod: got it beside", ("--append-eod", "--split-sentences")),
    ("", "old", '--pattern: got "/x", must be a pattern of file names (Non-relative', ("--pattern", "/x")),
])  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(tmp_path, capsys, monkeypatch, given, prefix, message, arguments):
    monkeypatch.setattr(texts, "PIECE", 20)
    for name, content in {
        "blank.txt": "", "text.txt": "text", "lines.jsonl": '{"text": "one"}\n[]\n',
        "broken.jsonl": '{"text": "one"}\n\n{"text": "two"}\n{"text": "th', "half.JSONL": '{"text": "\\ud800"}',
        "keys.jsonl": '{"text": "one"}\n{"text": 2}\n',
        "words.json": '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(content)
    (tmp_path / "old.bin").write_bytes(b"old")
    arguments = [str(each).replace("{}", str(tmp_path)) for each in arguments]
    status, _, err = prepared(capsys, tmp_path / given, tmp_path / prefix, *arguments)
    assert status == 1 and err.startswith("ds_terapipe prepare-data: error: ")
    assert message.replace("{}", str(tmp_path)) in err and err.count("\n") == 1
    assert not [*tmp_path.glob("out/*"), *tmp_path.glob("*.tmp")] and (tmp_path / "old.bin").read_bytes() == b"old"


def test_every_commands_help_has_an_example_and_figures_can_be_had_as_json(capsys):
    (commands,) = [a.choices for a in cli.build_parser()._actions if isinstance(a.choices, dict)]
    for command in commands:
        with pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        out = capsys.readouterr().out
        assert end.value.code == 0 and ("--json FILE" in out or command == "schema"), command  # which prints JSON
        assert out.split("example:")[1].split()[:2] == ["ds_terapipe", command], command
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ds_terapipe {cli.__version__}\n"


def test_losses_that_are_no_numbers_are_not_the_same(capsys):
    losses = "open(path, 'w').write('1.0 nan' if ours else '1.0 1.0')"
    script = f"import json, os; path, _, ours = json.loads(os.environ['{SAME_LOSS}']); {losses}"
    status, out, err = run(capsys, "same-loss", "--", sys.executable, "-c", script)
    assert status == 1 and "the losses differ by nan" in err and "2 steps: nan" in out

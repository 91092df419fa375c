"""``ds_terapipe report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_terapipe import cli, compat
from ds_terapipe.commands import report


def test_it_shows_versions_hook_names_and_ops(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DS_TERAPIPE_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["report", "--json", str(tmp_path / "report.json")]) == 0
    text = capsys.readouterr().out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["versions"]["deepspeed"] in text
    assert data["hook"]["on"], data["hook"]["problem"]
    assert "deepspeed/__init__.py:" in data["hook"]["wraps"]
    assert data["names"]["deepspeed"]["missing"] == []
    assert sum(entry["found"] for entry in data["names"].values()) <= len(compat.NAMES)
    ops = {op["name"]: op for op in data["ops"]}
    ours = ops["fused_lamb_terapipe_cpu"]
    assert ours["compatible"] and ours["remark"].split()[-1] in ("avx512", "avx2", "scalar")
    assert "cpu_adam" in ops and "cpu_adam" in text


def test_a_hook_that_is_off_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TERAPIPE_AUTOLOAD", "0")
    found = report.hook()
    assert not found["on"] and "DS_TERAPIPE_AUTOLOAD=0 turns it off" in found["problem"]


def test_a_name_that_is_gone_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Name("deepspeed:no_such_thing", "0.19.8", "test")
    monkeypatch.setattr(compat, "NAMES", (gone,))
    monkeypatch.setattr(compat.report, "__defaults__", ((gone,), None))
    data = {
        "versions": {},
        "hook": {"on": True, "wraps": "x", "problem": None},
        "names": report.names(),
        "ops": [],
        "locks": [],
        "buffers": [],
    }
    assert "deepspeed       0 found, missing: deepspeed:no_such_thing" in report.as_text(data)


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["report", "--json", str(tmp_path / "no" / "report.json")]) == 1
    assert "--json: cannot write" in capsys.readouterr().err

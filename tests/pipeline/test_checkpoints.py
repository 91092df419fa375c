"""A checkpoint's folder after a process has died at any single operation of writing it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_terapipe.names import MANIFEST
from ds_terapipe.pipeline.checkpoints import LATEST, WholeFolder, tag_of
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.operations import operations
from tests.pipeline.training import build_engine
from tests.spawn import launch

FILES = ("layer_00-model_states.pt", "mp_rank_00_model_states.pt", "elastic_pipeline.json")
SCRIPT = "zero_to_fp32.py"  # DeepSpeed puts it beside the checkpoints
TAGS = ("global_step5", "epoch/5", "a_b")


class Killed(BaseException):
    """No error: nobody sees it but the test."""


class Alone:
    """The consensus of a job of one process."""

    def agree(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


def whole(folder: Path, tag: str) -> WholeFolder:
    return WholeFolder(folder, tag, True, Alone())  # type: ignore[arg-type]


def save(folder: Path, tag: str, content: str, latest: bool = True) -> None:
    """As an engine does it."""
    checkpoint = whole(folder, tag)
    checkpoint.begin()
    (checkpoint.unfinished / tag).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (checkpoint.unfinished / tag / name).write_text(content)
    (checkpoint.unfinished / SCRIPT).write_text("script")
    checkpoint.finish(latest, {})


def content(folder: Path, tag: str) -> str | None:
    """What all files of a checkpoint have in them; None where there is none."""
    if not (folder / tag).exists():
        return None
    found = {path.name: path.read_text() for path in (folder / tag).iterdir()}
    assert set(json.loads(found.pop(MANIFEST))["files"]) == set(FILES)
    assert sorted(found) == sorted(FILES), found
    (text,) = set(found.values())
    return text


def killed() -> None:
    raise Killed


def ends(folder: Path, action: Callable[[Path], None]) -> list[tuple[Path, bool]]:
    """Folders in which the action was killed at every operation, and whether that was the last; the same preparation in each."""
    found, at = [], 0
    while True:
        for halfway in (False, True):
            each = folder / f"{at}-{halfway}"
            each.mkdir()
            prepare(each)
            try:
                with operations(killed, at, halfway):
                    action(each)
            except Killed:
                found.append((each, halfway))
            else:
                assert at > 8, "there is more to do than that"
                return found
        at += 1


def prepare(folder: Path) -> None:
    """Another checkpoint, a job's leftovers of it, and what the user has beside them."""
    save(folder, "other", "other")
    for leftover in (".other.unfinished", ".other_5.unfinished", ".other_5.replaced"):
        (folder / leftover).mkdir()
        (folder / leftover / "file").write_text("left")
    (folder / "notes.txt").write_text("notes")


def untouched(folder: Path) -> bool:
    left = [(folder / name / "file") for name in (".other.unfinished", ".other_5.unfinished", ".other_5.replaced")]
    return content(folder, "other") == "other" and all(path.is_file() for path in (*left, folder / "notes.txt"))


@pytest.mark.parametrize("tag", TAGS)
def test_a_new_checkpoint_is_there_as_a_whole_or_not_at_all(tmp_path, tag):
    seen = set()
    for folder, _ in ends(tmp_path, lambda folder: save(folder, tag, "new")):
        assert content(folder, tag) in (None, "new")
        assert (folder / LATEST).read_text() in ("other", tag)
        seen.add((content(folder, tag), content(folder, tag_of(folder, None) or "")))
        whole(folder, tag).recover()
        assert content(folder, tag) in (None, "new") and untouched(folder)
        save(folder, tag, "again")
        assert content(folder, tag) == "again" and tag_of(folder, None) == tag and untouched(folder)
        assert not leftovers(folder)
    assert seen == {(None, "other"), ("new", "other")}, "latest comes last: nothing can die after it"


@pytest.mark.parametrize("tag", TAGS)
def test_one_that_replaces_another_is_the_old_or_the_new(tmp_path, tag):
    def replace(folder: Path) -> None:
        save(folder, tag, "new")

    def twice(folder: Path) -> None:
        save(folder, tag, "old")
        replace(folder)

    seen = set()
    for folder, _ in ends(tmp_path, twice):
        assert content(folder, tag) in (None, "old", "new")  # between two renames there is none, until
        missing = content(folder, tag) is None
        whole(folder, tag).recover()
        latest = tag_of(folder, None)
        if latest == tag:
            assert content(folder, tag) in ("old", "new")
            seen.add((missing, content(folder, tag)))
        assert content(folder, latest or "") is not None and untouched(folder)
        save(folder, tag, "again")
        assert content(folder, tag) == "again" and not leftovers(folder)
    assert seen == {(False, "old"), (True, "old"), (False, "new")}


def put_by_the_user(checkpoint: Path) -> None:
    (checkpoint / "plots").mkdir()
    for name in ("weights.pt", "hf", "plots/loss.svg"):
        with (checkpoint / name).open("w") as file:  # no operation that is counted
            file.write("user's")


def users(checkpoint: Path) -> list[str]:
    """Files that are nobody's but the user's, whole ones."""
    found = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
    return sorted(name for name, path in found.items() if name not in FILES and path.read_text() == "user's")


def test_what_a_user_has_put_into_a_checkpoint_is_in_the_one_that_replaces_it(tmp_path):
    put = []

    def twice(folder: Path) -> None:
        save(folder, "last", "old")
        put_by_the_user(folder / "last")
        put.append(folder)
        save(folder, "last", "new")

    for folder, _ in ends(tmp_path, twice):
        whole(folder, "last").recover()
        if folder in put:
            assert users(folder / "last") == ["hf", "plots/loss.svg", "weights.pt"]
    twice(tmp_path)
    assert users(tmp_path / "last") == ["hf", "plots/loss.svg", "weights.pt"]
    assert {(tmp_path / "last" / name).read_text() for name in FILES} == {"new"}


def test_files_of_a_checkpoint_that_the_new_one_does_not_have_go(tmp_path):
    """They are of more stages, of freezing, of a Hugging Face model: the new one would be read as if it were such."""
    save(tmp_path, "last", "old")
    (tmp_path / "last" / "layer_09-model_states.pt").write_text("old")
    (tmp_path / "last" / "offloaded_tensors").mkdir()
    (tmp_path / "last" / "hf").mkdir()
    (tmp_path / "last" / "hf" / "names.json").write_text("old")
    save(tmp_path, "last", "new")
    assert content(tmp_path, "last") == "new"


def test_a_recovery_that_dies_itself_leaves_it_to_the_next(tmp_path):
    def recovered(folder: Path) -> None:
        save(folder, "last", "old")
        (folder / "last").rename(whole(folder, "last")._replaced)
        whole(folder, "last").recover()
        save(folder, "last", "new")

    for folder, _ in ends(tmp_path, recovered):
        whole(folder, "last").recover()
        assert content(folder, tag_of(folder, None) or "") in ("other", "old", "new") and untouched(folder)


def test_what_was_about_to_be_replaced_is_never_put_under_another_name(tmp_path):
    save(tmp_path, "epoch/5", "slash")
    (tmp_path / "epoch/5").rename(whole(tmp_path, "epoch/5")._replaced)  # died between two renames
    save(tmp_path, "epoch_5", "underscore")
    whole(tmp_path, "epoch%2F5").recover()
    assert not (tmp_path / "epoch%2F5").exists()
    whole(tmp_path, "epoch/5").recover()
    assert content(tmp_path, "epoch/5") == "slash" and content(tmp_path, "epoch_5") == "underscore"


def test_half_of_what_was_replaced_is_not_put_back(tmp_path):
    """Where the new one has been removed since: no checkpoint is better than a part of one."""
    for folder, halfway in ends(
        tmp_path, lambda folder: [save(folder, "last", text) for text in ("old", "new")] and None
    ):
        if halfway and content(folder, "last") == "new":
            for path in (folder / "last").iterdir():
                path.unlink()
            (folder / "last").rmdir()
            whole(folder, "last").recover()
            assert content(folder, "last") in (None, "old")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and not path.name.startswith(".other")]


def saved_nowhere(rank: int, world_size: int, folder: str) -> list[str]:
    """What each rank gets to know of saves into what is a file, and of one that goes well after them."""
    errors = []
    for block in (
        {"token_pipeline": {"slices": 2}},
        {"token_pipeline": {"slices": 2}, "config": {"elastic_pipeline": {}}},
    ):
        engine = build_engine(gpt(2), mean_loss, **block)
        for where in ("file", "file/below"):
            try:
                engine.save_checkpoint(f"{folder}/{where}")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        engine.train_batch(iter([micro_batch(m, masked=False) for m in range(2)]))
        engine.save_checkpoint(f"{folder}/good")
        engine.destroy()
    return errors


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    ranks: list[Any] = launch(saved_nowhere, 2, str(tmp_path), timeout=100)
    for result in ranks:
        assert result.error is None, result.traceback
        assert len(result.value) == 4
        assert all("Error: " in text and str(tmp_path / "file") in text for text in result.value), result.value
    assert tag_of(tmp_path / "good", None) == "global_step1"

"""A checkpoint's folder after a process has died at any single operation of writing it."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe.errors import ConfigError
from ds_terapipe.job import Job
from ds_terapipe.names import MANIFEST
from ds_terapipe.pipeline.checkpoints import LATEST, WholeFolder, tag_of
from ds_terapipe.pipeline.saved_files import SavedFiles, Share
from tests.pipeline.models import gpt, mean_loss, steps_of
from tests.pipeline.operations import operations
from tests.pipeline.training import build_engine
from tests.spawn import launched

FILES = ("layer_00-model_states.pt", "mp_rank_00_model_states.pt", "elastic_pipeline.json")
LEFT = (".other.unfinished", ".other_5.unfinished", ".other_5.replaced")
OF_USER = ("hf", "plots/loss.svg", "weights.pt")


class Killed(BaseException):
    """No error: only the test sees it."""


def whole(folder: Path, tag: str) -> WholeFolder:
    return WholeFolder(folder, tag, True, Job([0]))  # type: ignore[arg-type]


def save(folder: Path, tag: str, content: str) -> None:
    (checkpoint := whole(folder, tag)).begin()
    (checkpoint.unfinished / tag).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (checkpoint.unfinished / tag / name).write_text(content)
    (checkpoint.unfinished / "zero_to_fp32.py").write_text("script")  # DeepSpeed puts it beside the checkpoints
    checkpoint.finish(True, {})


def content(folder: Path, tag: str | None) -> str | None:
    """The text that all files of a checkpoint have in them, the user's aside; None where there is none."""
    if not (here := folder / str(tag)).exists():
        return None
    names = {str(path.relative_to(here)) for path in here.rglob("*")}
    found = {name: (here / name).read_text() for name in names - {*OF_USER, "plots"}}
    assert set(json.loads(found.pop(MANIFEST))["files"]) == set(FILES) == found.keys(), found
    (text,) = set(found.values())
    return text


def ends(folder: Path, action: Callable[[Path], None]) -> Iterator[Path]:
    """Folders with another checkpoint, leftovers and a user's file: killed before each operation, and halfway through it."""

    def killed() -> None:
        raise Killed

    for at in range(1000):
        for halfway in (False, True):
            each = folder / f"{at}-{halfway}"
            save(each, "other", "other")
            beside = [each / leftover / "file" for leftover in LEFT] + [each / "notes.txt"]
            for path in beside:
                path.parent.mkdir(exist_ok=True)
                path.write_text("left")
            try:
                with operations(killed, at, halfway):
                    action(each)
            except Killed:
                yield each
                assert content(each, "other") == "other", "another checkpoint is lost"
                assert all(path.is_file() for path in beside)
            else:
                assert at > 8, "there is more to do than that"
                return


def twice(folder: Path, tag: str) -> None:
    save(folder, tag, "old")
    (folder / tag / "plots").mkdir()
    for path in (*(folder / tag / name for name in OF_USER), folder / "put"):
        with path.open("w") as file:  # no operation that is counted
            file.write("user's")
    save(folder, tag, "new")


@pytest.mark.parametrize("tag", ["global_step5", "epoch/5"])
def test_a_checkpoint_is_there_as_a_whole_or_not_at_all_and_one_that_replaces_it_too(tmp_path, tag):
    """Files that the user has put into one are in the one that replaces it."""
    seen = set()
    for folder in ends(tmp_path, lambda folder: twice(folder, tag)):
        before = content(folder, tag)  # between two renames there is none, until
        assert before in (None, "old", "new") and (folder / LATEST).read_text() in ("other", tag)
        whole(folder, tag).recover()
        seen.add((tag_of(folder, None) == tag, before, content(folder, tag)))
        if (folder / "put").exists():
            assert all((folder / tag / name).read_text() == "user's" for name in OF_USER)
        save(folder, tag, "again")
        assert content(folder, tag) == "again" and tag_of(folder, None) == tag
        assert not [path for path in folder.iterdir() if path.name.startswith(".") and path.name not in LEFT]
    first = {(False, None, None), (False, "old", "old")}  # latest comes last: nothing can die after it
    assert seen == first | {(True, "old", "old"), (True, None, "old"), (True, "new", "new")}


def test_files_of_a_checkpoint_that_the_new_one_does_not_have_go(tmp_path):
    """They are of more stages, of freezing, of a Hugging Face model: the new one would be read as if it were such."""
    save(tmp_path, "last", "old")
    for name in ("layer_09-model_states.pt", "offloaded_tensors/0.pt", "hf/names.json"):
        (tmp_path / "last" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "last" / name).write_text("old")
    (link := tmp_path / "last" / "plots" / "best.svg").parent.mkdir()  # the user's, and stays
    link.symlink_to("nowhere")
    save(tmp_path, "last", "new")
    assert link.is_symlink() and {path.name for path in link.parents[1].iterdir()} == {*FILES, MANIFEST, "plots"}


def test_a_rank_of_three_digits_has_its_own_file(tmp_path):
    for rank in range(101):
        (tmp_path / f"mp_rank_{rank:02d}_model_states.pt").touch()
    assert SavedFiles(tmp_path).of_optimizer(Share((), 0, 1, 100, 101, 0, 1), None) == "mp_rank_100_model_states.pt"


def test_a_recovery_that_dies_itself_leaves_it_to_the_next(tmp_path):
    def recovered(folder: Path) -> None:
        save(folder, "last", "old")
        (folder / "last").rename(whole(folder, "last")._replaced)
        whole(folder, "last").recover()
        save(folder, "last", "new")

    for folder in ends(tmp_path, recovered):
        whole(folder, "last").recover()
        assert content(folder, tag_of(folder, None)) in ("other", "old", "new")


def saved_nowhere(rank: int, world_size: int, folder: str) -> tuple[str, str | None]:
    """The error of a save into a place that is a file, and the tag of a save that goes well after it."""
    Path(folder, "file").touch()
    engine = build_engine(gpt(2), mean_loss, token_pipeline={"slices": 2})
    with pytest.raises(Exception) as said:
        engine.save_checkpoint(f"{folder}/file/below")
    assert engine.load_checkpoint(f"{folder}/good") == (None, None), "there is none yet"
    engine.train_batch(iter(steps_of(1, 2, masked=False)[0]))
    written = {} if torch.distributed.get_rank() == 0 else {"lock": threading.Lock()}  # not by one rank, as on its full disk
    with pytest.raises(ConfigError, match=r"mp_rank_01_model_states.pt that cannot be written \(TypeError.* GB are free\), must"):
        engine.save_checkpoint(f"{folder}/good", client_state=written)
    assert not list(Path(folder, "good").iterdir())
    engine.save_checkpoint(f"{folder}/good", tag=f"{folder}/good/global_step1")
    _, client = engine.load_checkpoint(f"{folder}/good")
    with pytest.raises(ConfigError, match=r"^module_state_dict: got a call outside .*, must be .*, use save_checkpoint$"):
        engine.save_16bit_model(folder)  # in DeepSpeed it writes into the checkpoint that was loaded
    several = {"tag": f"run{torch.distributed.get_rank()}"}, "tag: got .*run0.*run1.*, must be the same on all ranks"
    for given, text in (({"tag": ""}, 'tag: got "", must'), several, ({"client_state": client}, "client_state: got ")):
        with pytest.raises(ConfigError, match=f"^save_checkpoint: {text}.*, use "):
            engine.save_checkpoint(f"{folder}/good", **given)
    engine.destroy()
    return f"{said.type.__name__}: {said.value}", tag_of(Path(folder, "good"), None)


ranks = launched(saved_nowhere, 2, timeout=180, folder=True)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(ranks: list[Any]) -> None:
    for said, tag in ranks:
        assert "Error: " in said and "file/below" in said and tag == "global_step1", said

"""Atomic checkpoints: written to a temporary folder, and renamed with a manifest when all ranks are done."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_terapipe import manifest
from ds_terapipe.bf16_parts import LoadArguments, load_with_parts
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.job import RankFailed, error_of
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.names import ELASTIC_STATE, HF_FOLDER, HF_NAMES, MANIFEST, PLACED_STATE
from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.autotune.engine_facts import follow_micro_batch
from ds_terapipe.pipeline.loss_state import loss_file
from ds_terapipe.pipeline.parameter_groups import names_in
from ds_terapipe.pipeline.saved_files import KEY, SavedFiles, Share, Wanted, wanted
from ds_terapipe.pipeline.transport.consensus import Consensus

LATEST = "latest"
PLAN_STATE = "ds_terapipe_plan"
Names = Sequence[Sequence[str | None]]  # of the optimizer's parameters in a rank's files, by group
_Found = TypeVar("_Found")
_OF_DEEPSPEED = ("checkpoint_parallel_dimensions", "optimizer", "global_samples")  # load_checkpoint returns them too
_LONG: dict[str, Any] = {"counts": False, "bounded": False}  # ranks may have very different amounts to read


class WholeFolder:
    """A folder of a checkpoint that a killed job leaves either in its old or in its new state.

    Args:
        folder: folder of the checkpoints.
        tag: name of this checkpoint.
        writes: whether this process makes and renames folders: one per file system.
        consensus: consensus of the job; every method is collective.
    """

    def __init__(self, folder: str | Path, tag: str, writes: bool, consensus: Consensus) -> None:
        name = quote(tag, safe="")  # unique for each tag
        self._folder, self._target = Path(folder), Path(folder) / tag
        self.unfinished = self._folder / f".{name}.unfinished"
        self._replaced, self._removed = (self._folder / f".{name}.{what}" for what in ("replaced", "removed"))
        self._tag, self._writes, self._consensus = tag, writes, consensus

    def begin(self) -> None:
        """Remove remains of a killed job, restore the checkpoint that it was replacing, and make the folder.

        Raises:
            OSError, RuntimeError: on every rank, if the folder cannot be made.
        """
        self.recover()
        self._do(self._make)

    def finish(self, latest: bool, known: Mapping[str, manifest.Entry]) -> None:
        """Rename the checkpoint to its name, in place of an older one; ``latest``: also update the latest file.

        Other files in the replaced checkpoint are kept. ``known``: measured files, for the manifest.
        """
        self._do(lambda: self._rename(latest, known))

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Context manager for what fails on all ranks or on none: an error, as of a full disk, leaves no files behind."""
        try:
            yield
        except (ConfigError, OSError, RankFailed):
            self._do(self._give_up)
            raise

    def recover(self) -> None:
        """Rename a replaced checkpoint back if a killed job left it between two renames."""
        self._do(self._put_back)

    def _make(self) -> None:
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True, exist_ok=True)

    def _give_up(self) -> None:
        self._put_back()
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def _put_back(self) -> None:
        if self._replaced.exists() and not self._target.exists():
            self._replaced.rename(self._target)
        self._remove_replaced()

    def _remove_replaced(self) -> None:
        shutil.rmtree(self._removed, ignore_errors=True)
        with suppress(OSError):  # readers without write permission leave it
            self._replaced.rename(self._removed)  # a partly removed folder is never put back
        shutil.rmtree(self._removed, ignore_errors=True)

    def _keep_others(self) -> None:
        """Copy files that are not ours, instead of moving them: if the job is killed, no checkpoint lacks them."""
        for path in self._target.iterdir():
            to = self.unfinished / self._tag / path.name
            if _is_ours(path) or to.exists():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, to, symlinks=True)
            else:
                shutil.copy2(path, to, follow_symlinks=False)

    def _rename(self, latest: bool, known: Mapping[str, manifest.Entry]) -> None:
        manifest.write(self.unfinished / self._tag, known)
        self._target.parent.mkdir(parents=True, exist_ok=True)
        if self._target.is_dir():
            self._keep_others()
        if self._target.exists():
            self._target.rename(self._replaced)
        (self.unfinished / self._tag).rename(self._target)
        self._remove_replaced()
        for other in self.unfinished.iterdir():  # DeepSpeed's scripts
            if other.is_file():
                other.replace(self._folder / other.name)
        shutil.rmtree(self.unfinished)
        if latest:
            new = self._folder / f".{LATEST}.unfinished"
            new.write_text(self._tag, encoding="utf-8")
            new.replace(self._folder / LATEST)

    def _do(self, action: Callable[[], None]) -> None:
        error = None
        try:
            if self._writes:
                action()
        except OSError as problem:
            error = problem
        self._consensus.agree(error)


def _is_ours(path: Path) -> bool:
    """Whether a save by DeepSpeed or this package writes this file into a checkpoint."""
    name = path.name
    return (
        name.endswith("_states.pt")
        or name in ("offloaded_tensors", ELASTIC_STATE, MANIFEST)
        or (name == HF_FOLDER and (path / HF_NAMES).exists())
    )


class Checkpointer:
    """Checkpoints of an engine: written as a whole or not at all, checked before they are read.

    Args:
        consensus: consensus of the job; every method is collective.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus, self._watchdog = consensus, consensus.watchdog

    def save(
        self,
        engine: Any,
        save: Callable[..., Any],
        save_dir: Any,
        tag: Any,
        client_state: Mapping[str, Any],
        latest: bool,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save a checkpoint with ``save``, which is ``DeepSpeedEngine.save_checkpoint``.

        Args:
            engine: the engine to save.
            save: called with the other arguments.
            save_dir, tag, client_state, latest, exclude_frozen_parameters: its arguments; no ``tag``: that of the step.

        Raises:
            ConfigError: on every rank, for an empty tag, or if ranks give different ones, and for what a load has returned beside
                the user's client state.
        """
        tag = f"global_step{engine.global_steps}" if tag is None else relpath(Path(save_dir, str(tag)), save_dir)
        tags = sorted(set(self._consensus.gather(tag, "all ranks to save a checkpoint", counts=False)))
        if len(tags) > 1:  # of ranks that add their clock or number to it: none of the folders would be whole
            raise bad_value("save_checkpoint: tag", tags[:2], "the same on all ranks", "the number of the step")
        if tag == ".":
            raise bad_value("save_checkpoint: tag", "", "the name of a folder", "the number of the step")
        self._consensus.together(lambda: _refuse_stale(client_state, engine.global_samples))
        plans = engine._slicer.state()
        with self.as_saved(engine) as placed:
            ours = {PLACED_STATE: placed, **({PLAN_STATE: plans} if plans else {})}
            facts = self.client_state(engine, placed["names"], not exclude_frozen_parameters)
            client_state = {**facts, **client_state, **ours}
            save = partial(save, exclude_frozen_parameters=exclude_frozen_parameters)
            if isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
                return self._save_whole(engine, save, save_dir, tag, client_state, latest, placed["names"])
            # other engines write later, or elsewhere
            self._consensus.decide(lambda: (Path(save_dir) / tag / MANIFEST).unlink(missing_ok=True))
            self.write_beside(engine, Path(save_dir) / tag, placed["names"])
            return save(save_dir, tag, client_state, latest)

    def _save_whole(
        self,
        engine: Any,
        save: Callable[..., Any],
        save_dir: Any,
        tag: str,
        client_state: Any,
        latest: bool,
        names: Names,
    ) -> Any:
        whole = self._whole(engine, save_dir, tag)
        whole.begin()
        folder = whole.unfinished / tag
        self.write_beside(engine, folder, names)
        with (
            self._watchdog.waiting("all ranks to write their files", **_LONG),
            manifest.saving(engine.checkpoint_engine) as here,
        ):
            saved = save(str(whole.unfinished), tag, client_state, False)
        with whole.or_nothing():
            self._consensus.agree(here.error)
            of_ranks = self._consensus.gather(manifest.entries_of(here.files, folder))
            whole.finish(latest, {name: entry for of_rank in of_ranks for name, entry in of_rank.items()})
        return saved

    @contextmanager
    def as_saved(self, engine: Any) -> Iterator[dict[str, Any]]:
        """Context manager in which the optimizer's state is that of this rank's files; yields the record of it."""
        yield {**ModelChunks(engine.module).placed, "names": names_in(engine)}

    def client_state(self, engine: Any, names: Names, frozen: bool) -> dict[str, Any]:
        """Return what is added to the client state in DeepSpeed's own files.

        Args:
            engine: the engine to save.
            names: as recorded.
            frozen: whether frozen parameters are saved.
        """
        return {}

    def write_beside(self, engine: Any, folder: Path, names: Names) -> None:
        """Write further files into the folder of a checkpoint; ``names``: as recorded."""

    def _whole(self, engine: Any, folder: Any, tag: str) -> WholeFolder:
        rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
        return WholeFolder(folder, tag, rank == 0, self._consensus)

    def load(self, engine: Any, load: Callable[..., Any], given: LoadArguments) -> Any:
        """Check a checkpoint's files, and load it with ``load``, which is ``PipelineEngine.load_checkpoint``.

        Raises:
            ConfigError: on every rank, a file that is missing, not as it was saved, or not of this model: nothing was changed.
        """
        folder, put = self.recover(engine, given.load_dir, given.tag), None
        if folder is not None and not engine.load_universal_checkpoint():
            put = self.check(engine, folder, wanted(engine, given))
        return self.load_checked(engine, load, given, put)

    def check(self, engine: Any, folder: Path, wants: Wanted) -> Callable[[], None] | None:
        """Check the files that are about to be read.

        Returns:
            What loads the optimizer's state after the weights; None: DeepSpeed does.
        """
        chunks = ModelChunks(engine.module)
        self.check_files(engine, folder, engine.module._topo, chunks.parts, chunks.places, wants)
        return None

    def load_checked(
        self, engine: Any, load: Callable[..., Any], given: LoadArguments, put: Callable[[], None] | None = None
    ) -> Any:
        """Load a checkpoint whose files were checked, as :meth:`load`; ``put``: loads the optimizer's state for DeepSpeed."""
        if put is not None:
            given = given._replace(load_optimizer_states=False)
        with self._watchdog.waiting("all ranks to read their files", **_LONG), read_once(engine.checkpoint_engine):
            try:
                path, client_state = load_with_parts(engine, load, *given)
            finally:
                engine._curr_ckpt_path = None  # or `module_state_dict` would write into the checkpoint that was read
        if put is not None:
            put()
        follow_micro_batch(engine)
        if client_state:
            engine._slicer.load(client_state.pop(PLAN_STATE, None))
            client_state.pop(PLACED_STATE, None)
        return path, client_state

    def check_files(
        self,
        engine: Any,
        folder: Path,
        topology: ProcessTopology,
        parts: Sequence[int],
        places: Sequence[int],
        wants: Wanted,
        beside: Iterable[str] = (),
    ) -> bool:
        """Check the files that this rank is about to read, in the shape that it will have.

        Args:
            engine: the engine that loads them.
            folder: folder of the checkpoint.
            topology, parts, places: the shape; see `ModelChunks`.
            wants: states to read beside weights.
            beside: names of further files.

        Returns:
            Whether the optimizer's state was saved with stages in other places.
        """
        module = engine.module
        layers = ModelChunks(module).functions

        def check() -> bool:
            files = SavedFiles(folder)
            elsewhere = files.check(Share.of(engine.global_rank, topology, parts, places), wants, layers)
            files.check_bytes(beside)
            loss = loss_file(module, str(folder))
            files.check_bytes_of([] if loss is None else [loss.name])
            return elsewhere

        return any(self._consensus.gather(self.on_all(check)))

    def on_all(self, look: Callable[[], _Found]) -> _Found:
        """Return what ``look`` finds in files; an error of any rank is raised on every rank; collective."""
        found: list[_Found] = []
        error = error_of(lambda: found.append(look()))
        with self._watchdog.waiting("all ranks to look at their files", **_LONG):
            self._consensus.job.gather(None)
        self._consensus.agree(error)
        return found[0]

    def recover(self, engine: Any, folder: Any, tag: Any = None) -> Path | None:
        """Restore a checkpoint that a killed job was replacing.

        Returns:
            The folder of the checkpoint, by default of the latest; None where there is none.
        """
        tag = self._consensus.decide(lambda: tag_of(folder, tag))
        if tag is None:
            return None
        self._whole(engine, folder, tag).recover()
        return Path(folder) / str(tag)


def _refuse_stale(client_state: Mapping[str, Any], samples: int) -> None:
    """Refuse entries of DeepSpeed's among the client state of a load, which would replace those of the present."""
    for key in _OF_DEEPSPEED:
        if key in client_state and client_state[key] != samples:
            must, use = "no key that DeepSpeed writes itself", "your own entries alone of what load_checkpoint returned"
            raise bad_value("save_checkpoint: client_state", key, must, use)


def read_once(reader: Any) -> AbstractContextManager[None]:
    """Context manager that caches files between two successive reads by DeepSpeed."""
    load = reader.load
    last: dict[Any, Any] = {}

    def loaded(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path in last:
            return last.pop(path)
        last.clear()
        return last.setdefault(path, load(path, *args, **kwargs))

    return replaced(reader, load=loaded)


def tag_of(folder: str | Path, tag: str | None, key: str = KEY, file: str = LATEST) -> str | None:
    """Return the name of the checkpoint to read, by default the latest; None if there is none.

    Raises:
        ConfigError: a damaged ``file``; the message begins with ``key``.
    """
    latest = Path(folder) / file
    if tag is not None or not latest.is_file():
        return None if tag is None else str(tag)
    try:
        name = latest.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        name = ""
    if not name.isprintable() or not name:
        raise ConfigError(f"{key}: got {latest} that is damaged, must have the name of a checkpoint in it, use tag=...")
    return name

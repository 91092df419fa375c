"""The job: processes that train together, their store, the groups in which they talk, and their agreement.

No other module names PyTorch's default group, its store, or makes groups. So a job can be a part of a launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from ds_terapipe.errors import ConfigError, first_line

_Made = TypeVar("_Made")


class RankFailed(RuntimeError):
    """Another rank's error, which this rank raises as well."""


class Job:
    """Processes that train together; each makes its own object.

    Args:
        ranks: global ranks of a part of the launch, in ascending order; None: all, or this process alone before
            ``init_process_group``. A part's groups are made by its own ranks. PyTorch names these by the number of
            groups that a process has, so it must be the same on all of the part.

    Attributes:
        ranks, rank: global ranks of all, and of this process.
    """

    _of_launch: Job | None = None

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._made_in = _launch()
        self.rank = torch.distributed.get_rank() if self._made_in else 0
        everyone = range(torch.distributed.get_world_size() if self._made_in else 1)
        self.ranks, self._is_part = tuple(everyone if ranks is None else ranks), ranks is not None
        self._group: Any = None  # of a part
        self._host_group: Any = None  # where messages of the job's backend are not in host memory

    @classmethod
    def current(cls) -> Job:
        """Return the job of all processes of the launch."""
        if cls._of_launch is None or cls._of_launch._made_in != _launch():
            cls._of_launch = cls()
        return cls._of_launch

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that decides and logs for all."""
        return self.rank == self.ranks[0]

    @property
    def store(self) -> Any:
        """Store of the launch; keys have a rank or an owner in their names."""
        return torch.distributed.distributed_c10d._get_default_store()

    @property
    def group(self) -> Any:
        """Group of all ranks, on the backend of the launch; collective at the first use by a part."""
        if self._is_part and self._group is None:
            self._group = self.new_group()
        return self._group if self._is_part else _default_group()

    @property
    def host_group(self) -> Any:
        """Group of all ranks for messages in host memory; collective at the first use."""
        if "cpu" in torch.distributed.get_backend_config(_default_group()):
            return self.group
        if self._host_group is None:
            self._host_group = self.new_group(backend="gloo")
        return self._host_group

    def new_group(
        self, ranks: Sequence[int] | None = None, timeout_s: float | None = None, backend: str | None = None
    ) -> Any:
        """Make a group of these ranks, by default of all, whose operations end after ``timeout_s``; collective over the job.

        Its creation has the launch's own timeout, since processes may arrive at very different times.
        """
        ranks = self.ranks if ranks is None and self._is_part else ranks
        try:
            group = torch.distributed.new_group(ranks, backend=backend, use_local_synchronization=self._is_part)
        except RuntimeError as error:
            if "gloo" not in str(error).lower():
                raise
            hint = "use GLOO_SOCKET_IFNAME, the network interface that all machines share"
            raise RuntimeError(f"{first_line(error)}: gloo could not connect all ranks, {hint}") from error
        if timeout_s is not None and isinstance(group, torch.distributed.ProcessGroup):  # else this rank is not in it
            # PyTorch 2.14 made it public, and warns of the old name
            new = getattr(torch.distributed, "set_timeout", None)
            (new or torch.distributed.distributed_c10d._set_pg_timeout)(timedelta(seconds=timeout_s), group)
        return group

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        """Return any value of every rank, in the order of the ranks; collective. ``group``: of all ranks."""
        if len(self.ranks) == 1:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        torch.distributed.all_gather_object(values, value, group=self.host_group if group is None else group)
        return values

    def agree(self, error: BaseException | None, gather: Callable[[Any], list[Any]] | None = None) -> None:
        """Raise any rank's error on every rank, its own if it has one; collective. ``gather``: by default this object's."""
        mine = None if error is None else (type(error).__name__, " ".join(str(error).split()))
        found = (gather or self.gather)(mine)
        if error is not None:
            raise error
        for rank, theirs in zip(self.ranks, found, strict=True):
            if theirs is not None:
                raise _restored(rank, *theirs)

    def together(self, make: Callable[[], _Made]) -> _Made:
        """Return the result of ``make``, or raise any rank's error of it on every rank; collective."""
        made: list[_Made] = []
        self.agree(error_of(lambda: made.append(make())))
        return made[0]


def _default_group() -> Any:
    """Return PyTorch's default group; None while there is none, or where PyTorch was built without any."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


def _launch() -> weakref.ref[Any] | None:
    """Return what tells launches of this process apart, without keeping a group that is destroyed."""
    world = _default_group()
    return None if world is None else weakref.ref(world)


def _restored(rank: int, kind: str, text: str) -> Exception:
    if kind == "StopIteration":
        return StopIteration(text)
    return ConfigError(text) if kind == "ConfigError" else RankFailed(f"rank {rank} failed: {kind}: {text}")


def error_of(action: Callable[[], Any]) -> Exception | None:
    """Return the exception that ``action`` raises, for an agreement; None if it succeeds."""
    try:
        action()
    except Exception as error:  # any error of a user's layer or file
        return error
    return None

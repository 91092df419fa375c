"""End of process groups.

The object that made a group destroys it, on all of its ranks together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup


def close_groups(groups: Iterable[Any], *holders: Any) -> None:
    """Destroy process groups; collective over the ranks of each, every rank with all of them that it is in.

    Groups that are destroyed already, as all are after the job's own, are skipped, and so are placeholders for groups
    of other ranks.

    Args:
        groups: in any order.
        *holders: objects that have them among their attributes, and lose those. PyTorch forgets a group that is destroyed,
            but over gloo three threads and five open files stay as long as the object is referenced.
    """
    mine = {group for group in groups if isinstance(group, ProcessGroup)}
    # By name, as PyTorch ends a job: all ranks of a group know it by one name, so ranks cannot deadlock.
    for group in sorted(mine, key=lambda group: group.group_name, reverse=True):
        with suppress(ValueError):  # "Invalid process group specified"
            torch.distributed.destroy_process_group(group)
    for holder in holders:
        _forget(mine, holder)


def _forget(groups: Collection[ProcessGroup], holder: Any) -> None:
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        each = value if isinstance(value, list) else [value]
        if any(isinstance(item, ProcessGroup) and item in groups for item in each):
            del vars(holder)[name]

"""Process groups whose operations end in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from ds_terapipe.pipeline.transport.watchdog import first_line

# PyTorch 2.14 made it public, and warns of the old name
_set_timeout: Callable[[timedelta, Any], None] = getattr(torch.distributed, "set_timeout", None) or (
    distributed_c10d._set_pg_timeout
)


def bounded_group(ranks: Sequence[int] | None, timeout_s: float, backend: str | None = None) -> Any:
    """Make a process group whose operations end after ``timeout_s``; collective. ``ranks`` None: all of the job.

    Its creation has the job's own timeout, since processes may arrive at very different times.
    """
    try:
        group = torch.distributed.new_group(ranks, backend=backend)
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        hint = "use GLOO_SOCKET_IFNAME, the network interface that all machines share"
        raise RuntimeError(f"{first_line(error)}: gloo could not connect all ranks, {hint}") from error
    if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
        _set_timeout(timedelta(seconds=timeout_s), group)
    return group

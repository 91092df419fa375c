"""Finds where a step reads numbers of a tensor on the host: on a device each such place waits for all that was issued before."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_terapipe.pipeline.assembly import Assembly

_ATEN = torch.ops.aten
_READS = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.nonzero.default, _ATEN.masked_select.default}


class _Reads(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            frames = [frame for frame in traceback.extract_stack() if "ds_terapipe" in frame.filename]
            self._found.append(f"{func}: {frames[-1].filename}:{frames[-1].lineno}" if frames else str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The reads within actions of this process's steps, backward passes too: operator and the line of ours that led there."""
    found: list[str] = []
    execute = Assembly.execute

    def watched(self: Assembly, action: Any) -> None:
        with _Reads(found):
            execute(self, action)

    with mock.patch.object(Assembly, "execute", watched):
        yield found

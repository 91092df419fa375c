"""Finds where a step reads numbers of a tensor on the host: on a device each such place waits for all that was issued before."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_terapipe.pipeline.runtime import PipelineRuntime

_ATEN = torch.ops.aten
# operators that have to know numbers, whose results have sizes that depend on them
_READS = {
    _ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.nonzero.default, _ATEN.masked_select.default,
    _ATEN._unique2.default, _ATEN.unique_dim.default, _ATEN.unique_consecutive.default, _ATEN.repeat_interleave.Tensor,
}  # fmt: skip
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}
# what on a CPU asks no operator
_METHODS = ("tolist", "numpy", "cpu", "__array__")


class _Reads(TorchDispatchMode):
    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func in _INDEXED and any(getattr(index, "dtype", None) == torch.bool for index in args[1])
        if masked or func in _READS:
            self._note(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The reads within actions of this process's steps, backward passes too: what reads, and the line that asked for it.

    Operators that know numbers and the usual methods; not what is read in other ways, such as by an extension.
    """
    found: list[str] = []
    execute = PipelineRuntime.execute

    def note(what: Any) -> None:
        theirs = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        found.append(f"{what}: {theirs[-1].filename}:{theirs[-1].lineno}")

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(method.__name__)
            return method(*args, **kwargs)

        return call

    def watched(self: PipelineRuntime, action: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(_Reads(note))
            for name in _METHODS:
                stack.enter_context(mock.patch.object(Tensor, name, noted(getattr(Tensor, name))))
            execute(self, action)

    with mock.patch.object(PipelineRuntime, "execute", watched):
        yield found

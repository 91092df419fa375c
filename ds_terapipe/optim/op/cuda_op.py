"""The compiled back end on CUDA: three kernels a step, no host that waits, all that changes from step to step on the device.

At a step Python only compares the table of segments in host memory with the one on the device, and launches.
A table that has changed is sent from pinned memory; the blocks' chunks are only remade when lengths or
layers have changed.
"""

from __future__ import annotations

import contextlib
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.optim.op.segments import GRADIENT, KIND, LAYER, LENGTH, PARAMETER, TYPE_SHIFTS, Tables

RULE_COLUMNS = 12
SQUARE_SUM, MOMENTS, APPLY = range(3)
SPARES = 2
NOT_RUN = "FusedLamb: got a step with new tensors while a CUDA graph is captured, run a step outside of it before"


class CudaOp:
    """The compiled op on CUDA devices; the interface is ``Backend`` of backends.py.

    ``tables.rules``, ``norms``, ``control`` and ``ratios`` lie on the device of the tensors, ``tables.segments`` in host
    memory. All work is put on the current stream of that device. A call may be captured in a CUDA graph once it has run outside
    of one with the same tables; the graph works on the addresses that the tables had when it was captured.

    The same input gives the same output to the last bit, at every run on the same kind of device.

    Args:
        library: the compiled module; loaded or compiled if None.

    Raises:
        RuntimeError: if the op cannot be loaded.
    """

    name = "cuda"
    takes_views = False

    def __init__(self, library: ModuleType | None = None) -> None:
        if library is None:
            from ds_terapipe.optim.op.builder import CudaLambBuilder

            library = CudaLambBuilder().load()
            library.blocks_of_device()  # fails here, and not in a step, where there is no code for the device
        self._library: Any = library
        self._blocks: dict[torch.device, tuple[int, int, int]] = {}
        self._sent: dict[int, _Sent] = {}
        self._captured: list[tuple[Tensor | None, _Chunks]] = []

    def square_sum(self, tables: Tables, control: Tensor) -> None:
        """See ``Backend``. One launch."""
        with self._ready(tables, control=control) as (sent, stream):
            self._library.square_sum(sent.handle, control.data_ptr(), sent.grid(SQUARE_SUM), stream)

    def moments(self, tables: Tables, norms: Tensor, control: Tensor) -> None:
        """See ``Backend``. One launch."""
        with self._ready(tables, control=control, norms=norms) as (sent, stream):
            self._moments(sent, norms, control, stream)

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor, *, advance: bool = False) -> None:
        """See ``Backend``. One launch.

        Args:
            advance: add one to the step of all of ``tables.rules`` after the update, unless ``control[3]`` is not 0: for a table
                that is written once and counts by itself, as in a CUDA graph.
        """
        with self._ready(tables, control=control, norms=norms, ratios=ratios) as (sent, stream):
            self._apply(sent, norms, control, ratios, advance, stream)

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor, *, advance: bool = False) -> None:
        """See ``Backend`` and :meth:`apply`. Two launches."""
        with self._ready(tables, control=control, norms=norms, ratios=ratios) as (sent, stream):
            self._moments(sent, norms, control, stream)
            self._apply(sent, norms, control, ratios, advance, stream)

    def write_rules(self, rules: Tensor, values: Tensor) -> None:
        """Give the rules on the device new settings, all but the step, without waiting and without a kernel. Not in a graph.

        Args:
            rules: float64 [R, 12] on the device.
            values: float64 [R, 12] in host memory.
        """
        _check("values", values, rules.numel(), torch.device("cpu"))
        with _guard(rules.device) as stream:
            staged = _pinned(values, rules.device).to(rules.device, non_blocking=True)
            self._library.copy_rules(rules.data_ptr(), staged.data_ptr(), rules.shape[0], stream)

    def _moments(self, sent: _Sent, norms: Tensor, control: Tensor, stream: int) -> None:
        self._library.moments(sent.handle, norms.data_ptr(), control.data_ptr(), sent.grid(MOMENTS), stream)

    def _apply(self, sent: _Sent, norms: Tensor, control: Tensor, ratios: Tensor, advance: bool, stream: int) -> None:
        arrays = norms.data_ptr(), control.data_ptr(), ratios.data_ptr()
        self._library.apply(sent.handle, *arrays, advance, sent.grid(APPLY), stream)

    @contextlib.contextmanager
    def _ready(self, tables: Tables, control: Tensor, norms: Tensor | None = None, ratios: Tensor | None = None) -> Any:
        """Yield the device's copy of ``tables`` and the address of the current stream, with their device current."""
        device = tables.rules.device
        _check("rules", tables.rules, RULE_COLUMNS * tables.rules.shape[0], device)
        _check("control", control, 4, device)
        if norms is not None:
            _check("norms", norms, 2 * tables.layers, device)
        if ratios is not None:
            _check("ratios", ratios, tables.layers, device)
        with _guard(device) as stream:
            sent = self._current(tables, device)
            sent.used_on(stream)
            yield sent, stream

    def _current(self, tables: Tables, device: torch.device) -> _Sent:
        """Return the device's copy of these tables, renewed if they have changed."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        sent = self._sent.get(id(tables))
        if tables.segments.dtype != torch.int64 or tables.segments.device.type != "cpu" or tables.segments.dim() != 2:
            raise ValueError(
                f"segments: got {tables.segments.dtype} on {tables.segments.device}, must be int64 [S, 8] on the CPU"
            )
        if sent is None or not sent.plan.fits(tables, device):
            if capturing:
                raise RuntimeError(NOT_RUN)
            if sent is None:
                weakref.finalize(tables, self._sent.pop, id(tables), None)
            plan = _Chunks(tables, device, self._library.CHUNK_ELEMENTS, self._grids(device))
            sent = self._sent[id(tables)] = _Sent(plan)
        sent.renew(tables, self._library, capturing)
        if capturing and not any(kept is sent.segments for kept, _ in self._captured):
            # The graph reads these at every replay, whatever becomes of the tables.
            self._captured.append((sent.segments, sent.plan))
        return sent

    def _grids(self, device: torch.device) -> tuple[int, int, int]:
        if device not in self._blocks:
            self._blocks[device] = self._library.blocks_of_device()
        return self._blocks[device]


class _Chunks:
    """Chunks of the tables' segments on the device, and work space. They depend on lengths, layers and device only.

    Args:
        tables: whose segments to cut.
        device: where the kernels run.
        chunk: the most elements that a block takes at a time.
        blocks: that fill the device, for each kernel.
    """

    def __init__(self, tables: Tables, device: torch.device, chunk: int, blocks: tuple[int, int, int]) -> None:
        self._shape = tables.segments[:, [LENGTH, LAYER]].clone()
        self._layers = tables.layers
        self._blocks = blocks
        self.device = device
        cut, first_chunk = chunks(tables.segments, tables.layers, chunk)
        self.chunk_count = len(cut)
        self.chunks = _upload(torch.from_numpy(cut), device)
        self.first_chunk = _upload(torch.from_numpy(first_chunk), device)
        partials = 2 * max(self.chunk_count, blocks[SQUARE_SUM])
        self.partials = torch.empty(partials, dtype=torch.float64, device=device)
        self.arrived = torch.zeros(tables.layers + 2, dtype=torch.int32, device=device)

    def fits(self, tables: Tables, device: torch.device) -> bool:
        """Whether lengths and layers are those of these chunks."""
        same = device == self.device and tables.layers == self._layers
        return same and torch.equal(self._shape, tables.segments[:, [LENGTH, LAYER]])

    def grid(self, kernel: int) -> int:
        """Blocks to launch: no more than have work, one at least, because a layer without a chunk has a norm too."""
        return max(1, min(self.chunk_count, self._blocks[kernel]))


class _Sent:
    """The segments on the device, and the structure of addresses that the kernels are given."""

    def __init__(self, plan: _Chunks) -> None:
        self.plan = plan
        self.handle: Any = None
        self.segments: Tensor | None = None
        self._host: Tensor | None = None
        self._rules: tuple[int, int] | None = None
        self._spares: list[Tensor] = []
        self._streams: set[int] = set()

    def used_on(self, stream: int) -> None:
        """Tell PyTorch's allocator of a stream, so that no memory is given away that a kernel there still reads."""
        if stream not in self._streams:
            self._streams.add(stream)
            plan = self.plan
            for tensor in (self.segments, plan.chunks, plan.first_chunk, plan.partials, plan.arrived):
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def grid(self, kernel: int) -> int:
        return self.plan.grid(kernel)

    def renew(self, tables: Tables, library: Any, capturing: bool) -> None:
        """Send the segments if they have changed, and take the address of the rules.

        Raises:
            ValueError: for a table that would make the kernels read or write elsewhere.
            RuntimeError: in a capture, if nothing is left to send them to.
        """
        rules = tables.rules.data_ptr(), tables.rules.shape[0]
        changed = self._host is None or not torch.equal(self._host, tables.segments)
        if changed:
            check_segments(tables)
            self._host = tables.segments.clone()
            self._streams.clear()
            if capturing:
                self._send_now(library)
            else:
                self.segments = _upload(tables.segments, self.plan.device)
        if not capturing:
            while len(self._spares) < SPARES:
                self._spares.append(torch.empty_like(tables.segments, device=self.plan.device))
        if changed or rules != self._rules:
            self._rules = rules
            self.handle = self._handle(library)

    def _send_now(self, library: Any) -> None:
        """Memory of the graph's own is written to by other parts of it, and a copy in the graph would need its source for good:
        so this copy runs beside the capture, at once, into memory from before it."""
        if not self._spares:
            raise RuntimeError(NOT_RUN)
        self.segments = self._spares.pop()
        assert self._host is not None
        library.upload_now(self.segments.data_ptr(), self._host.data_ptr(), self._host.nbytes)

    def _handle(self, library: Any) -> Any:
        plan = self.plan
        assert self.segments is not None and self._rules is not None
        return library.Tables(
            segments=self.segments.data_ptr(),
            chunks=plan.chunks.data_ptr(),
            first_chunk=plan.first_chunk.data_ptr(),
            rules=self._rules[0],
            partials=plan.partials.data_ptr(),
            arrived=plan.arrived.data_ptr(),
            chunk_count=plan.chunk_count,
            layer_count=plan.arrived.shape[0] - 2,
            rule_count=self._rules[1],
        )


def chunks(segments: Tensor, layers: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut segments into chunks, for blocks to take.

    Args:
        segments: int64 [S, 8], sorted by layer.
        layers: number of layers L.
        chunk: the most elements of one.

    Returns:
        int64 [C, 2], ``Chunk`` in csrc/lamb/lamb_cuda.h: offset in the segment, segment | length << 32; and int64 [L + 1], the
        first chunk of every layer and C at the end.
    """
    table = segments.numpy()
    lengths, layer = table[:, LENGTH], table[:, LAYER]
    counts = -(-lengths // chunk)
    segment = np.repeat(np.arange(len(table)), counts)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = within * chunk
    cut = np.stack([offset, segment | np.minimum(lengths[segment] - offset, chunk) << 32], axis=1)
    return cut, np.searchsorted(layer[segment], np.arange(layers + 1)).astype(np.int64)


def check_segments(tables: Tables) -> None:
    """Refuse a table with which the kernels would read or write elsewhere.

    Raises:
        ValueError: with the first row that is wrong.
    """
    table, rules = tables.segments.numpy(), tables.rules.shape[0]
    kind, length, layer = table[:, KIND], table[:, LENGTH], table[:, LAYER]
    addresses = table[:, PARAMETER : GRADIENT + 3]
    types = [kind >> shift & 0xF for shift in TYPE_SHIFTS if shift]
    for wrong, what in (
        (length < 0, "a negative length"),
        ((layer < 0) | (layer >= tables.layers), f"a layer that is not one of {tables.layers}"),
        (np.diff(layer, prepend=0) < 0, "a layer lower than that of the row before"),
        (kind & 0xFFFF >= rules, f"a rule that is not one of {rules}"),
        (np.max(types, axis=0, initial=0) > 2, "an unknown type"),
        ((length > 0) & (addresses == 0).any(axis=1), "no address"),
    ):
        if wrong.any():
            raise ValueError(f"segments: got {what} in row {int(np.argmax(wrong))}")


@contextlib.contextmanager
def _guard(device: torch.device) -> Any:
    """Make ``device`` the current one; gives the address of its current stream."""
    if device.type != "cuda":
        yield 0
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy in host memory for asynchronous reads by a CUDA device. PyTorch keeps it until then."""
    if device.type != "cuda":
        return values.clone()
    return torch.empty_like(values, pin_memory=True).copy_(values)


def _upload(values: Tensor, device: torch.device) -> Tensor:
    """A copy of an array in host memory on the device, without waiting for it."""
    return _pinned(values, device).to(device, non_blocking=True)


def _check(name: str, array: Tensor, elements: int, device: torch.device) -> None:
    """The kernels see an address only: whether enough of the right kind lies behind it is known here."""
    if array.dtype != torch.float64 or array.device != device or array.numel() != elements or not array.is_contiguous():
        got = f"{array.dtype} {tuple(array.shape)} on {array.device}"
        raise ValueError(f"{name}: got {got}, must be contiguous torch.float64 with {elements} elements on {device}")

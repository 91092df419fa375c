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

from ds_terapipe.optim.op.segments import GRADIENT, KIND, LAYER, LENGTH, PARAMETER, TYPE_SHIFTS, Tables, check_array

SQUARE_SUM, MOMENTS, APPLY = range(3)
SPARES = 2
NOT_RUN = "FusedLamb: got a step with new tensors while a CUDA graph is captured, run a step outside of it before"


class CudaOp:
    """The compiled op on CUDA devices; the functions are those of `Plain`.

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
        self._sent: dict[int, _Sent] = {}
        self._captured: list[tuple[Tensor, ...]] = []

    def square_sum(self, tables: Tables, control: Tensor) -> None:
        """See `Plain`. One launch."""
        with self._ready(tables, control) as (sent, stream):
            self._library.square_sum(sent.handle, control.data_ptr(), sent.grid(SQUARE_SUM), stream)

    def moments(self, tables: Tables, norms: Tensor, control: Tensor) -> None:
        """See `Plain`. One launch."""
        with self._ready(tables, control, norms) as (sent, stream):
            self._moments(sent, norms, control, stream)

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor, *, advance: bool = False) -> None:
        """See `Plain`. One launch.

        Args:
            advance: add one to the step of all of ``tables.rules`` after the update, unless ``control[3]`` is not 0: for a table
                that is written once and counts by itself, as in a CUDA graph.
        """
        with self._ready(tables, control, norms, ratios) as (sent, stream):
            self._apply(sent, norms, control, ratios, advance, stream)

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor, *, advance: bool = False) -> None:
        """See `Plain` and :meth:`apply`. Two launches."""
        with self._ready(tables, control, norms, ratios) as (sent, stream):
            self._moments(sent, norms, control, stream)
            self._apply(sent, norms, control, ratios, advance, stream)

    def write_rules(self, rules: Tensor, values: Tensor) -> None:
        """Give the rules on the device new settings, all but the step, without waiting and without a kernel. Not in a graph.

        Args:
            rules: float64 [R, 12] on the device.
            values: float64 [R, 12] in host memory.
        """
        check_array("values", values, rules.numel(), torch.device("cpu"))
        with _guard(rules.device) as stream:
            staged = _pinned(values, rules.device).to(rules.device, non_blocking=True)
            self._library.copy_rules(rules.data_ptr(), staged.data_ptr(), rules.shape[0], stream)

    def _moments(self, sent: _Sent, norms: Tensor, control: Tensor, stream: int) -> None:
        self._library.moments(sent.handle, norms.data_ptr(), control.data_ptr(), sent.grid(MOMENTS), stream)

    def _apply(self, sent: _Sent, norms: Tensor, control: Tensor, ratios: Tensor, advance: bool, stream: int) -> None:
        arrays = norms.data_ptr(), control.data_ptr(), ratios.data_ptr()
        self._library.apply(sent.handle, *arrays, advance, sent.grid(APPLY), stream)

    @contextlib.contextmanager
    def _ready(self, tables: Tables, *arrays: Tensor) -> Any:
        """Yield the device's copy of ``tables`` and the address of the current stream, with their device current."""
        device = tables.rules.device
        tables.check(device, *arrays)
        with _guard(device) as stream:
            sent = self._current(tables, device)
            sent.used_on(stream)
            yield sent, stream

    def _current(self, tables: Tables, device: torch.device) -> _Sent:
        """Return the device's copy of these tables, renewed if they have changed."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        sent = self._sent.get(id(tables))
        if sent is None or not sent.fits(tables, device):
            if capturing:
                raise RuntimeError(NOT_RUN)
            if sent is None:
                weakref.finalize(tables, self._sent.pop, id(tables), None)
            sent = self._sent[id(tables)] = _Sent(tables, device, self._library)
        sent.renew(tables, capturing)
        if capturing and not any(kept[0] is sent.memory[0] for kept in self._captured):
            self._captured.append(sent.memory)  # which the graph reads at every replay, whatever becomes of the tables
        return sent


class _Sent:
    """Tables on the device: segments, chunks of them, work space, and the structure of addresses that kernels are given.

    Chunks depend on lengths, layers and device only.

    Args:
        tables: what to send, at every :meth:`renew`.
        device: where the kernels run.
        library: the compiled module.
    """

    def __init__(self, tables: Tables, device: torch.device, library: Any) -> None:
        self._shape, self._layers = tables.segments[:, [LENGTH, LAYER]].clone(), tables.layers
        self._device, self._library = device, library
        self._blocks: tuple[int, int, int] = library.blocks_of_device()  # that fill it, for each kernel
        cut, first_chunk = chunks(tables.segments, tables.layers, library.CHUNK_ELEMENTS)
        self._chunk_count = len(cut)
        partials = 2 * max(self._chunk_count, self._blocks[SQUARE_SUM])
        self._work = (
            _upload(torch.from_numpy(cut), device),
            _upload(torch.from_numpy(first_chunk), device),
            torch.empty(partials, dtype=torch.float64, device=device),
            torch.zeros(tables.layers + 2, dtype=torch.int32, device=device),
        )
        self.handle: Any = None
        self.memory: tuple[Tensor, ...] = ()
        """The segments on the device, and the work space."""
        self._host: Tensor | None = None
        self._spares: list[Tensor] = []
        self._streams: set[int] = set()

    def fits(self, tables: Tables, device: torch.device) -> bool:
        """Whether lengths and layers are those of the chunks."""
        same = device == self._device and tables.layers == self._layers
        return same and torch.equal(self._shape, tables.segments[:, [LENGTH, LAYER]])

    def grid(self, kernel: int) -> int:
        """Blocks to launch: no more than have work, one at least, because a layer without a chunk has a norm too."""
        return max(1, min(self._chunk_count, self._blocks[kernel]))

    def used_on(self, stream: int) -> None:
        """Tell PyTorch's allocator of a stream, so that no memory is given away that a kernel there still reads."""
        if stream not in self._streams:
            self._streams.add(stream)
            for tensor in self.memory:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def renew(self, tables: Tables, capturing: bool) -> None:
        """Send the segments if they have changed, and take the address of the rules.

        Raises:
            ValueError: for a table that would make the kernels read or write elsewhere.
            RuntimeError: in a capture, if nothing is left to send them to.
        """
        if self._host is None or not torch.equal(self._host, tables.segments):
            check_segments(tables)
            self._host = tables.segments.clone()
            self._streams.clear()
            segments = self._sent_now(self._host) if capturing else _upload(tables.segments, self._device)
            self.memory = segments, *self._work
        if not capturing:
            while len(self._spares) < SPARES:
                self._spares.append(torch.empty_like(tables.segments, device=self._device))
        names = ("segments", "chunks", "first_chunk", "partials", "arrived")
        self.handle = self._library.Tables(
            **{name: tensor.data_ptr() for name, tensor in zip(names, self.memory, strict=True)},
            chunk_count=self._chunk_count, layer_count=self._layers, rules=tables.rules.data_ptr(),
            rule_count=tables.rules.shape[0],
        )  # fmt: skip

    def _sent_now(self, host: Tensor) -> Tensor:
        """Memory of the graph's own is written to by other parts of it, and a copy in the graph would need its source for good:
        so this copy runs beside the capture, at once, into memory from before it."""
        if not self._spares:
            raise RuntimeError(NOT_RUN)
        segments = self._spares.pop()
        self._library.upload_now(segments.data_ptr(), host.data_ptr(), host.nbytes)
        return segments


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

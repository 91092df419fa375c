"""Outputs of the first stage's frozen layers, cached by sample, so that the layers need not run again.

A level is a number of frozen layers with their current weights. When more layers are frozen, a new level begins: the
further layers start from the entries of the last level, and each sample's new entry replaces its old one. A rank
requests a step's micro-batches when it has read them; threads read the entries while the stage computes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_terapipe.elastic.cache.samples import decode, encode, names, rows_of, sample_dims, some_rows
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.moves.attributes import is_plain
from ds_terapipe.pipeline.clock import Clock
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.layer_range import Layer, modules_of
from ds_terapipe.pipeline.slicing import as_tuple, like
from ds_terapipe.pipeline.transport.stream import take_device
from ds_terapipe.plan.costs.memory import GIGABYTE

_AHEAD = 2  # micro-batches that are read ahead
_WAITING = 4  # micro-batches that may wait to be written; further ones are not kept
CHUNK = 1 << 24  # bytes of a tensor that are summed at once
_WRITES = 4  # passes that write before the cache is not used: layers may make buffers in their first one
_TIMED = 4  # times of each kind before reading and computing are compared
# Relative tolerance for a sample's outputs in another micro-batch; last for 16 bits, or for entries kept as bf16.
_CLOSE, _CLOSE_16 = {torch.float64: 1e-9, torch.float32: 1e-4}, 5e-2


class Level(NamedTuple):
    """A level: the first ``layers`` layers; ``folder`` is a hash of their weights."""

    layers: int
    folder: str


class Compute(NamedTuple):
    """Forward of a stage on a whole micro-batch: ``run(inputs, start)`` runs its layers from ``start`` on.

    A third argument of ``run`` says which rows of the micro-batch the inputs are. ``versions`` returns those of the layers'
    tensors.
    """

    run: Callable[..., Any]
    can_start_inside: bool
    versions: Callable[[], Any]


class _Asked(NamedTuple):
    """Names of a micro-batch's samples, and their cached outputs; ``level`` is None if some are missing."""

    samples: Sequence[str]
    level: Level | None
    outputs: Any
    seconds: float


@dataclass
class Counts:
    """Counts of samples: read, computed from an earlier level, computed from the inputs, and kept."""

    read: int = 0
    continued: int = 0
    computed: int = 0
    kept: int = 0


def level_of(layers: Sequence[Layer], flags: str) -> Level:
    """Return the level of these layers: a hash of their structure, every weight and every buffer.

    Args:
        layers: in order.
        flags: further facts that outputs depend on.
    """
    found = hashlib.blake2b(flags.encode(), digest_size=16)
    for layer in layers:
        found.update(f"{type(layer).__qualname__} {getattr(layer, '__qualname__', '')}".encode())
        for module in modules_of(layer):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum(tensor)}".encode())
    return Level(len(layers), found.hexdigest())


def versions_of(layers: Sequence[Layer]) -> list[tuple[int, int, int]]:
    """Return the versions of the layers' weights and buffers."""
    tensors = (t for layer in layers for module in modules_of(layer) for t in (*module.parameters(), *module.buffers()))
    # an assignment to `.data` leaves the version as it is
    return [(tensor.data_ptr(), id(tensor), tensor._version) for tensor in tensors]


def plain_attributes(layers: Sequence[Layer]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the plain attributes of each module of the layers."""
    modules = [module for layer in layers for each in modules_of(layer) for module in each.modules()]
    return [
        (each, {key: value for key, value in vars(each).items() if is_plain(value) and key != "training"})
        for each in modules
    ]


def _sum(tensor: Tensor) -> int:
    """Sum all bits of a tensor, weighted by position; on its device, in chunks."""
    total, at = 0, 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for piece in flat.split(CHUNK):
        spare = -len(piece) % 4
        whole = torch.cat([piece, piece.new_zeros(spare)]) if spare else piece
        words = whole.view(torch.int32).long()
        places = torch.arange(at, at + len(words), device=words.device) * 2 + 1
        mixed = (words ^ (places * 0x9E3779B97F4A7C1)) * 0x2545F4914F6CDD1D
        total = (total + int((mixed ^ (mixed >> 29)).sum())) & (2**64 - 1)
        at += len(words)
    return total


class OutputCache:
    """Cache of this rank's first stage.

    Args:
        tiers: stores for entries, the fastest first.
        smaller: keep floating-point numbers as bf16.
        device: where the stage computes.
        agree: MIN all-reduce over the stage's tensor-parallel ranks.
        say: prints a line.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        smaller: bool,
        device: torch.device,
        agree: Callable[[int], int],
        say: Callable[[str], None],
    ) -> None:
        self.tiers, self._smaller, self._device = list(tiers), smaller, device
        self._agree, self._say = agree, say
        self._clock = Clock(device)
        self._readers = ThreadPoolExecutor(1, "cache-read", take_device, (device,))
        self._writers = ThreadPoolExecutor(1, "cache-write", take_device, (device,))
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._warned_full = False
        self._writes = 0  # successive passes in which layers wrote into their own tensors
        self._level: Level | None = None
        self._earlier: Level | None = None
        self.counts = Counts()
        self._restart(None, None, kept=())

    # ------------------------------------------------------------------------------------------------------------ levels

    def begin(self, level: Level, earlier: Level | None) -> None:
        """Keep the outputs of a level from now on.

        Args:
            level: the present layers.
            earlier: a level of fewer layers with entries; None: there is none.
        """
        if level != self._level:
            self._restart(level, earlier, kept=(level, earlier))

    def is_out(self, layers: int) -> bool:
        """Whether the cache is not used for these layers, which write into their own tensors in every pass."""
        return self._writes >= _WRITES and self._level is not None and layers == self._level.layers

    def forget(self) -> None:
        """Restart the level, without its entries."""
        self._restart(self._level, None, kept=())

    def tell(self) -> None:
        """Log the counts of this level."""
        counts = self.counts
        if self._level is not None and counts != Counts():
            self._say(
                f"elastic_pipeline.cache: {self._level.layers} layers: {counts.read} samples read, {counts.continued} computed "
                f"from fewer layers' outputs, {counts.computed} from the inputs; "
                f"kept {' and '.join(f'{tier.used_bytes / GIGABYTE:.3f} GB in {tier.root}' for tier in self.tiers)}"
            )

    def _restart(self, level: Level | None, earlier: Level | None, kept: Sequence[Level | None]) -> None:
        """Begin a level; entries of the levels so far are dropped, except those of ``kept``."""
        self.tell()
        folders = {each.folder for each in kept if each is not None}
        for each in (self._level, self._earlier):
            if each is not None and each.folder not in folders:
                self._writers.submit(_drop, self.tiers, each.folder)
        if level is None or self._level is None or level.layers != self._level.layers:
            self._writes = 0
        self._level, self._earlier = level, earlier
        self.counts = Counts()
        self._given: list[Any] = []  # inputs of the step's micro-batches
        self._documents: Mapping[int, Documents] = {}  # of these
        self._jobs: dict[int, Future[_Asked]] = {}
        self._writing: list[Future[None]] = []
        self._dims: list[int | None] | None = None
        self._reading: list[float] = []  # seconds of micro-batches
        self._computing: list[tuple[Any, Any]] = []  # begin and end marks of micro-batches
        self._checked = False
        self._sound = True  # outputs depend on the sample alone; the same on the tensor-parallel ranks
        self._given_up = False  # this rank computes faster than it reads, or cannot write
        self.active = False

    # ------------------------------------------------------------------------------------------------------------- steps

    @property
    def worth(self) -> bool:
        """Whether entries of this level are used, as far as is known."""
        return bool(self.tiers) and self._sound and not self._given_up

    def see(self, micro_batches: Sequence[Any], documents: Mapping[int, Documents] | None = None) -> None:
        """Begin to read the samples of a step; collective over the tensor-parallel ranks.

        ``micro_batches``: inputs of the step, on the host; ``documents``: of those that have several, or padding.
        """
        self.end()
        self.active = self._agree(int(self.worth)) == 1
        if not self.active:
            return
        self._given, self._documents = list(micro_batches), documents or {}
        for number in range(min(_AHEAD, len(self._given))):
            self._ask(number)

    def end(self) -> None:
        """End the step, after an error too."""
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()
        self._given = []

    def outputs(self, number: int, inputs: Any, compute: Compute) -> Any:
        """Return the stage's output for a micro-batch: read from the cache, or computed and kept.

        Args:
            number: index of the micro-batch in the step.
            inputs: inputs of the stage for the whole micro-batch.
            compute: runs layers.
        """
        asked = self._jobs.pop(number).result()
        if number + _AHEAD < len(self._given):
            self._ask(number + _AHEAD)
        samples = len(asked.samples)
        # all of a stage's ranks read entries of one level, or all of them compute; none that were found wrong in this step
        if self._agree(int(self._sound and asked.level is not None and asked.level == self._level)):
            outputs = _to_device(asked.outputs, self._device)
            self._reading.append(asked.seconds)
            if not self._checked:
                return self._check(outputs, inputs, compute)
            self._compare()
            self.counts.read += samples
            return outputs
        earlier = self._earlier
        continues = self._sound and earlier is not None and asked.level == earlier and compute.can_start_inside
        if self._agree(int(continues)) and earlier is not None:
            start, given = earlier.layers, _to_device(asked.outputs, self._device)
            self.counts.continued += samples
        else:
            start, given = 0, inputs
            self.counts.computed += samples
        before = compute.versions()
        outputs = self._timed(compute, given, start)
        self._writes = 0 if compute.versions() == before else self._writes + 1
        if self._writes == _WRITES:
            self._stop("layers that write into their buffers in every pass")
        if self._dims is None and self._sound and not self._writes:  # another pass would write again
            self._learn(inputs, outputs, start, compute)
            if start and not self._sound:  # the entries it began with may be wrong
                outputs = self._timed(compute, inputs, 0)
        if self._sound:
            self._keep(asked.samples, outputs)
        return outputs

    def _timed(self, compute: Compute, given: Any, start: int) -> Any:
        begin = self._clock.now()
        outputs = compute.run(given, start)
        if start == 0:
            self._computing = [*self._computing[-_TIMED:], (begin, self._clock.now())]
        return outputs

    # ----------------------------------------------------------------------------------------------------------- reading

    def _ask(self, number: int) -> None:
        self._jobs[number] = self._readers.submit(self._read, self._given[number], self._documents.get(number))

    def _read(self, inputs: Any, documents: Documents | None) -> _Asked:
        begin, samples = time.perf_counter(), names(inputs, documents)
        for level in (self._level, self._earlier):
            entries = None if level is None else _entries(self.tiers, level.folder, samples)
            found = None if entries is None else decode(entries)
            if found is not None:
                if self._stream is not None:
                    found = like(found, [tensor.pin_memory() for tensor in as_tuple(found)])
                return _Asked(samples, level, found, time.perf_counter() - begin)
        return _Asked(samples, None, None, 0.0)

    # ----------------------------------------------------------------------------------------------------------- writing

    def _keep(self, samples: Sequence[str], outputs: Any) -> None:
        errors = [error for job in self._writing if job.done() and (error := job.exception()) is not None]
        self._writing = [job for job in self._writing if not job.done()]
        if errors:  # the step does not need what could not be written
            self._give_up(f"{type(errors[0]).__name__} while outputs were written: {errors[0]}")
        level, dims = self._level, self._dims
        if self._given_up or len(self._writing) >= _WAITING or level is None or dims is None:
            return
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        self._writing.append(self._writers.submit(self._write, samples, outputs, dims, ready, level, self._earlier))

    def _write(
        self,
        samples: Sequence[str],
        outputs: Any,
        dims: Sequence[int | None],
        ready: Any,
        level: Level,
        earlier: Level | None,
    ) -> None:
        if ready is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                for tensor in as_tuple(outputs):
                    tensor.record_stream(self._stream)  # keeps its memory until the copy is done
                outputs = like(outputs, [tensor.cpu() for tensor in as_tuple(outputs)])
        for row, sample in enumerate(samples):
            parts = encode(outputs, dims, row, self._smaller)
            name = _path(level.folder, sample)
            if not any(tier.write(name, parts) for tier in self.tiers):
                if not self._warned_full:
                    self._warned_full = True
                    self._say(
                        "elastic_pipeline.cache: there is no more room: what does not fit is computed in every step"
                    )
                continue
            self.counts.kept += 1
            for tier in self.tiers:
                if earlier is not None:
                    tier.remove(_path(earlier.folder, sample))

    # ---------------------------------------------------------------------------------------------------- whether to use it

    def _learn(self, inputs: Any, outputs: Any, start: int, compute: Compute) -> None:
        """Find the sample dimension of each output, and check that outputs depend on their own inputs alone."""
        rows = rows_of(inputs)
        chosen = [0, 0] if rows == 1 else [rows - 1]
        others = compute.run(some_rows(inputs, chosen), 0, chosen)
        alike, self._dims = False, sample_dims(outputs, others, rows, len(chosen))
        if self._dims is not None:
            at, pairs = torch.tensor(chosen, device=self._device), zip(as_tuple(outputs), self._dims, strict=True)
            expected = [one if dim is None else one.index_select(dim, at) for one, dim in pairs]
            alike = _alike(expected, others, self._smaller and start > 0)
        if self._agree(int(alike)) == 0:
            self._stop(
                "outputs that do not follow the samples, or differ from time to time or with the other samples of a batch"
            )

    def _check(self, outputs: Any, inputs: Any, compute: Compute) -> Any:
        """Compute the first micro-batch that is read, too: entries of other weights are refused here."""
        self.counts.computed += rows_of(inputs)
        computed = self._timed(compute, inputs, 0)
        self._checked = self._agree(int(_alike(outputs, computed, self._smaller))) == 1
        if not self._checked:
            self._stop("entries that are not what the layers put out")
        return computed

    def _compare(self) -> None:
        """Stop using this level if reading is not faster than computing."""
        if len(self._reading) < _TIMED or not self._computing:
            return
        reading = min(self._reading)
        computing = min(self._clock.seconds(end, begin) for begin, end in self._computing)
        self._reading.clear()
        if reading >= computing:
            self._give_up(
                f"that reading a micro-batch takes {1e3 * reading:.1f} ms, and computing it {1e3 * computing:.1f} ms"
            )

    def _stop(self, why: str) -> None:
        self._sound = False
        self._give_up(f"{why}; use layers without dropout or batch statistics")

    def _give_up(self, why: str) -> None:
        """Do not use this level on this rank, and say so once."""
        layers = 0 if self._level is None else self._level.layers
        if not self._given_up:
            self._say(f"elastic_pipeline.cache: not used for {layers} layers: got {why}")
        self._given_up = True

    # --------------------------------------------------------------------------------------------------------------- end

    def close(self, keep: bool) -> None:
        """Wait for writes that have begun, give up those that wait, and close the folders."""
        self.end()
        self.tell()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        for tier in self.tiers:
            tier.close(keep)


def _drop(tiers: Iterable[Tier], folder: str) -> None:
    for tier in tiers:
        tier.drop(folder)


def _entries(tiers: Sequence[Tier], folder: str, samples: Sequence[str]) -> list[memoryview] | None:
    """Return the entries of these samples; None if one is missing: a micro-batch is computed whole."""
    found = []
    for sample in samples:
        name = _path(folder, sample)
        entry = next((data for tier in tiers if (data := tier.read(name)) is not None), None)
        if entry is None:
            return None
        found.append(entry)
    return found


def _to_device(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    return like(value, [tensor.to(device, non_blocking=True) for tensor in as_tuple(value)])


def _alike(outputs: Any, others: Any, smaller: bool) -> bool:
    return all(_close(one, other, smaller) for one, other in zip(as_tuple(outputs), as_tuple(others), strict=True))


def _path(folder: str, sample: str) -> str:
    return f"{folder}/{sample[:2]}/{sample}"


def _close(one: Tensor, other: Tensor, smaller: bool) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return bool(torch.equal(one, other))
    limit = _CLOSE_16 if smaller else _CLOSE.get(one.dtype, _CLOSE_16)
    if not one.numel():
        return True
    largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max()  # of finite numbers: a mask has infinities, which must be equal
    return bool(((one == other) | ((one - other).abs() <= limit * largest)).all())

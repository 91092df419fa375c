"""Messages between stages on different places: typed, ordered, posted ahead.

Every channel, one direction of one boundary, has its own process group (``channels.py``). So each is a queue whose
order both ends know from the schedule. Shapes and types of a boundary are announced once per new shape and cached;
afterwards receives are posted ahead, and nothing else is negotiated. A send completes only when its receiver arrives,
so a rank waits for sends only to bound their memory. ``schedule/streams.py`` proves that this cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.seat import Seat
from ds_terapipe.pipeline.slicing import as_tuple
from ds_terapipe.pipeline.transport.channels import Channels, channels_of, ends_of
from ds_terapipe.pipeline.transport.stream import StreamClock
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.schedule import EVAL_SENT_KEPT, POSTED_AHEAD, SENT_KEPT, Action, Channel, Op, Unit

_META_SIZE = 256
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_AS_BYTES = (torch.bool, torch.int16, torch.complex64, torch.complex128)  # NCCL has no such types


class TensorSpec(NamedTuple):
    """A tensor of a boundary; ``needs_grad``: its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


class BoundarySpec(NamedTuple):
    """Types and shapes of a stage's output for one unit: one tensor or a tuple of them."""

    tensors: tuple[TensorSpec, ...]
    single: bool

    @classmethod
    def of(cls, outputs: Tensor | Sequence[Tensor]) -> BoundarySpec:
        """Describe a stage's outputs, which `check_sendable` accepts."""
        single, tensors = isinstance(outputs, Tensor), as_tuple(outputs)
        return cls(tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), single)

    def gradients(self) -> BoundarySpec:
        """Return the spec of the gradients that come back for it."""
        return BoundarySpec(tuple(spec for spec in self.tensors if spec.needs_grad), self.single)

    def encode(self, device: torch.device) -> Tensor:
        """Encode as int64 [256]: single, count, then type, needs_grad, dimensions and shape of each tensor."""
        words = [int(self.single), len(self.tensors)]
        for spec in self.tensors:
            words += [_DTYPES.index(spec.dtype), int(spec.needs_grad), len(spec.shape), *spec.shape]
        if len(words) > _META_SIZE:
            raise ValueError(
                f"a stage hands on {len(self.tensors)} tensors: their shapes take {len(words)} words, at most {_META_SIZE}"
            )
        return torch.tensor(words + [0] * (_META_SIZE - len(words)), dtype=torch.int64, device=device)

    @classmethod
    def decode(cls, meta: Tensor) -> BoundarySpec:
        """Decode the result of :meth:`encode`."""
        words = meta.tolist()
        single, count, words = bool(words[0]), words[1], words[2:]
        specs = []
        for _ in range(count):
            dtype, needs_grad, dims = words[:3]
            specs.append(TensorSpec(tuple(words[3 : 3 + dims]), _DTYPES[dtype], bool(needs_grad)))
            words = words[3 + dims :]
        return cls(tuple(specs), single)


def check_sendable(outputs: Any, layer: str) -> None:
    """Check that a stage's outputs can be sent.

    Args:
        outputs: of the stage's last layer.
        layer: name of that layer in errors.

    Raises:
        ConfigError: an entry is no tensor, or of a type that cannot be sent.
    """
    entries = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    for index, entry in enumerate(entries):
        if isinstance(entry, Tensor) and entry.dtype in _DTYPES:
            continue
        got = str(entry.dtype) if isinstance(entry, Tensor) else type(entry).__name__
        where = f" as entry {index}" if entries is outputs else ""
        raise ConfigError(
            f"{layer}: got outputs with {got}{where}, must be a tensor or a tuple of tensors where a stage ends, use a tensor "
            "there or another partition_method"
        )


def raw(tensor: Tensor) -> Tensor:
    """Return the tensor in the form of a message: on the same memory if it is contiguous and resolved."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


class _Sent(NamedTuple):
    """A message in flight: its work, its tensor, which must not change until then, and its unit."""

    work: Any
    tensor: Tensor
    version: int
    what: str
    unit: Unit | None


def _version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class Outbox:
    """Sends to one neighbour in one direction, in order."""

    def __init__(self, peer: int, group: Any, device: torch.device, watchdog: Watchdog) -> None:
        self._peer, self._group, self._device, self._watchdog = peer, group, device, watchdog
        self._pending: deque[_Sent] = deque()

    def announce(self, spec: BoundarySpec, what: str) -> None:
        """Announce the shapes of the next messages to the neighbour."""
        self._send(spec.encode(self._device), f"the shapes of {what}", None)

    def send(self, unit: Unit, tensors: Sequence[Tensor], what: str) -> None:
        """Start sending a unit's tensors; they must not change until they have been received."""
        for tensor in tensors:
            self._send(raw(tensor), what, unit)

    def _send(self, tensor: Tensor, what: str, unit: Unit | None) -> None:
        work = dist.isend(tensor, self._peer, group=self._group)
        self._pending.append(_Sent(work, tensor, _version(tensor), what, unit))

    def taken(self, unit: Unit) -> None:
        """Release this unit and all before it: the neighbour is known to have received them."""
        ours = [index for index, sent in enumerate(self._pending) if sent.unit == unit]
        if ours:
            self._finish(len(self._pending) - ours[-1] - 1)

    def keep(self, units: int) -> None:
        """Wait until the messages of at most so many units are in flight."""
        kept = list(dict.fromkeys(sent.unit for sent in self._pending if sent.unit is not None))[-units:]
        self._finish(sum(sent.unit in kept for sent in self._pending))

    def finish(self) -> None:
        """Wait until all messages have been received."""
        self._finish(0)

    def _finish(self, left: int) -> None:
        while len(self._pending) > left:
            sent = self._pending[0]
            self._watchdog.wait(sent.work, f"rank {self._peer} to take {sent.what}")
            if _version(sent.tensor) != sent.version:
                raise RuntimeError(
                    f"{sent.what}: a layer wrote into them while they were sent to rank {self._peer}; a stage must hand on "
                    "tensors that its next micro-batch leaves alone, use .clone() on what it returns"
                )
            self._pending.popleft()


class Inbox:
    """Receives from one neighbour in one direction; a few are posted ahead, in the order of the schedule."""

    def __init__(
        self, peer: int, group: Any, device: torch.device, watchdog: Watchdog, clock: StreamClock | None
    ) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._watchdog, self._clock = watchdog, clock
        self._expected: deque[Unit] = deque()
        self._posted: deque[tuple[Unit, BoundarySpec, list[tuple[Any, Tensor, Tensor]]]] = deque()
        self._spec_of: Callable[[Unit], BoundarySpec | None] = lambda unit: None

    def expect(self, units: Sequence[Unit], spec_of: Callable[[Unit], BoundarySpec | None]) -> None:
        """Set the units that will arrive, in order; ``spec_of`` returns the spec of each, None while it is unknown."""
        self._expected, self._spec_of = deque(units), spec_of
        self._posted.clear()
        self._post_ahead()

    def receive_spec(self, what: str) -> BoundarySpec:
        """Receive the neighbour's announcement."""
        meta = torch.empty(_META_SIZE, dtype=torch.int64, device=self._device)
        what = f"the shapes of {what}"
        self._await(dist.irecv(meta, self._peer, group=self._group), what)
        with self._watchdog.waiting(f"{what} from rank {self._peer}"):  # with streams the host waits here
            return BoundarySpec.decode(meta)

    def take(self, unit: Unit, what: str) -> tuple[BoundarySpec, list[Tensor]]:
        """Receive the tensors of ``unit``, which must be the next one expected and of known spec."""
        self._post_ahead()
        assert self._posted and self._posted[0][0] == unit, f"{unit} is taken, {list(self._posted)[:1]} comes next"
        _, spec, messages = self._posted.popleft()
        for work, _, _ in messages:
            self._await(work, what)
        self._post_ahead()
        return spec, [tensor for _, tensor, _ in messages]

    def _post_ahead(self) -> None:
        while self._expected and len(self._posted) < POSTED_AHEAD:
            spec = self._spec_of(self._expected[0])
            if spec is None:
                return
            messages = []
            for wanted in spec.tensors:
                tensor = torch.empty(wanted.shape, dtype=wanted.dtype, device=self._device)
                view = raw(tensor)  # the message lands in ``tensor``
                messages.append((dist.irecv(view, self._peer, group=self._group), tensor, view))
            self._posted.append((self._expected.popleft(), spec, messages))

    def _await(self, work: Any, what: str) -> None:
        what = f"{what} from rank {self._peer}"
        if self._clock is None:
            self._watchdog.wait(work, what)
        else:
            with self._clock.measure():
                self._watchdog.wait(work, what)


class Links:
    """Links of a place's stages to those of other places, with the known specs of the boundaries.

    Args:
        seat: stages and their ranks.
        channels: process groups of the messages.
        device: device of the messages.
        watchdog: times and bounds the waits.
    """

    def __init__(self, seat: Seat, channels: Channels, device: torch.device, watchdog: Watchdog) -> None:
        self.clock = StreamClock() if device.type == "cuda" else None
        self._placement = seat.placement
        self._known: dict[Hashable, BoundarySpec] = {}  # by boundary and key of the shapes
        self._in: dict[Channel, Inbox] = {}
        self._out: dict[Channel, Outbox] = {}
        for channel in channels_of(seat.placement):
            sender, receiver = ends_of(channel)
            if sender in seat.stages:
                self._out[channel] = Outbox(seat.rank_of(receiver), channels[channel], device, watchdog)
            elif receiver in seat.stages:
                self._in[channel] = Inbox(seat.rank_of(sender), channels[channel], device, watchdog, self.clock)

    def begin(self, row: Sequence[Action], shape_of: Callable[[Unit], Hashable]) -> None:
        """Begin a step with this place's actions; ``shape_of`` returns a key on which the shapes of a unit depend."""
        self._shape_of = shape_of
        if self.clock is not None:
            self.clock.begin()
        for channel, inbox in self._in.items():
            op = Op.RECV_FORWARD if channel.forward else Op.RECV_BACKWARD
            known = self._spec if channel.forward else self._gradient_spec
            inbox.expect(units(row, op, ends_of(channel)[1]), partial(known, channel.boundary))

    def _spec(self, boundary: int, unit: Unit) -> BoundarySpec | None:
        return self._known.get((boundary, self._shape_of(unit)))

    def _gradient_spec(self, boundary: int, unit: Unit) -> BoundarySpec | None:
        spec = self._spec(boundary, unit)
        return None if spec is None else spec.gradients()

    def send_forward(self, stage: int, unit: Unit, outputs: Tensor | Sequence[Tensor]) -> None:
        """Send a unit's outputs to the next stage. Raises RuntimeError if they differ from the announcement."""
        outbox, key, spec = self._out[Channel(stage, True)], (stage, self._shape_of(unit)), BoundarySpec.of(outputs)
        if key not in self._known:
            self._known[key] = spec
            outbox.announce(spec, f"activations of {unit}")
        elif self._known[key] != spec:
            raise RuntimeError(
                f"outputs of {unit} are {spec}, but for inputs of the same shape they were {self._known[key]}"
            )
        outbox.send(unit, (outputs,) if isinstance(outputs, Tensor) else outputs, f"activations of {unit}")
        if not (torch.is_grad_enabled() and self._placement.goes_backward(stage)):
            # a stage that runs backward keeps its outputs anyway, and its gradients acknowledge them
            outbox.keep(EVAL_SENT_KEPT)

    def receive_forward(self, stage: int, unit: Unit) -> Tensor | tuple[Tensor, ...]:
        """Receive the inputs of a unit from the previous stage, with ``requires_grad`` as announced."""
        inbox, key = self._in[Channel(stage - 1, True)], (stage - 1, self._shape_of(unit))
        if key not in self._known:
            self._known[key] = inbox.receive_spec(f"activations of {unit}")
        spec, tensors = inbox.take(unit, f"activations of {unit}")
        for tensor, wanted in zip(tensors, spec.tensors, strict=True):
            tensor.requires_grad_(wanted.needs_grad)
        return tensors[0] if spec.single else tuple(tensors)

    def send_backward(self, stage: int, unit: Unit, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of those inputs of a unit that need one to the previous stage."""
        outbox = self._out[Channel(stage - 1, False)]
        outbox.send(unit, gradients, f"gradients of {unit}")
        # received in this order in any case, so waiting for old ones cannot deadlock
        outbox.keep(SENT_KEPT)

    def receive_backward(self, stage: int, unit: Unit) -> list[Tensor]:
        """Receive the gradients of those outputs of a unit that need one."""
        gradients = self._in[Channel(stage, False)].take(unit, f"gradients of {unit}")[1]
        self._out[Channel(stage, True)].taken(unit)
        return gradients

    def close(self) -> None:
        """Drop the groups: over gloo each keeps threads and open files as long as it is referenced."""
        self._in.clear()
        self._out.clear()

    def finish(self) -> None:
        """Wait until all of the step's messages have been received."""
        for outbox in self._out.values():
            outbox.finish()


def units(row: Sequence[Action], op: Op, stage: int) -> list[Unit]:
    """Return the units of a stage's actions of one kind, in the order of its place."""
    return [action.unit for action in row if action.op is op and action.stage == stage]

"""What crosses between neighbouring stages: typed, ordered, posted ahead.

Every channel, one direction of one boundary, has a process group of its own (``channels.py``), so each is a queue whose order
both ends know from the schedule. Shapes and types of a boundary are announced once per new shape and cached; afterwards
receives are posted before they are needed and nothing else is negotiated. Sends complete only when the receiver arrives, so
none is waited for but to bound what is kept (``schedule/streams.py`` proves that this cannot lock up).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_terapipe.pipeline.channels import Channels
from ds_terapipe.pipeline.stream import StreamClock
from ds_terapipe.pipeline.watch import Watch
from ds_terapipe.schedule import EVAL_SENT_KEPT, POSTED_AHEAD, SENT_KEPT, Channel, Unit

_META_SIZE = 256
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


class TensorSpec(NamedTuple):
    """One tensor of a boundary; ``needs_grad``: its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


class BoundarySpec(NamedTuple):
    """What a stage hands to the next for one unit: one tensor or a tuple of them."""

    tensors: tuple[TensorSpec, ...]
    single: bool

    @classmethod
    def of(cls, outputs: Tensor | Sequence[Tensor]) -> BoundarySpec:
        """The spec of a stage's outputs. Raises TypeError for anything but tensors of the usual types."""
        single = isinstance(outputs, Tensor)
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
                raise TypeError(
                    f"a stage must hand on tensors of types that can be sent, got {type(tensor).__name__} {tensor}"
                )
        return cls(tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), single)

    def gradients(self) -> BoundarySpec:
        """What comes back for it."""
        return BoundarySpec(tuple(spec for spec in self.tensors if spec.needs_grad), self.single)

    def encode(self, device: torch.device) -> Tensor:
        """As int64 [256]: single, count, then type, needs_grad, dimensions and shape of each tensor."""
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
        """Inverse of :meth:`encode`."""
        words = meta.tolist()
        single, count, words = bool(words[0]), words[1], words[2:]
        specs = []
        for _ in range(count):
            dtype, needs_grad, dims = words[:3]
            specs.append(TensorSpec(tuple(words[3 : 3 + dims]), _DTYPES[dtype], bool(needs_grad)))
            words = words[3 + dims :]
        return cls(tuple(specs), single)


def _raw(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # NCCL has no bool


class _Sent(NamedTuple):
    """A message on its way: what to wait for, the tensor that must not change until then, and whose it is."""

    work: Any
    tensor: Tensor
    what: str
    unit: Unit | None


class Outbox:
    """Sends to one neighbour in one direction, in order."""

    def __init__(self, peer: int, group: Any, device: torch.device, watch: Watch) -> None:
        self._peer, self._group, self._device, self._watch = peer, group, device, watch
        self._pending: deque[_Sent] = deque()

    def announce(self, spec: BoundarySpec, what: str) -> None:
        """Tell the neighbour what the next messages look like."""
        self._send(spec.encode(self._device), f"the shapes of {what}", None)

    def send(self, unit: Unit, tensors: Sequence[Tensor], what: str) -> None:
        """Start sending what a unit leaves; the tensors must not change until they have been taken."""
        for tensor in tensors:
            self._send(_raw(tensor), what, unit)

    def _send(self, tensor: Tensor, what: str, unit: Unit | None) -> None:
        work = dist.isend(tensor, self._peer, group=self._group)
        self._pending.append(_Sent(work, tensor, what, unit))

    def taken(self, unit: Unit) -> None:
        """The neighbour is known to have taken this unit, and so all before it: let go of them."""
        ours = [index for index, sent in enumerate(self._pending) if sent.unit == unit]
        if ours:
            self._finish(len(self._pending) - ours[-1] - 1)

    def keep(self, units: int) -> None:
        """Wait until the messages of at most so many units are still on their way."""
        kept = list(dict.fromkeys(sent.unit for sent in self._pending if sent.unit is not None))[-units:]
        self._finish(sum(sent.unit in kept for sent in self._pending))

    def finish(self) -> None:
        """Wait until all messages have been taken."""
        self._finish(0)

    def _finish(self, left: int) -> None:
        while len(self._pending) > left:
            sent = self._pending[0]
            self._watch.wait(sent.work, f"rank {self._peer} to take {sent.what}")
            self._pending.popleft()


class Inbox:
    """Receives from one neighbour in one direction; a few are posted ahead, in the order of the schedule."""

    def __init__(self, peer: int, group: Any, device: torch.device, watch: Watch, clock: StreamClock | None) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._watch, self._clock = watch, clock
        self._expected: deque[Unit] = deque()
        self._posted: deque[tuple[Unit, BoundarySpec, list[tuple[Any, Tensor, Tensor]]]] = deque()
        self._spec_of: Callable[[Unit], BoundarySpec | None] = lambda unit: None

    def expect(self, units: Sequence[Unit], spec_of: Callable[[Unit], BoundarySpec | None]) -> None:
        """The units that will arrive, in order; ``spec_of`` gives what is known of each, None while it is unknown."""
        self._expected, self._spec_of = deque(units), spec_of
        self._posted.clear()
        self._post_ahead()

    def receive_spec(self, what: str) -> BoundarySpec:
        """The neighbour's announcement."""
        meta = torch.empty(_META_SIZE, dtype=torch.int64, device=self._device)
        what = f"the shapes of {what}"
        self._await(dist.irecv(meta, self._peer, group=self._group), what)
        with self._watch.waiting(f"{what} from rank {self._peer}"):  # where there are streams the host waits here
            return BoundarySpec.decode(meta)

    def take(self, unit: Unit, what: str) -> tuple[BoundarySpec, list[Tensor]]:
        """The tensors of ``unit``, which must be the next one expected and of known spec."""
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
                raw = _raw(tensor)  # a view: the message lands in ``tensor``
                messages.append((dist.irecv(raw, self._peer, group=self._group), tensor, raw))
            self._posted.append((self._expected.popleft(), spec, messages))

    def _await(self, work: Any, what: str) -> None:
        what = f"{what} from rank {self._peer}"
        if self._clock is None:
            self._watch.wait(work, what)
        else:
            with self._clock.measure():
                self._watch.wait(work, what)


class Wire:
    """The links of one stage to its neighbours, and what is known of the boundaries.

    Args:
        ranks: global ranks of the stages of this rank's pipeline.
        stage: this rank's.
        channels: the groups that the messages travel in.
        device: where the messages live.
        watch: times and bounds the waits.
    """

    def __init__(
        self, ranks: Sequence[int], stage: int, channels: Channels, device: torch.device, watch: Watch
    ) -> None:
        self.clock = StreamClock() if device.type == "cuda" else None
        self._watch = watch
        self._known: dict[Hashable, BoundarySpec] = {}  # of both boundaries of this stage
        self._from_before = self._to_before = self._from_after = self._to_after = None
        if stage > 0:
            before, inward, outward = ranks[stage - 1], Channel(stage - 1, True), Channel(stage - 1, False)
            self._from_before = Inbox(before, channels[inward], device, watch, self.clock)
            self._to_before = Outbox(before, channels[outward], device, watch)
        if stage < len(ranks) - 1:
            after, inward, outward = ranks[stage + 1], Channel(stage, False), Channel(stage, True)
            self._from_after = Inbox(after, channels[inward], device, watch, self.clock)
            self._to_after = Outbox(after, channels[outward], device, watch)

    def begin(self, forward: Sequence[Unit], backward: Sequence[Unit], shape_of: Callable[[Unit], Hashable]) -> None:
        """A step starts: the units in the order in which this stage receives them, and what their shapes depend on."""
        self._shape_of = shape_of
        if self.clock is not None:
            self.clock.begin()
        if self._from_before is not None:
            self._from_before.expect(forward, lambda unit: self._known.get(("in", shape_of(unit))))
        if self._from_after is not None:
            self._from_after.expect(backward, self._gradient_spec)

    def _gradient_spec(self, unit: Unit) -> BoundarySpec | None:
        spec = self._known.get(("out", self._shape_of(unit)))
        return None if spec is None else spec.gradients()

    def send_forward(self, unit: Unit, outputs: Tensor | Sequence[Tensor]) -> None:
        """Hand a unit's outputs to the next stage. Raises RuntimeError when they are not what was announced."""
        assert self._to_after is not None
        key, spec = ("out", self._shape_of(unit)), BoundarySpec.of(outputs)
        if key not in self._known:
            self._known[key] = spec
            self._to_after.announce(spec, f"activations of {unit}")
        elif self._known[key] != spec:
            raise RuntimeError(
                f"outputs of {unit} are {spec}, but for inputs of the same shape they were {self._known[key]}"
            )
        self._to_after.send(unit, (outputs,) if isinstance(outputs, Tensor) else outputs, f"activations of {unit}")
        if not torch.is_grad_enabled():
            # in training a stage keeps its outputs anyway, and its gradients say that they were taken
            self._to_after.keep(EVAL_SENT_KEPT)

    def receive_forward(self, unit: Unit) -> Tensor | tuple[Tensor, ...]:
        """Inputs of a unit from the stage before, those that need a gradient marked so."""
        assert self._from_before is not None
        key = ("in", self._shape_of(unit))
        if key not in self._known:
            self._known[key] = self._from_before.receive_spec(f"activations of {unit}")
        spec, tensors = self._from_before.take(unit, f"activations of {unit}")
        for tensor, wanted in zip(tensors, spec.tensors, strict=True):
            tensor.requires_grad_(wanted.needs_grad)
        return tensors[0] if spec.single else tuple(tensors)

    def send_backward(self, unit: Unit, inputs: Tensor | Sequence[Tensor]) -> None:
        """Hand the gradients of a unit's inputs to the stage before; an input that nothing used has a zero gradient."""
        assert self._to_before is not None
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors if t.requires_grad]
        self._to_before.send(unit, gradients, f"gradients of {unit}")
        # taken in this order whatever else the stage before does, so waiting for old ones holds up nothing that it needs
        self._to_before.keep(SENT_KEPT)

    def receive_backward(self, unit: Unit) -> list[Tensor]:
        """Gradients of those outputs of a unit that asked for one."""
        assert self._from_after is not None and self._to_after is not None
        gradients = self._from_after.take(unit, f"gradients of {unit}")[1]
        self._to_after.taken(unit)
        return gradients

    def finish(self) -> None:
        """The step's messages have all arrived."""
        for box in (self._to_after, self._to_before):
            if box is not None:
                box.finish()

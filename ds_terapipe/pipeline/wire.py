"""What crosses between neighbouring stages: typed, ordered, posted ahead.

Forward and backward traffic have process groups of their own, so each is a queue whose order both ends know from the
schedule. Shapes and types of a boundary are announced once per new shape and cached; afterwards receives are posted before
they are needed and nothing else is negotiated. (One fixed order per direction is what rules out the deadlocks of lazily
paired sends and receives; gloo's sends complete only when the receiver arrives, hence no wait for a send before the end.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_terapipe.pipeline.watch import StreamClock, Watch
from ds_terapipe.schedule import Unit

_META_SIZE = 256
_POSTED_AHEAD = 2
SENT_KEPT = 8  # gradients that a stage sends ahead of their being taken
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


class Outbox:
    """Sends to one neighbour in one direction, in order."""

    def __init__(self, peer: int, group: Any, device: torch.device) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._pending: deque[tuple[Any, Tensor, str, Unit | None]] = deque()

    def announce(self, spec: BoundarySpec, what: str) -> None:
        """Tell the neighbour what the next messages look like."""
        self._send(spec.encode(self._device), f"the shapes of {what}")

    def send(self, tensors: Sequence[Tensor], what: str, unit: Unit | None = None) -> None:
        """Start sending; the tensors must not change until they have been taken."""
        for tensor in tensors:
            self._send(_raw(tensor), what, unit)

    def _send(self, tensor: Tensor, what: str, unit: Unit | None = None) -> None:
        self._pending.append((dist.isend(tensor, self._peer, group=self._group), tensor, what, unit))

    def taken(self, unit: Unit, watch: Watch) -> None:
        """The neighbour is known to have taken this unit, and so all before it: let go of them."""
        ours = [index for index, (*_, sent) in enumerate(self._pending) if sent == unit]
        if ours:
            self.finish(watch, keep=len(self._pending) - ours[-1] - 1)

    def finish(self, watch: Watch, keep: int = 0) -> None:
        """Wait until at most ``keep`` messages are still on their way."""
        while len(self._pending) > keep:
            work, _, what, _ = self._pending[0]
            watch.wait(work, f"rank {self._peer} to take {what}")
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
        self._await(dist.irecv(meta, self._peer, group=self._group), f"the shapes of {what}")
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
        while self._expected and len(self._posted) < _POSTED_AHEAD:
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
        grid: DeepSpeed's ``PipelineParallelGrid``.
        device: where the messages live.
        forward_group, backward_group: process groups of this rank's pipeline.
        watch: times and bounds the waits.
    """

    def __init__(self, grid: Any, device: torch.device, forward_group: Any, backward_group: Any, watch: Watch) -> None:
        stage, last = grid.get_stage_id(), grid.pipe_parallel_size - 1
        self.clock = StreamClock() if device.type == "cuda" else None
        self._watch = watch
        self._known: dict[Hashable, BoundarySpec] = {}  # of both boundaries of this stage
        before = grid.stage_to_global(stage - 1) if stage > 0 else None
        after = grid.stage_to_global(stage + 1) if stage < last else None
        self._from_before = None if before is None else Inbox(before, forward_group, device, watch, self.clock)
        self._to_after = None if after is None else Outbox(after, forward_group, device)
        self._from_after = None if after is None else Inbox(after, backward_group, device, watch, self.clock)
        self._to_before = None if before is None else Outbox(before, backward_group, device)

    def begin(self, forward: Sequence[Unit], backward: Sequence[Unit], shape_of: Callable[[Unit], Hashable]) -> None:
        """A step starts: the units in the order in which this stage runs them, and what their shapes depend on."""
        self._shape_of = shape_of
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
        self._to_after.send((outputs,) if isinstance(outputs, Tensor) else outputs, f"activations of {unit}", unit)

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
        self._to_before.send(gradients, f"gradients of {unit}")
        # taken in this order whatever else the stage before does, so waiting for old ones holds up nothing that it needs
        self._to_before.finish(self._watch, keep=SENT_KEPT * len(gradients))

    def receive_backward(self, unit: Unit) -> list[Tensor]:
        """Gradients of those outputs of a unit that asked for one."""
        assert self._from_after is not None and self._to_after is not None
        gradients = self._from_after.take(unit, f"gradients of {unit}")[1]
        self._to_after.taken(unit, self._watch)
        return gradients

    def trim(self, keep: int) -> None:
        """Bound the outputs that wait to be taken; only where no backward traffic can be waiting for this stage."""
        if self._to_after is not None:
            self._to_after.finish(self._watch, keep)

    def finish(self) -> None:
        """The step's messages have all arrived."""
        for box in (self._to_after, self._to_before):
            if box is not None:
                box.finish(self._watch)

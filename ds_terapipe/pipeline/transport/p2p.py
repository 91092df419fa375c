"""Messages between stages on different places: one for each unit and boundary, ordered, posted ahead.

Every channel, one direction of one boundary, has its own process group (``channels.py``). So each is a queue whose
order both ends know from the schedule. Several tensors are packed into one message. Shapes and types of a boundary are
announced once, between hosts, and follow from the tokens afterwards (``boundary.py``). A send completes only when its
receiver arrives, so a rank waits for sends only to bound their memory. ``schedule/hardware_queue.py``
proves that this cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed
from deepspeed import comm as dist
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.clock import Clock, Waits
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.slicing import Span, TensorCut, as_tuple
from ds_terapipe.pipeline.transport.boundary import BoundarySpec, new_announcement, new_message, packed
from ds_terapipe.pipeline.transport.channels import channels_of, ends_of
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.schedule import EVAL_SENT_KEPT, POSTED_AHEAD, SENT_KEPT, Action, Channel, Op, Unit

_KNOWN = 64
"""Specs of a boundary that are remembered from step to step."""

Described: TypeAlias = Callable[[Unit], tuple[Hashable, Span | None]]
"""Returns the key of a unit's shapes and, where these follow the tokens, the tokens."""


class _Sent(NamedTuple):
    """A message in flight: its work, its tensor, which must not change until then, and its unit."""

    work: Any
    tensor: Tensor
    version: int
    what: str
    unit: Unit


def _version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class Sender:
    """Sends to one neighbour in one direction, in order."""

    def __init__(self, peer: int, group: Any, watchdog: Watchdog) -> None:
        self._peer, self._group, self._watchdog = peer, group, watchdog
        self._pending: deque[_Sent] = deque()

    def send(self, unit: Unit, tensors: Sequence[Tensor], what: str) -> None:
        """Start sending a unit's tensors; a single one must not change until it has been received."""
        if tensors:
            message = packed(tensors)
            with self._watchdog.waiting(f"rank {self._peer} to take {what}", counts=False):  # it may be gone
                work = dist.isend(message, self._peer, group=self._group)
            self._pending.append(_Sent(work, message, _version(message), what, unit))

    def taken(self, unit: Unit) -> None:
        """Release this unit and all before it: the neighbour is known to have received them."""
        ours = [index for index, sent in enumerate(self._pending) if sent.unit == unit]
        if ours:
            self.keep(len(self._pending) - ours[-1] - 1)

    def keep(self, messages: int) -> None:
        """Wait until at most so many messages are in flight."""
        while len(self._pending) > messages:
            sent = self._pending[0]
            self._watchdog.wait(sent.work, f"rank {self._peer} to take {sent.what}")
            if _version(sent.tensor) != sent.version:
                raise RuntimeError(
                    f"{sent.what}: a layer wrote into them while they were sent to rank {self._peer}; a stage must hand on "
                    "tensors that its next micro-batch leaves alone, use .clone() on what it returns"
                )
            self._pending.popleft()


class Receiver:
    """Receives from one neighbour in one direction; a few are posted ahead, in the order of the schedule."""

    def __init__(self, peer: int, group: Any, device: torch.device, watchdog: Watchdog, waits: Waits | None) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._watchdog, self._waits = watchdog, waits
        self._expected: deque[Unit] = deque()
        self._posted: deque[tuple[Unit, BoundarySpec, list[Tensor], Any]] = deque()
        self._spec_of: Callable[[Unit], BoundarySpec | None] = lambda unit: None

    def expect(self, units: Sequence[Unit], spec_of: Callable[[Unit], BoundarySpec | None]) -> None:
        """Set the units that will arrive, in order; ``spec_of`` returns the spec of each, None while it is unknown."""
        self._expected, self._spec_of = deque(units), spec_of
        self._posted.clear()
        self._post_ahead()

    def take(self, unit: Unit, what: str) -> tuple[BoundarySpec, list[Tensor]]:
        """Receive the tensors of ``unit``, which must be the next one expected and of known spec."""
        self._post_ahead()
        assert self._posted and self._posted[0][0] == unit, f"{unit} is taken, {list(self._posted)[:1]} comes next"
        _, spec, tensors, work = self._posted.popleft()
        if work is not None:
            with nullcontext() if self._waits is None else self._waits.measure():
                self._watchdog.wait(work, f"{what} from rank {self._peer}")
        self._post_ahead()
        return spec, tensors

    def _post_ahead(self) -> None:
        while self._expected and len(self._posted) < POSTED_AHEAD:
            spec = self._spec_of(self._expected[0])
            if spec is None:
                return
            message, tensors = new_message(spec, self._device)
            with self._watchdog.waiting(f"messages from rank {self._peer}", counts=False):
                work = dist.irecv(message, self._peer, group=self._group) if tensors else None
            self._posted.append((self._expected.popleft(), spec, tensors, work))


class Announcements:
    """Specs of one boundary, told from host to host, whatever the device.

    Args:
        peer: rank at the other end.
        boundary: number of the boundary.
        group: gloo group of both ranks.
        watchdog: times and bounds the waits.
    """

    def __init__(self, peer: int, boundary: int, group: Any, watchdog: Watchdog) -> None:
        self._peer, self._tag, self._group, self._watchdog = peer, boundary, group, watchdog
        self._pending: list[tuple[Any, Tensor]] = []

    def send(self, spec: BoundarySpec) -> None:
        """Announce a spec to the next stage."""
        words = spec.encode()
        with self._watchdog.waiting(f"rank {self._peer} to take shapes", counts=False):
            self._pending.append((torch.distributed.isend(words, self._peer, group=self._group, tag=self._tag), words))

    def receive(self, what: str) -> BoundarySpec:
        """Receive the previous stage's announcement."""
        words = new_announcement()
        with self._watchdog.waiting(waits := f"the shapes of {what} from rank {self._peer}", counts=False):
            work = torch.distributed.irecv(words, self._peer, group=self._group, tag=self._tag)
        self._watchdog.wait_on_host(work, waits)
        return BoundarySpec.decode(words)

    def finish(self) -> None:
        """Wait until all announcements have been received."""
        while self._pending:
            self._watchdog.wait_on_host(self._pending[0][0], f"rank {self._peer} to take the shapes of activations")
            self._pending.pop(0)


class Links:
    """Links of a place's stages to those of other places, with the known specs of the boundaries.

    Args:
        view: stages and their ranks.
        channels: process groups of the messages.
        device: device of the messages.
        watchdog: times and bounds the waits.
        host_group: gloo group of all ranks, for announcements.
    """

    def __init__(
        self, view: RankView, channels: Mapping[Channel, Any], device: torch.device, watchdog: Watchdog, host_group: Any
    ) -> None:
        self.waits = Waits(Clock(device)) if device.type == "cuda" else None
        self._placement = view.placement
        self._in: dict[Channel, Receiver] = {}
        self._out: dict[Channel, Sender] = {}
        self._announcements: dict[int, Announcements] = {}
        # of units with outputs that need no gradient, as they were announced to: whether each of the gradients is needed
        self._needed: dict[tuple[int, Unit], list[bool]] = {}
        self._known: dict[int, dict[Hashable, BoundarySpec]] = {}  # of each boundary, by what its shapes depend on
        for channel in channels_of(view.placement):
            sender, receiver = ends_of(channel)
            peer = view.rank_of(receiver if sender in view.stages else sender)
            if sender in view.stages:
                self._out[channel] = Sender(peer, channels[channel], watchdog)
            elif receiver in view.stages:
                self._in[channel] = Receiver(peer, channels[channel], device, watchdog, self.waits)
            else:
                continue
            self._known[channel.boundary] = {}
            self._announcements[channel.boundary] = Announcements(peer, channel.boundary, host_group, watchdog)

    def begin(
        self,
        row: Sequence[Action],
        described: Described,
        cuts: Mapping[int, Sequence[TensorCut]] = MappingProxyType({}),
    ) -> None:
        """Begin a step with this place's actions.

        Args:
            row: actions of the place.
            described: returns the key of a unit's shapes, and its tokens.
            cuts: of each boundary, how its tensors follow the tokens; both ends know it or neither does.
        """
        self._described, self._cuts = described, cuts
        self._needed.clear()
        if self.waits is not None:
            self.waits.begin()
        for known in self._known.values():  # both ends learn in the same order, so they forget the same
            for key in list(known)[:-_KNOWN]:
                del known[key]
        for channel, receiver in self._in.items():
            op = Op.RECV_FORWARD if channel.forward else Op.RECV_BACKWARD
            known_spec = self._spec if channel.forward else self._gradient_spec
            receiver.expect(units(row, op, ends_of(channel)[1]), partial(known_spec, channel.boundary))

    def _spec(self, boundary: int, unit: Unit) -> BoundarySpec | None:
        """Return a unit's spec: as announced, or as it follows from that of another slice."""
        known, cuts, (key, span) = self._known[boundary], self._cuts.get(boundary), self._described(unit)
        if cuts is not None and span is not None and key in known:
            return known[key].at(cuts, span)
        return known.get((key, span))

    def _gradient_spec(self, boundary: int, unit: Unit) -> BoundarySpec | None:
        spec = self._spec(boundary, unit)
        return None if spec is None else spec.gradients()

    def _learn(self, boundary: int, unit: Unit, spec: BoundarySpec) -> None:
        key, span = self._described(unit)
        follows = span is not None and len(self._cuts.get(boundary, ())) == len(spec.tensors)
        self._known[boundary][key if follows else (key, span)] = spec

    def send_forward(self, stage: int, unit: Unit, outputs: Tensor | Sequence[Tensor]) -> None:
        """Send a unit's outputs to the next stage. Raises RuntimeError if they differ from the announcement."""
        sender, spec = self._out[Channel(stage, True)], BoundarySpec.of(outputs)
        known = self._spec(stage, unit)
        if known is None:
            self._announcements[stage].send(spec)
            self._learn(stage, unit, spec)
        elif known != spec:
            self._needed[stage, unit] = _needed(stage, unit, spec, known)
        sender.send(unit, as_tuple(outputs), f"activations of {unit}")
        if not (torch.is_grad_enabled() and self._placement.goes_backward(stage)):
            # a stage that runs backward keeps its outputs anyway, and its gradients acknowledge them
            sender.keep(EVAL_SENT_KEPT)

    def receive_forward(self, stage: int, unit: Unit) -> Tensor | tuple[Tensor, ...]:
        """Receive the inputs of a unit from the previous stage, with ``requires_grad`` as announced."""
        what = f"activations of {unit}"
        if self._spec(stage - 1, unit) is None:
            self._learn(stage - 1, unit, self._announcements[stage - 1].receive(what))
        spec, tensors = self._in[Channel(stage - 1, True)].take(unit, what)
        for tensor, wanted in zip(tensors, spec.tensors, strict=True):
            tensor.requires_grad_(wanted.needs_grad)
        return tensors[0] if spec.single else tuple(tensors)

    def send_backward(self, stage: int, unit: Unit, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of those inputs of a unit that need one to the previous stage."""
        sender = self._out[Channel(stage - 1, False)]
        sender.send(unit, gradients, f"gradients of {unit}")
        # received in this order in any case, so waiting for old ones cannot deadlock
        sender.keep(SENT_KEPT)

    def receive_backward(self, stage: int, unit: Unit) -> list[Tensor]:
        """Receive the gradients of those outputs of a unit that need one."""
        gradients = self._in[Channel(stage, False)].take(unit, f"gradients of {unit}")[1]
        self._out[Channel(stage, True)].taken(unit)
        needed = self._needed.pop((stage, unit), None)
        return gradients if needed is None else [each for each, wanted in zip(gradients, needed, strict=True) if wanted]

    def close(self) -> None:
        """Drop the groups: over gloo each keeps threads and open files as long as it is referenced."""
        self._in.clear()
        self._out.clear()
        self._announcements.clear()

    def finish(self) -> None:
        """Wait until all of the step's messages have been received."""
        for sender in self._out.values():
            sender.keep(0)
        for announcements in self._announcements.values():
            announcements.finish()


def _needed(stage: int, unit: Unit, spec: BoundarySpec, known: BoundarySpec) -> list[bool]:
    """Return for each gradient that will come back whether an output needs it; outputs were ``known``, and are ``spec``.

    Raises:
        ConfigError: an output needs a gradient that does not come.
        RuntimeError: another difference.
    """
    pairs = list(zip(spec.tensors, known.tensors, strict=False))
    if known.single != spec.single or any(a[:2] != b[:2] for a, b in pairs) or len(spec.tensors) != len(known.tensors):
        raise RuntimeError(
            f"outputs of {unit} are {spec}, but as those of other units follow the tokens they were {known}"
        )
    more = [index for index, (now, before) in enumerate(pairs) if now.needs_grad and not before.needs_grad]
    if more:
        raise ConfigError(
            f"stage {stage}: got output {more[0]} of micro-batch {unit.micro_batch} with requires_grad, and of an earlier one "
            "without, must have it in the first one or in none, use .detach(), or add 0 times a trained weight"
        )
    return [now.needs_grad for now, before in pairs if before.needs_grad]


def units(row: Sequence[Action], op: Op, stage: int) -> list[Unit]:
    """Return the units of a stage's actions of one kind, in the order of its place."""
    return [action.unit for action in row if action.op is op and action.stage == stage]

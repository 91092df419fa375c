"""Values between stages arrive as they were sent, in one message each, issued in the proven order; shapes are told once."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.transport import boundary, p2p as links_module
from ds_terapipe.pipeline.transport.boundary import BoundarySpec, TensorSpec, check_sendable
from ds_terapipe.pipeline.transport.channels import channels_of
from ds_terapipe.pipeline.transport.p2p import Links, Sender
from ds_terapipe.schedule import Action, Op, Placement, Unit, forward_only, order, with_messages
from ds_terapipe.schedule.hardware_queue import COMPUTE, program_of
from tests.schedule import strategies

CPU = torch.device("cpu")
PAIR = (torch.zeros(1, requires_grad=True), torch.zeros(2, requires_grad=True))  # outputs


def test_too_many_tensors_are_an_error_that_says_how_many():
    spec = BoundarySpec(tuple(TensorSpec((size,), torch.float32, True) for size in range(400)), False)
    with pytest.raises(ValueError, match=r"^a stage hands on 400 tensors: their shapes take \d+ bytes, at most 4096$"):
        spec.encode()


@pytest.mark.parametrize(("outputs", "said"), [
    ((torch.zeros(1), "text"), "outputs with str as entry 1,"), ({"hidden": torch.zeros(1)}, "outputs with dict,"),
    (torch.zeros(1).to(torch.float8_e5m2), "outputs with torch.float8_e5m2,"),
])  # fmt: skip
def test_only_tensors_that_can_be_sent_are_handed_on(outputs, said):
    with pytest.raises(ConfigError, match=rf"^layer 2 \(Block\): got {said} must be a tensor or a tuple of tensors"):
        check_sendable(outputs, "layer 2 (Block)")


def test_a_tensor_that_changes_while_it_is_sent_is_an_error(monkeypatch):
    monkeypatch.setattr(links_module.dist, "isend", lambda *args, **kwargs: None)
    box, counter = Sender(1, None, SimpleNamespace(wait=lambda work, what: None, waiting=Issued.waiting)), torch.zeros(2)
    box.send(Unit(0, 0), [counter], "activations of 0.0")
    box.keep(0)
    box.send(Unit(0, 1), [counter], "activations of 0.1")
    counter.add_(1)
    with pytest.raises(RuntimeError, match=r"^activations of 0\.1: a layer wrote into them"):
        box.keep(0)


class Issued:
    """Stand-in for ``deepspeed.comm`` and the watchdog that writes down what a place issues, as `program_of` says it."""

    waiting = staticmethod(lambda what, counts: nullcontext())

    def __init__(self, placement: Placement, place: int) -> None:
        view, channels = RankView(placement, place, tuple(range(placement.places))), {c: c for c in channels_of(placement)}
        self.entries: list[tuple[Any, int | None]] = []  # a stream, or the entry that is waited for
        self.links = Links(view, channels, CPU, self, None)  # type: ignore[arg-type]
        for known in self.links._known.values():
            known["any", None] = BoundarySpec.of(PAIR)

    def isend(self, message: Tensor, peer: int, group: Any) -> int:
        return self.issue(("out", group))

    def irecv(self, message: Tensor, peer: int, group: Any) -> int:
        return self.issue(("in", group))

    def wait(self, work: int, what: str) -> None:
        self.issue(COMPUTE, work)

    def issue(self, stream: Any, waits_for: int | None = None) -> int:
        self.entries.append((stream, waits_for))
        return len(self.entries) - 1

    def run(self, row: list[Action]) -> None:
        self.links.begin(row, lambda unit: ("any", None))
        for op, stage, unit, _ in row:
            if op.is_receive:
                (self.links.receive_forward if op is Op.RECV_FORWARD else self.links.receive_backward)(stage, unit)
            elif op is Op.SEND_FORWARD:
                self.links.send_forward(stage, unit, PAIR)
            elif op is Op.SEND_BACKWARD:
                self.links.send_backward(stage, unit, [each.detach() for each in PAIR])
            else:
                self.issue(COMPUTE)


@settings(deadline=None)
@given(strategies.names, strategies.placements() | strategies.in_turn, strategies.few_or_long, st.booleans())
def test_a_host_issues_one_message_a_unit_as_is_proven_to_end_on_one_hardware_queue(name, placement, slices, trains):
    made = order(name, placement, slices) if trains else forward_only(placement, slices)
    for place, row in enumerate(with_messages(made, placement)):
        issued, proven = Issued(placement, place), program_of(row)
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(trains):
            patch.setattr(links_module, "dist", issued)
            issued.run(row)
        wanted = [(each.stream, each.after[0] if each.stream == COMPUTE and each.after else None) for each in proven]
        issued.links.finish()
        end = [each.action for each in proven].index(len(row)) if proven[-1].action == len(row) else len(proven)
        assert issued.entries[:end] == wanted[:end] and sorted(issued.entries[end:]) == sorted(wanted[end:])


def test_few_shapes_are_remembered_the_latest_ones():
    links = Issued(Placement.plain(2), 0).links
    links._known[0].update((length, BoundarySpec((), True)) for length in range(99))
    links.begin([], lambda unit: (0, None))
    assert list(links._known[0]) == [*range(99 - 64, 99)]


def all_kinds() -> tuple[Tensor, ...]:
    whole = torch.randint(-100, 100, (3, 4), generator=torch.Generator().manual_seed(1))
    tensors = [whole > 0 if dtype == torch.bool else whole.to(dtype) for dtype in boundary._DTYPES]
    tensors += [torch.tensor(1.0), torch.tensor(True), torch.empty(0, 5)]
    pairs = torch.complex(whole.float(), whole.float() + 1)
    tensors += [pairs.conj(), pairs.conj().imag]  # of which memory holds other values
    tensors += [torch.empty(0, dtype=torch.bool), whole.double().t(), (whole > 0).t(), whole.float()[:, ::2]]
    return tuple(t.requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors)


def test_tensors_of_a_message_are_aligned_and_writing_into_one_leaves_the_others_unwritten():
    sent = all_kinds()
    message, tensors = boundary.new_message(BoundarySpec.decode(BoundarySpec.of(sent).encode()), CPU)
    message.copy_(boundary.packed(sent))
    starts = [t.data_ptr() - message.data_ptr() for t in tensors if t.numel()]
    assert message.dtype == torch.uint8 and all(start % 256 == 0 for start in starts) and starts == sorted(set(starts))
    before = [tensor._version for tensor in tensors]
    tensors[0].zero_()
    assert [tensor._version for tensor in tensors[1:]] == before[1:] and tensors[0]._version > before[0]
    assert all(torch.equal(got, wanted) for got, wanted in zip(tensors[1:], sent[1:], strict=True))


def test_another_shape_or_more_gradients_than_announced_are_errors_of_the_sender():
    links = Issued(Placement.plain(2), 0).links
    links.begin([], lambda unit: ("any", None))
    with pytest.raises(RuntimeError, match=r"^outputs of 0\.0 are .*shape=\(2, 4\).* they were "):
        links.send_forward(0, Unit(0, 0), torch.ones(2, 4))
    constant, trained = (BoundarySpec((TensorSpec((2,), torch.float32, needs),), True) for needs in (False, True))
    with pytest.raises(ConfigError, match=r"^stage 1: got output 0 of micro-batch 2 with requires_grad, and of an earlier one"):
        links_module._needed(1, Unit(2, 0), trained, constant)


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NCCL = {*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64}  # getNcclDataType in PyTorch's NCCLUtils.hpp


@pytest.mark.parametrize("dtype", boundary._DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 5)])
def test_a_message_is_of_a_type_that_nccl_has(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(10)[: torch.Size(shape).numel()].view(shape).to(dtype)
    message, landing = boundary.raw(tensor), torch.zeros(shape, dtype=dtype)
    assert message.dtype in NCCL and message.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    boundary.raw(landing).copy_(message)
    assert torch.equal(landing, tensor)

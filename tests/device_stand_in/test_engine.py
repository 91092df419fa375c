"""The engine on a CUDA device, with many hardware queues and with one: losses of one process, no wait of the host in a step."""

import itertools
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests import device

if device.NAME != "cuda":
    pytest.skip("needs TESTS_DEVICE=cuda: make test-device, or a GPU", allow_module_level=True)

from ds_terapipe.pipeline import replicas as gradients
from ds_terapipe.pipeline.transport import p2p
from tests.pipeline.models import Block, Embedding, Head, mean_loss, micro_batch
from tests.pipeline.training import ADAMW, build_engine, mine
from tests.spawn import in_background, launched, run_to_exit

LENGTH, SLICES, MICRO_BATCHES, STEPS, BATCH = 24, [7, 2, 9, 1, 5], 4, 3, 2
ORDERS: dict[str, dict[str, Any]] = {
    "1f1b": {}, "terapipe": {}, "zero_bubble": {"stages_per_place": 2, "placement": "v"},
    "interleaved": {"stages_per_place": 2},
}  # fmt: skip
TIMEOUT_S = 15.0
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "EAGER"}


class TwoStreams(nn.Module):
    """A layer that takes and gives two tensors of different types."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, beside = given if isinstance(given, tuple) else (given, given[..., :8].double())
        return self.block(hidden + beside.sum(-1, keepdim=True).to(hidden.dtype)), beside * 0.5


class OneStream(nn.Module):
    """Puts two tensors together."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        hidden, beside = given
        return hidden + beside.mean(-1, keepdim=True).to(hidden.dtype)


def layers(tensors: int) -> list[Any]:
    """A GPT of six layers, with one tensor or two on each boundary between stages."""
    if tensors == 1:
        return [LayerSpec(Embedding), *[LayerSpec(Block)] * 6, LayerSpec(Head)]
    return [LayerSpec(Embedding), *[LayerSpec(TwoStreams)] * 6, LayerSpec(OneStream), LayerSpec(Head)]


def losses(rank: int, world_size: int, stages: int, tensors: int, schedule: str) -> list[float]:
    """Train, with several stages on each of several replicas under ZeRO-1; the loss of each step."""
    replicas, gradients._ALONE = world_size // stages, 1
    zero = int(replicas > 1 and "stages_per_place" in ORDERS[schedule])
    engine = build_engine(
        layers(tensors), mean_loss, micro_batches=MICRO_BATCHES // replicas, stages=stages, optimizer=ADAMW,
        token_pipeline={"slices": SLICES, "schedule": schedule, "timeout_s": TIMEOUT_S, **ORDERS[schedule]},
        config={"zero_optimization": {"stage": zero}},
    )  # fmt: skip
    assert engine.device.type == "cuda"
    assert len(engine._runtime.stages) == ORDERS[schedule].get("stages_per_place", 1)
    found = []
    for step in range(STEPS):
        data = [micro_batch(100 * step + m, length=LENGTH, batch=BATCH, masked=False) for m in range(MICRO_BATCHES)]
        found.append(float(engine.train_batch(iter(mine(engine, data)))))
        assert set(engine.slices_run) == {tuple(SLICES)}
    assert engine._replicas._ended == set(engine._runtime.stages if replicas > 1 else ()), "reduced from their last action on"
    engine.destroy()
    return found


def all_losses(rank: int, world_size: int, cases: list[tuple[int, int, str]]) -> list[list[float]]:
    """The losses of several trainings, one after the other."""
    return [losses(rank, world_size, *case) for case in cases]


def cases_of(ranks: int) -> list[tuple[int, int, str]]:
    """Cases (stages, tensors on a boundary, schedule): all schedules on as many stages as ranks, every other one on replicas."""
    cases = itertools.product({2: (2,), 3: (3,), 4: (4, 2)}[ranks], enumerate(ORDERS))
    return [(n, 1 + (ranks + number) % 2, order) for n, (number, order) in cases if n == ranks or number % 2]


alone = launched(all_losses, 1, [(1, 1, "1f1b"), (1, 2, "1f1b")], timeout=240.0)
two, three, four = (launched(all_losses, ranks, cases_of(ranks), timeout=240.0, env=ONE_QUEUE) for ranks in (2, 3, 4))


@pytest.mark.parametrize(("ranks", "found"), [(2, "two"), (3, "three"), (4, "four")])
def test_one_hardware_queue_ends_with_the_losses_of_one_process(
    ranks: int, found: str, alone: Any, request: pytest.FixtureRequest
) -> None:
    wanted = dict(zip((1, 2), alone[0], strict=True))
    for rank in request.getfixturevalue(found):
        for (_, tensors, _), got in zip(cases_of(ranks), rank, strict=True):
            assert got == pytest.approx(wanted[tensors], rel=1e-5)
    assert len({tuple(each) for each in wanted.values()}) == 2 and len(set(wanted[1])) == STEPS


def two_ahead(rank: int, world_size: int) -> None:
    """Train with two receives posted ahead."""
    p2p.POSTED_AHEAD = 2
    losses(rank, world_size, world_size, 1, "1f1b")


two_ahead_ends = in_background("two ahead", 3, lambda: run_to_exit(two_ahead, 3, timeout=150.0, env=ONE_QUEUE))


def test_two_receives_ahead_lock_up_one_queue_and_are_reported(two_ahead_ends: Any) -> None:
    for end in two_ahead_ends:
        assert end.code == 70, end.output
        assert re.search(
            r"waited .* s for .* in step .*: (no answer|another rank has ended) .token_pipeline.timeout_s", end.output
        ), end.output


def waits(rank: int, world_size: int) -> Counter[str]:
    """Calls that made the host wait for the device in a step after the first two, by the package's line that made them."""
    engine = build_engine(
        layers(1), mean_loss, micro_batches=MICRO_BATCHES, stages=world_size, optimizer=ADAMW,
        token_pipeline={"slices": SLICES, "timeout_s": TIMEOUT_S},
    )  # fmt: skip
    data = [micro_batch(m, length=LENGTH, batch=BATCH, masked=False) for m in range(MICRO_BATCHES)]
    for _ in range(2):
        engine.train_batch(iter(data))
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.train_batch(iter(data))
        torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        if "called a synchronizing CUDA operation" in str(each.message):
            path = each.filename.split("site-packages/")[-1]
            found[f"{path}:{each.lineno}"] += 1
    engine.destroy()
    return found


waiting = launched(waits, 2, timeout=200.0)


# Inputs and labels come from ordinary memory: two tensors of each micro-batch on the first stage, one on the last. At the end
# of a step DeepSpeed reads the loss.
ALLOWED = {"ds_terapipe/pipeline/transport/stream.py": 2 * MICRO_BATCHES, "deepspeed": 1}


def test_a_step_waits_for_its_inputs_and_at_its_end_alone(waiting: list[Counter[str]]) -> None:
    for found in waiting:
        often = {name: sum(n for line, n in found.items() if name in line) for name in ALLOWED}
        assert sum(often.values()) == sum(found.values()) > 0, found  # no other line waits
        assert all(often[name] <= most for name, most in ALLOWED.items()), found

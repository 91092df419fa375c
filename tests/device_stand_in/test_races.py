"""No access of a training races with another; without a wait that the engine makes, one does."""

from typing import Any, NamedTuple

import pytest

from tests import device

if device.NAME != "cuda":
    pytest.skip("needs the stand-in: make test-device", allow_module_level=True)

import torch

from ds_terapipe.elastic.cache.outputs import OutputCache
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from tests.device_stand_in import runtime

if runtime.LIBRARY is None:
    pytest.skip("needs the stand-in: make test-device", allow_module_level=True)

from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import ADAMW, build_engine
from tests.spawn import launched

CHECKED = {"STAND_IN_RACES": "1", "STAND_IN_DELAY_US": "2000"}
MICRO_BATCHES, STEPS, FROZEN_AFTER = 3, 6, 1


LEFT_OUT: dict[str, tuple[Any, str]] = {
    "the stream of inputs is not waited for": (torch.cuda.Stream, "wait_stream"),
    "inputs are given back too early": (torch.Tensor, "record_stream"),
    "messages are not waited for": (Watchdog, "wait"),
    "the cache copies before its event": (torch.cuda.Stream, "wait_event"),
}


class Found(NamedTuple):
    """Losses of a training, races in it, and samples that were read from the cache."""

    losses: list[float]
    races: list[str]
    read: int


def train(rank: int, world_size: int, left_out: str | None) -> Found:
    """Train two stages whose first layers freeze and are cached."""
    OutputCache._compare = lambda self: None  # whether it pays to read is another test's
    freeze = {"policy": "schedule", "frozen_layers": [[FROZEN_AFTER, 2]]}
    config = {"elastic_pipeline": {"freeze": freeze, "cache": {"enabled": True}}}
    engine = build_engine(
        gpt(4), mean_loss, micro_batches=MICRO_BATCHES, stages=world_size, optimizer=ADAMW, config=config,
        token_pipeline={"slices": 4, "verify": False},
    )  # fmt: skip
    if left_out is not None:
        owner, name = LEFT_OUT[left_out]
        setattr(owner, name, lambda *args, **kwargs: None)
    runtime.races()
    losses = []
    for step in range(STEPS):
        data = [micro_batch(10 * (step % 2) + m, masked=False) for m in range(MICRO_BATCHES)]
        losses.append(float(engine.train_batch(iter(data))))
    torch.cuda.synchronize()
    return Found(losses, sorted(runtime.races()), engine.cache_counts.read)


whole = launched(train, 2, None, timeout=200.0, env=CHECKED)
no_inputs, given_back, no_messages, no_event = (launched(train, 2, name, timeout=200, env=CHECKED) for name in LEFT_OUT)


def test_a_training_has_no_race(whole: list[Found]) -> None:
    assert not [race for found in whole for race in found.races]
    assert sum(found.read for found in whole) and len(set(whole[0].losses)) == STEPS


@pytest.mark.parametrize("fixture", ["no_inputs", "given_back", "no_messages", "no_event"])
def test_a_wait_that_is_left_out_is_a_race(fixture: str, whole: list[Found], request: pytest.FixtureRequest) -> None:
    assert [race for found in request.getfixturevalue(fixture) for race in found.races], "no access raced"

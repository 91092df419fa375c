"""Layers checkpointed in ranges of any length train as one process does; DeepSpeed counts layers anew in every range."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import SGD, build_engine, train, train_plain, worst
from tests.spawn import launched

STEPS, BLOCKS = 2, 6
CASES = [(1, True, 4), (1, False, [7, 2, 9, 6]), (2, True, [7, 2, 9, 6]), (2, False, 4), (3, True, 4)]


def compare(rank: int, world_size: int) -> dict[tuple[int, bool], tuple[float, float]]:
    """Per interval and kind of checkpoint: the largest relative difference of a loss and of a gradient from one process."""
    steps = steps_of(STEPS, 2)
    reference = train_plain(tied_gpt(BLOCKS), masked_loss, steps, partial(torch.optim.SGD, lr=SGD["params"]["lr"]))
    found = {}
    for interval, reentrant, slices in CASES:
        engine = build_engine(
            tied_gpt(BLOCKS),
            masked_loss,
            token_pipeline={"slices": slices},
            config={"pipeline": {"use_reentrant": reentrant}},
            module={"activation_checkpoint_interval": interval, "checkpointable_layers": ["Block"]},
        )
        trace = train(engine, steps)
        engine.destroy()
        losses = [abs(a - b) / abs(b) for a, b in zip(trace.losses, reference.losses, strict=True)]
        gradients = [worst(a, b) for a, b in zip(trace.gradients, reference.gradients, strict=True)]
        found[interval, reentrant] = (max(losses), max(gradients))
    return found


differences = launched(compare, 2, timeout=120)


@pytest.mark.parametrize(("interval", "reentrant"), [case[:2] for case in CASES])
def test_ranges_of_checkpointed_layers(
    differences: list[dict[tuple[int, bool], tuple[float, float]]], interval: int, reentrant: bool
) -> None:
    for rank, found in enumerate(differences):
        loss, gradient = found[interval, reentrant]
        assert loss <= 1e-5 and gradient <= 1e-5, f"rank {rank}: loss {loss:.1e}, gradients {gradient:.1e}"

"""Random numbers by where in the training they are drawn: the same on any placement, in any order, in a recomputation."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.runtime import Step
from ds_terapipe.pipeline.slicing import TensorCut
from ds_terapipe.pipeline.step_grid import FORWARD_ONLY, grid_of_step
from ds_terapipe.schedule import Placement
from tests.pipeline.fake_links import PlainGradients, assemblies, run

WIDTH, LENGTH, LAYERS = 16, 12, 4
Key = tuple[int, int, int]  # layer, micro-batch, first token of the slice


class Noisy(nn.Module):
    """A linear layer and dropout; tells what was dropped, in recomputations too."""

    def __init__(self, dropped: dict[Key, list[Tensor]]) -> None:
        super().__init__()
        self.linear, self.dropped = nn.Linear(WIDTH, WIDTH), dropped

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        kept = F.dropout(torch.ones_like(hidden), 0.5)
        context: Any = SliceContext.current
        self.dropped[context.layer, context.micro_batch, context.span.start].append(kept.detach())
        return hidden + hidden.tanh() * kept


def holder_of(local_start: int, checkpoint: Any, seeded: bool) -> nn.Module:
    """Attributes that layers read of their ``PipelineModule``."""
    holder, interval = nn.Module(), 2 if checkpoint is not None else 0
    vars(holder).update(
        _local_start=local_start, _local_stop=99, micro_offset=0, curr_layer=0, seed_layers=seeded, base_seed=5,
        seed_fn=torch.manual_seed, activation_checkpoint_interval=interval, activation_checkpoint_func=checkpoint,
        _is_checkpointable=lambda functions: True,
    )  # fmt: skip
    return holder


class Found:
    """Of a step: what was dropped, the gradients, the loss, whether the generators are as they were."""

    def __init__(
        self, places: tuple[int, ...] = (0,), schedule: str = "1f1b", slices: int = 3, checkpoint: Any = None,
        micro_batches: tuple[int, ...] = (0, 1), step: int = 7, seed: int | None = 3,
    ) -> None:  # fmt: skip
        self.dropped: dict[Key, list[Tensor]] = defaultdict(list)
        torch.manual_seed(0)
        layers = [Noisy(self.dropped) for _ in range(LAYERS)]
        placement = Placement.of(places, [LAYERS * s // len(places) for s in range(len(places) + 1)])
        batch = batch_of(micro_batches, slices)
        losses = StepLosses(batch, lambda outputs, labels: (outputs * labels).square().mean(), (TensorCut(1),))
        make = None if seed is None else partial(RandomStreams, seed)
        seeded = len(places) > 1 and seed is not None  # by DeepSpeed, by their place: which changes nothing
        holder = partial(holder_of, checkpoint=checkpoint, seeded=seeded)
        own = assemblies(placement, layers, PlainGradients(1), holder, make)
        torch.manual_seed(sum(places) + slices)  # of the user's, whatever it is
        before = torch.get_rng_state()
        grid = grid_of_step(schedule, placement, (slices,) * len(micro_batches))
        with torch.set_grad_enabled(schedule != FORWARD_ONLY):
            assert run(own, [Step(step, batch, grid, losses, micro_batches[0])] * placement.places) == 0
        self.untouched = torch.equal(before, torch.get_rng_state())
        self.loss, self.gradients = float(losses.total), [layer.linear.weight.grad for layer in layers]

    def masks(self, first: int = 0) -> dict[Key, tuple[float, ...]]:
        """Dropped elements, the same in each recomputation; micro-batches from ``first`` on."""
        assert all(torch.equal(each[0], other) for each in self.dropped.values() for other in each[1:])
        found = {(layer, first + m, token): each[0] for (layer, m, token), each in self.dropped.items()}
        return {key: tuple(mask.flatten().tolist()) for key, mask in found.items()}


def batch_of(micro_batches: tuple[int, ...], slices: int) -> StepBatch:
    batch = StepBatch(lengths=[LENGTH] * len(micro_batches), signatures=[0] * len(micro_batches))
    for m in micro_batches:
        generator = torch.Generator().manual_seed(m)
        batch.inputs.append(torch.randn(2, LENGTH, WIDTH, generator=generator))
        batch.labels.append(torch.randn(2, LENGTH, WIDTH, generator=generator))
        batch.input_cuts.append((TensorCut(1),))
    batch.cut(slices)
    return batch


CHECKPOINTS = {"none": None, "reentrant": checkpointing.checkpoint, "not": checkpointing.non_reentrant_checkpoint}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("slices", [1, 3])
def test_what_is_dropped_depends_on_no_placement_and_no_order(slices: int, checkpoint: str) -> None:
    wanted = Found(slices=slices)
    for places, schedule in (((0,), "terapipe"), ((0, 1), "1f1b"), ((0, 1, 1, 0), "1f1b")):
        found = Found(places, schedule, slices, CHECKPOINTS[checkpoint])
        assert found.masks() == wanted.masks() and found.untouched
        assert {len(each) for each in found.dropped.values()} == {1 if checkpoint == "none" else 2}
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert Found(seed=None, slices=slices).masks() != Found((0, 1), seed=None, slices=slices).masks(), "without streams"


def test_replicas_drop_what_one_pipeline_drops_but_layers_micro_batches_slices_steps_and_seeds_differ() -> None:
    two = {**Found(micro_batches=(0, 1)).masks(), **Found(micro_batches=(2, 3)).masks(2)}
    assert Found(micro_batches=(0, 1, 2, 3)).masks() == two
    masks = [*Found().masks().values(), *Found(step=8).masks().values(), *Found(seed=4).masks().values()]
    assert len(set(masks)) == len(masks) == 3 * LAYERS * 2 * 3
    assert Found().masks() == Found().masks()


def test_evaluations_and_failed_steps_leave_the_users_generators() -> None:
    assert not Found(schedule=FORWARD_ONLY).untouched, "an evaluation draws from them"
    torch.manual_seed(1)
    before, streams = torch.get_rng_state(), RandomStreams(0)
    streams.begin(0)
    streams.enter(0, 0, 0)
    assert not torch.equal(torch.get_rng_state(), before)
    streams.begin(1)  # the step before never ended
    streams.end()
    streams.end()
    streams.enter(0, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


NAMES = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")


def drawn(state: Any) -> tuple[float, ...]:
    """Next numbers of a state, which stays as it is."""
    generator = torch.Generator()
    generator.set_state(state.get_state() if isinstance(state, torch.Generator) else state)
    return tuple(torch.rand(3, generator=generator).tolist())


CORES, DEEPSPEEDS = "megatron.core.tensor_parallel.random", checkpointing.__name__


@pytest.mark.parametrize(("module", "kind"), [(CORES, "states"), (CORES, "generators"), (DEEPSPEEDS, "states")])
def test_megatrons_states_differ_by_shard_and_the_default_ones_do_not(module: str, kind: str, monkeypatch: Any) -> None:
    """Stand-in for the trackers of megatron-core, which need a GPU, and DeepSpeed: states by name, tensors or generators."""
    states_of = pytest.importorskip(module)
    states: dict[str, Any] = {name: torch.Generator().manual_seed(number) for number, name in enumerate(NAMES)}
    if kind == "states":
        states = {name: generator.get_state() for name, generator in states.items()}
    monkeypatch.setattr(states_of, "_CUDA_RNG_STATE_TRACKER", SimpleNamespace(states_=states))
    before = {name: drawn(state) for name, state in states.items()}
    seen: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for shard, layer in ((0, 1), (1, 1), (0, 2), (0, 1)):
        streams = RandomStreams(3, shard=shard)
        streams.begin(5)
        streams.enter(layer, 0, 0)
        for name, state in {"default": torch.get_rng_state(), **states}.items():
            seen[name].append(drawn(state))
        if kind == "states":
            states[NAMES[0]] = torch.Generator().manual_seed(77).get_state()  # as what draws from it does
        streams.end()
        assert {name: drawn(state) for name, state in states.items()} == before
    for name, (one, other_shard, other_layer, again) in seen.items():
        assert one == again != other_layer
        assert (one == other_shard) == (name in ("default", "data-parallel-rng"))
    assert len({each[0] for each in seen.values()}) == 4

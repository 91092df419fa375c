"""Random numbers by where in the training they are drawn: the same on any placement, in any order, in a recomputation."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor

from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from tests.pipeline.models import Block, Embedding, Head, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import launched

STEPS = steps_of(2, 4)
TWO = {"stages_per_place": 2}
RECOMPUTED: dict[str, Any] = {"activation_checkpoint_interval": 2, "checkpointable_layers": ["Dropping"]}
# stages, keys of token_pipeline, arguments of the PipelineModule, whether checkpoints are reentrant
PLACED: dict[str, tuple[int, dict[str, Any], dict[str, Any], bool]] = {
    "two stages": (2, {}, {}, False), "two replicas": (1, {"schedule": "terapipe"}, {}, False),
    "there and back": (2, {**TWO, "placement": "v"}, {}, False), "reentrant": (2, TWO, RECOMPUTED, True),
    "recomputed": (1, {}, RECOMPUTED, False), "another seed": (2, {}, {"base_seed": 5}, False),
}  # fmt: skip


class Dropping(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * F.dropout(torch.ones_like(hidden), 0.3)


def everywhere(rank: int, world_size: int) -> dict[str, list[float]]:
    """Losses of each; training leaves a user's own generators as they are."""
    found = {}
    for number, (name, (stages, keys, module, reentrant)) in enumerate(PLACED.items()):
        engine = build_engine(
            [LayerSpec(kind) for kind in (Embedding, *[Dropping] * 4, Head)], masked_loss, stages=stages,
            micro_batches=2 * stages, token_pipeline={"slices": 3, **keys}, module=module,
            config={"elastic_pipeline": {"resize": {"policy": "off"}}, "pipeline": {"use_reentrant": reentrant}},
        )  # fmt: skip
        torch.manual_seed(10 * number + rank)
        before = torch.get_rng_state()
        found[name] = train(engine, STEPS).losses
        assert torch.equal(torch.get_rng_state(), before)
        engine.eval_batch(iter(STEPS[0]))
        assert not torch.equal(torch.get_rng_state(), before), "an evaluation draws from them"
        engine.destroy()
    return found


ranks = launched(everywhere, 2)


def test_what_is_dropped_depends_on_no_placement_replicas_order_or_recomputation(ranks: list[Any]) -> None:
    for found in ranks:
        other, wanted = found.pop("another seed"), found["two stages"]
        assert other != pytest.approx(wanted, rel=1e-3)
        for name, losses in found.items():
            assert losses == pytest.approx(wanted, rel=1e-5), name


def test_layers_micro_batches_slices_steps_and_seeds_differ_and_the_users_generators_stay() -> None:
    before, streams, drawn = torch.get_rng_state(), RandomStreams(0), set()
    for streams.seed, step, *where in product((0, 1), (0, 1), (0, 1), (0, 1), (0, 8)):
        streams.begin(step)  # the step before failed and never ended
        streams.enter(*where)
        drawn.add(tuple(torch.rand(2).tolist()))
    streams.end()
    streams.end()
    streams.enter(0, 0, 0)
    assert len(drawn) == 2**5 and torch.equal(torch.get_rng_state(), before)


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

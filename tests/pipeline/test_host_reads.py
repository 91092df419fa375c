"""Within a step the host waits for nothing: no action reads numbers of a tensor. What has to be looked at waits for the end."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from ds_terapipe.pipeline.operators.context import PlacementError
from ds_terapipe.pipeline.runtime import PipelineRuntime
from ds_terapipe.schedule import Action
from tests.megatron.common import MICRO_BATCH, Model, batches, build as build_megatron
from tests.pipeline.host_reads import host_reads
from tests.pipeline.models import Block, masked_loss, micro_batch, tied_gpt
from tests.pipeline.training import build_engine
from tests.spawn import launched

SLICES, MICRO_BATCHES, BF16 = 4, 2, {"bf16": {"enabled": True}}
RANGES = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block", "Noisy"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"clip": 0.5},
    "bf16": {"config": BF16},
    "recomputed": {"module": RANGES, "config": {"pipeline": {"use_reentrant": False}}},
    "recomputed, reentrant": {"module": RANGES},
}
MEGATRON = {"megatron": Model(), "megatron, recomputed": Model(checkpoint_interval=1)}


class Noisy(Block):
    """A block that a recomputation does not repeat."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + 0.1 * torch.rand(hidden.shape, generator=self.generator))

    generator = torch.Generator().manual_seed(0)


def data() -> Iterator[Any]:
    return iter([micro_batch(m) for m in range(2 * MICRO_BATCHES)])


def reads_of(engine: Any, batches: Iterator[Any]) -> dict[str, Any]:
    """Host reads of a second step; the first one looks at the model."""
    engine.train_batch(batches)
    with host_reads() as found:
        engine.train_batch(batches)
    ran = [len(slices) for slices in engine.slices_run]
    engine.destroy()
    return {"reads": Counter(found), "ran": ran}


def work(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        engine = build_engine(tied_gpt(), masked_loss, token_pipeline={"slices": SLICES}, **options)
        found[name] = reads_of(engine, data())
    for name, model in MEGATRON.items():
        made, once = build_megatron(model, stages=2), {"slices": SLICES, "weight_gradients": "micro_batch"}
        engine = build_engine([], None, made=made, token_pipeline=once, batch=MICRO_BATCH, config=BF16)
        found[name] = reads_of(engine, batches())
    return {**found, "noisy": noisy()}


def noisy() -> str:
    specs = tied_gpt()
    specs[2:-2] = [LayerSpec(Noisy) for _ in specs[2:-2]]
    engine = build_engine(specs, masked_loss, token_pipeline={"slices": SLICES, "verify": False}, module=RANGES)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    with pytest.raises(PlacementError) as error:
        engine.train_batch(data())
    assert all(map(torch.equal, before, engine.module.parameters())), "the optimiser has stepped all the same"
    return str(error.value)


ranks = launched(work, 2, timeout=200)


@pytest.mark.parametrize("name", [*CASES, *MEGATRON])
def test_no_action_reads_numbers(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert not found[name]["reads"]
        assert found[name]["ran"] == [SLICES] * MICRO_BATCHES


def test_each_way_of_reading_is_found() -> None:
    """The test before can fail."""
    x = torch.rand(4)
    stage = SimpleNamespace(make_weight_gradients=lambda *unit: (x.sum().item(), x.tolist(), x[x > 0], x.unique(), x.cpu()))
    with host_reads() as found:
        PipelineRuntime.execute(SimpleNamespace(stages={0: stage}), Action.from_text("0W0.0"))  # type: ignore[arg-type]
    ways = ["aten._local_scalar_dense.default", "tolist", "aten.index.Tensor", "aten._unique2.default", "cpu"]
    assert [read.split(":")[0] for read in found] == ways and all(__file__ in read for read in found)


def test_a_layer_that_recomputes_something_else_ends_the_run_before_the_optimiser(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "of a step made keys that no attention call of the forward pass made (near layer" in found["noisy"]
        assert "(Noisy)" in found["noisy"]

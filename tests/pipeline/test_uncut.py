"""Features of DeepSpeed's pipeline that ours has while nothing is cut: contiguous checkpoints, compiled layers.

With slices they are refused on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch._dynamo.backends.registry import lookup_backend

from ds_terapipe.pipeline.operators.interception import Overrides
from tests.pipeline.models import Block, Embedding, Head, gpt, masked_loss, steps_of
from tests.pipeline.training import build_engine, raised, train, worst
from tests.spawn import launched

MICRO_BATCHES, STEPS = 3, 2
SAME = 1e-6  # relative; the same operations in the same order
EVERY_BLOCK = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]}
WHOLE, LENGTHS = {"slices": 1}, {"slices": [7, 8, 9]}
CUTS = {"lengths": LENGTHS, "auto": {"slices": "auto"}}
# The first stage runs two micro-batches of two blocks forward before the first one backward, DeepSpeed's and ours.
CONTIGUOUS = {"contiguous_checkpointing": True, "num_checkpoints": 4}
graphs: list[int] = []  # compiled by this process, by their number of nodes
build = partial(build_engine, loss_fn=masked_loss, micro_batches=MICRO_BATCHES)


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that traces as the default one does, autograd and operators included, and counts graphs."""
    graphs.append(len(graph.graph.nodes))
    return lookup_backend("aot_eager")(graph, inputs)


class CompiledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend=counting)


class Halving(PipelineModule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.forward = lambda inputs: 0.5 * PipelineModule.forward(self, inputs)


@contextmanager
def partitioned(**options: Any) -> Iterator[None]:
    """``deepspeed.checkpointing`` with partitioned activations and these settings, which are the process's."""
    checkpointing.configure(None, partition_activations=True, **options)
    try:
        yield
    finally:
        checkpointing.reset()
        checkpointing.configure(None)


def course(engine: Any) -> dict[str, Any]:
    """Training with evaluations before, between and after; all losses, and this rank's weights at the end."""

    def evaluate() -> float:
        return float(engine.eval_batch(iter(steps_of(1, MICRO_BATCHES)[0])))

    evaluated = [evaluate(), evaluate()]
    trace = train(engine, steps_of(STEPS, MICRO_BATCHES), after_step=lambda: evaluated.append(evaluate()))
    intercepted = Overrides._library is not None
    engine.destroy()
    kind = type(engine).__name__
    return {"losses": trace.losses, "evaluated": evaluated, "weights": trace.weights, "kind": (kind, intercepted)}


def checkpointed(rank: int, world_size: int) -> dict[str, Any]:
    steps, results = steps_of(STEPS, MICRO_BATCHES), {}
    for name, key in {"DeepSpeed": None, "ours": WHOLE}.items():
        engine = build(gpt(), token_pipeline=key, module=EVERY_BLOCK)
        with partitioned(**CONTIGUOUS):
            results[name] = course(engine)
    results["refused"] = []
    for key in CUTS.values():
        engine = build(gpt(), token_pipeline=key, module=EVERY_BLOCK)
        with partitioned(**CONTIGUOUS) if rank == 1 else nullcontext():  # one rank knows, both have to say
            for step in (engine.train_batch, engine.eval_batch):
                results["refused"].append(raised(lambda step=step: step(iter(steps[0]))))
        engine.destroy()
    return results


def compiled(rank: int, world_size: int) -> dict[str, Any]:
    specs = [LayerSpec(kind) for kind in (Embedding, CompiledBlock, CompiledBlock, Head)]
    results: dict[str, Any] = {"uncompiled": course(build(gpt(2), token_pipeline=None))}
    for way, layers in {"layers": specs, "engine": gpt(2)}.items():
        for name, key in {"DeepSpeed": None, "ours": WHOLE}.items():
            torch._dynamo.reset()
            graphs.clear()
            engine = build(layers, token_pipeline=key)
            if way == "engine":
                engine.compile(backend=counting)
            results[f"{name} {way}"] = {**course(engine), "graphs": sorted(graphs)}
    results["refused"] = []
    for key in CUTS.values():
        engine = build(gpt(2), token_pipeline=key)
        results["refused"].append(raised(lambda engine=engine: engine.compile(backend=counting)))
        engine.destroy()
    return results


def own_forward(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {"DeepSpeed": course(build(gpt(), token_pipeline=None, kind=Halving))}
    engine = build(gpt(), token_pipeline=WHOLE, kind=Halving)
    results["refused"] = raised(lambda: engine.set_slices(2))
    results["ours"] = course(engine)
    return results


ranks = launched([checkpointed, compiled, own_forward], 2, timeout=240)


def check_same(ours: dict[str, Any], deepspeeds: dict[str, Any]) -> None:
    """Nothing is cut, so operators are left alone."""
    assert ours["kind"] == ("TokenPipelineEngine", False) and deepspeeds["kind"] == ("PipelineEngine", False)
    assert len({round(loss, 4) for loss in ours["losses"]}) == STEPS, "the course must change the model"
    for kind in ("losses", "evaluated"):
        assert ours[kind] == pytest.approx(deepspeeds[kind], rel=SAME), kind
    assert ours["weights"].keys() == deepspeeds["weights"].keys()
    assert worst(ours["weights"], deepspeeds["weights"]) <= SAME


def test_contiguous_checkpoints_train_as_deepspeeds_and_are_refused_where_something_is_cut(ranks: list[Any]) -> None:
    rule = "ConfigError: deepspeed.checkpointing.configure: contiguous_checkpointing: got true, must be false"
    for found, *_ in ranks:
        check_same(found["ours"], found["DeepSpeed"])
        assert len(found["refused"]) == 2 * len(CUTS) and found["refused"] == ranks[0][0]["refused"]
        for said in found["refused"]:
            assert said.startswith(rule) and 'use false, or "slices": 1' in said and "\n" not in said


def test_a_forward_of_the_modules_own_runs_uncut(ranks: list[Any]) -> None:
    for _, plain, own in ranks:
        check_same(own["ours"], own["DeepSpeed"])
        assert own["ours"]["losses"] != pytest.approx(plain["uncompiled"]["losses"], rel=1e-3)
        assert own["refused"].startswith("ConfigError: token_pipeline: Halving has a forward of its own, must be ")


@pytest.mark.parametrize("way", ["layers", "engine"])
def test_compiled_layers_train_as_deepspeeds_and_are_refused_where_something_is_cut(ranks: list[Any], way: str) -> None:
    for _, found, _ in ranks:
        ours, deepspeeds = found[f"ours {way}"], found[f"DeepSpeed {way}"]
        check_same(ours, deepspeeds)
        assert ours["losses"] == pytest.approx(found["uncompiled"]["losses"], rel=1e-5)
        assert ours["graphs"] and ours["graphs"] == deepspeeds["graphs"]
        assert found["refused"] == ranks[0][1]["refused"] and len(found["refused"]) == len(CUTS)
        for said in found["refused"]:
            assert said.startswith("ConfigError: ") and "compile" in said and "\n" not in said
            assert "must be 1 (nothing is cut), use 1 or" in said

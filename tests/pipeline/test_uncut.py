"""What goes with DeepSpeed's pipeline goes with ours as long as nothing is cut: contiguous checkpoints, compiled layers.

With slices they are refused on every rank; partitioned and offloaded checkpoints, which keep their inputs one by one, are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch._dynamo.backends.registry import lookup_backend

from ds_terapipe.pipeline.operators.interception import Overrides
from tests.pipeline.models import Block, Embedding, Head, gpt, masked_loss, steps_of
from tests.pipeline.training import SGD, build_engine, train, train_plain, worst
from tests.spawn import launched

STAGES, BLOCKS, MICRO_BATCHES, STEPS = 2, 4, 3, 2
SAME = 1e-6  # relative; the same operations in the same order
EVERY_BLOCK = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]}
# The first stage runs two micro-batches forward before the first one backward, DeepSpeed's and ours.
CHECKPOINTS = 2 * BLOCKS // STAGES
CUTS = {"slices": {"slices": 2}, "lengths": {"slices": [7, 8, 9]}, "auto": {"slices": "auto"}}
# DeepSpeed 0.19.8 loses checkpoints that are offloaded from a CPU without being partitioned.
CHECKPOINTED = {
    "partitioned": {"partition_activations": True},
    "offloaded": {"partition_activations": True, "checkpoint_in_cpu": True},
}

graphs: list[int] = []  # compiled by this process, by their number of nodes


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that traces as the default one does, autograd and operators included, and counts graphs."""
    graphs.append(len(graph.graph.nodes))
    return lookup_backend("aot_eager")(graph, inputs)


class CompiledBlock(Block):
    """Compiled before there is an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend=counting)


def compiled_gpt() -> list[Any]:
    return [LayerSpec(Embedding), *(LayerSpec(CompiledBlock) for _ in range(STAGES)), LayerSpec(Head)]


class Halving(PipelineModule):
    """A module with a forward of its own."""

    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs) * 0.5


@contextmanager
def configured(**options: Any) -> Iterator[None]:
    """``deepspeed.checkpointing`` with these settings, which are the process's."""
    checkpointing.configure(None, **options)
    try:
        yield
    finally:
        checkpointing.reset()
        checkpointing.configure(None)


contiguous = partial(configured, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=CHECKPOINTS)


def course(engine: Any) -> dict[str, Any]:
    """Training with evaluations before, between and after; all losses, and this rank's weights at the end."""
    steps = steps_of(STEPS, MICRO_BATCHES)

    def evaluate() -> float:
        return float(engine.eval_batch(iter(steps_of(1, MICRO_BATCHES)[0])))

    evaluated = [evaluate(), evaluate()]
    trace = train(engine, steps, after_step=lambda: evaluated.append(evaluate()))
    intercepted = Overrides._library is not None
    engine.destroy()
    return {
        "losses": trace.losses,
        "evaluated": evaluated,
        "weights": trace.weights,
        "intercepted": intercepted,
        "engine": type(engine).__name__,
    }


def attempt(call: Callable[[], Any]) -> tuple[str, float]:
    """What it raises, and after how long."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def checkpointed(rank: int) -> dict[str, Any]:
    """Contiguous checkpoints uncut and cut, and the other kinds cut."""
    steps = steps_of(STEPS, MICRO_BATCHES)
    build = partial(build_engine, gpt(BLOCKS), masked_loss, micro_batches=MICRO_BATCHES, module=EVERY_BLOCK)
    results: dict[str, Any] = {}
    for name, key in {"DeepSpeed": None, "ours": {"slices": 1}}.items():
        engine = build(token_pipeline=key)
        with contiguous():
            results[name] = course(engine)
    for name, key in CUTS.items():
        engine = build(token_pipeline={**key, "timeout_s": 20})
        with contiguous() if rank == 1 else configured():  # one rank knows, both have to say
            results[f"train {name}"] = attempt(lambda engine=engine: engine.train_batch(iter(steps[0])))
            results[f"eval {name}"] = attempt(lambda engine=engine: engine.eval_batch(iter(steps[0])))
        engine.destroy()
    reference = train_plain(gpt(BLOCKS), masked_loss, steps, partial(torch.optim.SGD, lr=SGD["params"]["lr"]))
    for name, options in CHECKPOINTED.items():
        engine = build(token_pipeline={"slices": [7, 8, 9]})
        with configured(**options):
            trace = train(engine, steps)
        units = engine.peak_live_units
        engine.destroy()
        losses = [abs(a - b) / abs(b) for a, b in zip(trace.losses, reference.losses, strict=True)]
        gradients = [worst(a, b) for a, b in zip(trace.gradients, reference.gradients, strict=True)]
        results[name] = (units, max(losses), max(gradients))
    return results


def compiled() -> dict[str, Any]:
    """Layers that are compiled before the engine is there, and by ``engine.compile()``, uncut and cut."""
    results: dict[str, Any] = {}
    build = partial(build_engine, loss_fn=masked_loss, micro_batches=MICRO_BATCHES)
    results["uncompiled"] = course(build(gpt(STAGES), token_pipeline=None))
    for way, layers in {"layers": compiled_gpt, "engine": partial(gpt, STAGES)}.items():
        for name, key in {"DeepSpeed": None, "ours": {"slices": 1}}.items():
            torch._dynamo.reset()
            graphs.clear()
            engine = build(layers(), token_pipeline=key)
            if way == "engine":
                engine.compile(backend=counting)
            results[f"{name} {way}"] = {**course(engine), "graphs": list(graphs)}
    for name, key in CUTS.items():
        results[f"layers {name}"] = attempt(lambda key=key: build(compiled_gpt(), token_pipeline=key))
        engine = build(gpt(STAGES), token_pipeline=key)
        results[f"engine {name}"] = attempt(lambda engine=engine: engine.compile(backend=counting))
        engine.destroy()
    return results


def own_forward() -> dict[str, Any]:
    """A module whose own forward does something, uncut, and cut from the start or later."""
    build = partial(build_engine, gpt(BLOCKS), masked_loss, micro_batches=MICRO_BATCHES, kind=Halving)
    results: dict[str, Any] = {"DeepSpeed": course(build(token_pipeline=None))}
    engine = build(token_pipeline={"slices": 1})
    results["later"] = attempt(lambda: engine.set_slices(2))
    results["ours"] = course(engine)
    results["plain"] = course(build_engine(gpt(BLOCKS), masked_loss, micro_batches=MICRO_BATCHES, token_pipeline=None))
    results["cut"] = attempt(lambda: build(token_pipeline={"slices": 2}))
    return results


def everything(rank: int, world_size: int) -> dict[str, Any]:
    return {"checkpointed": checkpointed(rank), "compiled": compiled(), "own": own_forward()}


ranks = launched(everything, STAGES, timeout=240)


def same_course(ours: dict[str, Any], deepspeeds: dict[str, Any]) -> None:
    assert ours["engine"] == "TokenPipelineEngine" and deepspeeds["engine"] == "PipelineEngine"
    assert not ours["intercepted"], "nothing is cut, so operators are to be left alone"
    assert len(ours["losses"]) == STEPS and len(ours["evaluated"]) == STEPS + 2
    assert len({round(loss, 4) for loss in ours["losses"]}) == STEPS, "the course must change the model"
    for kind in ("losses", "evaluated"):
        assert ours[kind] == pytest.approx(deepspeeds[kind], rel=SAME), kind
    assert ours["weights"].keys() == deepspeeds["weights"].keys()
    assert worst(ours["weights"], deepspeeds["weights"]) <= SAME


def test_contiguous_checkpoints_train_and_evaluate_as_deepspeeds(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        same_course(results["checkpointed"]["ours"], results["checkpointed"]["DeepSpeed"])


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("cut", CUTS)
def test_contiguous_checkpoints_are_refused_where_something_is_cut(
    ranks: list[dict[str, Any]], kind: str, cut: str
) -> None:
    (first, first_s), (second, second_s) = (results["checkpointed"][f"{kind} {cut}"] for results in ranks)
    assert first == second
    assert first.startswith(
        "ConfigError: deepspeed.checkpointing.configure: contiguous_checkpointing: got true, must be false"
    )
    assert 'use false, or "slices": 1' in first and "\n" not in first
    assert max(first_s, second_s) < 10


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_other_checkpoints_go_with_slices(ranks: list[dict[str, Any]], kind: str) -> None:
    for results, live in zip(ranks, (STAGES + 3 - 1, 3), strict=True):
        units, loss, gradient = results["checkpointed"][kind]
        assert units == live, "three slices of a micro-batch"
        assert loss <= 1e-5 and gradient <= 1e-5, f"loss {loss:.1e}, gradients {gradient:.1e}"


def test_a_forward_of_the_modules_own_runs_uncut_and_is_refused_cut(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        own = results["own"]
        same_course(own["ours"], own["DeepSpeed"])
        assert own["ours"]["losses"] != pytest.approx(own["plain"]["losses"], rel=1e-3)
        for when in ("cut", "later"):
            said, _ = own[when]
            assert said.startswith("ConfigError: token_pipeline: Halving has a forward of its own, must be ")


@pytest.mark.parametrize("way", ["layers", "engine"])
def test_compiled_layers_train_and_evaluate_as_deepspeeds(ranks: list[dict[str, Any]], way: str) -> None:
    for results in ranks:
        ours, deepspeeds = results["compiled"][f"ours {way}"], results["compiled"][f"DeepSpeed {way}"]
        same_course(ours, deepspeeds)
        assert ours["losses"] == pytest.approx(results["compiled"]["uncompiled"]["losses"], rel=1e-5)
        assert ours["graphs"] and sorted(ours["graphs"]) == sorted(deepspeeds["graphs"])


@pytest.mark.parametrize("way", ["layers", "engine"])
@pytest.mark.parametrize("cut", CUTS)
def test_compiling_is_refused_where_something_is_cut(ranks: list[dict[str, Any]], way: str, cut: str) -> None:
    (first, first_s), (second, second_s) = (results["compiled"][f"{way} {cut}"] for results in ranks)
    assert first.startswith("ConfigError: ") and "compile" in first and "\n" not in first
    assert max(first_s, second_s) < 10
    if way == "layers":
        assert "must be plain Python where sequences are cut" in first and 'or "slices": 1' in first
    else:
        assert first == second
        assert "must be 1 (nothing is cut), use 1 or" in first

"""Which layers of a ``PipelineModule`` are a stage that only goes forward; and that its layers run as DeepSpeed runs them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe import ConfigError
from ds_terapipe.commands.trace import panels_of
from ds_terapipe.pipeline.layer_range import LayerRange, modules_of
from ds_terapipe.pipeline.placing import placement_of
from ds_terapipe.plan import MeasuredCost, Plan
from ds_terapipe.schedule import Placement, timelines_svg
from ds_terapipe.tracing.chrome import read
from ds_terapipe.tracing.summary import summarise
from tests.pipeline.models import Block, Embedding, Head, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import run_ranks

# ------------------------------------------------------------------------------------- where the stages are

FROZEN, TRAINED, NOTHING = "F", "T", "."  # a layer with frozen weights, with trained ones, with none


def layer(kind: str) -> Any:
    return F.gelu if kind == NOTHING else nn.Linear(1, 1).requires_grad_(kind == TRAINED)


def placed(*places: str, own: Any = (), **changes: Any) -> Placement:
    """The placement of a model whose layers are these on each place, by letter; ``own``: weights of the module itself."""
    modules, start = [], 0
    for number, kinds in enumerate(places):
        functions = changes.get("forward_funcs") or [layer(kind) for kind in kinds]
        weights = [*own, *(p for f in functions for module in modules_of(f) for p in module.parameters())]
        modules.append(
            SimpleNamespace(
                stage_id=number,
                _local_start=np.int64(start),  # as DeepSpeed has it where it searched for layers by type
                forward_funcs=functions,
                parameters=partial(list, weights),
                tied_comms={},
            )
        )
        start += len(kinds)
    parts: dict[int, Any] = {}
    for module in modules:  # each rank hands its own part to all
        with pytest.raises(_Handed) as handed:
            placement_of(module, SimpleNamespace(gather=_hand))
        parts[module.stage_id] = handed.value.args[0]
    consensus: Any = SimpleNamespace(gather=lambda mine: list(parts.values()))
    (found, *others) = [placement_of(module, consensus) for module in modules]
    assert all(other == found for other in others)
    assert {type(number) for number in (found.forward_only, *found.stages[0], *found.stages[-1])} == {int}
    return found


class _Handed(Exception):
    pass


def _hand(part: Any) -> None:
    raise _Handed(part)


@pytest.mark.parametrize(
    ("places", "stages", "boundaries", "forward_only"),
    [
        (("TTT", "TTT"), [0, 1], [0, 3, 6], 0),
        (("TFF", "FFT"), [0, 1], [0, 3, 6], 0),  # frozen, but not from the beginning
        (("FTT", "TTT"), [0, 0, 1], [0, 1, 3, 6], 1),
        (("FFF", "TTT"), [0, 1], [0, 3, 6], 1),
        (("FFF", "FTT"), [0, 1, 1], [0, 3, 4, 6], 2),
        (("FFF", "FFF"), [0, 1], [0, 3, 6], 2),
        (("FTF", "FFT"), [0, 0, 1], [0, 1, 3, 6], 1),
        ((".FT", "TTT"), [0, 0, 1], [0, 2, 3, 6], 1),
        (("F.T", "TTT"), [0, 0, 1], [0, 2, 3, 6], 1),
        (("..T", "TTT"), [0, 1], [0, 3, 6], 0),  # a stage without weights would be one for nothing
        (("FFF", ".TT"), [0, 1], [0, 3, 6], 1),
        (("...", "FTT"), [0, 1, 1], [0, 3, 4, 6], 2),
        (("FT",), [0, 0], [0, 1, 2], 1),
    ],
)
def test_the_frozen_beginning_of_a_model_only_goes_forward(
    places: tuple[str, ...], stages: list[int], boundaries: list[int], forward_only: int
) -> None:
    assert placed(*places) == Placement.of(stages, boundaries, forward_only)


def test_layers_that_cannot_be_divided_stay_together() -> None:
    extra = nn.Parameter(torch.zeros(1))  # of the module itself: any layer may use it
    assert placed("FTT", "TTT", own=[extra]) == Placement.plain(2, [0, 3, 6])


def test_a_layer_that_is_a_function_of_a_module_has_its_weights() -> None:
    tied = nn.Linear(1, 1)
    functions = [partial(lambda module, x: module(x), tied.requires_grad_(False)), nn.Linear(1, 1)]
    assert placed("..", forward_funcs=functions) == Placement.of([0, 0], [0, 1, 2], 1)
    tied.requires_grad_(True)
    assert placed("..", forward_funcs=functions) == Placement.plain(1, [0, 2])


# ------------------------------------------------------------------------------------- as DeepSpeed runs them


class Holder(nn.Module):
    """What a range of layers asks of a ``PipelineModule``, which checkpoints in threes."""

    def __init__(self) -> None:
        super().__init__()
        self._local_start, self.micro_offset, self.curr_layer, self.seed_layers = 10, 0, -1, False
        self.activation_checkpoint_interval = 3
        self.checkpoints: list[int] = []
        self.counted: list[int] = []

    def activation_checkpoint_func(self, run: Any, *inputs: Any) -> Any:
        self.checkpoints.append(len(self.counted))
        return run(*inputs)

    def _is_checkpointable(self, functions: Any) -> bool:
        return True

    def note(self, layer: int, x: Tensor) -> Tensor:
        self.counted.append(self.curr_layer)
        return x


def test_a_part_of_the_layers_of_a_process_is_checkpointed_as_in_the_whole() -> None:
    for first, checkpoints in ((10, [0, 3, 6]), (11, [0, 2, 5]), (13, [0, 3]), (15, [0, 1])):
        module = Holder()
        layers = LayerRange(
            [partial(module.note, n) for n in range(first, 18)], first, lambda layer: None, lambda: None, module
        )
        layers(torch.ones(1))
        assert module.checkpoints == checkpoints, first
        assert module.counted == [10, 11, 12, 10, 11, 12, 10, 11][first - 10 :]


def test_nothing_is_checkpointed_where_nothing_goes_backward() -> None:
    module = Holder()
    layers = LayerRange([partial(module.note, n) for n in range(10, 18)], 10, lambda layer: None, lambda: None, module)
    with torch.no_grad():
        layers(torch.ones(1))
    assert module.checkpoints == [] and len(module.counted) == 8


DROPOUT, MICRO_BATCHES, STEPS = 0.3, 2, 2


class Noisy(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden), DROPOUT, self.training)


def frozen_until(first: int) -> list[Any]:
    kinds = [Embedding, *(Noisy for _ in range(6)), Head]
    return [LayerSpec(frozen(kind) if number < first else kind) for number, kind in enumerate(kinds)]


def frozen(kind: type[nn.Module]) -> type[nn.Module]:
    class Frozen(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    return Frozen


def losses(first: int, interval: int, ours: bool) -> list[float]:
    """Of some steps with dropout, in DeepSpeed's own engine or uncut in ours; seeds are those of ``seed_layers``."""
    engine = build_engine(
        frozen_until(first),
        masked_loss,
        token_pipeline={"slices": 1} if ours else None,
        micro_batches=MICRO_BATCHES,
        config={"pipeline": {"use_reentrant": False}},
        module={"activation_checkpoint_interval": interval},
    )
    found = train(engine, steps_of(STEPS, MICRO_BATCHES)).losses
    engine.destroy()
    return found


def seeds(rank: int, world_size: int) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    # DeepSpeed's own engine can't have a stage of which nothing is trained
    return {(2, interval): (losses(2, interval, True), losses(2, interval, False)) for interval in (0, 1, 2, 3)}


def test_layers_of_a_divided_place_have_the_seeds_and_checkpoints_of_the_whole() -> None:
    for found in run_ranks(seeds, 2, timeout=120):
        for case, (ours, theirs) in found.items():
            assert ours == pytest.approx(theirs, rel=1e-6), case
        assert len({tuple(ours) for ours, _ in found.values()}) > 1  # the seeds do depend on the interval


# ------------------------------------------------------------------------------------- choice, files, trace

TRIALS = 14


def auto(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A run that plans, one that has the plan, one that has the measurements; then one with other layers frozen."""
    found: dict[str, Any] = {}
    for name, first, keys in (
        ("measuring", 2, {"measurements_path": f"{folder}/costs.json", "trace_path": f"{folder}/trace.json"}),
        ("measured", 2, {"measurements_path": f"{folder}/costs.json", "memory_gb": 1.0}),
        ("other", 4, {"measurements_path": f"{folder}/other.json"}),
    ):
        engine = build_engine(frozen_until(first), masked_loss, token_pipeline={"slices": "auto", **keys})
        train(engine, steps_of(TRIALS, 2))
        (found[name],) = engine._cutting.state()["plans"]
        engine.save_checkpoint(f"{folder}/{name}")
        if name == "measured":
            again = engine._cutting._plans()
            engine._cutting._phases.clear()
            engine.load_checkpoint(f"{folder}/{name}")
            found["loaded"] = engine._cutting._plans() == again
        engine.destroy()
    if rank == 0:
        Path(f"{folder}/plan.json").write_text(json.dumps(found["other"]))
    torch.distributed.barrier()
    try:
        keys = {"slices": "auto", "plan_path": f"{folder}/plan.json"}
        build_engine(frozen_until(0), masked_loss, token_pipeline=keys)
    except ConfigError as error:
        found["refused"] = str(error)
    return found


def test_auto_plans_for_several_stages_on_a_place(tmp_path: Path) -> None:
    for found in run_ranks(auto, 2, str(tmp_path), timeout=200):
        for name in ("measuring", "measured"):
            plan = Plan.from_dict(found[name])
            assert plan.stages == 3 and len(plan.memory) == 2
            assert plan.placement == Placement.of([0, 0, 1], plan_boundaries(plan), 1)
            assert min(use.total for use in plan.memory) > 0
        assert found["loaded"]
        assert "for 3 stages on 2 places, 2 micro-batches" in "\n".join(Plan.from_dict(found["measured"]).lines())
        assert Plan.from_dict(found["other"]).placement == Placement.plain(2, [0, 4, 8], 1)
        assert found["refused"].endswith("use a plan made for it or leave plan_path out")
    check_files(tmp_path)


def plan_boundaries(plan: Plan) -> list[int]:
    assert plan.placement is not None
    return [plan.placement.stages[0].first_layer, *(stage.stop_layer for stage in plan.placement.stages)]


def check_files(folder: Path) -> None:
    cost = MeasuredCost.load(folder / "costs.json")
    assert cost.placement == Placement.of([0, 0, 1], [0, 2, 4, 8], 1)
    assert cost.layers is not None and [len(place) for place in cost.layers.stages] == [4, 4]
    assert cost.weights(0, 24.0) == 0 < min(cost.weights(1, 24.0), cost.weights(2, 24.0))
    timed = [stage.samples for stage in cost.stage_costs]
    assert min(sample.forward for samples in timed for sample in samples) > 1e-6
    # a stage that only goes forward has no backward; that of the others, less its weight gradients, may be lost in noise
    assert [max(sample.backward for sample in samples) > 1e-6 for samples in timed] == [False, True, True]
    assert cost.memory is not None and len(cost.memory.stages) == 3
    frozen, trained, _ = cost.memory.stages
    assert frozen.activations == 0 < trained.activations and frozen.keys_values > 0
    # K and V of two layers of attention, one of them frozen: nothing is divided among the stages of a place
    assert trained.keys_values == 2 * frozen.keys_values
    events = read(str(folder / "trace.json"))
    assert {event.stage for event in events} == {0, 1}
    assert {line.stage: sorted(line.waiting) for line in summarise(events)} == {0: [1], 1: [0]}
    assert "<svg" in timelines_svg(panels_of("trace", events))

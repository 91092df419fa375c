"""Which layers of a ``PipelineModule`` are a stage that only goes forward; and that its layers run as DeepSpeed runs them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.placing import placement_of
from ds_terapipe.plan.costs.cost import MeasuredCost
from ds_terapipe.plan.result import Plan
from ds_terapipe.schedule import Placement
from tests.elastic.test_elastic_wrapped import KEYS as MOMENTS, kept
from tests.elastic.training import FusedAdamOnCPU
from tests.megatron import common
from tests.pipeline.models import HIDDEN, Block, Embedding, Head, Tokens, gpt, masked_loss, steps_of, tied_gpt
from tests.pipeline.test_frozen import frozen
from tests.pipeline.training import allow_fp16, build_engine, raised, train
from tests.rows.train import GIVEN
from tests.spawn import launched
from tests.threads import on_threads

FROZEN, TRAINED, NOTHING = "F", "T", "."  # a layer with frozen weights, with trained ones, with none


def layer(kind: str) -> Any:
    return F.gelu if kind == NOTHING else nn.Linear(1, 1).requires_grad_(kind == TRAINED)


def placed(*places: Any, own: Any = ()) -> Placement:
    """The placement of a model of these layers on each place, functions or letters; ``own``: weights of the module itself."""
    modules, start = [], 0
    for number, kinds in enumerate(places):
        functions = [layer(kind) if isinstance(kind, str) else kind for kind in kinds]
        weights = [*own, *(p for f in functions for module in modules_of(f) for p in module.parameters())]
        # numbers are numpy's where DeepSpeed searched for layers by type
        place = {"_local_start": np.int64(start), "_local_stop": start + len(functions), "forward_funcs": functions}
        modules.append(SimpleNamespace(stage_id=number, tied_comms={}, parameters=partial(list, weights), **place))
        start += len(kinds)
    found = on_threads(len(modules), lambda rank, gather: placement_of(modules[rank], SimpleNamespace(gather=gather)))
    assert all(other == found[0] for other in found)
    assert {type(n) for n in (found[0].forward_only, *found[0].stages[0], *found[0].stages[-1])} == {int}
    return found[0]


TIED = nn.Linear(1, 1).requires_grad_(False)
HELD = nn.Linear(1, 1)
LOOK_UP = partial(lambda module, x: module(x), TIED)  # a layer that is a function of modules has their weights
CALLS = (lambda x: HELD(x), lambda x, layer=HELD: layer(x), (lambda layer: lambda x: layer(x))(HELD),
         SimpleNamespace(layer=HELD), SimpleNamespace(layer=HELD).__eq__)  # fmt: skip


@pytest.mark.parametrize(("places", "stages", "boundaries", "forward_only"), [
    (("TTT", "TTT"), [0, 1], [0, 3, 6], 0),
    (("TFF", "FFT"), [0, 1], [0, 3, 6], 0),  # frozen, but not from the beginning
    (("FTT", "TTT"), [0, 0, 1], [0, 1, 3, 6], 1), (("FFF", "TTT"), [0, 1], [0, 3, 6], 1),
    (("FFF", "FTT"), [0, 1, 1], [0, 3, 4, 6], 2), (("FFF", "FFF"), [0, 1], [0, 3, 6], 2),
    (("F.T", "TTT"), [0, 0, 1], [0, 2, 3, 6], 1),
    (("..T", "TTT"), [0, 1], [0, 3, 6], 0),  # a stage without weights would be one for nothing
    (("...", "FTT"), [0, 1, 1], [0, 3, 4, 6], 2), *((((LOOK_UP, call, "F"),), [0, 0], [0, 1, 3], 1) for call in CALLS),
    (((lambda x: x.HELD, "F"),), [0], [0, 2], 1),
])  # fmt: skip
def test_the_frozen_beginning_of_a_model_only_goes_forward(places, stages, boundaries, forward_only):
    assert placed(*places) == Placement.of(stages, boundaries, forward_only)


def test_layers_that_cannot_be_divided_stay_together():
    extra = nn.Parameter(torch.zeros(1))  # of the module itself: any layer may use it
    assert placed("FTT", "TTT", own=[extra]) == Placement.plain(2, [0, 3, 6])


MICRO_BATCHES, STEPS = 2, 2
Noisy = type("Noisy", (Block,), {"forward": lambda self, x: F.dropout(Block.forward(self, x), 0.3, self.training)})


def frozen_until(first: int) -> list[Any]:
    kinds = [Embedding, *[Noisy] * 6, Head]
    return [frozen(kind) if number < first else LayerSpec(kind) for number, kind in enumerate(kinds)]


def losses(interval: int, ours: bool) -> list[float]:
    """Of some steps with dropout, in DeepSpeed's own engine or uncut in ours; seeds are those of ``seed_layers``."""
    engine = build_engine(
        frozen_until(2), masked_loss, token_pipeline={"slices": 1} if ours else None, micro_batches=MICRO_BATCHES,
        config={"pipeline": {"use_reentrant": False}}, module={"activation_checkpoint_interval": interval},
    )  # fmt: skip
    found = train(engine, steps_of(STEPS, MICRO_BATCHES)).losses
    engine.destroy()
    return found


def seeds(rank: int, world_size: int) -> dict[int, tuple[list[float], list[float]]]:
    # DeepSpeed's own engine can't have a stage of which nothing is trained
    return {interval: (losses(interval, True), losses(interval, False)) for interval in (0, 3)}


def auto(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A run that plans, and one that has the measurements; its measurements."""
    found: dict[str, Any] = {}
    costs = f"{folder}/costs.json"
    for name, keys in (("measuring", {}), ("measured", {"memory_gb": 1.0})):
        engine = build_engine(frozen_until(2), masked_loss, token_pipeline={"measurements_path": costs, **keys})
        train(engine, steps_of(14, 2))
        (found[name],) = engine._slicer.state()["plans"]
        engine.destroy()
    return {**found, "cost": MeasuredCost.load(costs)}


TWO = {"slices": 3, "stages_per_place": 2}
KEYS = {"own": None, "plain": {"slices": 3}, "interleaved": TWO, "v": {**TWO, "placement": "v"}, "uneven": None}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}}  # another scale after each step
PLACED = ("interleaved", "v")
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 50}}}
PRECISIONS = {"bf16": (BF16, ("own", "plain", "v")), "fp16": (FP16, ("plain", "v")), "fp32": ({}, tuple(KEYS))}


class Shifted(Tokens):
    """With weights that the first stage's copy alone uses, as in Megatron-DeepSpeed, or has, as in our GPT."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(HIDDEN)), nn.Parameter(torch.ones(HIDDEN)) if first else None

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, positions = super().forward(inputs)
        return hidden * self.scale + self.shift, positions


class Uneven(PipelineModule):
    def _partition_layers(self, method: str = "") -> None:
        self.parts = [0, 5, 8]
        self._set_bounds(*self.parts[self.stage_id :][:2])


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all((some[name] == others[name]).all() for name in others)


def held(engine: Any) -> list[dict[str, Any]]:
    """The model's weights, or masters, and moments, whole; loss scale, counts and rate."""
    names, wrapper, state = dict(engine.module.named_parameters()), engine.optimizer, engine.basic_optimizer.state
    plain = {} if hasattr(wrapper, "optimizer") else {name: (p, *map(state[p].get, MOMENTS)) for name, p in names.items()}
    found = {id(names[name]): tensors for name, tensors in (plain or kept(engine)).items()}
    copies = set[str]()
    whole = [common.whole_tensors(engine.module, lambda p, n=n: found[id(p)][n], copies) for n in range(3)]  # type: ignore[misc]
    assert copies <= {"tied_modules.tokens.shift"}
    scale = np.array([getattr(wrapper, "loss_scale", 0), max(float(each["step"]) for each in state.values())])
    counts = engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration, *engine.get_lr()
    return [*whole, {"scale": scale}, {"counts": np.array(counts)}]


def exchanged(engines: dict[str, Any], folder: str, precision: str) -> Iterator[tuple[Any, ...]]:
    """Who saved and who loaded, what the two held then, and their losses from there on."""
    for number, (saver, engine) in enumerate(engines.items()):
        first, second = ([step] for step in steps_of(2 * len(engines), 2)[2 * number :][:2])
        train(engine, first * 2)
        engine.save_checkpoint(f"{folder}/{precision}", tag=saver, client_state={"note": saver})
        saved, losses = held(engine), train(engine, second).losses
        for loader in (name for name in engines if name not in (saver, "uneven") and (saver != "uneven" or name in PLACED)):
            client = engines[loader].load_checkpoint(f"{folder}/{precision}", tag=saver)[1]
            assert ("terapipe" in str(client.keys())) == (loader == "own") and client["note"] == saver
            yield saver, loader, saved, held(engines[loader]), losses, train(engines[loader], second).losses


def several(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[Any], list[str]]:
    """Of each placement weights at the start, names, ranks of tied layers; all that is exchanged; and errors."""
    found, pairs = list[Any](), list[Any]()
    allow_fp16()
    for precision, (config, names) in PRECISIONS.items():
        optimizer = FusedAdamOnCPU if precision == "fp16" else GIVEN["adamw"]
        options: dict[str, Any] = {"optimizer": optimizer, "config": {**config, **WARMUP}}
        specs = [TiedLayerSpec("tokens", Shifted, first=True), *tied_gpt(tokens=Shifted)[1:]]
        engines = {
            n: build_engine(specs, masked_loss, token_pipeline=KEYS[n], kind={"uneven": Uneven}.get(n, PipelineModule), **options)
            for n in names
        }
        for engine in engines.values():
            tied = [comm["ranks"] for comm in engine.module.tied_comms.values()]
            layers = {n.removeprefix("tied_modules.").split(".")[0] for n, _ in engine.module.named_parameters()}
            found.append((common.whole_tensors(engine.module), layers, tied))
        pairs += exchanged(engines, folder, precision)
        assert engines["v"].load_checkpoint(f"{folder}/{precision}", tag="plain", load_optimizer_states=False)[0]
        assert same(held(engines["v"])[0], common.whole_tensors(engines["v"].module))  # masters too
    torn = Path(folder, "fp32", "own", "mp_rank_00_model_states.pt")
    if rank == 0:  # of DeepSpeed's own engine: there are no checksums
        states = torch.load(torn, weights_only=False)
        states["optimizer"]["state"][1]["exp_avg"] = torch.zeros(3)
        torch.save(states, torn)
    engine = engines["v"]
    before = held(engine)
    errors = [raised(partial(engine.load_checkpoint, f"{folder}/fp32", tag="own"))]
    assert all(map(same, before, held(engine)))
    assert engine.load_checkpoint(f"{folder}/fp32", tag="own", load_optimizer_states=False)[0] is not None
    assert all(map(same, before[1:4], held(engine)[1:4])) and not same(before[0], held(engine)[0])
    muon = {"optimizer": {"type": "Muon", "params": {"torch_adam": True}}, "config": {"zero_optimization": {"stage": 1}}}
    for specs, stages, more in ((gpt(1), 2, {}), (gpt(6), 1, {}), (gpt(6), 2, muon)):  # fewer layers than stages, one place
        errors.append(raised(partial(build_engine, specs, masked_loss, token_pipeline=TWO, stages=stages, **more)))
    return found, pairs, errors


seeded, planned = launched(seeds, 2), launched(auto, 2, timeout=200, folder=True)
spread = launched(several, 2, folder=True)


def test_layers_go_to_their_places_with_their_weights(spread):
    assert all(same(start, found[5][0]) for found, *_ in spread for start, *_ in found[5:])
    assert [[of_rank[0][each][1:] for of_rank in spread] for each in (6, 7, 8)] == [
        [({"tokens", "1", "2", "3"}, [[0, 1]]), ({"4", "5", "6", "tokens"}, [[0, 1]])],
        [({"tokens", "1", "2", "4"}, [[0, 1]]), ({"3", "5", "6", "tokens"}, [[0, 1]])],  # cut by parameters
        [({"tokens", "1", "2", "5", "6"}, [[0]]), ({"3", "4"}, [])],
    ]


def test_a_training_goes_on_in_any_placement_from_the_same_bits(spread):
    for _, pairs, _ in spread:
        for number, (saver, loader, saved, loaded, losses, others) in enumerate(pairs):
            assert all(map(same, saved, loaded)), (saver, loader)
            assert others == pytest.approx(losses, rel=1e-3 if number < 8 else 1e-6), (saver, loader)
        assert len(pairs) == 22 and len({tuple(losses) for *_, losses, _ in pairs}) == 10


def test_states_of_other_shapes_and_what_cannot_be_placed_are_refused(spread):
    wanted = ("exp_avg of shape [3], not [", "each of the 4 stages has one of the 3 layers", "on one place", "another beside")
    for _, _, errors in spread:
        for text, part in zip(errors, wanted, strict=True):
            assert text.startswith("ConfigError: ") and part in text and "\n" not in text, text


def test_layers_of_a_divided_place_have_the_seeds_and_checkpoints_of_the_whole(seeded):
    for found in seeded:
        for interval, (ours, theirs) in found.items():
            assert ours == pytest.approx(theirs, rel=1e-6), interval
        assert len({tuple(ours) for ours, _ in found.values()}) > 1  # the seeds do depend on the interval


def test_auto_measures_and_plans_for_several_stages_on_a_place(planned):
    for found in planned:
        for name in ("measuring", "measured"):
            plan = Plan.from_dict(found[name])
            assert plan.placement == Placement.of([0, 0, 1], [0, 2, 4, 8], 1)
            assert plan.stages == 3 and len(plan.memory) == 2 and min(use.total for use in plan.memory) > 0
        assert "for 3 stages on 2 places, 2 micro-batches" in "\n".join(plan.lines())
    cost = planned[0]["cost"]
    assert cost.placement == Placement.of([0, 0, 1], [0, 2, 4, 8], 1)
    assert cost.layers is not None and [len(place) for place in cost.layers.stages] == [4, 4]
    assert cost.weights(0, 24.0) == 0 < min(cost.weights(1, 24.0), cost.weights(2, 24.0))
    timed = [stage.samples for stage in cost.stage_costs]
    assert all(max(sample.forward for sample in samples) > 1e-6 for samples in timed)  # one may be lost in noise
    # a stage that only goes forward has no backward; one of the others, less its weight gradients, may be lost in noise
    assert [max(sample.backward for sample in samples) > 1e-6 for samples in timed] == [False, True, True]
    assert cost.memory is not None and len(cost.memory.stages) == 3
    first, second, _ = cost.memory.stages
    # of a unit that only goes forward there is its output
    assert 2 * first.activations == first.keys_values > 0 and first.activations < second.activations
    # K and V of two layers of attention, one of them frozen: nothing is divided among the stages of a place
    assert second.keys_values == 2 * first.keys_values

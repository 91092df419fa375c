"""Values set on live modules move with them where a spec builds the same structure; other changes are refused."""

import gc
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from ds_terapipe import ConfigError
from ds_terapipe.tracing.chrome import read
from tests.elastic.test_elastic_moves import Lora
from tests.elastic.training import MODELS, Case, data_of, engine_of, reference, weights
from tests.pipeline.models import HIDDEN, POSITIONS, SEED, VOCABULARY, Block, Embedding, Head, gpt, masked_loss
from tests.pipeline.training import difference
from tests.spawn import launched

# DeepSpeed's own optimizer for fp32 on GPUs, which counts the steps of a group in the state of its last parameter
CASE = Case("gpt", "muon", 2, ((1, 1), (2, 2)), ((1, 1), (3, 2)), slices=None, steps=5)
DATA = data_of(CASE)
WEIGHED = (0, 1, 3)  # the first steps of the shapes
OFF = 1e-5


class Rich(Block):
    """A block with dropout, buffers, of which one is not saved, and a tensor that is neither buffer nor parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.plain, self.more = nn.Dropout(0.1), torch.zeros(()), {"by": [1.0, torch.zeros(())]}
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.also = self.shift  # a second name

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.drop(hidden) * self.scale + self.shift + self.plain + self.more["by"][0] * self.more["by"][1])


def rich() -> list[Any]:
    return [LayerSpec(Embedding), *(LayerSpec(Rich) for _ in range(4)), LayerSpec(Head)]


def prepare(layers: list[nn.Module], first: int = 0) -> list[nn.Module]:
    """Change layers that were built as users do: load weights, freeze some as LoRA does, set buffers, marks and dropout."""
    for entry, layer in enumerate(layers, start=first):
        generator = torch.Generator().manual_seed(900 + entry)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
        if isinstance(layer, Rich):
            layer.drop.p = 0.0
            layer.scale.fill_(1 + entry / 100)
            layer.shift.fill_(entry / 50)
            layer.up.requires_grad_(entry == 1)
            layer.qkv.weight.lamb_rows = (32, 32, 32)
            layer.before_mlp.weight.tensor_model_parallel = False
            layer.plain, layer.more["by"] = torch.linspace(0, entry / 10, 32), [entry / 8, torch.linspace(1, 0, 32)]
            layer.window, layer.drop.spans = entry, (entry, 2)  # the spec builds neither
            layer.up.weight.mean = torch.full((2,), entry)
            layer.seen = deque([np.full(2, entry), {entry}], maxlen=3)
            layer.register_buffer("late", torch.ones(1), persistent=False)
    return layers


class Prepared(PipelineModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare(self.forward_funcs, self._local_start)


def built(specs: list[Any]) -> list[nn.Module]:
    layers = []
    for entry, spec in enumerate(specs):
        torch.manual_seed(SEED + entry)
        layers.append(spec.build())
    return layers


def lost(engine: Any) -> list[str]:  # of the settings of `prepare`
    problems = []
    for entry, layer in enumerate(engine.module.forward_funcs, start=engine.module._local_start):
        if not isinstance(layer, Rich):
            continue
        trains, qkv, norm = entry >= engine.frozen_layers, layer.qkv.weight, layer.before_mlp.weight
        held = f"{layer.seen} {layer.up.weight.mean}"
        flags = [p.requires_grad for p in (layer.up.weight, layer.down.weight)], layer.training, held
        values = layer.drop.p, layer.window, layer.drop.spans, bool({"shift", "late"} & layer.state_dict().keys())
        seen = f"deque([array([{entry}, {entry}]), {{{entry}}}], maxlen=3) tensor([{entry}, {entry}])"
        found = flags, values, qkv.lamb_rows, norm.tensor_model_parallel, layer.scale.item(), layer.also.item()
        wanted = ([entry == 1 and trains, trains], trains, seen), (0.0, entry, (entry, 2), False), (32, 32, 32), False
        if found != (*wanted, pytest.approx(1 + entry / 100), pytest.approx(entry / 50)):
            problems.append(f"{entry}: {found}")
    return problems


def weighed(engine: Any) -> tuple[int, int]:
    """Bytes of all parameters in this process that have a place for each of their elements, each once; of those that are here."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is nn.Parameter]
    storages = {each.data_ptr(): each.nbytes() for p in alive if (each := p.untyped_storage()).nbytes() >= p.nbytes}
    return sum(storages.values()), sum(p.nbytes for p in engine.module.parameters())


def run(specs: list[Any], **options: Any) -> dict[str, Any]:
    engine = engine_of(CASE, specs=specs, **options)
    found: dict[str, Any] = {name: [] for name in ("losses", "wrong", "random", "weighed")}
    found["first"], change = weighed(engine), engine._controller.change

    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]

    def noted(*args: Any, **more: Any) -> None:
        before = states()
        change(*args, **more)
        found["random"].append(before == states())

    engine._controller.change = noted
    # both ranks read everything: they are the first and the last stage at the start
    for step, batches in enumerate(DATA):
        found["losses"].append(float(engine.train_batch(iter(batches))))
        found["weighed"] += [weighed(engine)] if step in WEIGHED else []
        found["wrong"] += [f"step {step}: {text}" for text in lost(engine)]
    del engine._controller.change
    found["weights"] = weights(engine)
    engine.destroy()
    return found


def refused_midway(rank: int, folder: str) -> dict[str, Any]:
    """Reshape with a module on the second stage that its spec does not build, then without; return all that is told."""
    lines: list[str] = []
    traced = {"slices": 1, "trace_path": f"{folder}/trace.json", "trace_steps": [1, 5]}
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "told"}}
    with (
        mock.patch("ds_terapipe.elastic.report.emit", lines.append),
        mock.patch("ds_terapipe.elastic.report.logger.warning", lambda text, *args: lines.append(text % args)),
    ):
        engine = engine_of(CASE, config=monitor, token_pipeline=traced)
        losses, layer = [float(engine.train_batch(iter(DATA[0])))], engine.module.forward_funcs[0]
        if rank == 1:
            layer.out = Lora(layer.out)
        before = state_of(engine)
        with pytest.raises(ConfigError) as refused:
            engine.train_batch(iter(DATA[1]))
        after = state_of(engine)
        if rank == 1:
            layer.out = layer.out.base
        losses += [float(engine.train_batch(iter(step))) for step in DATA[1:]]
        engine.destroy()
    same = before[1:] == after[1:] and all(map(torch.equal, before[0], after[0]))
    changes = [] if rank else [e.step for e in read(traced["trace_path"]) if (e.rank, e.name) == (0, "reshape")]
    return {"said": str(refused.value), "same": same, "losses": losses, "lines": lines, "changes": changes}


def state_of(engine: Any) -> tuple[Any, ...]:
    module, groups = engine.module, engine.basic_optimizer.param_groups
    grouped = [[id(p) for p in group["params"]] for group in groups]
    shape = engine.shape, engine.frozen_layers, engine.global_steps, list(module.parts), id(module._grid)
    return [p.detach().clone() for p in module.parameters()], [id(p) for p in module.parameters()], grouped, shape


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "carried": run(rich(), kind=Prepared), "modules": run(built(gpt())), "refused": refused_midway(rank, folder),
        "told": {path.stem: path.read_text().split() for path in Path(folder).rglob("Elastic_*.csv")},
    }  # fmt: skip


ranks = launched(worker, 2, timeout=200, folder=True)


@pytest.mark.parametrize(("kind", "specs"), [("carried", lambda: prepare(built(rich()))), ("modules", gpt)])
def test_what_was_set_on_live_layers_is_where_the_layers_are(ranks: Any, kind: str, specs: Any) -> None:
    with mock.patch.dict(MODELS, {kind: (specs, masked_loss, MODELS["gpt"][2])}):
        wanted = reference(replace(CASE, model=kind))
    whole = sum(weight.nbytes for weight in wanted.weights.values())
    for found in (rank[kind] for rank in ranks):
        assert found["wrong"] == [] and found["losses"] == pytest.approx(wanted.losses, rel=OFF)
        assert max(difference(weight, wanted.weights[name]) for name, weight in found["weights"].items()) <= OFF
        assert found["random"] == [True] * 3, "a change draws random numbers"
        assert found["first"][0] == found["first"][1] < whole, "weights are where they are trained and nowhere else"
        assert all(alive == here for alive, here in found["weighed"])
        assert [here for _, here in found["weighed"]] == [found["first"][1], whole, found["weighed"][2][1]]


def test_a_refused_reshape_changes_nothing_and_training_goes_on(ranks: Any) -> None:
    for found in (rank["refused"] for rank in ranks):
        assert found["same"] and found["said"] == ranks[0]["refused"]["said"] and "\n" not in found["said"]
        assert "got module 3.out (Lora), set on a live layer" in found["said"]
        assert found["losses"] == pytest.approx(reference(CASE).losses, rel=OFF)


def test_a_transition_is_one_line_and_events_for_the_monitor(ranks: Any) -> None:
    lines = [line for line in ranks[0]["refused"]["lines"] if "layers frozen" in line]
    one, two = "1 stage x 2 replicas (2 micro-batches of 2)", "2 stages x 1 replica (4 micro-batches of 2)"
    wanted = [f"step 1: 1 of 6 layers frozen, {two} -> {one}, ", f"step 2: 2 of 6 layers frozen, {one}, "]
    wanted += [f"step 3: 2 of 6 layers frozen, {one} -> {two}, "]
    assert len(lines) == 3 and all(text in line for text, line in zip(wanted, lines, strict=True)), lines
    assert sum("a rank has up to" in line for line in ranks[0]["refused"]["lines"]) == 1
    assert ranks[1]["refused"]["lines"] == [] and ranks[0]["refused"]["changes"] == [2, 3, 4], "counted from 1"
    told, block = ranks[0]["told"], sum(p.numel() for p in Block().parameters())
    seconds, freed = (told.pop(f"Elastic_{name}") for name in ("transition_seconds", "freed_bytes"))
    assert told == {
        f"Elastic_{name}": [f"step,{name}", *(f"{8 * step},{value}" for step, value in enumerate(values, start=1))]
        for name, values in (("frozen_layers", (1, 2, 2)), ("stages", (1, 1, 2)), ("replicas", (2, 2, 1)))
    }
    # two moments of four bytes: of the tables, on the first stage; of a block, on both replicas
    tables = (VOCABULARY + POSITIONS) * HIDDEN
    assert len(seconds) == 4 and freed[1:3] == [f"8,{8 * tables}", f"16,{2 * 8 * block}"]

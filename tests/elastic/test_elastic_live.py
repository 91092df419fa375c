"""Values set on live modules move with them where a spec builds the same structure; other changes are refused."""

from __future__ import annotations

import gc
import random
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
from tests.elastic.test_elastic_moves import Lora
from tests.elastic.training import (
    MODELS,
    Case,
    data_of,
    engine_of,
    grouped_adamw,
    prefixes,
    reference,
    weights,
    what_is_wrong,
)
from tests.pipeline.models import SEED, Block, Embedding, Head, Plain, gpt, masked_loss
from tests.pipeline.training import difference
from tests.spawn import launched

# DeepSpeed's own optimizer for fp32 on GPUs, which counts the steps of a group in the state of its last parameter
CASE = Case("gpt", "fused adam", 2, ((1, 1), (2, 2)), ((1, 1), (3, 2)), slices=None, steps=5)
DATA = data_of(CASE)
WEIGHED = (0, 1, 3)  # the first steps of the shapes
OFF = 1e-5


class Rich(Block):
    """A block with dropout and buffers, of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.drop(hidden) * self.scale + self.shift)


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
            layer.window, layer.drop.spans = entry, (entry, 2)  # the spec builds neither
    return layers


class Prepared(PipelineModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare(self.forward_funcs, self._local_start)


def built(specs: list[Any]) -> list[nn.Module]:
    """Modules in place of specs, the same on every rank."""
    layers = []
    for entry, spec in enumerate(specs):
        torch.manual_seed(SEED + entry)
        layers.append(spec.build())
    return layers


def lost(engine: Any) -> list[str]:
    """The settings of `prepare` that the live layers do not have."""
    problems = []
    for entry, layer in enumerate(engine.module.forward_funcs, start=engine.module._local_start):
        if not isinstance(layer, Rich):
            continue
        trains, scale, shift = entry >= engine.frozen_layers, torch.tensor(1 + entry / 100), torch.tensor(entry / 50)
        flags = [p.requires_grad for p in (*layer.up.parameters(), layer.down.weight)]
        found = (
            layer.drop.p,
            float(layer.scale),
            float(layer.shift),
            layer.training,
            "shift" in layer.state_dict(),
            flags,
        )
        wanted = 0.0, float(scale), float(shift), trains, False, [*[entry == 1 and trains] * 2, trains]
        marks = (
            layer.qkv.weight.lamb_rows,
            layer.before_mlp.weight.tensor_model_parallel,
            layer.window,
            layer.drop.spans,
        )
        if (found, marks) != (wanted, ((32, 32, 32), False, entry, (entry, 2))):
            problems.append(f"{entry}: {found}, {marks}")
    return problems


def weighed(engine: Any) -> tuple[int, int]:
    """Bytes of all parameters in this process that have a place for each of their elements, each once; of those that are here."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is nn.Parameter]
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in alive
        if p.untyped_storage().nbytes() >= p.nbytes
    }
    return sum(storages.values()), sum(p.nbytes for p in engine.module.parameters())


def bytes_by_name(engine: Any) -> dict[str, int]:
    """Of weights, moments and buffers of more than one element."""
    state = engine.basic_optimizer.state
    each = {name: (p, *state.get(p, {}).values()) for name, p in engine.module.named_parameters()}
    each |= {name: (buffer,) for name, buffer in engine.module.named_buffers()}
    return {
        name: sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.numel() > 1)
        for name, tensors in each.items()
    }


def settings(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Rate and decay of every parameter that is trained, by name."""
    of = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: of[p] for name, p in module.named_parameters() if p in of}


def run(specs: list[Any], **options: Any) -> dict[str, Any]:
    engine = engine_of(CASE, specs=specs, **options)
    found: dict[str, Any] = {name: [] for name in ("losses", "wrong", "random", "weighed", "moved")}
    found["first"] = weighed(engine)
    change, reshape = engine._change, engine._reshape

    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]

    def noted(*args: Any, **more: Any) -> None:
        before = states()
        change(*args, **more)
        found["random"].append(before == states())

    def counted(*args: Any) -> int:
        before = bytes_by_name(engine)
        sent = reshape(*args)
        lacked = sum(size for name, size in bytes_by_name(engine).items() if name not in before)
        found["moved"].append((sent, lacked))
        return int(sent)

    engine._change, engine._reshape = noted, counted
    # both ranks read everything: they are the first and the last stage at the start
    for step, batches in enumerate(DATA):
        found["losses"].append(float(engine.train_batch(iter(batches))))
        found["weighed"] += [weighed(engine)] if step in WEIGHED else []
        wrong = lost(engine) if "kind" in options else what_is_wrong(engine, gpt(), CASE.frozen(step))
        found["wrong"] += [f"step {step}: {text}" for text in wrong]
    del engine._change, engine._reshape
    found |= {"weights": weights(engine), "settings": settings(engine.module, engine.basic_optimizer)}
    engine.destroy()
    return found


def refused_midway(rank: int, folder: str) -> dict[str, Any]:
    """On the second stage something is set that its spec does not build, at the step of the reshape; then it is taken away.

    Meanwhile, what the log and the monitor are told.
    """
    lines: list[str] = []
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "told"}}
    with (
        mock.patch("ds_terapipe.elastic.report.emit", lines.append),
        mock.patch("ds_terapipe.elastic.report.logger.warning", lambda text, *args: lines.append(text % args)),
    ):
        engine = engine_of(CASE, config=monitor)
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
    return {"said": str(refused.value), "same": same, "losses": losses, "lines": lines}


def state_of(engine: Any) -> tuple[Any, ...]:
    module, groups = engine.module, engine.basic_optimizer.param_groups
    grouped = [[id(p) for p in group["params"]] for group in groups]
    shape = engine.shape, engine.frozen_layers, engine.global_steps, list(module.parts), id(module._grid)
    return [p.detach().clone() for p in module.parameters()], [id(p) for p in module.parameters()], grouped, shape


class Hooked(PipelineModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.stage_id == 1:
            self.forward_funcs[0].up.register_forward_hook(lambda *args: None)


def refused_tied(rank: int) -> str:
    """Put a hook on the first stage's copy of a tied layer, which the second stage would have to build."""
    engine = engine_of(replace(CASE, model="tied"))
    (hooked,) = engine.module.tied_modules.children()
    if rank == 0:
        hooked.register_forward_hook(lambda *args: None)
    engine.train_batch(iter(DATA[0]))
    with pytest.raises(ConfigError) as refused:
        engine.train_batch(iter(DATA[1]))
    engine.destroy()
    return str(refused.value)


def dropping(case: Case) -> list[float]:
    engine = engine_of(replace(case, model="dropping"))
    torch.manual_seed(SEED)
    losses = [float(engine.train_batch(iter(step))) for step in DATA]
    engine.destroy()
    return losses


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {
        "dropout": [dropping(CASE), dropping(replace(CASE, resize=()))],
        "carried": run(rich(), kind=Prepared),
        "modules": run(built(gpt())),
        "refused": refused_midway(rank, folder),
        "tied": refused_tied(rank),
        "rows": {path.stem: path.read_text().split()[1:] for path in sorted(Path(folder).rglob("Elastic_*.csv"))},
    }
    with pytest.raises(ConfigError) as refused:
        engine_of(CASE, kind=Hooked)
    return {**found, "first": str(refused.value)}


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


def test_groups_keep_their_settings_by_name(ranks: Any) -> None:
    model = Plain(gpt())
    wanted = settings(model, grouped_adamw(list(model.parameters())))
    for found in (rank["modules"] for rank in ranks):
        trained = {
            name for name in found["weights"] if not name.startswith(prefixes(gpt(), CASE.frozen(CASE.steps - 1)))
        }
        assert found["settings"] == {name: wanted[name] for name in trained}
    assert len(set(wanted.values())) == 3


def test_what_a_rank_lacks_is_all_that_is_sent(ranks: Any) -> None:
    for moves in zip(*(rank["modules"]["moved"] for rank in ranks), strict=True):
        assert sum(sent for sent, _ in moves) == sum(lacked for _, lacked in moves)
    assert any(sent for sent, _ in ranks[0]["modules"]["moved"])


def test_dropout_does_not_depend_on_the_shape(ranks: Any) -> None:
    for reshaped, stayed in (rank["dropout"] for rank in ranks):
        assert reshaped == pytest.approx(stayed, rel=OFF)
        assert reshaped != pytest.approx(reference(replace(CASE, model="dropping")).losses, rel=10 * OFF)


def test_a_refused_reshape_changes_nothing_and_training_goes_on(ranks: Any) -> None:
    for found in (rank["refused"] for rank in ranks):
        assert found["same"] and found["said"] == ranks[0]["refused"]["said"] and "\n" not in found["said"]
        assert "got module 3.out (Lora), set on a live layer" in found["said"]
        assert found["losses"] == pytest.approx(reference(CASE).losses, rel=OFF)


@pytest.mark.parametrize(("when", "module"), [("first", "3.up"), ("tied", "tied_modules.tokens")])
def test_a_hook_is_refused_before_there_is_an_engine_and_on_a_tied_layer(ranks: Any, when: str, module: str) -> None:
    text = f"elastic_pipeline.resize.policy: got 1 hooks on module {module}, registered on a live layer"
    assert all(rank[when].startswith(text) and "\n" not in rank[when] for rank in ranks), ranks[0][when]


def test_a_transition_is_one_line_and_events_for_the_monitor(ranks: Any) -> None:
    lines = [line for line in ranks[0]["refused"]["lines"] if "layers frozen" in line]
    one, two = "1 stage x 2 replicas (2 micro-batches of 2)", "2 stages x 1 replica (4 micro-batches of 2)"
    wanted = [f"step 1: 1 of 6 layers frozen, {two} -> {one}, ", f"step 2: 2 of 6 layers frozen, {one}, "]
    wanted += [f"step 3: 2 of 6 layers frozen, {one} -> {two}, "]
    assert len(lines) == 3 and all(text in line for text, line in zip(wanted, lines, strict=True)), lines
    assert sum("a rank has up to" in line for line in ranks[0]["refused"]["lines"]) == 1
    assert ranks[1]["refused"]["lines"] == []
    rows = {name: [[float(cell) for cell in row.split(",")] for row in told] for name, told in ranks[0]["rows"].items()}
    named = ("frozen_layers", "stages", "replicas", "transition_seconds", "freed_bytes")
    assert set(rows) == {f"Elastic_{name}" for name in named}
    assert rows["Elastic_stages"] == [[8, 1], [16, 1], [24, 2]]
    assert [row[1] for row in rows["Elastic_frozen_layers"]] == [1, 2, 2]
    freed = [row[1] for row in rows["Elastic_freed_bytes"]]
    moments = [2 * sum(p.numel() * 4 for p in kind().parameters()) for kind in (Embedding, Block)]
    assert freed[2] == 0 and moments[0] <= freed[0] < 1.6 * moments[0]  # with gradients
    assert 2 * moments[1] <= freed[1] < 3.2 * moments[1]  # there are two replicas then

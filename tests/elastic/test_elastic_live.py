"""What a rebuild from specs would lose: what was set on live modules moves with them, or is refused before anything changes."""

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
from tests.elastic.training import Case, data_of, engine_of
from tests.mutants.claims import holds
from tests.pipeline.models import SEED, Block, Embedding, Head, Plain, gpt, masked_loss
from tests.pipeline.training import difference
from tests.spawn import run_ranks

CASE = Case("gpt", "adamw", 2, ((2, 1), (4, 2)), ((2, 1), (5, 2)), slices=None, steps=8)
DATA = data_of(CASE)
WEIGHED = (0, 2, 5)  # the first steps of the shapes
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


def prepare(entry: int, layer: nn.Module) -> None:
    """What a user does to layers that were built: loads weights, freezes some as LoRA does, sets buffers, marks, dropout."""
    generator = torch.Generator().manual_seed(900 + entry)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    if not isinstance(layer, Rich):
        return
    layer.drop.p = 0.0
    layer.scale.fill_(1 + entry / 100)
    layer.shift.fill_(entry / 50)
    layer.up.requires_grad_(entry == 1)
    layer.qkv.weight.lamb_rows = (32, 32, 32)
    layer.before_mlp.weight.tensor_model_parallel = False
    layer.out.weight.note = f"entry {entry}"
    layer.window, layer.drop.spans = entry, (entry, 2)  # the spec builds neither


class Prepared(PipelineModule):
    """A module whose layers get `prepare` when they are there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for entry, layer in enumerate(self.forward_funcs, start=self._local_start):
            prepare(entry, layer)


def lost(engine: Any) -> list[str]:
    """What of `prepare` the live layers do not have."""
    problems = []
    for entry, layer in enumerate(engine.module.forward_funcs, start=engine.module._local_start):
        if not isinstance(layer, Rich):
            continue
        frozen = entry < engine.frozen_layers
        wanted = {
            "p": (layer.drop.p, 0.0),
            "scale": (float(layer.scale), float(torch.tensor(1 + entry / 100))),
            "shift": (float(layer.shift), float(torch.tensor(entry / 50))),
            "requires_grad": ([p.requires_grad for p in layer.up.parameters()], [entry == 1 and not frozen] * 2),
            "others": (layer.down.weight.requires_grad, not frozen),
            "lamb_rows": (getattr(layer.qkv.weight, "lamb_rows", None), (32, 32, 32)),
            "mark": (getattr(layer.before_mlp.weight, "tensor_model_parallel", None), False),
            "note": (getattr(layer.out.weight, "note", None), f"entry {entry}"),
            "settings": ((getattr(layer, "window", None), getattr(layer.drop, "spans", None)), (entry, (entry, 2))),
            "training": (layer.training, not frozen),
            "saved": ("shift" in layer.state_dict(), False),
        }
        problems += [f"{entry}: {name} {got}" for name, (got, value) in wanted.items() if got != value]
    return problems


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]


def train(engine: Any, found: dict[str, Any], first: int = 0, stop: int = CASE.steps) -> None:
    for step in range(first, stop):
        batches = DATA[step]  # both ranks read everything: they are the first and the last stage at the start
        found.setdefault("losses", []).append(float(engine.train_batch(iter(batches))))
        if step in WEIGHED and "weighed" in found:
            found["weighed"].append((bytes_of_parameters(), sum(p.nbytes for p in engine.module.parameters())))


def bytes_of_parameters() -> int:
    """Memory of all parameters in this process that have a place for each of their elements, each once."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is nn.Parameter]
    alive = [p for p in alive if p.untyped_storage().nbytes() >= p.nbytes]
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in alive}.values())


def carried() -> dict[str, Any]:
    engine, found = engine_of(CASE, specs=rich(), kind=Prepared), {"lost": [], "random": [], "weighed": []}
    change = engine._change

    def noted(*args: Any, **options: Any) -> None:
        before = random_states()
        change(*args, **options)
        found["random"].append(before == random_states())

    engine._change = noted
    for step in range(CASE.steps):
        train(engine, found, step, step + 1)
        found["lost"] += [f"step {step}: {text}" for text in lost(engine)]
    del engine._change
    found["weights"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def built() -> list[nn.Module]:
    """Modules in place of specs, the same on every rank."""
    layers = []
    for entry, spec in enumerate(gpt()):
        torch.manual_seed(SEED + entry)
        layers.append(spec.build())
    return layers


def given_modules() -> dict[str, Any]:
    engine = engine_of(CASE, specs=built())
    found: dict[str, Any] = {"weighed": []}
    found["first"] = bytes_of_parameters(), sum(p.nbytes for p in engine.module.parameters())
    train(engine, found)
    found["weights"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


# ---------------------------------------------------------------------------------------------------------- refusals


def with_lora(layer: Block) -> Any:
    out = layer.out
    layer.out = Lora(out)
    return lambda: setattr(layer, "out", out)


def with_hook(layer: Block) -> Any:
    return layer.up.register_forward_hook(lambda *args: None).remove


def with_another_shape(layer: Block) -> Any:
    bias = layer.down.bias
    layer.down.bias = nn.Parameter(torch.zeros(1))
    return lambda: setattr(layer.down, "bias", bias)


CHANGES = {"lora": with_lora, "hook": with_hook, "another shape": with_another_shape}
SAYS = {
    "lora": "got module 3.out (Lora), set on a live layer",
    "hook": "got 1 hooks on module 3.up, registered on a live layer",
    "another shape": "got parameter 3.down.bias of shape [1], built as [32], set on a live layer",
}


def refused_midway(rank: int) -> dict[str, Any]:
    """On the second stage something is set that its spec does not build, at the step of the reshape; then it is taken away."""
    engine, found = engine_of(CASE), {"said": {}, "changed": []}
    train(engine, found, 0, 2)
    for name, change in CHANGES.items():
        undo = change(engine.module.forward_funcs[0]) if rank == 1 else (lambda: None)
        before = state_of(engine)
        with pytest.raises(ConfigError) as refused:
            engine.train_batch(iter(DATA[2]))
        found["said"][name] = str(refused.value)
        found["changed"] += [] if alike(before, state_of(engine)) else [name]
        undo()
    train(engine, found, 2)
    engine.destroy()
    return found


def refused_tied(rank: int) -> str:
    """A hook on the first stage's copy of a tied layer, which the second stage would have to build."""
    engine = engine_of(replace(CASE, model="tied"))
    (hooked,) = engine.module.tied_modules.children()
    if rank == 0:
        hooked.register_forward_hook(lambda *args: None)
    losses = [float(engine.train_batch(iter(DATA[step]))) for step in range(2)]
    with pytest.raises(ConfigError) as refused:
        engine.train_batch(iter(DATA[2]))
    engine.destroy()
    return str(refused.value) if losses[0] != losses[1] else ""


def state_of(engine: Any) -> tuple[Any, ...]:
    module = engine.module
    return (
        engine.shape, engine.frozen_layers, engine.global_steps, list(module.parts), id(module._grid),
        [id(parameter) for parameter in module.parameters()],
        [[id(p) for p in group["params"]] for group in engine.basic_optimizer.param_groups],
        [parameter.detach().clone() for parameter in module.parameters()],
    )  # fmt: skip


def alike(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return some[:-1] == others[:-1] and all(map(torch.equal, some[-1], others[-1]))


class Hooked(PipelineModule):
    """A module with a hook on a layer of the last stage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.stage_id == 1:
            with_hook(self.forward_funcs[0])


def refused_first() -> str:
    with pytest.raises(ConfigError) as refused:
        engine_of(CASE, kind=Hooked)
    return str(refused.value)


# ------------------------------------------------------------------------------------------------------ what is told


PARTS = {"lines": "layers frozen", "warnings": "a rank has up to"}


def told(folder: str) -> dict[str, Any]:
    """Lines of the log, and the monitor's events."""
    lines: list[str] = []
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "told"}}
    with (
        mock.patch("ds_terapipe.elastic.report.emit", lines.append),
        mock.patch("ds_terapipe.elastic.report.logger.warning", lambda text, *args: lines.append(text % args)),
    ):
        engine = engine_of(CASE, config=monitor)
        train(engine, {})
    engine.destroy()
    return {key: [line for line in lines if part in line] for key, part in PARTS.items()}


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "carried": carried(),
        "modules": given_modules(),
        "refused": refused_midway(rank),
        "refused first": refused_first(),
        "tied": refused_tied(rank),
        "told": told(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("monitor")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(worker, 2, str(folder), timeout=200)


def alone(specs: list[Any], prepared: bool) -> tuple[list[float], dict[str, Tensor]]:
    """One process."""
    from tests.elastic.training import OPTIMIZERS

    model, losses = Plain(specs), []
    if prepared:
        for entry, layer in enumerate(model.functions):
            prepare(entry, layer)
    optimizer = OPTIMIZERS["adamw"][1](list(model.parameters()))
    for number, step in enumerate(DATA):
        for layer in model.functions[: CASE.frozen(number)]:
            layer.requires_grad_(False)
        optimizer.zero_grad()
        parts = [masked_loss(model(inputs), labels) / len(step) for inputs, labels in step]
        sum(parts).backward()
        losses.append(float(sum(parts)))
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CASE.clip)
        optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def check_as_alone(found: dict[str, Any], losses: list[float], weights: dict[str, Tensor]) -> None:
    assert found["losses"] == pytest.approx(losses, rel=OFF)
    assert max(difference(weight, weights[name]) for name, weight in found["weights"].items()) <= OFF


def test_what_was_set_on_live_layers_is_where_the_layers_are(ranks):
    check_carried([rank["carried"] for rank in ranks])
    wanted = alone(rich(), prepared=True)
    for rank in ranks:
        check_as_alone(rank["carried"], *wanted)


def test_a_reshape_draws_no_random_numbers(ranks):
    for rank in ranks:
        assert rank["carried"]["random"] == [True] * 3


@pytest.mark.parametrize("kind", ["carried", "modules"])
def test_weights_are_where_they_are_trained_and_nowhere_else(ranks, kind):
    wanted = alone(gpt(), prepared=False)
    whole = sum(weight.nbytes for weight in wanted[1].values())
    for rank in ranks:
        if kind == "modules":
            check_as_alone(rank["modules"], *wanted)
            assert rank["modules"]["first"][0] == rank["modules"]["first"][1] < whole
        sizes = rank[kind]["weighed"]
        assert all(alive == here for alive, here in sizes), sizes
        assert sizes[1][1] > max(sizes[0][1], sizes[2][1]) and (sizes[1][1] == whole or kind == "carried")


def test_a_refused_reshape_changes_nothing_and_training_goes_on(ranks):
    undisturbed = alone(gpt(), prepared=False)[0]
    for rank in ranks:
        found = rank["refused"]
        assert found["changed"] == []
        for name, text in found["said"].items():
            assert SAYS[name] in text and "\n" not in text and text == ranks[0]["refused"]["said"][name]
        assert found["losses"] == pytest.approx(undisturbed, rel=OFF)


def test_what_cannot_move_is_refused_before_there_is_an_engine(ranks):
    text = "elastic_pipeline.resize.policy: got 1 hooks on module 3.up, registered on a live layer"
    for rank in ranks:
        assert rank["refused first"].startswith(text) and "\n" not in rank["refused first"]


def test_a_hook_on_a_tied_layer_is_not_lost(ranks):
    text = "elastic_pipeline.resize.policy: got 1 hooks on module tied_modules.tokens, registered on a live layer"
    assert all(rank["tied"].startswith(text) for rank in ranks), ranks[0]["tied"]


def test_one_line_for_each_transition_and_events_for_the_monitor(ranks, folder):
    lines = ranks[0]["told"]["lines"]
    wanted = [
        "step 2: 1 of 6 layers frozen, 2 stages x 1 replica (4 micro-batches of 2) -> 1 stage x 2 replicas (2 micro-batches",
        "step 4: 2 of 6 layers frozen, 1 stage x 2 replicas (2 micro-batches of 2), ",
        "step 5: 2 of 6 layers frozen, 1 stage x 2 replicas (2 micro-batches of 2) -> 2 stages x 1 replica (4 micro-batches",
    ]
    assert len(lines) == 3 and all(text in line for text, line in zip(wanted, lines, strict=True)), lines
    assert len(ranks[0]["told"]["warnings"]) == 1 and ranks[1]["told"] == {"lines": [], "warnings": []}
    rows = {
        path.stem: [line.split(",") for line in path.read_text().split()[1:]]
        for path in Path(folder).rglob("Elastic_*.csv")
    }
    assert set(rows) == {
        f"Elastic_{n}" for n in ("frozen_layers", "stages", "replicas", "transition_seconds", "freed_bytes")
    }
    assert [[float(cell) for cell in row] for row in rows["Elastic_stages"]] == [[16, 1], [32, 1], [40, 2]]
    assert [float(row[1]) for row in rows["Elastic_frozen_layers"]] == [1, 2, 2]
    freed = [float(row[1]) for row in rows["Elastic_freed_bytes"]]
    moments = [2 * sum(p.numel() * 4 for p in kind().parameters()) for kind in (Embedding, Block)]
    assert freed[2] == 0 and freed[0] >= moments[0] and freed[1] >= 2 * moments[1]  # there are two replicas then
    assert freed[0] < 1.6 * moments[0] and freed[1] < 3.2 * moments[1]  # with gradients


# for tests.mutants


def only_carried(rank: int, world_size: int) -> dict[str, Any]:
    return carried()


def check_carried(ranks: list[dict[str, Any]]) -> None:
    assert all(found["lost"] == [] for found in ranks)


def holds_for(mutant: str | None) -> bool:
    return holds(check_carried, run_ranks(only_carried, 2, mutant=mutant))

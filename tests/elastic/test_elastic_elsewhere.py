"""A training goes on from a checkpoint on other processes, or in a shape that it was not saved in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_terapipe.elastic.saved import restore
from ds_terapipe.errors import ConfigError
from tests.elastic.samples import Texts
from tests.elastic.test_elastic_wrapped import kept
from tests.elastic.training import Case, data_of, engine_of
from tests.spawn import run_ranks

SAMPLES, SAVED, STEPS = 20, 6, 10
FREEZE = ((2, 1), (4, 3))
CASES = {
    "adamw": Case("texts", "adamw", 2, FREEZE, ((4, 1),), scheduler="lambda"),
    "sgd": Case("texts", "sgd", 2, FREEZE, (), scheduler="warmup"),
    "lamb": Case("tied texts", "lamb", 2, ((2, 1),), (), slices=None),
    "fused adam": Case("texts", "fused adam", 2, FREEZE, ()),
    "groups": Case(
        "partly frozen", "adamw", 2, ((5, 4),), (), scheduler="lambda"
    ),  # four stages have them in another order
    "ZeRO-1": Case("texts", "adamw", 2, FREEZE, ((4, 1),), precision="ZeRO-1"),
    "bf16": Case("texts", "adamw", 2, FREEZE, ((4, 1),), precision="bf16"),
    "bf16 lamb": Case("texts", "lamb", 2, ((2, 1),), (), precision="bf16"),
    "bf16 ZeRO-1": Case("texts", "lamb", 2, FREEZE, (), precision="bf16 ZeRO-1"),
}
ELSEWHERE = {"one process": (1, 1), "replicas": (2, 1), "four stages": (4, 4), "two by two": (4, 2)}


@dataclass
class State:
    """What is known of a training on one rank: by name weights and the optimiser's state, and what is the same on all."""

    weights: dict[str, Tensor]
    kept: dict[str, tuple[Tensor, ...]]
    steps: dict[str, float]
    same: tuple[Any, ...]
    frozen: int
    rates: dict[str, float]


def state_of(engine: Any, case: Case) -> State:
    names = dict(engine.module.named_parameters())
    flat = case.precision != "fp32"
    optimizer = engine.basic_optimizer
    moments = kept(engine, case.optimizer) if flat else {
        name: tuple(v.clone() for k, v in sorted(optimizer.state[p].items()) if k != "step" and v is not None)
        for name, p in names.items()
        if p in optimizer.state
    }  # fmt: skip
    counts = (
        {} if flat else {n: float(optimizer.state[p].get("step", 0)) for n, p in names.items() if p in optimizer.state}
    )
    scheduler = (
        None
        if engine.lr_scheduler is None
        else engine.lr_scheduler.last_epoch
        if hasattr(engine.lr_scheduler, "last_epoch")
        else engine.lr_scheduler.last_batch_iteration
    )
    rates = {name: optimizer.param_groups[number]["lr"] for name, number in restore.numbers_of(engine).items()}
    return State(
        {name: p.detach().clone() for name, p in names.items()}, moments, counts,
        (engine.global_steps, engine.global_samples, scheduler), engine.frozen_layers, rates,
    )  # fmt: skip


def data_for(case: Case) -> Texts:
    return Texts(SAMPLES)


def save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        engine = engine_of(case, training_data=data_for(case))
        for _ in range(SAVED):
            engine.train_batch()
        engine.save_checkpoint(f"{folder}/{name}")
        state = state_of(engine, case)
        found[name] = state, [float(engine.train_batch()) for _ in range(STEPS - SAVED)]
        engine.destroy()
    return found


def go_on(rank: int, world_size: int, folder: str, stages: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        case = replace(CASES[name], stages=stages, resize=())
        engine = engine_of(case, training_data=data_for(case))
        before = engine.basic_optimizer, engine.lr_scheduler
        path, client = engine.load_checkpoint(f"{folder}/{name}")
        assert Path(path).is_file() and client is not None
        assert before == (engine.basic_optimizer, engine.lr_scheduler)
        state, shape = state_of(engine, case), tuple(engine.shape)
        found[name] = state, [float(engine.train_batch()) for _ in range(STEPS - SAVED)], shape
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("elsewhere"))
    return folder, run_ranks(save, 2, folder, timeout=200)


@pytest.mark.parametrize(
    "where",
    ["one process", *(pytest.param(w, marks=pytest.mark.full) for w in ("replicas", "two by two")), "four stages"],
)
def test_a_training_goes_on(saved, where):
    processes, stages = ELSEWHERE[where]
    # what launches take: all cases on one and two processes, those of each kind on four
    names = list(CASES) if processes < 4 else ["adamw", "lamb", "fused adam", "groups", "ZeRO-1", "bf16 ZeRO-1"]
    folder, ranks = saved
    others = run_ranks(go_on, processes, folder, stages, names, timeout=200)
    for name in names:
        check(name, [rank[name] for rank in ranks], [rank[name] for rank in others], (stages, processes // stages))


def check(name: str, saved: list[Any], loaded: list[Any], shape: tuple[int, int], case: Case | None = None) -> None:
    case = case or CASES[name]
    weights = {k: v for state, _ in saved for k, v in state.weights.items()}
    moments = {k: v for state, _ in saved for k, v in state.kept.items()}
    counts = {k: v for state, _ in saved for k, v in state.steps.items()}
    rates = {k: v for state, _ in saved for k, v in state.rates.items()}
    assert set(weights) == {k for state, *_ in loaded for k in state.weights}
    assert moments and set(moments) == {k for state, *_ in loaded for k in state.kept}
    limit = 1e-5 if case.precision in ("fp32", "ZeRO-1") else 1e-2
    for state, losses, now in loaded:
        assert now[:2] == shape and state.frozen == saved[0][0].frozen == case.frozen(SAVED - 1) > 0
        assert all(torch.equal(value, weights[k]) for k, value in state.weights.items())
        for k, values in state.kept.items():
            assert len(values) == len(moments[k]) > 0
            assert all(torch.equal(a, b) for a, b in zip(values, moments[k], strict=True)), k
        assert state.steps == {k: counts[k] for k in state.steps}
        assert state.same == saved[0][0].same
        assert state.rates == {k: rates[k] for k in state.rates}
        assert losses == pytest.approx(saved[0][1], rel=limit)


OURS = {name: case for name, case in CASES.items() if name in ("bf16", "bf16 lamb")}


def from_another_engine(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """DeepSpeed's engine saves, without ZeRO, parts that it does not read, and ours nothing beside them."""
    found = {}
    for name, case in OURS.items():
        case, path = replace(case, freeze=(), resize=()), f"{folder}/{name}"
        engine = engine_of(case, config={"elastic_pipeline": {"enabled": False}})
        assert not hasattr(engine, "elastic_pipeline")
        train(engine, case, SAVED)
        engine.save_checkpoint(path, tag="of/steps")
        saved = kept(engine, case.optimizer)
        losses = train(engine, case, STEPS)
        engine.destroy()
        engine = engine_of(case)
        assert hasattr(engine, "elastic_pipeline")
        engine.load_checkpoint(path)
        loaded = kept(engine, case.optimizer)
        found[name] = saved, loaded, losses, train(engine, case, STEPS), weights_alone(engine, case, path)
        engine.destroy()
    return found


def train(engine: Any, case: Case, until: int) -> list[float]:
    data = data_of(case)
    return [float(engine.train_batch(iter(data[step]))) for step in range(engine.global_steps, until)]


def weights_alone(engine: Any, case: Case, path: str) -> float:
    """How far a step of no rate moves the weights when the optimizer's state, masters with it, has been left out."""
    moments = {name: tensors[1:] for name, tensors in kept(engine, case.optimizer).items()}
    engine.load_checkpoint(path, load_optimizer_states=False)
    now = kept(engine, case.optimizer)
    assert all(torch.equal(a, b) for k in moments for a, b in zip(moments[k], now[k][1:], strict=True))
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.lr_scheduler = None
    for group in engine.basic_optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    train(engine, case, engine.global_steps + 1)
    return max(float((p - before[name]).abs().max()) for name, p in engine.module.named_parameters())


def test_what_deepspeed_saved_of_bf16_without_zero(tmp_path):
    for rank in run_ranks(from_another_engine, 2, str(tmp_path), timeout=150):
        for saved, loaded, losses, others, moved in rank.values():
            assert saved and set(saved) == set(loaded)
            assert all(torch.equal(a, b) for k in saved for a, b in zip(saved[k], loaded[k], strict=True))
            assert losses == others and moved == 0


def test_an_optimizer_without_a_parameter_is_refused(tmp_path):
    part = {"kind": "plain", "stage": 0, "data": 0, "tensor": 0, "file": "x.pt", "groups": [["0.weight"]]}
    wanted = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("0.weight", "1.weight")}
    for parts in ([part], [None], []):
        with pytest.raises(ConfigError, match=r"^load_checkpoint: got .* without the optimizer's state of .*1\.weight"):
            restore.SavedStates(tmp_path, parts, 0, 1, dict.fromkeys(wanted, 0), wanted)
    part["groups"] = [["0.weight", "1.weight"]]
    with pytest.raises(ConfigError, match=r"^load_checkpoint: optimizer: got .*\[1\] parameter groups.* must be 2"):
        restore.SavedStates(tmp_path, [part], 0, 2, dict.fromkeys(wanted, 0), wanted)
    with pytest.raises(ConfigError, match=r"^load_checkpoint: optimizer: got .*other parameter groups"):
        part["groups"] = [["0.weight", "1.weight"], []]
        restore.SavedStates(tmp_path, [part], 0, 2, {"0.weight": 0, "1.weight": 1}, wanted)

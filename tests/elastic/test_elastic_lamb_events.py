"""What ``FusedLamb`` tells a monitor goes on through freezes and reshapes: of the layers that rank 0 trains then, no others."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ds_terapipe import FusedLamb
from tests.elastic.training import MODELS, Case, data_of, engine_of, prefixes
from tests.pipeline.models import Plain
from tests.spawn import run_ranks

PARAMS = {"lr": 1e-2, "weight_decay": 0.05}
CASES = {
    "fp32": Case("gpt", "lamb", 2, ((2, 1), (5, 2)), ((5, 1), (8, 2)), slices=None, steps=10),
    "bf16": Case("gpt", "lamb", 2, ((2, 1), (5, 2)), ((5, 1), (8, 2)), slices=None, steps=10, precision="bf16"),
    "all of rank 0 frozen": Case("gpt", "lamb", 2, ((3, 4),), (), slices=None, steps=6, precision="bf16"),
}
NAMES = ("min_trust_ratio", "mean_trust_ratio", "max_trust_ratio", "clamped_share")
# of one step, in numbers of the type: bf16 has 8 bits
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}


def run(case: Case, folder: str) -> dict[str, Any]:
    optimizer = {"type": "FusedLamb", "params": {**PARAMS, "monitor_interval": 1}}
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    engine = engine_of(case, optimizer=optimizer, config=monitor)
    replica, share = engine.grid.data_parallel_id, case.batch // case.size // engine.dp_world_size
    told, trained, stages = [], [], []
    for step in data_of(case):
        engine.train_batch(iter(step[replica * share :][:share]))
        told.append(sorted(layer.name for layer in engine.basic_optimizer.statistics()))
        trained.append(sorted(name for name, p in engine.module.named_parameters() if p.requires_grad))
        stages.append(engine.num_stages)
    engine.destroy()
    return {"told": told, "trained": trained, "stages": stages}


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: run(case, f"{folder}/{name}") for name, case in CASES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(worker, 2, str(folder), timeout=150)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By name: the step and the value of each."""
    found = {}
    for path in sorted((folder / "job").glob("Train_Lamb_*.csv")):
        with path.open(encoding="utf-8") as file:
            rows = [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]
        found[path.stem.removeprefix("Train_Lamb_")] = rows
    return found


def ratios(case: Case) -> list[dict[str, float]]:
    """Of each step in one process, by name."""
    specs, loss_fn, _ = MODELS[case.model]
    model, found = Plain(specs()), []
    optimizer = FusedLamb(model.parameters(), **PARAMS)
    optimizer.set_names({parameter: name for name, parameter in model.named_parameters()})
    for number, step in enumerate(data_of(case)):
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes(specs(), case.frozen(number)) or ("nothing",)):
                parameter.requires_grad_(False)
        optimizer.zero_grad()
        for inputs, labels in step:
            (loss_fn(model(inputs), labels) / len(step)).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], case.clip)
        optimizer.step()
        found.append({layer.name: layer.trust_ratio for layer in optimizer.statistics()})
    return found


@pytest.mark.parametrize("name", CASES)
def test_of_the_layers_that_are_trained_here(ranks, name):
    for found in (rank[name] for rank in ranks):
        assert found["told"] == found["trained"]
    assert ranks[0][name]["stages"] == [CASES[name].stages_at(step) for step in range(CASES[name].steps)]


@pytest.mark.parametrize("name", LIMITS)
def test_events_go_on(ranks, folder, name):
    case, found = CASES[name], events(folder / name)
    assert set(NAMES) <= set(found) and len({tuple(names) for names in ranks[0][name]["trained"]}) == 4
    wanted = []
    for of_all, here in zip(ratios(case), ranks[0][name]["trained"], strict=True):
        each = [of_all[layer] for layer in here]
        wanted.append((min(each), sum(each) / len(each), max(each)))
    for values, event in zip(zip(*wanted, strict=True), NAMES, strict=False):
        assert [step for step, _ in found[event]] == list(range(1, case.steps + 1))
        assert [value for _, value in found[event]] == pytest.approx(values, rel=LIMITS[name]), event


def test_nothing_is_told_of_nothing(ranks, folder):
    name = "all of rank 0 frozen"
    assert ranks[0][name]["trained"][2] and not ranks[0][name]["trained"][3] and ranks[1][name]["trained"][3]
    assert [len(events(folder / name)[event]) for event in NAMES] == [3, 3, 3, 3]

"""After a transition a training is, to the bit, the one that starts from the same state in the new shape."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe.tracing.chrome import read
from tests.elastic.samples import Texts, in_order, micro_batch_of
from tests.elastic.training import Case, engine_of
from tests.spawn import launched

SAMPLES, SAVED, STEPS = 20, 6, 10
TRACED = [9, 10]  # the third to the fifth step of the resumed run, which ends with the fourth
FREEZE = ((2, 1), (4, 3))
CASES = {
    "shrunk": Case("texts", "adamw", 2, FREEZE, ((4, 1),), scheduler="lambda"),
    "grown": Case("texts", "lamb", 2, FREEZE, ((2, 1), (4, 2)), scheduler="warmup"),
    "in another order": Case("texts", "backwards", 1, FREEZE, ((2, 2), (4, 1))),
    "fp16 ZeRO-1": Case("texts", "adamw", 2, FREEZE, ((4, 1),), precision="fp16 ZeRO-1"),
}


def bits(case: Case, folder: str) -> dict[str, Any]:
    """Train, save in the new shape and go on; the same from the checkpoint, and in an engine that has always had the shape."""
    data = Texts(SAMPLES)
    first = engine_of(case, training_data=data)
    losses = trained(first, SAVED)
    first.save_checkpoint(folder)
    state, samples = everything(first), data.take()
    found = {
        "at the checkpoint": state["weights"],
        "losses": losses,
        "shape": tuple(first.shape),
        "parts": list(first.module.parts),
    }
    found["went on"] = trained(first, STEPS - SAVED), weights(first)
    samples_after = data.take()
    first.destroy()

    found["only weights"] = only_weights(case, data, folder)
    resumed = engine_of(case, training_data=data, token_pipeline=traced(case, folder))
    resumed.load_checkpoint(folder)
    found["restored"] = (tuple(resumed.shape), list(resumed.module.parts), resumed.frozen_layers, resumed.global_steps)
    found["had"] = SAVED, resumed.get_lr() == state["rate"], same(weights(resumed), state["weights"])
    found["resumed"] = trained(resumed, STEPS - SAVED), weights(resumed)
    found["samples"] = samples, samples_after, data.take(), (resumed.stage_id, resumed.grid.data_parallel_id)
    resumed.destroy()
    found["trace"] = steps_in(Path(folder) / "trace.json") if resumed.global_rank == 0 else TRACED
    if case.stages_at(SAVED) == 1 and case.precision == "fp32":
        found["started"] = started_in(case, state)
    return found


def traced(case: Case, folder: str) -> dict[str, Any]:
    """The block ``token_pipeline`` of a run that records the steps that it records by default."""
    return {"slices": case.slices, "trace_path": f"{folder}/trace.json"}


def steps_in(path: Path) -> list[int]:
    return sorted({event.step for event in read(path)})


def only_weights(case: Case, data: Texts, folder: str) -> tuple[Any, ...]:
    """What a new training, which begins with the weights of the checkpoint, has of it."""
    engine = engine_of(case, training_data=data)
    engine.load_checkpoint(folder, load_module_only=True)
    found = tuple(engine.shape)[:2], engine.frozen_layers, engine.global_steps, weights(engine)
    engine.destroy()
    return found


def trained(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def weights(engine: Any) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def everything(engine: Any) -> dict[str, Any]:
    """What a training's state is: weights, the optimiser's by name, rates and the schedule's position."""
    state, scheduler = engine.basic_optimizer.state, engine.lr_scheduler
    return {
        "weights": weights(engine),
        "optimizer": {name: deepcopy(dict(state[p])) for name, p in engine.module.named_parameters() if p in state},
        "rate": engine.get_lr(),
        "scheduler": None if scheduler is None else deepcopy(scheduler.state_dict()),
    }


def started_in(case: Case, state: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """An engine whose first step has one stage and the frozen layers, with the state put in by hand."""
    start = replace(case, stages=1, freeze=((0, case.frozen(SAVED)),), resize=())
    engine, data = engine_of(start), Texts(SAMPLES)
    optimizer = engine.basic_optimizer
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(state["weights"][name])
            if name in state["optimizer"]:
                optimizer.state[parameter] = deepcopy(state["optimizer"][name])
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(optimizer.param_groups, state["rate"], strict=True):
            group["lr"] = rate
    losses, share, replica = [], case.batch // engine.dp_world_size, engine.grid.data_parallel_id
    for indices in in_order(STEPS, case.batch, SAMPLES)[SAVED:]:
        own = indices[replica * share :][:share]
        parts = [micro_batch_of(data, own[at : at + case.size]) for at in range(0, share, case.size)]
        losses.append(float(engine.train_batch(iter(parts))))
    found = losses, weights(engine)
    engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: bits(case, f"{folder}/{name}") for name, case in CASES.items()}


ranks = launched(worker, 2, timeout=200, folder=True)


@pytest.mark.parametrize("name", CASES)
def test_after_a_transition_it_is_the_training_that_starts_there(ranks: list[Any], name: str) -> None:
    check(CASES[name], [found[name] for found in ranks])


def check(case: Case, ranks: list[Any]) -> None:
    stages = case.stages_at(SAVED)
    for found in ranks:
        assert found["restored"] == (found["shape"], found["parts"], case.frozen(SAVED), SAVED)
        assert found["shape"][:2] == (stages, len(ranks) // stages)
        assert found["had"] == (SAVED, True, True)
        assert found["only weights"][:3] == ((case.stages, len(ranks) // case.stages), 0, 0)
        everywhere = {name: tensor for each in ranks for name, tensor in each["at the checkpoint"].items()}
        for name, tensor in found["only weights"][3].items():
            assert torch.equal(tensor, everywhere[name]), name
        assert found["trace"] == TRACED
        assert ("started" in found) == (stages == 1 and case.precision == "fp32")
        losses, after = found["went on"]
        assert losses != found["losses"][-len(losses) :] and len(losses) == STEPS - SAVED
        for way in ("resumed", *(["started"] if "started" in found else [])):
            assert found[way][0] == losses, way
            assert same(found[way][1], after), way
    check_samples(case, ranks)


def check_samples(case: Case, ranks: list[Any]) -> None:
    """The run and its continuation from the checkpoint read every sample once an epoch, in the dataset's order."""
    for which in (1, 2):
        for stage in {0, case.stages_at(SAVED) - 1}:
            by_replica = {
                where[1]: found[which] for *found, where in (r["samples"] for r in ranks) if where[0] == stage
            }
            share = case.batch // len(by_replica)
            steps = [
                [index for replica in sorted(by_replica) for index in by_replica[replica][t * share :][:share]]
                for t in range(STEPS - SAVED)
            ]
            assert steps == in_order(STEPS, case.batch, SAMPLES)[SAVED:], (which, stage)

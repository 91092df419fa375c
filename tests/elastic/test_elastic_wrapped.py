"""Masters and moments that DeepSpeed keeps in flat parts (bf16, ZeRO-1) go through freezes and reshapes to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from tests.elastic.training import MODELS, OPTIMIZERS, Case, data_of, engine_of, prefixes, reference
from tests.mutants.claims import holds
from tests.pipeline.models import Plain
from tests.spawn import run_ranks

# a freeze with a reshape, one without, a reshape alone
FREEZE, RESIZE = ((3, 1), (6, 3)), ((3, 1), (9, 2))
TWO = {
    "ZeRO-1, AdamW": Case("gpt", "adamw", 2, FREEZE, RESIZE, steps=12, precision="ZeRO-1"),
    "ZeRO-1, FusedLamb": Case("gpt", "lamb", 2, FREEZE, RESIZE, steps=12, precision="ZeRO-1"),
    "bf16, AdamW": Case("gpt", "adamw", 2, FREEZE, RESIZE, steps=12, precision="bf16"),
    "bf16, FusedLamb": Case("gpt", "lamb", 2, FREEZE, RESIZE, steps=12, precision="bf16"),
    "bf16 ZeRO-1, SGD": Case("gpt", "sgd", 2, FREEZE, RESIZE, steps=12, precision="bf16 ZeRO-1"),
    "bf16, tied": Case("tied", "adamw", 2, ((6, 1),), RESIZE, steps=12, precision="bf16"),
    "ZeRO-1, partly frozen": Case("partly frozen", "adamw", 2, ((6, 4),), RESIZE, steps=12, precision="ZeRO-1"),
}
FOUR = {
    "ZeRO-1": Case("gpt", "adamw", 2, FREEZE, ((3, 1), (9, 4)), steps=12, precision="ZeRO-1"),
    "bf16": Case("gpt", "adamw", 4, FREEZE, ((3, 2), (9, 1)), steps=12, precision="bf16 ZeRO-1"),
}
KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "lamb": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def kept(engine: Any, optimizer: str) -> dict[str, tuple[Tensor, ...]]:
    """Master and moments of every parameter of this rank that is trained, whole; collective."""
    found, wrapper = {}, engine.optimizer
    # DeepSpeed 0.19.8 links the moments of ZeRO's groups when it has stepped with the first one: those of others are not there
    wrapper._hp_optimizer_states_linked = False
    wrapper._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if getattr(parameter, "_hp_mapping", None) is None and not hasattr(parameter, "_dp_group"):
            continue
        moments = [safe_get_full_optimizer_state(parameter, key) for key in KEYS[optimizer]]
        found[name] = tuple(tensor.clone() for tensor in (safe_get_full_fp32_param(parameter), *moments))
    return found


def steps_taken(engine: Any) -> set[int]:
    return {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}


def run(case: Case) -> dict[str, Any]:
    engine = engine_of(case)
    replica, share = engine.grid.data_parallel_id, case.batch // case.size // engine.dp_world_size
    found: dict[str, Any] = {"losses": [], "kept": [], "shapes": [], "steps": []}
    change = engine._change

    def noted(*args: Any, **options: Any) -> None:
        before = kept(engine, case.optimizer)
        change(*args, **options)
        found["kept"].append((engine.global_steps, before, kept(engine, case.optimizer)))
        found["steps"].append((engine.global_steps, steps_taken(engine)))

    engine._change = noted
    for step in data_of(case):
        found["losses"].append(float(engine.train_batch(iter(step[replica * share :][:share]))))
        found["shapes"].append(engine.num_stages)
    del engine._change
    found["wrapper"] = type(engine.optimizer).__name__
    engine.destroy()
    return found


def worker(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: run(case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two():
    return run_ranks(worker, 2, TWO, timeout=300)


@pytest.fixture(scope="module")
def four():
    return run_ranks(worker, 4, FOUR, timeout=300)


@pytest.mark.parametrize("name", TWO)
def test_two_processes(two, name):
    check(TWO[name], [found[name] for found in two])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes(four, name):
    check(FOUR[name], [found[name] for found in four])


def check(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    assert all(found["shapes"] == [case.stages_at(step) for step in range(case.steps)] for found in ranks)
    wanted = "DeepSpeedZeroOptimizer" if case.precision == "ZeRO-1" else "BF16_Optimizer"
    assert {found["wrapper"] for found in ranks} == {wanted}
    check_kept(case, ranks)
    if case.precision == "ZeRO-1":
        for found in ranks:
            assert found["losses"] == pytest.approx(reference(case).losses, rel=1e-5)
        return
    wide = torch.float32 if case.optimizer == "lamb" else torch.float64  # FusedLamb takes no fp64
    exact, single = in_one_process(case, wide), in_one_process(case, torch.bfloat16)
    assert 1e-6 < off(single, exact) < 1e-2
    for found in ranks:
        assert off(found["losses"], exact) <= 1.2 * off(single, exact)


def check_kept(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """What a rank has after a change is what some rank had before; what trains is all there, and nothing else."""
    specs = MODELS[case.model][0]()
    for number, step in enumerate(case.transitions):
        before: dict[str, tuple[Tensor, ...]] = {}
        for found in ranks:
            assert found["kept"][number][0] == step
            before |= {name: each for name, each in found["kept"][number][1].items() if name not in before}
            assert found["steps"][number][1] <= {step}
        after = [found["kept"][number][2] for found in ranks]
        frozen = prefixes(specs, case.frozen(step)) or ("nothing",)
        assert set().union(*after) == {name for name in before if not name.startswith(frozen)}
        for held in after:
            for name, tensors in held.items():
                assert all(map(torch.equal, tensors, before[name])), (step, name)
        assert step == 0 or any(tensors[1].any() for held in after for tensors in held.values())


def off(losses: Sequence[float], exact: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True))


@cache
def in_one_process(case: Case, dtype: torch.dtype) -> list[float]:
    """The same training in numbers of a type; beside bf16 there are fp32 masters and sums of gradients."""
    specs, loss_fn, _ = MODELS[case.model]
    model, losses = Plain(specs()).to(dtype), []
    masters = {name: nn.Parameter(p.detach().float() if dtype == torch.bfloat16 else p.detach().clone())
               for name, p in model.named_parameters()}  # fmt: skip
    optimizer = OPTIMIZERS[case.optimizer][1](list(masters.values()))
    for number, step in enumerate(data_of(case)):
        frozen = prefixes(specs(), case.frozen(number)) or ("nothing",)
        total = 0.0
        for master in masters.values():
            master.grad = None
        for inputs, labels in step:
            loss = loss_fn(model(inputs), labels) / len(step)
            loss.backward()
            total += loss.item()
            for name, parameter in model.named_parameters():
                if not name.startswith(frozen) and parameter.grad is not None:
                    gradient = parameter.grad.to(masters[name].dtype)
                    masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
                parameter.grad = None
        losses.append(total)
        nn.utils.clip_grad_norm_([p for p in masters.values() if p.grad is not None], case.clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return losses


# for tests.mutants


def one(rank: int, world_size: int) -> dict[str, Any]:
    return run(TWO["ZeRO-1, AdamW"])


def holds_for(mutant: str | None) -> bool:
    return holds(check, TWO["ZeRO-1, AdamW"], run_ranks(one, 2, mutant=mutant))

"""Masters and moments that DeepSpeed's wrappers keep (bf16, fp16, ZeRO-1) go through freezes and reshapes to the bit.

Beside fp16 the loss scale goes on, too: as DeepSpeed's own rules make it of the steps that overflowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from tests.elastic.training import FP16, MODELS, OPTIMIZERS, Case, Objects, data_of, engine_of, prefixes, reference
from tests.full import is_full, marked
from tests.mutants.claims import holds
from tests.pipeline.models import Plain
from tests.pipeline.training import together, worst
from tests.spawn import run_ranks

# a freeze with a reshape, one without, a reshape alone
FREEZE, RESIZE = ((3, 1), (6, 3)), ((3, 1), (9, 2))
TWO = {
    "ZeRO-1, instance": Case("gpt", "instance", 2, FREEZE, RESIZE, steps=12, precision="ZeRO-1"),
    "ZeRO-1, FusedLamb": Case("gpt", "lamb", 2, FREEZE, RESIZE, steps=12, precision="ZeRO-1"),
    "bf16, AdamW": Case("gpt", "adamw", 2, FREEZE, RESIZE, steps=12, precision="bf16"),
    "bf16, FusedLamb": Case("gpt", "lamb", 2, FREEZE, RESIZE, steps=12, precision="bf16"),
    "bf16 ZeRO-1, SGD": Case("gpt", "sgd", 2, FREEZE, RESIZE, steps=12, precision="bf16 ZeRO-1"),
    "bf16, instance": Case("tied", "instance", 2, ((6, 1),), RESIZE, steps=12, precision="bf16"),
    "fp16, instance": Case("gpt", "instance", 2, FREEZE, RESIZE, steps=14, precision="fp16"),
    "fp16, FusedLamb": Case("gpt", "lamb", 2, FREEZE, RESIZE, steps=14, precision="fp16"),
    "fp16, FusedAdam": Case("tied", "fused adam", 2, ((3, 1),), RESIZE, steps=14, precision="fp16"),
    "fp16 ZeRO-1, AdamW": Case(
        "gpt", "adamw", 2, ((2, 1), (6, 3)), ((2, 1), (9, 2)), steps=14, precision="fp16 ZeRO-1"
    ),
    "ZeRO-1, partly frozen": Case("partly frozen", "adamw", 2, ((6, 4),), RESIZE, steps=12, precision="ZeRO-1"),
}
FULL_TWO = ("ZeRO-1, FusedLamb", "bf16, AdamW", "bf16, instance", "fp16, instance", "ZeRO-1, partly frozen")
FOUR = {
    "ZeRO-1": Case("gpt", "adamw", 2, FREEZE, ((3, 1), (9, 4)), steps=12, precision="ZeRO-1"),
    "bf16": Case("gpt", "adamw", 4, FREEZE, ((3, 2), (9, 1)), steps=12, precision="bf16 ZeRO-1"),
}
WRAPPERS = {
    "fp16 ZeRO-1": "DeepSpeedZeroOptimizer",
    "ZeRO-1": "DeepSpeedZeroOptimizer",
    "fp16": "FP16_UnfusedOptimizer",
}
FULL = {
    "fp16, from four": Case("gpt", "adamw", 4, FREEZE, ((3, 2), (9, 1)), steps=14, precision="fp16"),
    "fp16 ZeRO-1, to four": Case(
        "gpt", "adamw", 2, ((5, 1), (7, 3)), ((5, 1), (9, 4)), steps=14, precision="fp16 ZeRO-1"
    ),
}
LOSS_ROUNDING = {torch.bfloat16: 2.0**-11, torch.float16: 2.0**-14}  # of a mean of losses made from such logits
_ADAM = ("exp_avg", "exp_avg_sq")
KEYS = {"adamw": _ADAM, "instance": _ADAM, "fused adam": _ADAM, "lamb": _ADAM, "sgd": ("momentum_buffer",)}


def kept(engine: Any, optimizer: str) -> dict[str, tuple[Tensor, ...]]:
    """Master and moments of every parameter of this rank that is trained, whole; collective."""
    found, wrapper = {}, engine.optimizer
    if hasattr(wrapper, "fp16_groups"):
        return kept_of_fp16(engine, KEYS[optimizer])
    # DeepSpeed 0.19.8 links the moments of ZeRO's groups when it has stepped with the first one: those of others are not there
    wrapper._hp_optimizer_states_linked = False
    wrapper._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if getattr(parameter, "_hp_mapping", None) is None and not hasattr(parameter, "_dp_group"):
            continue
        moments = [safe_get_full_optimizer_state(parameter, key) for key in KEYS[optimizer]]
        found[name] = tuple(tensor.clone() for tensor in (safe_get_full_fp32_param(parameter), *moments))
    return found


def kept_of_fp16(engine: Any, keys: Sequence[str]) -> dict[str, tuple[Tensor, ...]]:
    """The same without ZeRO, where all of it is here: a master for each parameter, or one after another in one for each group."""
    wrapper, state, found = engine.optimizer, engine.basic_optimizer.state, {}
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    for number, group in enumerate(wrapper.fp16_groups):
        if not any(parameter in names for parameter in group):
            continue
        if hasattr(wrapper, "fp32_groups"):
            each = [(master, *(state[master][key] for key in keys)) for master in wrapper.fp32_groups[number]]
        else:
            flat = wrapper.fp32_groups_flat[number]
            sizes = [parameter.numel() for parameter in group]
            columns = [tensor.split(sizes) for tensor in (flat, *(state[flat][key] for key in keys))]
            each = list(zip(*columns, strict=True))
        for parameter, tensors in zip(group, each, strict=True):
            found[names[parameter]] = tuple(tensor.detach().clone().view(parameter.shape) for tensor in tensors)
    return found


def scaling(engine: Any) -> dict[str, Any] | None:
    """All that is known of the loss scale: its position and settings, and what was skipped."""
    wrapper = engine.optimizer
    scaler = getattr(wrapper, "loss_scale_config", None) or getattr(wrapper, "loss_scaler", None)
    if not engine.fp16_enabled():
        return None
    return {**vars(scaler), "skipped": engine.skipped_steps, "overflow": wrapper.overflow}


def steps_taken(engine: Any) -> set[int]:
    return {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}


def run(case: Case) -> dict[str, Any]:
    engine = engine_of(case)
    replica, share = engine.grid.data_parallel_id, case.batch // case.size // engine.dp_world_size
    lists = ("losses", "kept", "shapes", "steps", "scales", "scales after", "skipped", "scaling")
    found: dict[str, Any] = {name: [] for name in lists}
    objects = Objects(engine)
    given = engine.client_optimizer if case.optimizer == "instance" else engine.basic_optimizer
    change = engine._change

    def noted(*args: Any, **options: Any) -> None:
        before, scale = kept(engine, case.optimizer), scaling(engine)
        change(*args, **options)
        found["scaling"].append((scale, scaling(engine)))
        found["kept"].append((engine.global_steps, before, kept(engine, case.optimizer)))
        found["steps"].append((engine.global_steps, steps_taken(engine)))

    engine._change = noted
    for step in data_of(case):
        found["scales"].append((scaling(engine) or {}).get("cur_scale", 1.0))
        found["losses"].append(float(engine.train_batch(iter(step[replica * share :][:share]))))
        found["scales after"].append((scaling(engine) or {}).get("cur_scale", 1.0))
        found["shapes"].append(engine.num_stages)
        found["skipped"].append(engine.skipped_steps - sum(found["skipped"]))
    del engine._change
    found["masters"] = {name: each[0] for name, each in kept(engine, case.optimizer).items()}
    if engine.fp16_enabled():
        found["by the rules"] = by_the_rules(case, found["skipped"])
    found["same"] = objects.same() and engine.basic_optimizer is given and engine.optimizer.optimizer is given
    found["wrapper"] = type(engine.optimizer).__name__
    engine.destroy()
    return found


def worker(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: run(case) for name, case in cases.items()}


@cache
def launched(full: bool) -> Any:
    return run_ranks(worker, 2, {name: case for name, case in TWO.items() if (name in FULL_TWO) == full}, timeout=300)


@pytest.fixture
def two(request):
    return launched(is_full(request))


@pytest.fixture(scope="module")
def four():
    return run_ranks(worker, 4, FOUR, timeout=300)


@pytest.mark.parametrize("name", marked(TWO, FULL_TWO))
def test_two_processes(two, name):
    check(TWO[name], [found[name] for found in two])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes(four, name):
    check(FOUR[name], [found[name] for found in four])


@pytest.mark.full
def test_fp16_on_four_processes():
    ranks = run_ranks(worker, 4, FULL, timeout=300)
    for name, case in FULL.items():
        check(case, [found[name] for found in ranks])


def check(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    assert all(found["shapes"] == [case.stages_at(step) for step in range(case.steps)] for found in ranks)
    wanted = "FP16_Optimizer" if case.optimizer == "fused adam" else WRAPPERS.get(case.precision, "BF16_Optimizer")
    assert {found["wrapper"] for found in ranks} == {wanted}
    assert all(found["same"] for found in ranks)
    check_kept(case, ranks)
    if case.precision == "ZeRO-1":
        for found in ranks:
            assert found["losses"] == pytest.approx(reference(case).losses, rel=1e-5)
        return
    if "fp16" in case.precision:
        check_scaling(case, ranks)
    check_numbers(case, ranks)


def check_numbers(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """As far from a training in wide numbers as one process is that has the same numbers."""
    wide = torch.float32 if case.optimizer == "lamb" else torch.float64  # FusedLamb takes no fp64
    narrow = torch.float16 if "fp16" in case.precision else torch.bfloat16
    skipped, before, after = (tuple(ranks[0][key]) for key in ("skipped", "scales", "scales after"))
    exact, single = (in_one_process(case, dtype, skipped, before, after) for dtype in (wide, narrow))
    assert 1e-6 < off(single.losses, exact.losses) < 1e-2
    for found in ranks:
        assert off(found["losses"], exact.losses) <= max(1.2 * off(single.losses, exact.losses), LOSS_ROUNDING[narrow])
        assert most_off(found["losses"], exact.losses) <= 3 * most_off(single.losses, exact.losses)
        ours = found["masters"]
        theirs = {name: single.masters[name] for name in ours}
        assert worst(ours, exact.masters) <= 1.5 * worst(theirs, exact.masters)
        if ours:
            assert together([(ours, exact.masters)]) <= 1.2 * together([(theirs, exact.masters)])


def check_kept(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """What a rank has after a change is what some rank had before; what trains is all there, and nothing else."""
    specs = MODELS[case.model][0]()
    for number, step in enumerate(case.transitions):
        before: dict[str, tuple[Tensor, ...]] = {}
        for found in ranks:
            assert found["kept"][number][0] == step
            before |= {name: each for name, each in found["kept"][number][1].items() if name not in before}
            # one more: without ZeRO, DeepSpeed's fp16 begins with a step of zeros; FusedLamb does not count it
            first = case.precision == "fp16" and case.optimizer != "lamb"
            assert found["steps"][number][1] <= {step - sum(found["skipped"][:step]) + first}
        after = [found["kept"][number][2] for found in ranks]
        frozen = prefixes(specs, case.frozen(step)) or ("nothing",)
        assert set().union(*after) == {name for name in before if not name.startswith(frozen)}
        for held in after:
            for name, tensors in held.items():
                assert all(map(torch.equal, tensors, before[name])), (step, name)
        assert step == 0 or any(tensors[1].any() for held in after for tensors in held.values())


def check_scaling(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """The scale is what DeepSpeed's rules make of the overflows, and no change takes part in it."""
    for found in ranks:
        assert found["scales"] == ranks[0]["scales"] and found["skipped"] == ranks[0]["skipped"]
        assert len(found["scaling"]) == len(case.transitions)
        for before, after in found["scaling"]:
            assert before is not None and before == after
    first, *_, last = case.transitions
    skipped, scales = ranks[0]["skipped"], ranks[0]["scales"]
    assert sum(skipped[:first]) and sum(skipped[first:last]) + sum(skipped[last:])
    assert any(a < b for a, b in pairwise(scales)) and any(a > b for a, b in pairwise(scales))
    assert scales == ranks[0]["by the rules"]


def by_the_rules(case: Case, skipped: Sequence[int]) -> list[float]:
    """The scale of each step, where those with a 1 overflow, in a training without changes."""
    hysteresis = FP16["hysteresis"] if "ZeRO" in case.precision else 1  # DeepSpeed's others know none
    scaler = DynamicLossScaler(2.0 ** FP16["initial_scale_power"], FP16["loss_scale_window"], 1, hysteresis, False)
    found = []
    for overflow in skipped:
        found.append(scaler.cur_scale)
        scaler.update_scale(bool(overflow))
    return found


def off(losses: Sequence[float], exact: Sequence[float]) -> float:
    return sum(abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True)) / len(losses)


def most_off(losses: Sequence[float], exact: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True))


class OneProcess(NamedTuple):
    losses: list[float]
    masters: dict[str, Tensor]


@cache
def in_one_process(
    case: Case, dtype: torch.dtype, skipped: tuple[int, ...], scales: tuple[float, ...], after: tuple[float, ...]
) -> OneProcess:
    """The same training in numbers of a type; beside bf16 and fp16 there are fp32 masters, beside bf16 fp32 sums of gradients.

    Beside fp16 the scales are those of the training, and the steps that it skipped are. Gradients are divided by the scale as it
    is after the step, as DeepSpeed 0.19.8 does it, which halves them in a step that doubles the scale.
    """
    specs, loss_fn, _ = MODELS[case.model]
    # of which all begin: weights that fp16 has rounded
    model, losses = Plain(specs()).to(torch.float16 if "fp16" in case.precision else dtype).to(dtype), []
    narrow = dtype in (torch.bfloat16, torch.float16)
    masters = {name: nn.Parameter(p.detach().float() if narrow else p.detach().clone())
               for name, p in model.named_parameters()}  # fmt: skip
    optimizer = OPTIMIZERS[case.optimizer][1](list(masters.values()))
    if case.precision == "fp16":  # without ZeRO, DeepSpeed's begins with a step of zeros
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        optimizer.step()
    for number, step in enumerate(data_of(case)):
        frozen = prefixes(specs(), case.frozen(number)) or ("nothing",)
        total, scale = 0.0, scales[number]
        for master in masters.values():
            master.grad = None
        for number_of, (inputs, labels) in enumerate(step, start=1):
            loss = loss_fn(model(inputs), labels) / len(step)
            (loss if scale == 1.0 else loss * scale).backward()
            total += loss.item()
            if dtype == torch.float16 and number_of < len(step):
                continue
            for name, parameter in model.named_parameters():
                if not name.startswith(frozen) and parameter.grad is not None:
                    gradient = parameter.grad.to(masters[name].dtype) / after[number]
                    masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
                parameter.grad = None
        losses.append(total)
        if skipped[number]:
            continue
        nn.utils.clip_grad_norm_([p for p in masters.values() if p.grad is not None], case.clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return OneProcess(losses, {name: master.detach() for name, master in masters.items()})


# for tests.mutants


def holds_for(mutant: str | None, name: str) -> bool:
    ranks = run_ranks(worker, 2, {name: TWO[name]}, mutant=mutant)
    return holds(check, TWO[name], [found[name] for found in ranks])

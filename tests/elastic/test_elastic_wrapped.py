"""Masters and moments that DeepSpeed's wrappers keep (bf16, fp16, ZeRO-1) go through freezes and reshapes to the bit.

Beside fp16 the loss scale goes on, too. FusedLamb tells a monitor of the layers that a rank trains then.
"""

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from ds_terapipe.elastic.changing import check_changeable
from ds_terapipe.elastic.moves import shares
from ds_terapipe.job import error_of
from tests.elastic.training import LAMB, MODELS, Case, are_the_same, data_of, engine_of, objects_of, prefixes
from tests.spawn import launched

# a freeze with a reshape, one without, a reshape alone; beside fp16 the first steps overflow, and later ones double the scale
SHORT = {"freeze": ((1, 1), (2, 3)), "resize": ((1, 1), (3, 2)), "steps": 4}
LONG = {"freeze": ((2, 1), (4, 3)), "resize": ((2, 1), (7, 2)), "steps": 10}
CASES = {  # and the wrapper
    "bf16, FusedLamb": (Case("tied", "lamb", 2, precision="bf16", **SHORT), "BF16_Optimizer"),
    "fp16, FusedLamb": (Case("gpt", "lamb", 2, precision="fp16", **LONG), "FP16_UnfusedOptimizer"),
    "fp16, FusedAdam": (Case("tied", "fused adam", 2, precision="fp16", **LONG), "FP16_Optimizer"),
    "fp16 ZeRO-1, instance": (Case("gpt", "instance", 2, precision="fp16 ZeRO-1", **LONG), "DeepSpeedZeroOptimizer"),
}
KEYS = ("exp_avg", "exp_avg_sq")
PROFILE = partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
BUCKET = 4096
NO_ROOM = "fp16 ZeRO-1, instance"  # rank 1 has no room for a bucket there


def kept(engine: Any) -> dict[str, tuple[Tensor, ...]]:
    """Master and moments of every parameter of this rank that is trained, whole; collective."""
    found, wrapper = {}, engine.optimizer
    if hasattr(wrapper, "fp16_groups"):
        return _kept_of_fp16(engine)
    # DeepSpeed 0.19.8 links the moments of ZeRO's groups when it has stepped with the first one: those of others are not there
    wrapper._hp_optimizer_states_linked = False
    wrapper._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if getattr(parameter, "_hp_mapping", None) is None and not hasattr(parameter, "_dp_group"):
            continue
        moments = [safe_get_full_optimizer_state(parameter, key) for key in KEYS]
        found[name] = tuple(tensor.clone().cpu() for tensor in (safe_get_full_fp32_param(parameter), *moments))
    return found


def _kept_of_fp16(engine: Any) -> dict[str, tuple[Tensor, ...]]:
    """Without ZeRO all of it is here, moments from the first step on: for each parameter, or one after another for a group."""
    wrapper, state, found = engine.optimizer, engine.basic_optimizer.state, {}
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    for number, group in enumerate(wrapper.fp16_groups):
        if not any(parameter in names for parameter in group):
            continue
        if hasattr(wrapper, "fp32_groups"):
            each = [(m, *(state[m][key] for key in KEYS if m in state)) for m in wrapper.fp32_groups[number]]
        else:
            flat, sizes = wrapper.fp32_groups_flat[number], [parameter.numel() for parameter in group]
            parts = (flat, *(state[flat][key] for key in KEYS if flat in state))
            each = list(zip(*(part.split(sizes) for part in parts), strict=True))
        for parameter, tensors in zip(group, each, strict=True):
            found[names[parameter]] = tuple(tensor.detach().clone().cpu().view(parameter.shape) for tensor in tensors)
    return found


def scaling(engine: Any) -> dict[str, Any]:
    """The position and settings of the loss scale, and the steps that were skipped."""
    wrapper = engine.optimizer
    scaler = getattr(wrapper, "loss_scale_config", None) or getattr(wrapper, "loss_scaler", None)
    more = {"skipped": engine.skipped_steps, "overflow": getattr(wrapper, "overflow", None)}
    return {**vars(scaler), **more} if engine.fp16_enabled() else {}


def extra(profile: Any) -> int:
    """Bytes that a change takes at most beside those that were there: the profile sees all tensors come and go."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def state_of(engine: Any) -> int:
    """Bytes of masters and moments of this rank."""
    masters = [master for group in engine.basic_optimizer.param_groups for master in group["params"]]
    moments = [state[key] for state in engine.basic_optimizer.state.values() for key in KEYS]
    return sum(tensor.nbytes for tensor in (*masters, *moments))


def run(case: Case) -> dict[str, Any]:
    monitored = {"optimizer": {"type": "FusedLamb", "params": {**LAMB, "monitor_interval": 1}}}
    engine = engine_of(case, **(monitored if case.optimizer == "lamb" else {}))
    replica, share = engine.grid.data_parallel_id, case.batch // case.size // engine.dp_world_size
    found: dict[str, Any] = {name: [] for name in ("changes", "shapes", "skipped", "told", "sums", "memory", "lines")}
    shares.emit, add = found["lines"].append, torch.distributed.all_reduce
    objects, change, take = objects_of(engine), engine._controller.change, engine._take_model_step
    given = engine.client_optimizer if case.optimizer == "instance" else engine.basic_optimizer

    def noted(*args: Any, **options: Any) -> None:
        before, scale, state = kept(engine), scaling(engine), state_of(engine)
        torch.distributed.all_reduce = counted
        found["sums"].append([])
        with PROFILE() as profile:
            change(*args, **options)
        found["memory"].append((extra(profile), state))
        torch.distributed.all_reduce = add
        steps = {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
        found["changes"].append((before, kept(engine), scale == scaling(engine), steps))

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found["sums"][-1].append((tensor.nbytes, tensor.dtype))
        return add(tensor, *args, **options)

    def stepped(*args: Any) -> None:
        with PROFILE():  # which sees the end of memory only if it has seen the begin: of moments here
            take(*args)

    engine._controller.change, engine._take_model_step = noted, stepped
    for step in data_of(case):
        engine.train_batch(iter(step[replica * share :][:share]))
        found["shapes"].append(engine.num_stages)
        found["skipped"].append(engine.skipped_steps - sum(found["skipped"]))
        if case.optimizer == "lamb":
            trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
            found["told"].append(sorted(each.name for each in engine.basic_optimizer.statistics()) == sorted(trained))
    del engine._controller.change
    here = engine.basic_optimizer is given is engine.optimizer.optimizer
    found |= {"same": here and are_the_same(objects, objects_of(engine)), "wrapper": type(engine.optimizer).__name__}
    given.state[given.param_groups[-1]["params"][0]]["list"] = [torch.zeros(2)]
    found["refused"] = str(error_of(lambda: check_changeable(engine)))
    engine.destroy()
    return found


def worker(rank: int, world_size: int) -> dict[str, Any]:
    shares.BUCKET_BYTES, room, found = BUCKET, shares._room, {}
    for name, (case, _) in CASES.items():
        shares._room = (lambda device: None) if name == NO_ROOM and rank == 1 else room
        found[name] = run(case)
    return found


ranks = launched(worker, 2, timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_masters_and_moments_are_the_same_bits_behind_a_change(ranks: Any, name: str) -> None:
    """A rank has after a change the bits that some rank had before; all trained parameters are there, and no others."""
    case, wrapper = CASES[name]
    for found in (rank[name] for rank in ranks):
        assert found["shapes"] == [case.stages_at(step) for step in range(case.steps)]
        assert found["wrapper"] == wrapper and found["same"] and len(found["changes"]) == len(case.transitions)
    for number, step in enumerate(case.transitions):
        changes, before = [rank[name]["changes"][number] for rank in ranks], {}
        for had, _, same_scale, steps in changes:
            before |= {key: each for key, each in had.items() if key not in before}
            assert same_scale
            assert steps <= {step - sum(ranks[0][name]["skipped"][:step])}
        frozen = prefixes(MODELS[case.model][0](), case.frozen(step))
        assert {key for change in changes for key in change[1]} == {key for key in before if not key.startswith(frozen)}
        for key, tensors in [pair for change in changes for pair in change[1].items()]:
            assert all(map(torch.equal, tensors, before[key])), (step, key)
    assert any("got state list of" in rank[name]["refused"] for rank in ranks) is (wrapper != "FP16_UnfusedOptimizer")
    assert any(tensors[1].any() for rank in ranks for tensors in rank[name]["changes"][-1][1].values())
    if "fp16" in name:  # overflows before and behind a change
        first, skipped = case.transitions[0], ranks[0][name]["skipped"]
        assert sum(skipped[:first]) and sum(skipped[first:]) and ranks[1][name]["skipped"] == skipped


@pytest.mark.parametrize("name", CASES)
def test_a_change_takes_a_bucket_beside_what_a_rank_had(ranks: Any, name: str) -> None:
    """Its sums are the same on all ranks; where one has no room for a bucket, all have it on the host, and say so."""
    case, summed = CASES[name][0], [rank[name]["sums"] for rank in ranks]
    assert summed[0] == summed[1] and len(summed[0]) == len(case.transitions)
    divided = name.startswith("bf16") or "ZeRO" in name  # without either nothing is summed
    sizes = [size for change in summed[0] for size, kind in change if kind == torch.float32]
    assert max(sizes, default=0) == BUCKET * divided
    for rank in (rank[name] for rank in ranks):
        alone = [number for number, step in enumerate(case.transitions) if step not in dict(case.resize)]
        peaks = [rank["memory"][number] for number in alone]
        assert peaks and all(peak <= state + 2 * BUCKET for peak, state in peaks), peaks
    lines = ranks[0][name]["lines"]
    assert len(lines) == (len(case.transitions) if name == NO_ROOM else 0) and not ranks[1][name]["lines"]
    assert all(line.startswith("elastic_pipeline: rank 1 has no ") for line in lines)


@pytest.mark.parametrize("name", [name for name in CASES if "FusedLamb" in name])
def test_a_monitor_is_told_of_the_layers_that_are_trained_here(ranks: Any, name: str) -> None:
    for found in (rank[name] for rank in ranks):
        assert all(told for told, skipped in zip(found["told"], found["skipped"], strict=True) if not skipped)

"""DeepSpeed's wrappers that keep fp32 masters in flat parts, taken off an optimiser and put around it again.

``BF16_Optimizer`` and ZeRO-1 (DeepSpeed 0.19.8, ``runtime/bf16_optimizer.py``, ``runtime/zero/stage_1_and_2.py``) give a torch
optimiser one flat fp32 tensor for each parameter group, of which each replica has a part. Between :func:`unwrap` and
:func:`fill` it has the model's parameters instead, each with its whole master and moments as its state, so that what moves
parameters of an fp32 engine by name moves these, too. For that time a rank needs room for all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from ds_terapipe.clipping import counting_nothing
from ds_terapipe.elastic.transfer import described

MASTER = "ds_terapipe_master"
_STEP = "step"
_UNUSED = "ds_terapipe_nothing_of_this_group_is_here"


def is_wrapped(optimizer: Any) -> bool:
    """Whether it is one of the wrappers of this file."""
    return isinstance(optimizer, ZeROOptimizer)


def parameters_of(wrapper: Any) -> list[list[nn.Parameter]]:
    """The model's parameters by parameter group."""
    return wrapper.bf16_groups if isinstance(wrapper, BF16_Optimizer) else wrapper.bit16_groups


def _flat(wrapper: Any) -> list[Tensor]:
    """This replica's part of each group."""
    if isinstance(wrapper, BF16_Optimizer):
        return wrapper.fp32_groups_flat_partition
    return wrapper.single_partition_of_fp32_groups


def unwrap(wrapper: Any, module: nn.Module) -> None:
    """Give the optimiser in a wrapper the model's parameters, with all that is known of them; collective over replicas.

    The wrapper is of no use afterwards. What in its groups is none of the module's is left out.
    """
    optimizer, here = wrapper.optimizer, set(map(id, module.parameters()))
    for group, flat, parameters in zip(optimizer.param_groups, _flat(wrapper), parameters_of(wrapper), strict=True):
        state = optimizer.state.pop(flat, {})
        flats = sorted(key for key, value in state.items() if _is_like(key, value, flat))
        plain = {key: described(value) for key, value in state.items() if key not in flats}
        for parameter in parameters:
            if id(parameter) not in here:
                continue
            whole = {key: _whole(parameter, flat, state[key]) for key in flats}
            copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in plain.items()}
            optimizer.state[parameter] = {**copies, **whole, MASTER: _whole(parameter, flat, flat)}
        group["params"] = [parameter for parameter in parameters if id(parameter) in here]
    wrapper.destroy()
    for parameters in parameters_of(wrapper):
        for parameter in parameters:
            parameter.data = parameter.data.clone()  # not a view of what all of them had together
            for name in [name for name in vars(parameter) if name in _LINKS]:
                delattr(parameter, name)


def occupy(optimizer: torch.optim.Optimizer, module: nn.Module, device: torch.device, names: dict[Any, str]) -> None:
    """Give each empty group a parameter that nothing uses: the wrappers have no flat tensor without one.

    Args:
        optimizer: about to be wrapped.
        module: whose type of numbers it has.
        device: where.
        names: of parameters, as the engine keeps them for its wrappers.
    """
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    for group in optimizer.param_groups:
        if not group["params"]:
            unused = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
            names[unused] = _UNUSED
            group["params"] = [unused]
    changed = getattr(optimizer, "parameters_changed", None)
    if changed is not None:
        changed()


def fill(wrapper: Any) -> None:
    """Put masters and moments, which `unwrap` has left in the state of the parameters, into a new wrapper's flat parts."""
    optimizer = wrapper.optimizer
    for flat, parameters in zip(_flat(wrapper), parameters_of(wrapper), strict=True):
        states = {parameter: optimizer.state.pop(parameter, {}) for parameter in parameters}
        for parameter, state in states.items():
            for key, value in state.items():
                if not _is_like(key, value, parameter):
                    if key not in optimizer.state[flat]:
                        optimizer.state[flat][key] = value
                    continue
                if key != MASTER and key not in optimizer.state[flat]:
                    optimizer.state[flat][key] = torch.zeros_like(flat)
                _put(parameter, flat if key == MASTER else optimizer.state[flat][key], value)
        if not optimizer.state[flat]:
            del optimizer.state[flat]
    if isinstance(wrapper, BF16_Optimizer):
        counting_nothing(wrapper)


def _is_like(key: str, value: Any, tensor: Tensor) -> bool:
    return key != _STEP and isinstance(value, Tensor) and value.shape == tensor.shape


def _whole(parameter: Any, flat: Tensor, part: Tensor) -> Tensor:
    """All elements of a parameter, of which the replicas have parts in tensors like ``flat``."""
    found = torch.zeros(parameter.numel(), dtype=part.dtype, device=part.device)
    if parameter._hp_mapping is not None:
        mine, its = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
        found[mine.start : mine.start + mine.numel] = part.detach()[its.start : its.start + its.numel]
    torch.distributed.all_reduce(found, group=parameter._dp_group)
    return found.view(parameter.shape)


def _put(parameter: Any, part: Tensor, values: Tensor) -> None:
    """The inverse of `_whole`, on this rank."""
    if parameter._hp_mapping is not None:
        mine, its = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
        part.data[its.start : its.start + its.numel] = values.flatten()[mine.start : mine.start + mine.numel]


_LINKS = (
    "_hp_mapping", "_dp_group", "_index_in_param_group", "_hp_grad", "get_full_hp_param", "get_full_hp_grad",
    "set_full_hp_param", "set_full_hp_grad", "load_hp_checkpoint_state", "_zero_optimizer",
)  # fmt: skip

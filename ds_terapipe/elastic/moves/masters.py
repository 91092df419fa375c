"""Removal and renewal of DeepSpeed's wrappers that keep fp32 masters.

They give a torch optimiser fp32 tensors in place of the model's parameters (DeepSpeed 0.19.8). ``BF16_Optimizer`` and
ZeRO-1 have one flat tensor for each parameter group, divided among the replicas. ``FP16_Optimizer`` has a whole one,
and ``FP16_UnfusedOptimizer`` one for each parameter. Between :func:`unwrap` and :func:`fill` the optimiser has the
model's parameters instead, each with this replica's `Share` of its master and moments as state. Where layers move,
:func:`join` makes them whole, in host memory. So code that moves parameters by name works for fp32 and for these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from ds_terapipe.clipping import counting_nothing
from ds_terapipe.elastic.moves.shares import Bucket, Share, copy_common
from ds_terapipe.elastic.moves.transfer import described
from ds_terapipe.pipeline.parameter_groups import tell

MASTER = "ds_terapipe_master"
_STEP = "step"
# Overflow state of a wrapper, in either scheme (runtime/fp16/loss_scaler.py); the same on all ranks.
_SCALING = ("loss_scaler", "loss_scale_config", "custom_loss_scaler", "external_loss_scale", "overflow")


class Fragment(NamedTuple):
    """Location of a parameter's master.

    Attributes:
        parameter: the model's parameter.
        master: the optimiser's fp32 tensor, for this parameter or for several.
        at: first element in ``master``.
        start: first element of the parameter.
        length: number of elements here; the others are on other ranks.
        group: group of these ranks; None: all elements are here.
    """

    parameter: nn.Parameter
    master: Tensor
    at: int
    start: int
    length: int
    group: Any


def is_wrapped(optimizer: Any) -> bool:
    """Whether the optimizer is one of these wrappers."""
    return isinstance(optimizer, DeepSpeedOptimizer)


def fragments(wrapper: Any) -> list[list[Fragment]]:
    """Return the locations of the parameters' masters, by parameter group."""
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        groups = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        return [[_whole_at(p, master, 0) for p, master in zip(*group, strict=True)] for group in groups]
    if isinstance(wrapper, FP16_Optimizer):
        return [_one_after_another(*group) for group in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)]
    if isinstance(wrapper, BF16_Optimizer):
        parts = zip(wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, strict=True)
    else:
        parts = zip(wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups, strict=True)
    return [[_linked(parameter, flat) for parameter in parameters] for parameters, flat in parts]


def _whole_at(parameter: nn.Parameter, master: Tensor, at: int) -> Fragment:
    return Fragment(parameter, master, at, 0, parameter.numel(), None)


def _one_after_another(parameters: list[nn.Parameter], flat: Tensor) -> list[Fragment]:
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [_whole_at(p, flat, end - p.numel()) for p, end in zip(parameters, ends, strict=True)]


def _linked(parameter: Any, flat: Tensor) -> Fragment:
    """Return the place of a replica's part as DeepSpeed's links give it."""
    if parameter._hp_mapping is None:
        return Fragment(parameter, flat, 0, 0, 0, parameter._dp_group)
    mine, its = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
    return Fragment(parameter, flat, its.start, mine.start, mine.numel, parameter._dp_group)


def unwrap(wrapper: Any, module: nn.Module) -> None:
    """Give the wrapped optimiser the model's parameters, with this replica's shares of their state; local.

    Nothing is allocated on the device that was not freed before. The wrapper loses its tensors, and must not be used
    afterwards, except as ``before`` of `fill`. Parameters outside the module are left out.
    """
    _empty(wrapper, _take_off(wrapper, set(map(id, module.parameters()))))


def _take_off(wrapper: Any, here: set[int]) -> list[nn.Parameter]:
    """Replace masters by the parameters that are ``here``, by ``id``; return all of the wrapper's parameters."""
    optimizer, found = wrapper.optimizer, fragments(wrapper)
    for group, members in zip(optimizer.param_groups, found, strict=True):
        states = {id(place.master): optimizer.state.pop(place.master, {}) for place in _by_master(members)}
        for place in members:
            if id(place.parameter) in here:
                optimizer.state[place.parameter] = _state_of(place, states[id(place.master)])
        group["params"] = [place.parameter for place in members if id(place.parameter) in here]
    tell(optimizer)
    return [place.parameter for members in found for place in members]


def _empty(wrapper: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Free a wrapper's tensors; the parameters, views of the flat ones, get memory of their own once these are gone."""
    if hasattr(wrapper, "destroy"):
        wrapper.destroy()
        wrapper.destroy = lambda: None
    for name, value in list(vars(wrapper).items()):
        if isinstance(value, (Tensor, list, tuple, dict)) and name not in _SCALING:
            delattr(wrapper, name)
    for parameter in parameters:
        for name in [name for name in vars(parameter) if name in _LINKS]:
            delattr(parameter, name)
    devices = [(parameter, parameter.device) for parameter in parameters]
    for parameter in parameters:
        parameter.data = _on_host(parameter.data)
    for parameter, device in devices:
        parameter.data = parameter.data.to(device)


def _by_master(members: list[Fragment]) -> list[Fragment]:
    """Return one place for each master."""
    return list({id(place.master): place for place in members}.values())


def _state_of(place: Fragment, state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state from that of its master: shares of what is like it."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if _is_like(key, value, place.master):
            found[key] = _share(place, value)
        else:
            found[key] = described(value).clone() if isinstance(described(value), Tensor) else described(value)
    found[MASTER] = _share(place, place.master)
    return found


def _share(place: Fragment, flat: Tensor) -> Share:
    mine = flat.detach().view(-1)[place.at : place.at + place.length]
    return Share(_on_host(mine), place.start, place.parameter.shape, place.group)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return tensor.to("cpu", copy=True)


def join(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Make the shares that `unwrap` has left whole tensors, in host memory; collective over replicas."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = optimizer.state.get(parameter, {})
        state.update({key: bucket.whole(value) for key, value in state.items() if isinstance(value, Share)})


@contextmanager
def taking_no_step(optimizer: Any) -> Iterator[None]:
    """Context manager that disables ``step``: new fp16 wrappers take a step of zeros, which decays and counts."""
    given = vars(optimizer).get("step")  # patched by a scheduler
    optimizer.step = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if given is None:
            del optimizer.step
        else:
            optimizer.step = given


def fill(wrapper: Any, before: Any = None, bucket: Bucket | None = None) -> None:
    """Move masters and moments, which `unwrap` has left in the parameters' state, into a new wrapper.

    Args:
        wrapper: around the same optimiser.
        before: the removed wrapper, whose loss scale continues; None: there was none.
        bucket: sums shares, and makes this collective over replicas; None: all of the state is whole.
    """
    optimizer = wrapper.optimizer
    for members in fragments(wrapper):
        states = [optimizer.state.pop(place.parameter, {}) for place in members]
        for place, state in zip(members, states, strict=True):
            _take_over(place, state, optimizer.state[place.master], bucket)
        for place in _by_master(members):
            if not optimizer.state[place.master]:
                del optimizer.state[place.master]
    for name in _SCALING:
        if hasattr(before, name):
            setattr(wrapper, name, getattr(before, name))
    if isinstance(wrapper, BF16_Optimizer):
        counting_nothing(wrapper)


def _take_over(place: Fragment, state: dict[str, Any], of_master: dict[str, Any], bucket: Bucket | None) -> None:
    """Invert `_state_of` for this replica's new part of the master."""
    for key, value in state.items():
        if not isinstance(value, Share) and not _is_like(key, value, place.parameter):
            of_master.setdefault(key, value)
            continue
        if key != MASTER and key not in of_master:
            of_master[key] = torch.zeros_like(place.master)
        into = (place.master if key == MASTER else of_master[key]).data.view(-1)[place.at : place.at + place.length]
        if isinstance(value, Share):
            assert bucket is not None
            for start, chunk in bucket.chunks(value):
                copy_common(into, place.start, chunk, start)
        else:
            copy_common(into, place.start, value.flatten(), 0)


def _is_like(key: str, value: Any, tensor: Tensor) -> bool:
    return key != _STEP and isinstance(value, Tensor) and value.shape == tensor.shape


_LINKS = (
    "_hp_mapping", "_dp_group", "_index_in_param_group", "_hp_grad", "get_full_hp_param", "get_full_hp_grad",
    "set_full_hp_param", "set_full_hp_grad", "load_hp_checkpoint_state", "_zero_optimizer",
)  # fmt: skip

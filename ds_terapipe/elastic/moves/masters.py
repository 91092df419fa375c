"""Removal and renewal of DeepSpeed's wrappers that keep fp32 masters.

They give a torch optimiser fp32 tensors in place of the model's parameters, flat ones or partitions of these
(``deepspeed_state.py``). Between :func:`unwrap` and :func:`fill` the optimiser has the model's parameters instead, each
with this replica's `Share` of its master and moments as state. Where layers move, :func:`join` makes them whole, in host
memory. So code that moves parameters by name works for fp32 and for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_terapipe.clipping import counting_nothing
from ds_terapipe.deepspeed_state import Fragment, fragments, link_sums, unlink
from ds_terapipe.elastic.moves.shares import Bucket, Share, copy_common
from ds_terapipe.elastic.moves.transfer import MASTER, described
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.parameter_groups import tell

_STEP = "step"
# Overflow state of a wrapper, in either scheme (runtime/fp16/loss_scaler.py); the same on all ranks.
_SCALING = ("loss_scaler", "loss_scale_config", "custom_loss_scaler", "external_loss_scale", "overflow")


def is_wrapped(optimizer: Any) -> bool:
    """Whether the optimizer is one of these wrappers."""
    return isinstance(optimizer, DeepSpeedOptimizer)


def check_states(wrapper: Any) -> None:
    """Refuse states of a wrapped optimizer that cannot be divided among the parameters in a flat master; local.

    Raises:
        ConfigError: naming the state.
    """
    for place in chain.from_iterable(map(_by_master, fragments(wrapper))):
        state = {} if place.master.shape == place.parameter.shape else wrapper.optimizer.state.get(place.master, {})
        for key, value in state.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel() > 1]
            if tensors and not _is_like(key, value, place.master):
                raise ConfigError(
                    f"optimizer: got state {key} of {type(wrapper.optimizer).__name__}, must be a tensor like its parameters "
                    "where layers freeze or move beside bf16, fp16 or ZeRO, use fp32 without ZeRO, or another optimizer"
                )


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
        unlink(parameter)
    devices = [(parameter, parameter.device) for parameter in parameters]
    for parameter in parameters:
        parameter.data = _on_host(parameter.data)
    for parameter, device in devices:
        parameter.data = parameter.data.to(device)


def _by_master(members: list[Fragment]) -> list[Fragment]:
    """Return one place for each master."""
    return list({id(place.master): place for place in members}.values())


def _state_of(place: Fragment, state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state from that of its master: shares of what is like it, in an order that all ranks know.

    Replicas sum their shares one by one. DeepSpeed 0.19.8 reads a universal checkpoint's in the order of a set.
    """
    found: dict[str, Any] = {}
    for key, value in sorted(state.items()):
        if _is_like(key, value, place.master):
            found[key] = _share(place, value)
        else:
            found[key] = described(value).clone() if isinstance(described(value), Tensor) else described(value)
    found[MASTER] = _share(place, place.master)
    return found


def _share(place: Fragment, flat: Tensor) -> Share:
    return Share(_on_host(place.of(flat)), place.start, place.parameter.shape, place.group)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return tensor.to("cpu", copy=True)


def join(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Make the shares that `unwrap` has left whole tensors, in host memory; collective over replicas."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = optimizer.state.get(parameter, {})
        state.update({key: bucket.whole(value) for key, value in state.items() if isinstance(value, Share)})


def fill(wrapper: Any, before: Any = None, bucket: Bucket | None = None) -> None:
    """Move masters and moments, which `unwrap` or `replace` has left in the parameters' state, into a wrapper.

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
        link_sums(wrapper)
        counting_nothing(wrapper)


def replace(wrapper: Any, states: Mapping[int, dict[str, Any]]) -> None:
    """Replace the masters and moments in a wrapper by whole ones; ``states``: of its parameters, by ``id``."""
    optimizer = wrapper.optimizer
    for members in fragments(wrapper):
        new = {id(place.parameter): states.get(id(place.parameter), {}) for place in members}
        keys = {key for state in new.values() for key in state}
        for place in _by_master(members):
            old = optimizer.state[place.master]
            # the parameters are linked to these very tensors
            kept = {key: old[key].zero_() for key in old if key in keys and _is_like(key, old[key], place.master)}
            old.clear()
            old.update(kept)
        for place in members:
            optimizer.state[place.parameter] = dict(new[id(place.parameter)])
    fill(wrapper)


def _take_over(place: Fragment, state: dict[str, Any], of_master: dict[str, Any], bucket: Bucket | None) -> None:
    """Invert `_state_of` for this replica's new part of the master."""
    for key, value in state.items():
        if not isinstance(value, Share) and not _is_like(key, value, place.parameter):
            of_master.setdefault(key, value)
            continue
        if key != MASTER and key not in of_master:
            of_master[key] = torch.zeros_like(place.master)
        into = place.of(place.master if key == MASTER else of_master[key])
        if isinstance(value, Share):
            assert bucket is not None
            for start, chunk in bucket.chunks(value):
                copy_common(into, place.start, chunk, start)
        else:
            copy_common(into, place.start, value.flatten(), 0)


def _is_like(key: str, value: Any, tensor: Tensor) -> bool:
    return key != _STEP and isinstance(value, Tensor) and value.shape == tensor.shape

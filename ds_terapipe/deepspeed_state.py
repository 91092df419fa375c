"""DeepSpeed's flat buffers and partitions: which elements of which parameter are where. No other module reads them.

A wrapper gives its optimizer fp32 masters in place of the model's parameters (DeepSpeed 0.19.8). ``BF16_Optimizer`` and ZeRO-1/2
have one flat tensor for each parameter group, divided among the replicas. ``FP16_Optimizer`` has a whole one, and
``FP16_UnfusedOptimizer`` one for each parameter. Files have the first two's partitions with the place of every name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.names import UNUSED
from ds_terapipe.overrides import replaced

_SLICES = "param_slice_mappings"
_PARTITIONS = "single_partition_of_fp32_groups"  # of ZeRO, and in files of BF16_Optimizer too
_WHOLE = ("fp32_groups_flat", "fp32_groups")  # of fp16 without ZeRO
# Attributes by which a parameter refers to its master.
_LINKS = (
    "_hp_mapping", "_dp_group", "_index_in_param_group", "_hp_grad", "get_full_hp_param", "get_full_hp_grad",
    "set_full_hp_param", "set_full_hp_grad", "load_hp_checkpoint_state", "_zero_optimizer",
)  # fmt: skip


class Fragment(NamedTuple):
    """Run of a parameter's elements, and its place in an fp32 tensor.

    Attributes:
        parameter: the model's parameter.
        master: the optimizer's tensor, for this parameter or for several.
        offset: first element in ``master``.
        start: first element of the parameter.
        length: number of elements here; the others are on other ranks.
        group: process group of these ranks; None: all elements are here.
    """

    parameter: Any
    master: Tensor
    offset: int
    start: int
    length: int
    group: Any

    def of(self, like_master: Tensor) -> Tensor:
        """Return the run's view of the master, or of a tensor like it."""
        return like_master.detach().view(-1)[self.offset : self.offset + self.length]


# ------------------------------------------------------------------------------------------------------ a live optimizer


def _clones(parameters: Sequence[Any], masters: Sequence[Tensor]) -> list[Fragment]:
    pairs = zip(parameters, masters, strict=True)
    return [Fragment(parameter, master, 0, 0, parameter.numel(), None) for parameter, master in pairs]


def _one_after_another(parameters: Sequence[Any], flat: Tensor) -> list[Fragment]:
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [Fragment(p, flat, end - p.numel(), 0, p.numel(), None) for p, end in zip(parameters, ends, strict=True)]


def _all_linked(parameters: Sequence[Any], flat: Tensor) -> list[Fragment]:
    return [_linked(parameter, flat) for parameter in parameters]


# A wrapper's lists by parameter group: masters, which tell the wrapper, their parameters, and how the former have the latter.
_WRAPPERS: tuple[tuple[str, str, Callable[..., list[Fragment]]], ...] = (
    ("fp32_groups", "fp16_groups", _clones),  # FP16_UnfusedOptimizer
    ("fp32_groups_flat", "fp16_groups", _one_after_another),  # FP16_Optimizer
    ("fp32_groups_flat_partition", "bf16_groups", _all_linked),  # BF16_Optimizer
    (_PARTITIONS, "bit16_groups", _all_linked),  # ZeRO
)


def _lists(wrapper: Any) -> tuple[str, str, Callable[..., list[Fragment]]]:
    return next(lists for lists in _WRAPPERS if hasattr(wrapper, lists[0]))


def groups_of(wrapper: Any) -> list[list[Any]]:
    """Return the model's parameters in a wrapper, by parameter group."""
    groups: list[list[Any]] = getattr(wrapper, _lists(wrapper)[1])
    return groups


def fragments(wrapper: Any) -> list[list[Fragment]]:
    """Return where the masters of a wrapper's parameters are, by parameter group."""
    masters, parameters, places = _lists(wrapper)
    groups = zip(getattr(wrapper, parameters), getattr(wrapper, masters), strict=True)
    return [places(*group) for group in groups]


def fragments_in(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Fragment] | None:
    """Return where parameters are in one group's tensors, by the tensors alone; None if that cannot be known.

    Args:
        masters: present tensors of the group: the parameters, clones of them in the same order, or partitions.
        parameters: the model's parameters of the group.

    Returns:
        One fragment for each parameter, in an order that is the same on all ranks that share them.
    """
    known = {id(parameter) for parameter in parameters}
    if all(id(master) in known for master in masters):
        return _clones(masters, masters)
    # DeepSpeed's wrappers leave out frozen and empty parameters.
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.numel()]
    if trained and all(hasattr(parameter, "_hp_mapping") for parameter in trained):
        homes = [next((m for m in masters if _is_linked(parameter, m)), None) for parameter in trained]
        if any(home is None for home in homes):
            return None
        return [_linked(p, home) for p, home in zip(trained, homes, strict=True) if home is not None]
    for candidates in (parameters, trained):
        if [candidate.shape for candidate in candidates] == [master.shape for master in masters]:
            return _clones(candidates, masters)
    return None


def _linked(parameter: Any, flat: Tensor) -> Fragment:
    """Return the place of a replica's part as DeepSpeed's links give it."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return Fragment(parameter, flat, 0, 0, 0, parameter._dp_group)
    at = mapping.hp_fragment_address
    return Fragment(parameter, flat, at.start, mapping.lp_fragment_address.start, at.numel, parameter._dp_group)


def _is_linked(parameter: Any, flat: Tensor) -> bool:
    """Whether a tensor has what is here of a parameter; any one has nothing of it."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return True
    at, first = mapping.hp_fragment_address, mapping.hp_fragment.data_ptr()
    inside = at.start + at.numel <= flat.numel() and flat.is_contiguous()
    return bool(inside and first == flat.data_ptr() + at.start * flat.element_size())


def link(parameter: Any) -> tuple[int, int] | None:
    """Return the first element in a flat partition, and the number, of a parameter that DeepSpeed has linked to one."""
    mapping = getattr(parameter, "_hp_mapping", None)
    return None if mapping is None else (mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)


def unlink(parameter: Any) -> None:
    """Remove a parameter's references to its master."""
    for name in [name for name in vars(parameter) if name in _LINKS]:
        delattr(parameter, name)


def flat_gradients(optimizer: Any) -> list[Tensor]:
    """Return the fp32 sums of gradients of a ``BF16_Optimizer``, one for each parameter group; none of another optimizer."""
    flat: list[Tensor] = getattr(optimizer, "fp32_groups_gradients_flat", [])
    return flat


def link_sums(optimizer: Any, counted: Iterable[Any] = ()) -> None:
    """Link every parameter of a ``BF16_Optimizer`` to its sum, as 0.19.8 does where a backward pass comes to it.

    Sums without a backward pass are zeros, which other ranks' may be added to.

    Args:
        optimizer: the wrapper.
        counted: parameters whose sums count in the norm of a step, also without a backward pass here.
    """
    wanted = set(map(id, counted))
    of_groups = optimizer.bf16_groups, optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients
    for parameters, totals, has in zip(*of_groups, strict=True):
        for index, parameter in enumerate(parameters):
            parameter._hp_grad = totals[index]
            has[index] = has[index] or id(parameter) in wanted


@torch.no_grad()
def add_to_sums(optimizer: Any) -> None:
    """Add the gradients in ``grad`` to the sums of a ``BF16_Optimizer``.

    Its ``backward_epilogue`` (0.19.8) does the same parameter by parameter, which takes longer than a slice's kernels.
    """
    if optimizer.immediate_grad_update or optimizer.autoep_folding_tp_group is not None:
        optimizer.backward_epilogue()
        return
    sums, gradients = [], []
    of_groups = optimizer.bf16_groups, optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients
    for parameters, totals, has in zip(*of_groups, strict=True):
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                has[index] = True
                sums.append(totals[index])
                gradients.append(parameter.grad.reshape(-1))
    if sums:
        torch._foreach_add_(sums, gradients)


def leave_reduced(optimizer: Any, averages: Mapping[int, Tensor]) -> list[Any]:
    """Have ``DeepSpeedZeroOptimizer.reduce_gradients`` (0.19.8) take gradients for reduced, and leave them as they are.

    Args:
        optimizer: of ZeRO-1.
        averages: messages after their reduction, by the address of the gradient that has the same values.

    Returns:
        Parameters of these gradients, which have the attribute ``ds_grad_is_ready`` until it is removed.
    """
    found = []
    for number, group in enumerate(optimizer.bit16_groups):
        for parameter in group:
            gradient = optimizer.get_gradient_for_reduction(parameter)
            if gradient is None or gradient.data_ptr() not in averages:
                continue
            average = averages[gradient.data_ptr()]
            # sums in another type than the model's are added to this rank's part where they are reduced
            bucket = optimizer.ipg_buckets[average.dtype]
            bucket.params.append((number, parameter.param_idx_in_group, optimizer.get_param_id(parameter)))
            optimizer._add_full_reduction_to_compact_grad_partition(average.view(-1), average.dtype)
            bucket.params.clear()
            parameter.ds_grad_is_ready = False
            found.append(parameter)
    return found


# ---------------------------------------------------------------------------------------------------------------- files


def saved_partitions(state: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, slice]]]:
    """Return the masters in a file of partitions, by parameter group, and the elements of each name.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: the file is not DeepSpeed's.
    """
    groups = zip(state[_PARTITIONS], state[_SLICES], strict=True)
    return [
        (flat, {name: slice(at.start, at.start + at.numel) for name, at in places.items()}) for flat, places in groups
    ]


def saved_masters(state: Any) -> Iterator[Tensor]:
    """Yield the flat masters of a state of the fp16 optimizers, fused and not, one for each parameter group."""
    for key in _WHOLE if isinstance(state, Mapping) else ():
        for group in state.get(key, ()):
            yield torch.cat([tensor.flatten() for tensor in group]) if isinstance(group, list) else group


def saved_fragments(state: Mapping[str, Any], sizes: Sequence[Sequence[int]]) -> list[list[tuple[int, Tensor, slice]]]:
    """Return, for each parameter in a state of the fp16 optimizers, its number there, its master, and its elements of that.

    Args:
        state: of ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer``.
        sizes: number of elements of each parameter, by parameter group.
    """
    found = []
    groups = state["optimizer_state_dict"]["param_groups"]
    for group, masters, of_group in zip(groups, next(state[key] for key in _WHOLE if key in state), sizes, strict=True):
        if isinstance(masters, list):
            each = zip(group["params"], masters, of_group, strict=True)
            found.append([(number, master, slice(0, size)) for number, master, size in each])
        else:
            ends = list(accumulate(of_group))
            (number,) = group["params"]
            found.append([(number, masters, slice(end - size, end)) for end, size in zip(ends, of_group, strict=True)])
    return found


def load_scale(wrapper: Any, saved: Mapping[str, Any]) -> None:
    """Load the loss scale, and what else a wrapper's saved state has beside tensors; the masters stay."""
    if hasattr(wrapper, "_load_global_state"):
        wrapper._load_global_state(saved)
    else:
        masters = _lists(wrapper)[0]
        wrapper.load_state_dict({**saved, masters: getattr(wrapper, masters)}, load_optimizer_states=False)


def sizes_of(optimizer: Any) -> dict[str, Any]:
    """Return what :func:`elements` and :func:`elements_by_name` read of an optimizer, under the keys of its saved state."""
    flat = {key: getattr(optimizer, key) for key in _WHOLE if hasattr(optimizer, key)}
    return {_SLICES: getattr(optimizer, "_param_slice_mappings", None)} | (
        flat or {"param_groups": optimizer.param_groups}
    )


def elements_by_name(state: Mapping[str, Any]) -> list[dict[str, int]] | None:
    """Return the number of elements of each parameter in a rank's partitions, by parameter group; None without any."""
    mappings = state.get(_SLICES)
    return None if mappings is None else [{name: at.numel for name, at in group.items()} for group in mappings]


def elements(state: Mapping[str, Any]) -> list[int] | None:
    """Return the number of parameters of each group, or of elements if a wrapper joins them."""
    if "param_groups" in state:
        return [len(group["params"]) for group in state["param_groups"]]
    for key in _WHOLE:
        if key in state:
            return [sum(t.numel() for t in (group if isinstance(group, list) else [group])) for group in state[key]]
    return None


class Run(NamedTuple):
    """Elements ``first`` to ``stop`` of a parameter, from ``offset`` on in a saved tensor."""

    name: str
    first: int
    stop: int
    offset: int


class SavedTensor(NamedTuple):
    """A tensor of an optimizer in a file, with the elements of one parameter of a group, or of several.

    Attributes:
        padding: number of elements behind the last parameter's.
        between: those behind each parameter.
    """

    group: int
    shape: tuple[int, ...]
    runs: Sequence[Run]
    padding: int = 0
    between: Sequence[int] = ()


def one_each(group: int, shapes: Mapping[str, tuple[int, ...]]) -> list[SavedTensor]:
    """Return a tensor for each parameter of a group."""
    return [SavedTensor(group, shape, [Run(name, 0, prod(shape), 0)]) for name, shape in shapes.items()]


def saved_tensors(
    wrapper: Any, group: int, shapes: Mapping[str, tuple[int, ...]], data: int, replicas: int
) -> list[SavedTensor]:
    """Return the tensors that replica number ``data`` would save of a group with these parameters."""
    masters, sizes = _lists(wrapper)[0], {name: prod(shape) for name, shape in shapes.items()}
    if masters == "fp32_groups":
        return one_each(group, shapes)
    is_whole, total = masters == "fp32_groups_flat", sum(sizes.values())
    between = [0] * len(sizes) if is_whole else _paddings(wrapper, [*sizes.values()])
    used, unit = total + sum(between), 1 if is_whole else wrapper.nccl_start_alignment_factor * replicas
    length = total if is_whole else -(-used // unit) * unit // replicas
    start, stop, at, runs = data * length, (data + 1) * length, 0, []
    for (name, size), behind in zip(sizes.items(), between, strict=True):
        first, last = max(at, start), min(at + size, stop)
        if first < last:
            runs.append(Run(name, first - at, last - at, first - start))
        at += size + behind
    padding = min(length, max(0, stop - used))
    if hasattr(wrapper, "bf16_groups"):  # all of it, also if it is longer than the last part
        padding = length * replicas - used if data == replicas - 1 else 0
    return [SavedTensor(group, (length,), runs, padding, between)]


def _paddings(wrapper: Any, sizes: Sequence[int]) -> list[int]:
    """Return the number of elements that ZeRO leaves behind each parameter."""
    found, at = [], 0
    width = wrapper.bit16_groups_flat[0].element_size() if getattr(wrapper, "parameter_alignment", False) else 16
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        found.append(0 if last else -(at + size) % (16 // gcd(16, width)))
        at += size + found[-1]
    return found


def with_masters(
    wrapper: Any, saved: Mapping[str, Any], masters: Sequence[list[Tensor]], tensors: Sequence[SavedTensor]
) -> dict[str, Any]:
    """Return a wrapper's saved state with other masters, by parameter group, laid out as `saved_tensors` says."""
    key = _lists(wrapper)[0]
    if key == "fp32_groups":
        return {**saved, key: masters}
    flat = [tensor for (tensor,) in masters]
    if key == "fp32_groups_flat":
        return {**saved, key: flat}
    from deepspeed.utils.tensor_fragment import fragment_address  # here: FusedLamb goes without DeepSpeed

    found = {**saved, "group_paddings": [tensor.padding for tensor in tensors]}
    if key == _PARTITIONS:
        flat = [values[: values.numel() - tensor.padding] for values, tensor in zip(flat, tensors, strict=True)]
        found["param_alignment_paddings"] = [list(tensor.between) for tensor in tensors]
    places = [
        OrderedDict((run.name, fragment_address(numel=run.stop - run.first, start=run.offset)) for run in tensor.runs)
        for tensor in tensors
    ]
    return {**found, _PARTITIONS: flat, _SLICES: places}


class Absent:
    """Stand-in for the parameters of a group without elements here, as DeepSpeed reads a universal checkpoint into them.

    Args:
        keys: names of the moments.
        step: number of steps, as it was saved.
    """

    def __init__(self, keys: list[str], step: Any) -> None:
        self._hp_mapping = self
        self.optim_fragment: dict[str, Any] = {}
        self._keys, self._step = keys, step

    def load_hp_checkpoint_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._step

    def get_optim_state_keys(self) -> list[str]:
        return self._keys

    def get_hp_fragment_address(self) -> Any:
        from deepspeed.utils.tensor_fragment import fragment_address  # here: FusedLamb goes without DeepSpeed

        return fragment_address(start=0, numel=0)

    def get_hp_fragment(self, optim_state_key: str) -> Tensor:
        return torch.empty(0)


@contextmanager
def groups_filled(wrapper: Any, stand_in: Callable[[list[str]], Absent]) -> Iterator[None]:
    """Context manager that fills groups without elements here: DeepSpeed 0.19.8 asks at least one parameter for its step.

    Args:
        wrapper: a ``BF16_Optimizer``, or ZeRO's.
        stand_in: makes one, from the names of a group.
    """
    attribute, groups, names = _lists(wrapper)[1], groups_of(wrapper), wrapper.param_names
    filled: list[list[Any]] = []
    for group in groups:
        here = any(p._hp_mapping is not None and names[p] != UNUSED for p in group)
        filled.append(group if here else [stand_in([names[p] for p in group])])
    added = {each: UNUSED for group in filled for each in group if isinstance(each, Absent)}
    with replaced(wrapper, **{attribute: filled, "param_names": {**names, **added}}):
        yield

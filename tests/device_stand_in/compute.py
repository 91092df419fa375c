"""The device's numbers: each operator is computed on host views of the same memory, in the order of its stream.

The operator itself runs first: its checks, allocations and copies are the device's, its kernels do nothing.
"""

import ctypes
import hashlib
import threading
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device_stand_in import attention, runtime

aten = torch.ops.aten

_KINDS: dict[str, Collection[str]] = {
    "allocate": ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_pin_memory"),
    "leave": ("record_stream", "resize_", "resize_as_", "set_", "is_pinned", "_local_scalar_dense", "_fused_sdp_choice"),
    "copy": ("copy_", "_to_copy", "clone"),
    # The shape of their result is in the data: kernels that do nothing would give nonsense.
    "data": ("nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    "indexed": ("index", "index_put", "index_put_", "_index_put_impl_"), "attention": attention.OPERATORS,
    "random": (
        "bernoulli", "bernoulli_", "native_dropout", "rand", "randn", "randint", "uniform_", "normal_", "rand_like",
        "randn_like", "random_", "exponential_", "multinomial", "randperm", "normal", "cauchy_", "randint_like",
    ),
}  # fmt: skip

_bases: dict[tuple[int, int, torch.dtype], Tensor] = {}


class _Facts(NamedTuple):
    kind: str
    name: bytes
    written: frozenset[str]  # arguments
    arguments: tuple[str, ...]
    in_place: bool


@cache
def _facts(func: Any) -> _Facts:
    schema, name = func._schema, func.overloadpacket.__name__
    kind = next((kind for kind, names in _KINDS.items() if name in names), "compute")
    if func is aten.repeat_interleave.Tensor:
        kind = "data"
    aliases = [each.alias_info for each in schema.returns]
    if kind == "compute" and any(alias is not None and not alias.is_write for alias in aliases):
        kind = "leave"  # a view
    written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    in_place = not aliases or any(alias is not None for alias in aliases)
    return _Facts(kind, str(func).encode(), frozenset(written), tuple(each.name for each in schema.arguments), in_place)


def host(value: Any) -> Any:
    """Return a CPU tensor over the memory of a device's tensor; anything else as it is."""
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    if value.numel() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    storage = value.untyped_storage()
    key = (storage.data_ptr(), storage.nbytes(), value.dtype)
    base = _bases.get(key)
    if base is None:
        if len(_bases) > 4096:
            _bases.clear()
        memory = (ctypes.c_char * key[1]).from_address(key[0])
        base = _bases[key] = torch.frombuffer(memory, dtype=value.dtype, count=key[1] // value.element_size())
    return base.as_strided(value.size(), value.stride(), value.storage_offset())


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply it to what lists and tuples hold: operators take no other containers, and PyTorch's own tree_map takes longer."""
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, each) for each in value)
    return function(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def wait(device: int | None = None) -> None:
    """Wait as a kernel on the device's current stream would; emulated kernels call it before they compute."""
    device = torch.cuda.current_device() if device is None else device
    runtime.LIBRARY.stand_in_reach(torch._C._cuda_getCurrentRawStream(device), device)


class Compute(TorchDispatchMode):
    """Computes every operator of a device; with races checked, reports what each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self._checks = bool(runtime.LIBRARY.stand_in_checks_races())
        if self._checks:
            torch._C._activate_gpu_trace()
            _gpu_trace.register_callback_for_memory_allocation(runtime.LIBRARY.stand_in_allocated)
            _gpu_trace.register_callback_for_memory_deallocation(runtime.LIBRARY.stand_in_freed)
            torch.cuda.Event.query = _query

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _device_of(args, kwargs)
        if device is None or func.namespace != "aten":
            out = func(*args, **kwargs)
        else:
            out = self._run(func, _facts(func), args, kwargs, device)
        if self._checks and func.namespace == "aten" and _facts(func).kind not in ("leave", "allocate"):
            stream = runtime.HOST if device is None else torch._C._cuda_getCurrentRawStream(device)
            _report(_facts(func), stream, args, kwargs, out)
        return out

    def _run(self, func: Any, facts: _Facts, args: Any, kwargs: Any, device: int) -> Any:
        indices = [index for index in args[1] if index is not None] if facts.kind == "indexed" else []
        if facts.kind == "data" or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return _by_data(func, facts, args, kwargs, device)
        seed = _seed(facts, kwargs.get("generator"), device) if facts.kind == "random" else None
        out = func(*args, **kwargs)
        if facts.kind in ("allocate", "leave") or (facts.kind == "copy" and _copied(args, out, device)):
            return out
        wait(device)
        if facts.kind == "attention":
            given = {each.name: each.default_value for each in func._schema.arguments}
            attention.compute(
                func.overloadpacket.__name__, {**given, **dict(zip(facts.arguments, args, strict=False)), **kwargs}, out, host
            )
            return out
        result = _computed(func, facts, args, kwargs, seed)
        if not facts.in_place:
            for written, value in zip(_leaves(out), _leaves(result), strict=False):
                _fill(func, written, value)
        return out


def _device_of(args: Any, kwargs: Any) -> int | None:
    """Index of the device that the operator runs on."""
    for each in _leaves((*args, *kwargs.values())):
        if isinstance(each, Tensor) and each.device.type == "cuda":
            return each.device.index
    wanted = kwargs.get("device")
    if wanted is None or torch.device(wanted).type != "cuda":
        return None
    index = torch.device(wanted).index
    return torch.cuda.current_device() if index is None else index


def _by_data(func: Any, facts: _Facts, args: Any, kwargs: Any, device: int) -> Any:
    """The host's result in place of the device's, which waits for the device's data too."""
    wait(device)
    result = func(*_map(host, args), **{key: _map(host, value) for key, value in kwargs.items()})
    if facts.in_place:
        return args[0]

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = torch.empty_like(value, device=torch.device("cuda", device))
        host(moved).copy_(value)
        return moved

    return _map(placed, result)


def _copied(args: Any, out: Any, device: int) -> bool:
    """Whether a copy is done: it was one of bytes, which the runtime makes, or what is done here."""
    source, written = (args[1], args[0]) if out is args[0] else (args[0], out)
    if "cuda" not in (source.device.type, written.device.type):
        return True
    same = source.dtype == written.dtype and source.shape == written.shape
    if same and source.is_contiguous() and written.is_contiguous():
        return True
    if written.device.type == "cuda":
        return False
    wait(device)  # the device converted first, by a kernel
    written.copy_(host(source))
    return True


def _seed(facts: _Facts, generator: Any, device: int) -> int:
    state = (generator or torch.cuda.default_generators[device]).get_state()
    digest = hashlib.blake2b(bytes(state.numpy()) + facts.name, digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _computed(func: Any, facts: _Facts, args: Any, kwargs: Any, seed: int | None) -> Any:
    args, kwargs = _map(host, args), {key: _map(host, value) for key, value in kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if kwargs.get("generator") is not None:
        kwargs["generator"] = torch.default_generator
    if seed is not None:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            return func(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)
    if func in _FORMULAS:
        return _FORMULAS[func](*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if facts.in_place:
            raise RuntimeError(f"the stand-in cannot compute {func}: {error}") from error
        return func(*_map(_wide, args), **{key: _map(_wide, value) for key, value in kwargs.items()})


def _rms_norm_backward(
    gradient: Tensor, given: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, mask: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight, which PyTorch has as a kernel for devices alone."""
    wide = torch.promote_types(given.dtype, torch.float32)
    dims = tuple(range(given.dim() - len(shape), given.dim()))
    gradient, normal = gradient.to(wide), given.to(wide) * rstd.to(wide)
    scaled = gradient if weight is None else gradient * weight.to(wide)
    of_given = rstd.to(wide) * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    of_weight = (gradient * normal).sum(tuple(range(given.dim() - len(shape)))) if mask[1] else None
    return of_given if mask[0] else None, of_weight


# Operators that the host has no kernel for.
_FORMULAS = {aten._fused_rms_norm_backward.default: _rms_norm_backward}


def _wide(value: Any) -> Any:
    half = (torch.float16, torch.bfloat16)
    if isinstance(value, Tensor) and value.dtype in half:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in half else value


def _fill(func: Any, written: Any, value: Any) -> None:
    if not isinstance(written, Tensor) or written.device.type != "cuda" or not written.numel():
        return
    if written.shape != value.shape:
        raise RuntimeError(f"{func}: {tuple(written.shape)} on the device, {tuple(value.shape)} on the host")
    host(written).copy_(value)


def _report(facts: _Facts, stream: int, args: Any, kwargs: Any, out: Any) -> None:
    """Report the accesses of an operator to the runtime: reads, then writes."""
    library, kind = runtime.LIBRARY, "cpu" if stream == runtime.HOST else "cuda"
    named = [*zip(facts.arguments, args, strict=False), *kwargs.items()]
    for name, value in sorted(named, key=lambda item: item[0] in facts.written):
        for address, size in _bytes_of(value, kind):
            library.stand_in_access(stream, address, size, name in facts.written, facts.name)
    if not facts.in_place:
        for address, size in _bytes_of(out, kind):
            library.stand_in_access(stream, address, size, True, facts.name)


def _bytes_of(value: Any, kind: str) -> Iterator[tuple[int, int]]:
    """Address and length of the bytes that tensors reach, gaps of their strides included."""
    for tensor in _leaves(value):
        if isinstance(tensor, Tensor) and tensor.device.type == kind and tensor.numel():
            if tensor.layout == torch.strided:
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=False))
                yield tensor.data_ptr(), (last + 1) * tensor.element_size()


_event_query = torch.cuda.Event.query


def _query(event: Any) -> bool:
    """`torch.cuda.Event.query` that tells of what the program learns; other threads watch alone."""
    completed = bool(_event_query(event))
    if completed and event.cuda_event and threading.current_thread() is threading.main_thread():
        runtime.LIBRARY.stand_in_saw(event.cuda_event)
    return completed


@cache
def install() -> None:
    """Compute from now on, in this thread and in autograd's threads."""
    if runtime.LIBRARY is None:
        raise RuntimeError('the stand-in is not preloaded: eval "$(python -m tests.device_stand_in.build)"')
    torch.cuda.init()
    Compute().__enter__()

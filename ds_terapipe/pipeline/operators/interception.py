"""Changes of an engine to the modules of its stages so that they run slices; the model's code stays as it is.

Attention is intercepted in two ways: as an operator of ATen (sdpa.py) and as a module of Megatron's
(core_attention.py). The weight gradients of linear layers and embeddings that are modules are deferred to the end of
their micro-batch (deferred.py). Other products are computed as usual, and named in the log.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.operators import core_attention
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.deferred import (
    EmbeddingCalls,
    deferred_embedding,
    deferred_linear,
    gathered_linear,
    has_operators,
    keeper_of,
    waits_as_linear,
)
from ds_terapipe.pipeline.operators.sdpa import Overrides

_DEFERS = "ds_terapipe_defers"


class Interception:
    """Makes modules of some layers run slices, until it is closed.

    A method is replaced by an attribute of the module itself, bound to it; a deep copy's is bound to the copy. Several
    instances may hold the same modules; the last one to close restores them.

    Args:
        layers: modules, or functions of modules as a ``TiedLayerSpec`` makes them (``functools.partial``).

    Attributes:
        adapted: modules that run differently in a slice.
        deferred: ids of the parameters whose gradients are made once per micro-batch in all their uses.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self.adapted: list[nn.Module] = []
        self.deferred: set[int] = set()
        changed: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        Overrides.acquire()
        self._finalizer = weakref.finalize(self, _undo, changed)
        layers = list(layers)
        for name, module in (found for layer in layers for root in modules_of(layer) for found in _named(root)):
            if core_attention.is_core_attention(name, module):
                self.adapted.append(module)
                _stand_in(module, "forward", core_attention.forward, changed)
            for method, function in _deferring(module):
                if _stand_in(module, method, function, changed):
                    own = [p for p in module._parameters.values() if p is not None]
                    self.deferred.update(id(p) for p in own if not has_operators(type(p)))
        # a function may use the weights of its module in any way, so a tied weight in it only counts if it is marked
        for root in (root for layer in layers if not _says_so(layer) for root in modules_of(layer)):
            self.deferred.difference_update(map(id, root.parameters()))

    def not_deferred(self, parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return the names of trained matrices whose gradients are made slice by slice."""
        return [n for n, p in parameters if p.requires_grad and p.dim() >= 2 and id(p) not in self.deferred]

    def close(self) -> None:
        """Restore the modules; idempotent."""
        self._finalizer()


def defers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a layer that is a function: all its products with weights are in modules or :func:`deferred_linear`."""
    setattr(function, _DEFERS, True)
    return function


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks on a parameter's gradient are not DeepSpeed's or this package's."""
    kinds = (getattr(parameter, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    origins = [str(getattr(hook, "__module__", "")) for hooks in kinds for hook in hooks.values()]
    return any(origin.split(".")[0] not in ("deepspeed", "ds_terapipe") for origin in origins)


def hooked_line(names: Iterable[str]) -> str:
    """Return a log line on parameters whose hooks run slice by slice; empty without any."""
    return _line("hooks on gradients run once per slice, not once per micro-batch (exact if linear)", names)


def not_deferred_line(names: Iterable[str]) -> str:
    """Return a log line on weights whose gradients are made slice by slice; empty without any."""
    return _line("weight gradients made slice by slice, not once per micro-batch (as exact, but slower)", names)


def written_line(names: Iterable[str]) -> str:
    """Return a log line on statistics of layers that are updated slice by slice; empty without any."""
    return _line("buffers and numbers that layers write are written once per slice, not once per micro-batch", names)


def _line(what: str, names: Iterable[str], shown: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{what}: {', '.join(names[:shown])}{more}" if names else ""


def _says_so(layer: Any) -> bool:
    function = layer.func if isinstance(layer, functools.partial) else layer
    return isinstance(function, nn.Module) or getattr(function, _DEFERS, False)


def _named(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with the name that their parent gives them."""
    for path, module in root.named_modules():
        yield path.rpartition(".")[2], module


# ------------------------------------------------------------------------------------------------------ changes to modules

# How many use a change, by id of the module and name of its method. Each user holds the module.
_users: Counter[tuple[int, str]] = Counter()


def _stand_in(
    module: nn.Module,
    method: str,
    function: Callable[..., Any],
    changed: list[tuple[nn.Module, str, Callable[..., Any]]],
) -> bool:
    """Replace a method by ``function(module, ...)``, unless other code has; return whether it was replaced."""
    there = module.__dict__.get(method)
    # of a deep copy the attribute is ours, of an unpickled one the class's own method
    if there is not None and getattr(there, "__func__", None) not in (function, getattr(type(module), method)):
        return False
    module.__dict__[method] = MethodType(function, module)
    _users[id(module), method] += 1
    changed.append((module, method, function))
    return True


def _undo(changed: list[tuple[nn.Module, str, Callable[..., Any]]]) -> None:
    for module, method, function in changed:
        _users[id(module), method] -= 1
        if _users[id(module), method] > 0:
            continue
        del _users[id(module), method]
        if getattr(module.__dict__.get(method), "__func__", None) is function:
            del module.__dict__[method]
    changed.clear()
    Overrides.release()


# ------------------------------------------------------------------------------------------------------ deferred layers


def _deferring(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield method names of a module and replacements that defer the gradients of its own parameters."""
    kind = type(module)
    if isinstance(module, nn.Linear):
        # nn.MultiheadAttention uses the weight of the other class without calling it
        if kind.forward is nn.Linear.forward and not isinstance(module, NonDynamicallyQuantizableLinear):
            yield "forward", _linear
    elif isinstance(module, nn.Embedding):
        if kind.forward is nn.Embedding.forward and not module.sparse and module.max_norm is None:
            yield "forward", _embedding
    elif hasattr(module, "vocab_start_index") and "weight" in module._parameters:
        if not getattr(module, "deterministic_mode", False):  # deterministic mode indexes the weight
            yield "forward", _vocabulary
    elif callable(getattr(kind, "_forward_impl", None)):
        if not getattr(module, "gradient_accumulation_fusion", False):
            yield "_forward_impl", _parallel_linear


def _named_as(method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Name a replacement like its method: pickle stores bound methods by name, and so restores the original."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__name__ = method
        return function

    return named


@_named_as("forward")
def _linear(self: nn.Linear, input: Tensor) -> Tensor:
    return deferred_linear(input, self.weight, self.bias)


@_named_as("forward")
def _embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    return deferred_embedding(
        input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
    )


@_named_as("forward")
def _vocabulary(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run megatron-core's ``VocabParallelEmbedding``, which masks the tokens of other processes around its lookup."""
    original = type(module).forward
    if keeper_of(module.weight) is None:
        return cast(Tensor, original(module, *args, **kwargs))
    with EmbeddingCalls():
        return cast(Tensor, original(module, *args, **kwargs))


@_named_as("_forward_impl")
def _parallel_linear(module: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run megatron-core's column- and row-parallel linear layers, which multiply in their own autograd function.

    With deferred weight gradients nothing overlaps the all-reduce of the input's gradient, so the plain region function
    does the same. With sequence parallelism the input is this rank's share of the tokens.
    """
    kind, bias, reduces = type(module), kwargs.get("bias"), kwargs.get("allreduce_dgrad", False)
    enter_region = getattr(sys.modules.get(kind.__module__), "copy_to_tensor_model_parallel_region", None)
    if (
        not waits_as_linear(input, weight, bias)
        or args
        or kwargs.get("gradient_accumulation_fusion")
        or kwargs.get("grad_output_buffer") is not None
        or (reduces and enter_region is None)
    ):
        return cast(Tensor, kind._forward_impl(module, input, weight, *args, **kwargs))
    context = SliceContext.current
    if kwargs.get("sequence_parallel") and context is not None and context.shares is not None:
        return gathered_linear(input, weight, bias, context.shares)
    if reduces and enter_region is not None:
        input = enter_region(input, group=kwargs.get("tp_group"))
    return deferred_linear(input, weight, bias)

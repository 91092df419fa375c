"""The ways into a slice's attention: where models call attention, without a line of the model changed.

``F.scaled_dot_product_attention`` is met below autograd's Python API, as an override of the ATen operator: that is the one
place that also sees recomputation (autograd drops torch-function modes during backward), checkpoints inside a layer,
``nn.MultiheadAttention`` and TorchScript. Outside a slice the override calls what it replaced. Attention written as modules
(megatron-core's and Megatron-DeepSpeed's ``core_attention``) is met by interface: no Megatron package is needed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ds_terapipe.pipeline.attention import slice_attention
from ds_terapipe.pipeline.context import CallForm, PlacementError, SliceContext, refuse_model
from ds_terapipe.pipeline.weight_gradients import DeferredLinear

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_LINEAR = torch.ops.aten.linear.default


class Overrides:
    """Installs the overrides of ATen operators once per process, for as long as an engine needs them."""

    _library: torch.library.Library | None = None
    _users = 0

    @classmethod
    def acquire(cls) -> None:
        """Install the overrides, or count one more user of them."""
        cls._users += 1
        if cls._library is not None:
            return
        cls._library = torch.library.Library("aten", "IMPL")
        for device in ("CPU", "CUDA"):
            cls._library.impl("scaled_dot_product_attention", _sdpa, f"Autograd{device}")
            cls._library.impl("scaled_dot_product_attention", _sdpa, device)  # tensors of torch.inference_mode
            cls._library.impl("linear", _linear, f"Autograd{device}")

    @classmethod
    def release(cls) -> None:
        """Remove the overrides with their last user."""
        cls._users = max(cls._users - 1, 0)
        if cls._users == 0 and cls._library is not None:
            cls._library._destroy()
            cls._library = None


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    context = SliceContext.current
    if context is None or not _mixes_tokens(context, query, key, value, attn_mask, is_causal):
        dropout_p = dropout_p if context is None or context.dropout else 0.0
        return _SDPA.decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dim() >= 3 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise PlacementError(f"{query.shape[-3]} query heads over {key.shape[-3]} key heads need enable_gqa=True")
    return slice_attention(context, query, key, value, attn_mask, dropout_p, scale, is_causal=is_causal)


def _mixes_tokens(
    context: SliceContext, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> bool:
    """True for attention of the slice's tokens over each other; False where the call concerns no slice (whole sequences,
    attention over some other dimension, cross attention to something that isn't cut). Raises where that can't be told."""
    span = context.span
    if span is None or span.is_whole:
        return False
    if isinstance(query, FakeTensor) or torch.compiler.is_compiling():
        raise PlacementError(
            f"attention is compiled by torch.compile ({context.describe()}): a slice's position would be baked in, "
            "don't compile the layers of a model that runs with token_pipeline"
        )
    over_itself = query.shape[-2] == span.length and key.shape[-2] == span.length
    if over_itself and span.length > 1 and (is_causal or mask is not None):
        context.note_call(CallForm.of(query, key, value, causal=is_causal and mask is None))
    if over_itself and (is_causal or mask is not None or _is_causal_for_more_tokens(context, query, key, value)):
        return True
    if over_itself:
        raise refuse_model(f"attention that is not causal ({context.describe()})")
    if is_causal:
        raise PlacementError(
            f"causal attention of {query.shape[-2]} queries over {key.shape[-2]} keys in a slice of {span.length} tokens "
            f"({context.describe()}): it can't be placed"
        )
    _refuse_packed_heads(context, query, key)
    return False


def _is_causal_for_more_tokens(context: SliceContext, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call of one token over itself, without a mask and without ``is_causal``, is causal all the same.

    With or without the flag, a single query attends to all keys so far and its own, so Hugging Face's attention leaves the
    flag out. A bidirectional layer's call looks the same: hence it must have set the flag in a slice of more tokens. The look
    at the model before the first step begins with such a slice, so every call of every layer is known by then.
    """
    if context.span.length > 1:
        return False
    # what is recomputed was let through in forward, and is placed again by its keys or not at all
    return context.is_recomputing or context.known_form() == CallForm.of(query, key, value, causal=True)


def _refuse_packed_heads(context: SliceContext, query: Tensor, key: Tensor) -> None:
    """Refuse a call over one token whose query heads are made into several queries for each of fewer key heads.

    Newer versions of Hugging Face's attention do so where there is a mask, or the heads are large. Unseen, it would be
    attention of these queries over the slice's own key alone.
    """
    span, queries, known = context.span, query.shape[-2], context.known_form()
    if span.length > 1 or known is None or queries == 1 or key.shape[-2] > 1 or query.dim() < 3:
        return
    if query.shape[-3] == key.shape[-3] and query.shape[-3] * queries == known.heads:
        raise refuse_model(
            f"attention that takes {known.heads} query heads of one token as {queries} queries of {key.shape[-3]} key heads "
            f"({context.describe()})",
            'use "slices" of two tokens or more',
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The override of ATen's ``linear``: deferred in a slice's training forward, else what it replaces."""
    context = SliceContext.current
    keeper = None if context is None else context.weight_gradients
    if keeper is None or not (_is_trained(weight) and weight.dim() == 2 and (bias is None or _is_trained(bias))):
        return _LINEAR.decompose(x, weight, bias)
    packed = context.packed_weights
    if not torch.is_grad_enabled():
        # a reentrant checkpoint's first pass: its recomputation, which is deferred, has to make the same keys bit for bit
        out = None if context.span.is_whole else packed.linear(x, weight, bias)
        return _LINEAR.decompose(x, weight, bias) if out is None else out
    if not x.requires_grad:
        return _LINEAR.decompose(x, weight, bias)
    packed.note(weight, x, context.span.length)
    if context.span.is_whole:
        return _LINEAR.decompose(x, weight, bias)
    return DeferredLinear.apply(x, (weight, bias), keeper, packed)


def _is_trained(parameter: Tensor) -> bool:
    return parameter.is_leaf and parameter.requires_grad


def adapt_core_attention(model: nn.Module) -> list[str]:
    """Let attention modules of Megatron's interface run slices; returns the names of those adapted.

    Met are modules called ``core_attention`` (megatron-core's ``DotProductAttention``, Megatron-DeepSpeed's
    ``CoreAttention``) whose forward takes query, key, value as [s, b, heads, d] and returns [s, b, heads * d].
    """
    adapted = []
    for name, module in _core_attentions(model):
        if "ds_terapipe_original_forward" not in module.__dict__:
            module.__dict__["ds_terapipe_original_forward"] = module.forward
            module.__dict__["forward"] = _core_forward(module, module.forward)
        adapted.append(name)
    return adapted


def restore_core_attention(model: nn.Module) -> None:
    """Undo :func:`adapt_core_attention`."""
    for _, module in _core_attentions(model):
        if module.__dict__.pop("ds_terapipe_original_forward", None) is not None:
            del module.__dict__["forward"]


def _core_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "core_attention" and _core_scale(module) is not None:
            yield name, module


def _core_scale(module: nn.Module) -> float | None:
    """The factor on q k^T, where the module is a scores-softmax-values attention of Megatron's kind; else None.

    Both packages divide the scores by the layer number (query-key layer scaling) and multiply again in the softmax.
    """
    softmax = getattr(module, "scale_mask_softmax", None)
    if softmax is None or not hasattr(module, "attention_dropout"):
        return None
    again = float(getattr(softmax, "scale", None) or 1.0)
    if hasattr(module, "softmax_scale"):  # megatron-core DotProductAttention
        return float(module.softmax_scale) * again
    if hasattr(module, "norm_factor"):  # Megatron-DeepSpeed CoreAttention
        return again / float(module.norm_factor)
    return None


def _core_forward(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = SliceContext.current
        span = context.span if context is not None else None
        if context is None or span is None or span.is_whole:
            return original(query, key, value, *args, **kwargs)
        given = signature.bind(query, key, value, *args, **kwargs).arguments
        _refuse_variants(context, module, given)
        mask = _visible(given.get("attention_mask"), span.total)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout_p = module.attention_dropout.p if module.training else 0.0
        with _model_parallel_random(module, dropout_p):
            out = slice_attention(context, q, k, v, mask, dropout_p, _core_scale(module))
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    return forward


def _visible(mask: Tensor | None, total: int) -> Tensor | None:
    """Megatron's mask (True: hidden) as "may attend"; None for the plain causal one, which needs no mask at all."""
    if mask is None or (mask.dtype == torch.bool and mask.shape[-2:] == (total, total) and _is_causal(mask)):
        return None
    return ~mask if mask.dtype == torch.bool else mask < 0.5


def _is_causal(mask: Tensor) -> bool:
    # Megatron keeps one mask for the whole run: compare it once. Version and address tell another tensor in its place.
    identity = (mask.data_ptr(), mask._version)
    known = getattr(mask, "_ds_terapipe_causal", None)
    if known is None or known[0] != identity:
        hidden = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu_(1)
        known = (identity, bool((mask == hidden).all()))
        mask._ds_terapipe_causal = known  # type: ignore[attr-defined]
    return known[1]


def _model_parallel_random(module: nn.Module, dropout_p: float) -> AbstractContextManager[Any]:
    """Megatron's random state that differs between tensor-parallel ranks, as its own attention dropout uses."""
    tensor_parallel = getattr(sys.modules.get(type(module).__module__), "tensor_parallel", None)
    if dropout_p == 0.0 or tensor_parallel is None:
        return nullcontext()
    return tensor_parallel.get_cuda_rng_tracker().fork()


def _refuse_variants(context: SliceContext, module: nn.Module, given: dict[str, Any]) -> None:
    where = context.describe()
    kind = given.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    if "causal" not in getattr(kind, "name", str(kind)):
        raise refuse_model(f"core attention whose mask type is {getattr(kind, 'name', kind)}, not causal ({where})")
    for name in ("attention_bias", "packed_seq_params"):
        if given.get(name) is not None:
            raise refuse_model(f"core attention with {name} ({where})")
    if getattr(module.scale_mask_softmax, "window_size", None) is not None:
        raise refuse_model(f"core attention with a sliding window ({where})")
    if getattr(module, "softmax_offset", None) is not None:
        raise refuse_model(f"core attention with a softmax offset ({where})")


def adapt_parallel_linears(model: nn.Module) -> None:
    """Let megatron-core's column- and row-parallel linear layers defer their weight gradients too.

    They multiply in an autograd function of their own, behind the method ``_forward_impl``. Deferred, there is no weight
    gradient left to overlap the all-reduce of the input's gradient with, so the plain region function does the same.
    """
    for module in model.modules():
        original = getattr(module, "_forward_impl", None)
        if callable(original) and "_forward_impl" not in module.__dict__:
            module.__dict__["_forward_impl"] = _parallel_linear(module, original)


def _parallel_linear(module: nn.Module, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    regions = sys.modules.get(type(module).__module__)
    enter_region = getattr(regions, "copy_to_tensor_model_parallel_region", None)

    def forward(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reduces = kwargs.get("allreduce_dgrad", False)
        if (
            SliceContext.current is None
            or SliceContext.current.weight_gradients is None
            or args
            or kwargs.get("sequence_parallel")
            or kwargs.get("gradient_accumulation_fusion")
            or kwargs.get("grad_output_buffer") is not None
            or (reduces and enter_region is None)
        ):
            return original(input, weight, *args, **kwargs)
        if reduces:
            input = enter_region(input, group=kwargs.get("tp_group"))
        return torch.nn.functional.linear(input, weight, kwargs.get("bias"))

    return forward


def track_layers(module: nn.Module, context: SliceContext) -> None:
    """Tell the context which layer runs, in the forward pass and in every recomputation.

    ``PipelineModule`` assigns ``self.curr_layer`` right before each layer it runs, inside the very function that it
    checkpoints; here the assignment becomes a property. The class keeps its name, which DeepSpeed looks at.
    """
    original = type(module)

    def entered(self: nn.Module, number: int) -> None:
        self.__dict__["curr_layer"] = number
        context.enter_next_layer(self._local_start, number)  # type: ignore[arg-type]

    layers = property(lambda self: self.__dict__["curr_layer"], entered, doc="The layer that runs, DeepSpeed's number.")
    module.__dict__.pop("curr_layer", None)
    members = {"curr_layer": layers, "__module__": original.__module__, "__qualname__": original.__qualname__}
    module.__class__ = type(original.__name__, (original,), members)

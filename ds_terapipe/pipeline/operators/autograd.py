"""Calls of autograd functions, several per layer and slice, without what PyTorch's wrappers add in Python.

``torch.autograd.Function.apply`` binds default arguments and unwraps tensors of functorch, and ``once_differentiable``
enters a context in each backward pass. For small layers that takes longer than their products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd import Function, function as torch_function


def apply(function: type[Function], *args: Any) -> Any:
    """Call an autograd function without ``setup_context``; functorch's transforms refuse it, as ``function.apply`` does."""
    if torch._C._are_functorch_transforms_active():
        return cast(Any, function).apply(*args)
    return cast(Any, super(Function, function)).apply(*args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass as ``torch.autograd.function.once_differentiable``, where it is differentiated itself."""
    refused = torch_function.once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        return (refused if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return wrapper

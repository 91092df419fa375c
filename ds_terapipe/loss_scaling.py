"""Loss scaling of DeepSpeed's fp16 optimizers (0.19.8), as training in one process has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ds_terapipe.overrides import replaced


@contextmanager
def dividing_by_its_scale(optimizer: Any) -> Iterator[None]:
    """Context manager of a step: gradients are divided by the scale that their loss had, and the scale changes at the end.

    ``FP16_Optimizer``, ``FP16_UnfusedOptimizer`` and ZeRO-1/2 enlarge the scale first, and divide by the new one.
    """
    update, found = getattr(optimizer, "_update_scale", None), list[bool]()
    if update is None:
        yield
        return
    with replaced(optimizer, _update_scale=found.append):
        yield
    for overflow in found:
        update(overflow)


def taking_no_step(optimizer: Any) -> AbstractContextManager[None]:
    """Context manager that disables ``step``: new fp16 wrappers take a step of zeros, which decays and counts."""
    return replaced(optimizer, step=lambda *args, **kwargs: None)

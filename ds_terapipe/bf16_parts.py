"""Loading of a bf16 pipeline's masters and moments without ZeRO, which DeepSpeed 0.19.8 saves but fails to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


def load_with_parts(
    engine: Any,
    load: Callable[..., Any],
    load_dir: Any,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``DeepSpeedEngine.load_checkpoint``, here ``load``; masters come from their files, or else from the weights.

    Args:
        engine: any of DeepSpeed's.
        load: its method, of a class that does not do this.
        load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, *args, **kwargs: its
            arguments.
    """
    shared_out = isinstance(engine.optimizer, BF16_Optimizer) and not engine.zero_optimization()
    here = shared_out and not engine.load_universal_checkpoint()
    path, client_state = load(
        load_dir, tag, load_module_strict, load_optimizer_states and not here, load_lr_scheduler_states, load_module_only,
        *args, **kwargs,
    )  # fmt: skip
    if here and path is not None:
        # ZeRO's reader reads them, and a tag may have slashes
        name = str(Path(path).parent.relative_to(load_dir))
        whole = load_optimizer_states and not load_module_only
        if not whole or not engine._load_zero_checkpoint(load_dir, name):
            engine.optimizer._restore_from_bit16_weights()
    return path, client_state

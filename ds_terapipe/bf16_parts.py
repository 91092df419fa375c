"""Loading of masters and moments without ZeRO: DeepSpeed 0.19.8 fails to read a bf16 pipeline's.

Without the optimizer's states its fp16 optimizers keep their masters, which replace the loaded weights at the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


class LoadArguments(NamedTuple):
    """Arguments of ``DeepSpeedEngine.load_checkpoint``, with its names and defaults."""

    load_dir: Any
    tag: Any = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Any = None

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer's state is read."""
        return self.load_optimizer_states and not self.load_module_only

    @property
    def scheduler(self) -> bool:
        """Whether the scheduler's state is read."""
        return self.load_lr_scheduler_states and not self.load_module_only


def load_with_parts(engine: Any, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``DeepSpeedEngine.load_checkpoint``, here ``load``; masters come from their files, or else from the weights.

    Args:
        engine: any of DeepSpeed's.
        load: its method, of a class that does not do this.
        *args, **kwargs: its arguments.
    """
    given = LoadArguments(*args, **kwargs)
    shared_out = isinstance(engine.optimizer, BF16_Optimizer) and not engine.zero_optimization()
    here = shared_out and not engine.load_universal_checkpoint()
    by_deepspeed = given.load_optimizer_states and not here
    path, client_state = load(*given._replace(load_optimizer_states=by_deepspeed))
    if path is not None and (here or not given.optimizer) and hasattr(engine.optimizer, "refresh_fp32_params"):
        # ZeRO's reader reads them, and a tag may have slashes
        name = str(Path(path).parent.relative_to(given.load_dir))
        if not (given.optimizer and engine._load_zero_checkpoint(given.load_dir, name)):
            engine.optimizer.refresh_fp32_params()
    return path, client_state

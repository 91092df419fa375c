"""Token-slice pipelining (TeraPipe) and elastic freezing (PipeTransformer) for DeepSpeed's pipeline engine, and a fused LAMB.

Importing the package leaves a hook on ``deepspeed.initialize`` and imports nothing but the standard library; every
other public name is loaded when it is first asked for.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from . import autoload
from .version import __version__ as __version__

_PUBLIC = {
    "ConfigError": "errors",
    "Documents": "pipeline.documents",
    "FusedLamb": "optim.lamb",
    "Span": "pipeline.slicing",
    "TokenPipelineConfig": "config",
    "TokenPipelineEngine": "pipeline.engine",
    "current_span": "pipeline.operators.context",
    "initialize": "register",
    "register": "register",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


# The function hides the submodule of the same name. Where it cannot be loaded, asking for it says why, and so does a
# configuration with our keys; PyTorch, which imports this package, must not notice.
with contextlib.suppress(Exception):
    from .register import register as register

autoload.load()

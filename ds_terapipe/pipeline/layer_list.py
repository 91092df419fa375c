"""Entries of a ``PipelineModule``'s layer list, and their modules on this rank.

An entry is a spec, which builds its layer; a tied spec, whose key shares one module among entries; a module; or a plain
function. Parameters have the names that ``PipelineModule`` gives them, which do not depend on the stages.
"""

from __future__ import annotations

from typing import Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

_TIED = "tied_modules"


def prefix_of(module: PipelineModule, entry: int) -> str:
    """Return the prefix of an entry's parameter names: ``3.``, or ``tied_modules.embedding.``."""
    spec = module._layer_specs[entry]
    return f"{_TIED}.{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{entry}."


def layers_here(module: PipelineModule) -> dict[str, nn.Module]:
    """Return the modules of this rank by their name prefix, in the order of the layer list."""
    found: dict[str, nn.Module] = {}
    for entry in range(module._local_start, module._local_stop):
        prefix = prefix_of(module, entry)
        layer = module.get_submodule(prefix[:-1]) if _has(module, prefix) else None
        if layer is not None:
            found[prefix] = layer
    return found


def _has(module: PipelineModule, prefix: str) -> bool:
    parent: Any = module
    for name in prefix[:-1].split("."):
        if name not in parent._modules:
            return False
        parent = parent._modules[name]
    return True

"""Weights of tied layers: all that the copies have in common, as if they were one module.

DeepSpeed 0.19.8 ties those that ``tied_weight_attr`` names. Of another weight, such as a bias that the head alone uses, each
stage trains its copy: the norm of all gradients and files of layers have the first one's, whichever stage uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ds_terapipe.parameter_marks import count_untied


def tie_all(module: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Tie the weights that all copies of a tied layer have, with the values of the first stage; collective.

    Args:
        module: a ``PipelineModule`` that was just built, or reassembled.
        gather: gathers a value of each rank.
    """
    common: dict[str, dict[str, Any]] = {}
    for of_rank in gather({key: _others(comm) for key, comm in module.tied_comms.items()}):
        for key, others in of_rank.items():
            known = common.get(key, others)
            common[key] = {name: shape for name, shape in known.items() if others.get(name) == shape}
    for key, comm in module.tied_comms.items():
        comm["weight_attr"] = [*comm["weight_attr"], *common[key]]
    count_untied(module)
    module._synchronize_tied_weights()


def tied_weights(comm: dict[str, Any]) -> list[Any]:
    """Return the weights of a tied layer that its copies have in common, from its entry in ``tied_comms``."""
    return [attrgetter(name)(comm["module"]) for name in comm["weight_attr"]]


def _others(comm: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    tied = set(map(id, tied_weights(comm)))
    return {name: tuple(p.shape) for name, p in comm["module"].named_parameters() if id(p) not in tied}

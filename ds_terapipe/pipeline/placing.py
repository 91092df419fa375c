"""The placement that a ``PipelineModule`` has been built for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.control import Control
from ds_terapipe.schedule import Placement


class _Part(NamedTuple):
    """What a rank has of the model."""

    stage: int
    first_layer: int
    stop_layer: int
    trains: bool
    tied: tuple[tuple[str, bool], ...]  # keys of tied layers, and whether their weights are trained here


def placement_of(module: Any, control: Control) -> Placement:
    """Stage s on place s, with the layers that DeepSpeed gave it; stages before the first trained weight only go forward.

    Collective. A model of which nothing is trained only goes forward: it can be evaluated. Raises ConfigError, on every rank, for
    a tied weight that some ranks train and others do not: they would wait for each other's gradients.
    """
    trains = any(parameter.requires_grad for parameter in module.parameters())
    tied = tuple((key, any(weight.requires_grad for weight in _weights(one))) for key, one in module.tied_comms.items())
    mine = _Part(module.stage_id, module._local_start, module._local_stop, trains, tied)
    parts = sorted({part.stage: part for part in control.gather(mine)}.values())
    _check_tied(parts)
    frozen = sum(1 for _ in takewhile(lambda part: not part.trains, parts))
    return Placement.plain(len(parts), [*(part.first_layer for part in parts), parts[-1].stop_layer], frozen)


def _weights(tied: dict[str, Any]) -> list[Any]:
    """The shared weights of a tied layer."""
    return [attrgetter(name)(tied["module"]) for name in tied["weight_attr"]]


def _check_tied(parts: Sequence[_Part]) -> None:
    known: dict[str, _Part] = {}
    for part in parts:
        for key, trained in part.tied:
            other = known.setdefault(key, part)
            if dict(other.tied)[key] != trained:
                on = "trained" if trained else "frozen"
                raise ConfigError(
                    f'model: got the tied layer "{key}" {on} on stage {part.stage} and not on stage {other.stage}, must be the '
                    "same on all stages that share it, use requires_grad_() alike"
                )

"""Layers of a ``PipelineModule`` by their numbers in the model: which are on this rank, and how their weights are named.

An entry of the layer list is a spec, which builds its layer; a tied spec, whose key shares one module among entries; a
module; or a plain function. Parameters have the names that ``PipelineModule`` gives them, which do not depend on the
stages.

DeepSpeed gives a rank one range of entries. A module with several stages on a place has the place of each in the
attribute `PLACES`. For DeepSpeed its range is the whole list, with `elsewhere` for entries of other ranks. So names and
files of layers, which DeepSpeed numbers from the range's start, are those of the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

PLACES, PLAIN = "stage_places", "plain_stages"
_TIED = "tied_modules"


def elsewhere(inputs: Any) -> Any:
    """Stand in for a layer that is on another rank."""
    raise RuntimeError("PipelineModule: got a call of a layer that is on another rank, must be run by its engine")


def ranges_on(place: int, parts: Sequence[int], places: Sequence[int]) -> tuple[range, ...]:
    """Return the entries of each stage on a place; ``parts``, ``places``: as in `ModelChunks`."""
    stages = zip(pairwise(map(int, parts)), places, strict=True)
    return tuple(range(*bounds) for bounds, of_stage in stages if of_stage == place)


def entries_on(place: int, parts: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """Return all entries on a place."""
    return tuple(chain(*ranges_on(place, parts, places)))


class ModelChunks:
    """View of a module's layer list; the only reader of the range of entries that DeepSpeed gives a rank.

    Each property reads the live module, which a reshape changes.

    Args:
        module: a ``PipelineModule``.
    """

    def __init__(self, module: PipelineModule) -> None:
        self._module = module

    @property
    def specs(self) -> Sequence[Any]:
        """The layer list of the whole model."""
        specs: Sequence[Any] = self._module._layer_specs
        return specs

    @property
    def parts(self) -> tuple[int, ...]:
        """First entry of each stage, then the number of entries."""
        return tuple(map(int, self._module.parts))  # some may be numpy integers

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each stage."""
        return getattr(self._module, PLACES, None) or tuple(range(len(self.parts) - 1))

    @property
    def is_placed(self) -> bool:
        """Whether places have several stages."""
        return hasattr(self._module, PLACES)

    @property
    def placed(self) -> dict[str, list[int]]:
        """Stages and places as a checkpoint records them."""
        return {"parts": [*self.parts], "places": [*self.places]}

    @property
    def plain_names(self) -> Sequence[Sequence[str]] | None:
        """Parameter names of each place in the module's order, as it was before its layers were placed on as many."""
        _, names = getattr(self._module, PLAIN, ((), ()))
        return names if len(names) == self._module.num_stages else None

    def leaves_out(self, prefix: str, entries: Sequence[int], name: str) -> bool:
        """Whether a tied layer has no such parameter where a stage has these entries, as known from before layers were placed."""
        parts, names = getattr(self._module, PLAIN, ((), ()))
        entry = self.builder(prefix, entries)
        of_stages = zip(pairwise(parts), names, strict=True)
        return any(self.builder(prefix, range(*bounds)) == entry and name not in known for bounds, known in of_stages)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Entries on this rank, a range for each of its stages."""
        if self.is_placed:
            return ranges_on(self._module.stage_id, self.parts, self.places)
        return (range(int(self._module._local_start), int(self._module._local_stop)),)

    @property
    def entries(self) -> tuple[int, ...]:
        """Entries on this rank."""
        return tuple(chain(*self.ranges))

    @property
    def functions(self) -> dict[int, Any]:
        """Layers on this rank, modules or functions, by entry."""
        start, functions = int(self._module._local_start), self._module.forward_funcs
        return {entry: functions[entry - start] for entry in self.entries}

    def file(self, folder: str, entry: int) -> str:
        """Return the path of an entry's file in the folder of a checkpoint."""
        path: str = self._module.ckpt_layer_path(folder, entry - int(self._module._local_start))
        return path

    @property
    def has_first(self) -> bool:
        """Whether the model's first stage is on this rank."""
        return bool(self.places[0] == self._module.stage_id)

    @property
    def has_last(self) -> bool:
        """Whether the model's last stage is on this rank."""
        return bool(self.places[-1] == self._module.stage_id)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Modules on this rank by the prefix of their parameters' names, in the order of the layer list."""
        found: dict[str, nn.Module] = {}
        for entry in self.entries:
            prefix = self.prefix(entry)
            with suppress(AttributeError):  # a function, or elsewhere
                found[prefix] = self._module.get_submodule(prefix[:-1])
        return found

    @property
    def prefixes(self) -> list[str]:
        """Prefix of each entry's parameter names; entries of one tied layer have the same."""
        return [self.prefix(entry) for entry in range(len(self.specs))]

    def prefix(self, entry: int) -> str:
        """Return the prefix of an entry's parameter names: ``3.``, or ``tied_modules.embedding.``."""
        spec = self.specs[entry]
        return f"{_TIED}.{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{entry}."

    def is_tied(self, prefix: str) -> bool:
        """Whether several entries may have the layer of a prefix."""
        return prefix.startswith(f"{_TIED}.")

    def builder(self, prefix: str, entries: Sequence[int] | None = None) -> int | None:
        """Return the first of ``entries``, by default those on this rank, that builds the layer of a prefix; or None."""
        entries = self.entries if entries is None else entries
        return next((entry for entry in entries if self.prefix(entry) == prefix), None)

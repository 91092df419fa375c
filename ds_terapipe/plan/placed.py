"""Placements in files and in messages: which stages are on which place, and which of them go forward only."""

from __future__ import annotations

from typing import Any

from ds_terapipe.json_files import Fields, is_count
from ds_terapipe.schedule import Placement


def placement_text(placement: Placement) -> str:
    """Stages and places as a message names them: which is on which, and which go forward only, whatever their layers."""
    if placement.is_usual:
        return "stage s on place s"
    places = ", ".join(str(stage.place) for stage in placement.stages)
    return f"stages on places {places}" + (f", {placement.forward_only} forward only" if placement.forward_only else "")


def placement_field(placement: Placement) -> dict[str, Any]:
    """Return the field ``placement`` of a file, which has none for a usual one."""
    if placement.is_usual:
        return {}
    return {
        "placement": {
            "places": [stage.place for stage in placement.stages],
            "boundaries": [placement.stages[0].first_layer, *(stage.stop_layer for stage in placement.stages)],
            "forward_only": placement.forward_only,
        }
    }


def placement_from(fields: Fields, stages: int) -> Placement:
    """Return the placement of so many stages in a file: the inverse of `placement_field`.

    Raises ConfigError, one line with file, field and expectation.
    """
    found = fields.value("placement")
    if found is None:
        return Placement.plain(stages)
    rule, use = f"the places of {stages} stages, their boundaries and how many of them are forward_only", "a new file"
    if not isinstance(found, dict):
        raise fields.fail("placement", rule, use)
    places, boundaries, frozen = (found.get(name) for name in ("places", "boundaries", "forward_only"))
    for numbers, count in ((places, stages), (boundaries, stages + 1), ([frozen], 1)):
        if not isinstance(numbers, list) or len(numbers) != count or not all(n == 0 or is_count(n) for n in numbers):
            raise fields.fail("placement", rule, use)
    try:
        return Placement.of(places, boundaries, frozen)  # type: ignore[arg-type]
    except ValueError as error:
        raise fields.fail("placement", rule, use) from error

"""Placement of a model's stages: each is a range of layers on a place of the pipeline.

A *stage* is a range of layers, a *place* a position in the pipeline. Plain is stage s on place s. Interleaved is stage s on
place s mod K of K places (Narayanan et al. 2021, arXiv 2104.04473), so that a unit goes around the pipeline more than once.
Any other is as good: ``Placement.of([0, 1, 1, 0])`` has both ends of the model on place 0.

A stage that follows another on the same place hands over in memory; only a boundary between two places has messages. The first
stages of a model may be *forward-only*: frozen layers, and layers before them, that nothing goes backward through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class PlacedStage(NamedTuple):
    """Layers ``first_layer`` to ``stop_layer - 1`` of the model, on a place."""

    place: int
    first_layer: int
    stop_layer: int


@dataclass(frozen=True)
class Placement:
    """All stages of a model, in model order.

    Attributes:
        stages: each starts at the layer with which the one before it stops. Every place from 0 on has one at least.
        forward_only: so many stages, the first ones, do not go backward. All of them: nothing is trained, which is an
            evaluation; `schedule.order` refuses it.

    Raises:
        ValueError: stages that are none of a model, or more forward-only ones than there are.
    """

    stages: tuple[PlacedStage, ...]
    forward_only: int = 0
    _on: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(PlacedStage(*stage) for stage in self.stages))
        _check(self.stages, self.forward_only)
        on: list[list[int]] = [[] for _ in range(1 + max(stage.place for stage in self.stages))]
        for number, stage in enumerate(self.stages):
            on[stage.place].append(number)
        object.__setattr__(self, "_on", tuple(map(tuple, on)))

    @classmethod
    def of(cls, places: Sequence[int], boundaries: Sequence[int] | None = None, forward_only: int = 0) -> Placement:
        """Stage s on place ``places[s]``.

        Args:
            places: a place for each stage, in model order.
            boundaries: the first layer of each stage, and the number after the last layer of the last one; None: a layer each.
            forward_only: as in the class.
        """
        if boundaries is None:
            boundaries = range(len(places) + 1)
        if len(boundaries) != len(places) + 1:
            raise ValueError(
                f"placement: got {len(boundaries)} boundaries, must be one more than the {len(places)} stages: the first layer "
                "of each, and where the last one stops"
            )
        return cls(tuple(map(PlacedStage, places, boundaries[:-1], boundaries[1:])), forward_only)

    @classmethod
    def plain(cls, stages: int, boundaries: Sequence[int] | None = None, forward_only: int = 0) -> Placement:
        """Stage s on place s; the other arguments as in `of`."""
        return cls.of(range(stages), boundaries, forward_only)

    @classmethod
    def interleaved(cls, places: int, chunks: int) -> Placement:
        """``chunks`` stages on each of ``places`` places, stage s on place s mod ``places``."""
        return cls.of([stage % places for stage in range(places * chunks)])

    @classmethod
    def v(cls, places: int) -> Placement:
        """Two stages on each place, there and back: stage s on place s, then on place 2 ``places`` - 1 - s."""
        return cls.of([*range(places), *reversed(range(places))])

    @classmethod
    def named(cls, name: str, places: int, each: int) -> Placement:
        """``each`` stages on each of ``places`` places, by the name that ``token_pipeline.placement`` gives them."""
        return cls.v(places) if name == "v" and each > 1 else cls.interleaved(places, each)

    @property
    def places(self) -> int:
        """Number of places, which is the number of a grid's rows."""
        return len(self._on)

    @property
    def stages_per_place(self) -> int:
        """Number of stages on each place, where all have as many."""
        return len(self.stages) // self.places

    @property
    def is_plain(self) -> bool:
        """Whether stage s is on place s."""
        return all(stage.place == number for number, stage in enumerate(self.stages))

    @property
    def is_usual(self) -> bool:
        """Whether stage s is on place s, and all stages go backward."""
        return self.is_plain and not self.forward_only

    @property
    def first_place(self) -> int:
        """The place of the first stage, which reads the inputs."""
        return self.stages[0].place

    @property
    def last_place(self) -> int:
        """The place of the last stage, which has the labels and the loss."""
        return self.stages[-1].place

    def place_of(self, stage: int) -> int:
        """The place of a stage."""
        return self.stages[stage].place

    def stages_on(self, place: int) -> tuple[int, ...]:
        """The stages of a place, in model order."""
        return self._on[place]

    def goes_backward(self, stage: int) -> bool:
        """Whether the stage has a backward pass in training."""
        return stage >= self.forward_only

    def receives_forward(self, stage: int) -> bool:
        """Whether the stage's input comes as a message: there is a stage before it, on another place."""
        return stage > 0 and self.stages[stage - 1].place != self.stages[stage].place

    def sends_forward(self, stage: int) -> bool:
        """Whether the stage's output leaves as a message: there is a next stage, on another place."""
        return stage + 1 < len(self.stages) and self.receives_forward(stage + 1)

    def sends_backward(self, stage: int) -> bool:
        """Whether the gradient of the stage's input leaves as a message: the stage before it goes backward, on another place."""
        return self.receives_forward(stage) and self.goes_backward(stage - 1)

    def receives_backward(self, stage: int) -> bool:
        """Whether the gradient of the stage's output comes as a message: it and the next stage, on another place, go backward."""
        return self.sends_forward(stage) and self.goes_backward(stage)


def as_placement(stages: int | Placement) -> Placement:
    """Return a placement unchanged, and a number of stages as `Placement.plain`."""
    return stages if isinstance(stages, Placement) else Placement.plain(stages)


def placement_of(rows: int, placement: Placement | None) -> Placement:
    """Return the placement of a grid of so many rows; None: a stage each, in their order.

    Raises:
        ValueError: a placement on another number of places.
    """
    if placement is None:
        return Placement.plain(rows)
    if placement.places != rows:
        raise ValueError(
            f"placement: got {placement.places} places for a grid of {rows} rows, must be a row for each place"
        )
    return placement


def row_word(placement: Placement) -> str:
    """Return the name of a grid's rows: ``stage`` if each place has one stage, in order, else ``place``."""
    return "stage" if placement.is_plain else "place"


def _check(stages: tuple[PlacedStage, ...], forward_only: int) -> None:
    if not stages:
        raise ValueError("placement: got no stages, must have at least one")
    places = {stage.place for stage in stages}
    if places != set(range(len(places))):
        raise ValueError(f"placement: got stages on places {sorted(places)}, must be on 0, 1, ... without a gap")
    for number, stage in enumerate(stages):
        start = stages[number - 1].stop_layer if number else max(stage.first_layer, 0)
        if stage.first_layer != start or stage.stop_layer <= start:
            raise ValueError(
                f"placement: got layers {stage.first_layer} to {stage.stop_layer} for stage {number}, must start at layer "
                f"{start} and stop at a later one"
            )
    if not 0 <= forward_only <= len(stages):
        raise ValueError(f"forward_only: got {forward_only}, must be 0 to the number of stages, {len(stages)}")

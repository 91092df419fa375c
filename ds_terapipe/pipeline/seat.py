"""Where a rank sits: the stages of the model on the places of a pipeline, and which of them are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_terapipe.schedule import Placement


@dataclass(frozen=True)
class Seat:
    """One rank's view of a placement.

    Attributes:
        placement: stages on places.
        place: this rank's.
        ranks: global ranks of this rank's pipeline, by place.
    """

    placement: Placement
    place: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, rank: int, pipelines: Sequence[Sequence[int]]) -> Seat:
        """The seat of a global rank in the one of several pipelines, each its ranks by place, that it belongs to."""
        ranks = next(tuple(each) for each in pipelines if rank in each)
        return cls(placement, ranks.index(rank), ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that are here, in model order."""
        return self.placement.stages_on(self.place)

    @property
    def has_first(self) -> bool:
        """Whether the model begins here: this rank reads the inputs."""
        return self.placement.first_place == self.place

    @property
    def has_last(self) -> bool:
        """Whether the model ends here: this rank has the labels and makes the loss."""
        return self.placement.last_place == self.place

    def at(self, place: int) -> Seat:
        """The seat of another place of this pipeline."""
        return replace(self, place=place)

    def rank_of(self, stage: int) -> int:
        """The global rank of a stage in this pipeline."""
        return self.ranks[self.placement.place_of(stage)]

    @property
    def name(self) -> str:
        """For messages: ``stage 1``, or ``place 1`` where stages and places are not the same."""
        return f"{'stage' if self.placement.is_plain else 'place'} {self.place}"

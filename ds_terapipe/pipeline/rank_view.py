"""View of a rank on its pipeline: the stages of the model on places, and those on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_terapipe.schedule import Placement


@dataclass(frozen=True)
class RankView:
    """One rank's view of a placement.

    Attributes:
        placement: stages on places.
        place: this rank's place.
        ranks: global ranks of this rank's pipeline, by place.
    """

    placement: Placement
    place: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, rank: int, pipelines: Sequence[Sequence[int]]) -> RankView:
        """Return the view of a global rank in its pipeline; ``pipelines``: the ranks of each, by place."""
        ranks = next(tuple(each) for each in pipelines if rank in each)
        return cls(placement, ranks.index(rank), ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages on this rank, in model order."""
        return self.placement.stages_on(self.place)

    @property
    def has_first(self) -> bool:
        """Whether this rank has the model's first stage: it reads the inputs."""
        return self.placement.first_place == self.place

    @property
    def has_last(self) -> bool:
        """Whether this rank has the model's last stage: it has the labels and makes the loss."""
        return self.placement.last_place == self.place

    def at(self, place: int) -> RankView:
        """Return the view of another place of this pipeline."""
        return replace(self, place=place)

    def rank_of(self, stage: int) -> int:
        """Return the global rank of a stage in this pipeline."""
        return self.ranks[self.placement.place_of(stage)]

    @property
    def name(self) -> str:
        """Name for messages: ``stage 1``, or ``place 1`` if stages and places differ."""
        return f"{'stage' if self.placement.is_plain else 'place'} {self.place}"

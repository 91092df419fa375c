"""Times of single layers, and advice on a faster partition: the stages exist before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from ds_terapipe.errors import ConfigError
from ds_terapipe.json_files import Fields, is_number
from ds_terapipe.plan.stages import Partition, describe, gain, partition

WORTH = 0.03  # share of the slowest stage's time from which other stages are worth a line


@dataclass(frozen=True)
class LayerSeconds:
    """Forward and backward of each layer over an uncut micro-batch, weight gradients and loss among them.

    All layers of one place are a stage here.

    Attributes:
        stages: seconds of the layers of each stage, in order.
        ends: layers at the beginning and at the end of the model that stay with their neighbour and that sizes of stages do not
            count: (1, 2) for the embedding, and for the final norm and the head. (0, 0): every layer counts.

    Raises:
        ConfigError: a stage without a layer that counts.
    """

    stages: tuple[tuple[float, ...], ...]
    ends: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        describe(self.movable, self._sizes)

    @property
    def movable(self) -> list[float]:
        """Seconds of the layers that count; those at the ends are in their neighbours' times."""
        layers, (before, after) = list(chain(*self.stages)), self.ends
        last = len(layers) - after
        layers[last - 1 :] = [sum(layers[last - 1 :])]
        layers[: before + 1] = [sum(layers[: before + 1])]
        return layers

    @property
    def present(self) -> Partition:
        """The stages that were measured."""
        return describe(self.movable, self._sizes)

    @property
    def best(self) -> Partition:
        """The partition whose slowest stage takes least."""
        return partition(self.movable, len(self.stages))

    @property
    def gain(self) -> float:
        """Share of the slowest stage's time that the best partition would save."""
        return gain(self.movable, self._sizes)

    def advice(self, worth: float = WORTH) -> str:
        """One line where other stages would gain more than ``worth`` in the slowest, else nothing."""
        if self.gain <= worth:
            return ""
        present, best = self.present, self.best
        if any(self.ends):
            how = (
                f"build the pipeline with layers_per_stage={list(best.layers)}, in train.py --stage-layers {best.text}"
            )
        else:
            how = f"begin the stages of the PipelineModule at its layers {_starts(best)} in place of {_starts(present)}"
        return f"{best.text} layers would take {self.gain:.1%} less than {present.text} in the slowest stage: {how}"

    def to_dict(self) -> dict[str, Any]:
        """Return the times as a file holds them."""
        return {"stages": [list(stage) for stage in self.stages], "ends": list(self.ends)}

    @classmethod
    def from_fields(cls, fields: Fields, stages: int) -> LayerSeconds:
        """The inverse of `to_dict`. Raises ConfigError, one line with file, field and expectation."""
        rows, ends = fields.value("stages"), fields.value("ends")
        good = isinstance(rows, list) and len(rows) == stages
        if not good or not all(isinstance(row, list) and row and all(map(is_number, row)) for row in rows):
            raise fields.fail("stages", f"the seconds of the layers of {stages} stages", "a new measurement")
        if not (isinstance(ends, list) and len(ends) == 2 and all(type(end) is int and end >= 0 for end in ends)):
            raise fields.fail("ends", "two numbers of layers", "a new measurement")
        try:
            return cls(tuple(tuple(map(float, row)) for row in rows), (ends[0], ends[1]))
        except ConfigError:
            rule = "fewer layers than the first and the last stage have"
            raise fields.fail("ends", rule, "a new measurement") from None

    @property
    def _sizes(self) -> tuple[int, ...]:
        sizes = [len(stage) for stage in self.stages]
        sizes[0] -= self.ends[0]
        sizes[-1] -= self.ends[1]
        return tuple(sizes)


def _starts(stages: Partition) -> str:
    return ", ".join(map(str, stages.boundaries[:-1]))

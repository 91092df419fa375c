"""Partition of layers into stages: the contiguous one whose slowest stage is fastest; advice from times of single layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.json_files import Fields, is_number

WORTH = 0.03  # share of the slowest stage's time from which other stages are worth a line


class Partition(NamedTuple):
    """Layers of each stage.

    ``layers[k]`` is how many layers stage k has, ``seconds[k]`` how long they take.
    """

    layers: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return max(self.seconds)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First layer of each stage and, last, the number of layers: DeepSpeed's ``parts``."""
        return (0, *accumulate(self.layers))

    @property
    def text(self) -> str:
        """Format for ``--stage-layers``: ``5,3``."""
        return ",".join(map(str, self.layers))


def partition(layer_seconds: Sequence[float], stages: int) -> Partition:
    """Return the partition with the fastest slowest stage; among several, with the least sum of squared times.

    A dynamic programme over the layers, exact. Every stage has at least one layer. Embedding, LM head and loss are layers
    like any other, each with its own time.

    Args:
        layer_seconds: forward and backward of each layer, in order.
        stages: number of stages, from 1 to that of layers.
    """
    seconds = _prefix_sums(layer_seconds)
    slowest = np.full(len(seconds), np.inf)
    slowest[0] = 0.0
    for _ in range(stages):
        slowest = np.min(np.maximum(slowest[:, None], seconds), axis=0)
    # rounding in the sums of the two programmes must not shut out the optimum
    limit = slowest[-1] * (1 + 1e-12)
    squares = np.where(seconds <= limit, seconds**2, np.inf)
    return describe(layer_seconds, least_sums(squares[:-1].T, stages)[stages])


def least_sums(costs: NDArray[np.float64], most: int) -> dict[int, tuple[int, ...]]:
    """Return for each number of parts up to ``most`` those with the least sum of costs, by dynamic programming.

    Args:
        costs: [n + 1, n]: of the part that ends before its row's number and starts with its column's; infinite for none.
        most: number of parts.

    Returns:
        Length of each part, by number of parts; numbers for which there are no parts are left out.
    """
    n = costs.shape[1]
    reached = np.full(n + 1, np.inf)
    reached[0] = 0.0
    came_from: list[NDArray[np.intp]] = []
    out = {}
    for parts in range(1, min(most, n) + 1):
        sums = costs + reached[None, :n]
        came_from.append(np.argmin(sums, axis=1))
        reached = sums[np.arange(n + 1), came_from[-1]]
        if np.isfinite(reached[n]):
            ends = [n]
            for before in reversed(came_from):
                ends.append(int(before[ends[-1]]))
            out[parts] = tuple(b - a for a, b in pairwise(reversed(ends)))
    return out


def describe(layer_seconds: Sequence[float], layers: Sequence[int]) -> Partition:
    """A given partition, with the time of each stage.

    Raises:
        ConfigError: the layers of the stages do not add up, or a stage has none.
    """
    if sum(layers) != len(layer_seconds) or min(layers, default=0) < 1:
        raise bad_value(
            "stage layers", list(layers), f"one layer or more per stage, {len(layer_seconds)} together",
            f"e.g. {partition(layer_seconds, min(len(layers) or 1, len(layer_seconds))).text}",
        )  # fmt: skip
    first = [0, *accumulate(layers)]
    seconds = [sum(layer_seconds[a:b]) for a, b in pairwise(first)]
    return Partition(tuple(layers), tuple(seconds))


def gain(layer_seconds: Sequence[float], layers: Sequence[int]) -> float:
    """Return the share of the slowest stage's time that the best partition would save: 0.03 is 3%."""
    present = describe(layer_seconds, layers).slowest
    return 1 - partition(layer_seconds, len(layers)).slowest / present if present > 0 else 0.0


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return an even partition; if it does not divide, the first stages have one layer more.

    Raises:
        ConfigError: more stages than layers.
    """
    if stages > layers:
        raise bad_value("--stages", stages, f"at most the model's layers, {layers}", str(layers))
    return even(layers, stages)


def even(total: int, parts: int) -> tuple[int, ...]:
    """Divide a number into even parts; if it does not divide, the first ones are larger by one."""
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def read_layers(text: str, layers: int, stages: int | None = None) -> tuple[int, ...]:
    """The argument ``--stage-layers`` of ``train.py`` and ``ds_terapipe plan``: ``5,3``.

    Args:
        text: Transformer layers of each stage.
        layers: of the model.
        stages: how many there are, None where the text says it.

    Raises:
        ConfigError: no positive number for each stage, or they do not add up.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or sum(counts) != layers or len(counts) != (stages or len(counts)):
        rule = f"one positive number for each of {stages or 'the'} stages, {layers} together"
        use = Partition(even_layers(layers, min(stages or len(counts) or 1, layers)), ()).text
        raise bad_value("--stage-layers", text, rule, f"e.g. {use}")
    return counts


def _prefix_sums(layer_seconds: Sequence[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[n + 1, n + 1]: time of the layers from a to b - 1; infinite where b <= a."""
    sums = np.concatenate([[0.0], np.cumsum(layer_seconds)])
    ahead = np.arange(len(sums))[:, None] < np.arange(len(sums))[None, :]
    return np.where(ahead, sums[None, :] - sums[:, None], np.inf)


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

    @classmethod
    def from_fields(cls, fields: Fields, stages: int) -> LayerSeconds:
        """The inverse of `dataclasses.asdict`. Raises ConfigError, one line with file, field and expectation."""
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

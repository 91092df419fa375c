"""Slices of a sequence as token positions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Token positions ``[start, stop)`` of a slice in a sequence of ``total`` tokens."""

    start: int
    stop: int
    total: int

    @property
    def length(self) -> int:
        """Number of tokens in the slice."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """True for the only slice of an uncut sequence."""
        return self.length == self.total


def spans(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """The slices of a sequence cut into ``lengths`` tokens, in order."""
    total, start, result = sum(lengths), 0, []
    for length in lengths:
        result.append(Span(start, start + length, total))
        start += length
    return tuple(result)

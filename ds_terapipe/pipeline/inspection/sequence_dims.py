"""Sequence dimensions of the tensors between layers, found by comparing their shapes at two slice lengths.

The first five tokens of a micro-batch run as slices of two and of three tokens. A dimension that grows from 2 to 3
follows the slice, one that grows from 2 to 5 follows context and slice. Other sizes that equal the sequence length
(hidden size, batch) do not matter. The first slice never has a single token: causal attention often sets its flag only
for several queries (Hugging Face's does), and that flag decides about its later slices of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.operators.context import refuse_model
from ds_terapipe.pipeline.slicing import Span, TensorCut, as_tuple
from ds_terapipe.pipeline.token_shares import TokenShares

LEAST_TOKENS = 3  # times the ranks that share them
_EXPLICIT = {"bsh": 1, "sbh": 0}


def probe_spans(total: int, multiple: int = 1) -> tuple[Span, Span]:
    """Return the two slices of a probe in a sequence of ``total`` tokens, at least :data:`LEAST_TOKENS`.

    Two and three tokens, or multiples of them; in a shorter sequence, two and one. In both, a dimension cannot follow
    both the slice and context and slice, and one that follows neither keeps its size.
    """
    first, second = 2 * multiple, (5 if total >= 5 * multiple else 3) * multiple
    return Span(0, first, total), Span(first, second, total)


@dataclass(frozen=True)
class SequenceDims:
    """Sequence dimensions of the tensors of one stage.

    ``layers``: per layer of the stage, the cuts of its input tensors; ``outputs``: the cuts of the stage's output tensors.
    """

    layers: tuple[tuple[TensorCut, ...], ...]
    outputs: tuple[TensorCut, ...]

    @property
    def inputs(self) -> tuple[TensorCut, ...]:
        """Cuts of the stage's input tensors."""
        return (*self.layers, self.outputs)[0]


@dataclass
class SequenceProbe:
    """Record of the shapes in a stage for the two slices of a probe."""

    layout: str  # token_pipeline.layout
    first_layer: int
    text: Callable[[int], str] = "layer {}".format  # name of a layer in errors
    shares: TokenShares | None = None  # ranks that share the tokens of a slice
    _spans: list[Span] = field(default_factory=list)
    _shapes: list[list[list[tuple[int, ...]]]] = field(default_factory=list)  # slice, boundary, tensor
    _floating: list[list[bool]] = field(default_factory=list)

    def begin_slice(self, span: Span) -> None:
        """Begin the next slice of the probe, in the order of :func:`probe_spans`."""
        self._spans.append(span)
        self._shapes.append([])
        self._floating.clear()

    def record(self, value: Any) -> None:
        """Record a layer's input, or after the last layer the stage's output."""
        tensors = as_tuple(value)
        others = [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)]
        if others:
            got = f"a tuple with {others[0]}" if isinstance(value, (tuple, list)) else type(value).__name__
            raise refuse_model(f"{self.text(self.first_layer + len(self._floating))} gets {got}, not tensors")
        self._shapes[-1].append([tuple(tensor.shape) for tensor in tensors])
        self._floating.append([tensor.is_floating_point() for tensor in tensors])

    def result(self) -> SequenceDims:
        """Return the sequence dimensions. Raises ConfigError if they are ambiguous."""
        one, two = self._shapes
        cuts = []
        for index, (first, second, floating) in enumerate(zip(one, two, self._floating, strict=True)):
            last = index == len(one) - 1
            where = "the stage's output" if last else f"the input of {self.text(self.first_layer + index)}"
            if len(first) != len(second):
                raise refuse_model(f"{where} is {len(first)} tensors for one slice and {len(second)} for the next")
            cuts.append(tuple(self._cut(where, a, b, f) for a, b, f in zip(first, second, floating, strict=True)))
        return SequenceDims(tuple(cuts[:-1]), cuts[-1])

    def _cut(self, where: str, first: tuple[int, ...], second: tuple[int, ...], floating: bool) -> TensorCut:
        a, b = self._spans
        if len(first) != len(second):
            raise refuse_model(
                f"{where} has {len(first)} dimensions for a slice of {a.length} tokens and {len(second)} for one of {b.length}"
            )
        changed = {d: sizes for d, sizes in enumerate(zip(first, second, strict=True)) if sizes[0] != sizes[1]}
        rows = [d for d, sizes in changed.items() if sizes == (a.length, b.length)]
        columns = [d for d, sizes in changed.items() if sizes == (a.stop, b.stop)]
        shared = [d for d, sizes in changed.items() if sizes == self._shares(a, b)]
        if len(rows) + len(columns) + len(shared) < len(changed):
            raise refuse_model(
                f"{where} has shape {list(first)} for a slice of {a.length} tokens and {list(second)} for one of {b.length}"
            )
        explicit = _EXPLICIT.get(self.layout)
        if len(rows) > 1 and floating and explicit in rows:
            rows = [explicit]
        if len(rows) > 1 or len(columns) > 1:
            raise ConfigError(
                f'token_pipeline.layout: got "{self.layout}", but {where} grows with the slice in dimensions {rows + columns} '
                f'(shape {list(second)} for {b.length} tokens); must say which one is the sequence, use "bsh" or "sbh"'
            )
        if shared and (rows or columns or len(shared) > 1):
            raise refuse_model(f"{where} has shares of the tokens in dimensions {shared} beside {rows + columns}")
        if shared:
            return TensorCut(shared[0], shares=self.shares)
        return TensorCut(rows[0] if rows else None, columns[0] if columns else None)

    def _shares(self, *spans: Span) -> tuple[int, ...] | None:
        return None if self.shares is None else tuple(span.length // self.shares.size for span in spans)


def check_outputs(outputs: Sequence[TensorCut]) -> None:
    """Raise ConfigError unless the last stage's outputs can be joined from their slices."""
    if not any(cut.row is not None for cut in outputs) or any(cut.column is not None for cut in outputs):
        raise refuse_model("its outputs do not follow the tokens (is the sequence pooled?)")
    if any(cut.shares is not None for cut in outputs):
        raise refuse_model("each tensor-parallel rank has its share of the tokens in the outputs, not all of them")

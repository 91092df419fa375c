"""Slices of a micro-batch: their lengths, and the dimensions of each tensor that are cut.

Dimension 0 of an input is the batch. Every further dimension as long as the sequence is cut: rows to the slice's own
positions, the columns of an attention mask to all positions up to the slice's end. Ambiguous tensors raise an error
that names the key ``cut``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.token_shares import TokenShares
from ds_terapipe.plan.stages import even


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
        """Whether the slice is an uncut sequence."""
        return self.length == self.total


def spans(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the slices of a sequence cut into ``lengths`` tokens, in order."""
    stops = [*accumulate(lengths)]
    return tuple(Span(stop - length, stop, stops[-1]) for length, stop in zip(lengths, stops, strict=True))


class TensorCut(NamedTuple):
    """Dimensions of a tensor that follow the tokens: ``row`` by the slice's positions, ``column`` by all up to its end.

    With ``shares`` this rank has its share of the rows.
    """

    row: int | None = None
    column: int | None = None
    shares: TokenShares | None = None

    def rows(self, span: Span) -> int:
        """Size of the dimension ``row`` for a slice."""
        return span.length if self.shares is None else span.length // self.shares.size

    def apply(self, tensor: Tensor, span: Span) -> Tensor:
        """Return the part of ``tensor`` for a slice, contiguous if cut; collective over the ranks of ``shares``."""
        part = tensor
        if self.row is not None:
            part = self.whole(part).narrow(self.row, span.start, span.length)
            part = part if self.shares is None else self.shares.own(part, self.row)
        if self.column is not None:
            part = part.narrow(self.column, 0, span.stop)
        return part if part is tensor else part.contiguous()

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the rows of all ranks; collective over the ranks of ``shares``."""
        return tensor if self.shares is None or self.row is None else self.shares.gather(tensor, self.row)


WHOLE = TensorCut()
HIDES = 1e3  # less than a visible number, in a mask that is added to scores


def slice_lengths(total: int, slices: int | Sequence[int], multiple: int = 1) -> tuple[int, ...]:
    """Return the slice lengths in tokens for a sequence of ``total`` tokens.

    ``slices`` is a number of equal slices, the first ones longer if it does not divide, or the lengths themselves. All
    are multiples of ``multiple``, as ``total`` is. Raises ConfigError if the lengths do not add up or are no multiples,
    or there are more slices than tokens.
    """
    if not isinstance(slices, int):
        if sum(slices) != total:
            raise ConfigError(
                f"token_pipeline.slices: got {list(slices)}, which add up to {sum(slices)} tokens, must add up to the "
                f"sequence length {total}, use e.g. {len(slices)}"
            )
        _check_multiples(slices, multiple)
        return tuple(slices)
    most = total // multiple
    if slices > most:
        limit = f"the sequence length {total}" + (f" / {multiple} ranks that share it" if multiple > 1 else "")
        raise ConfigError(f"token_pipeline.slices: got {slices}, must be at most {limit}, use e.g. {min(8, most)}")
    return tuple(multiple * length for length in even(most, slices))


def _check_multiples(lengths: Sequence[int], multiple: int) -> None:
    if all(length % multiple == 0 for length in lengths):
        return
    ends = [round(end / multiple) * multiple for end in accumulate(lengths)]
    near = [end - start for start, end in pairwise([0, *ends]) if end > start]
    raise ConfigError(
        f"token_pipeline.slices: got {list(lengths)}, must be multiples of {multiple}, the tensor-parallel ranks that share "
        f"the tokens of a slice (sequence_parallel), use e.g. {near}"
    )


def as_tuple(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return one tensor or several as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def like(value: object, tensors: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Return ``tensors`` in the form of ``value``, a named tuple too: the inverse of :func:`as_tuple`."""
    return tensors[0] if isinstance(value, Tensor) else getattr(type(value), "_make", tuple)(tensors)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value, also those in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def part_of(value: Tensor | Sequence[Tensor], cuts: Sequence[TensorCut], span: Span) -> Any:
    """Copy the part of ``value`` that belongs to a slice.

    A layer may write into its input, so a part shares no memory with ``value`` or with another part.
    """
    pairs = zip(as_tuple(value), cuts, strict=True)
    return like(value, [_apart(cut.apply(tensor, span), tensor) for tensor, cut in pairs])


def copy_of(value: Tensor | Sequence[Tensor]) -> Any:
    """Copy the tensors, in the form of ``value``."""
    return like(value, [tensor.detach().clone() for tensor in as_tuple(value)])


def _apart(part: Tensor, whole: Tensor) -> Tensor:
    shares = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return part.detach().clone() if shares else part.detach()


class _Alias(torch.autograd.Function):
    """A tensor on the same memory that is neither a leaf nor a view, so that autograd lets a layer write into it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def aliases(value: Tensor | Sequence[Tensor]) -> Any:
    """Return non-leaf tensors on the memory of ``value``, whose gradients reach the tensors in ``value``.

    A layer may write into them or free their data; a leaf with ``requires_grad`` allows neither.
    """
    alias: Any = _Alias.apply
    return like(value, [alias(t) if t.requires_grad else t.detach() for t in as_tuple(value)])


def plan_cuts(
    tensors: Sequence[Tensor],
    given: Sequence[int | Sequence[int] | None] | None,
    key: str,
    followed: MutableMapping[Any, Any] | None = None,
) -> tuple[int, tuple[TensorCut, ...]]:
    """Return the sequence length of a micro-batch and the cut of each of its tensors.

    Args:
        tensors: inputs or labels of the micro-batch, batch first.
        given: the user's ``cut``, one entry per tensor: a dimension, [row, column], or None for a tensor that stays whole.
        key: name of the tensors in errors: ``inputs`` or ``labels``.
        followed: what holds for tensors of earlier micro-batches: dimensions as long as the sequence, values of hidden
            tokens in masks. Those of this one are added.
    """
    if given is not None:
        total, cuts = _given_cuts(tensors, given, key)
    else:
        total = _sequence_length(tensors, key)
        batch = _flat(tensors)[0][1].shape[0]
        cuts = tuple(_infer(index, tensor, total, key, batch) for index, tensor in enumerate(tensors))
        _refuse_chance(tensors, total, key, {} if followed is None else followed)
    for index, (tensor, cut) in enumerate(zip(tensors, cuts, strict=True)):
        if followed is not None and cut.row is not None and cut.column is not None:
            _refuse_seen_future(tensor.movedim((cut.row, cut.column), (-2, -1)), f"{key}[{index}]", followed)
    return total, cuts


def _refuse_seen_future(mask: Tensor, name: str, followed: MutableMapping[Any, Any]) -> None:
    """Refuse a mask [..., S, S] by which tokens see later ones, where none did in the first micro-batch, as of a prefix.

    Slices leave out the columns behind their end, and only the first micro-batch is compared with its slices. Later
    tokens are hidden by False, by a number far below the others, or by Megatron's True. A bias hides nothing.
    """
    future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu_(1)
    if not mask.numel() or len(future) == 1:
        return
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask  # whose bounds take a fifth of the time
    low, high = _bounds(mask, future, mask[..., :1, -1:])
    if name not in followed:
        least, most = _bounds(mask, ~future, mask[..., :1, :1])
        below, above = low == high < most and high <= least, low == high > least and low >= most
        followed[name] = (-math.inf, most - HIDES) if most - high >= HIDES else (low, high) if below or above else None
    hidden = followed[name]
    if hidden is not None and not hidden[0] <= low <= high <= hidden[1]:
        raise ConfigError(
            f"the data iterator: got a mask, {name}, by which tokens see later ones, must hide these as in the first "
            'micro-batch, use "slices": 1 with such a prefix'
        )


def _bounds(values: Tensor, where: Tensor, one: Tensor) -> tuple[float, float]:
    """Return the least and the largest number ``where`` it counts; ``one`` of these takes the place of the others."""
    low, high = torch.where(where, values, one).aminmax()  # a tenth of the time of an index
    return float(low), float(high)


def _refuse_chance(tensors: Sequence[Tensor], total: int, key: str, followed: MutableMapping[Any, Any]) -> None:
    """Refuse a dimension that is as long as the sequence in some micro-batches only: features, as many by chance."""
    for index, tensor in enumerate(tensors):
        for dimension, size in enumerate(tensor.shape[1:], start=1):
            place, follows = (key, index, tensor.dim(), dimension), size == total
            if size > 1 and followed.setdefault(place, follows) != follows:
                why = f"has {size} in dimension {dimension} for {total} tokens, as many as tokens in some micro-batches only"
                raise _ambiguous(key, index, tensor, why)


def _ambiguous(key: str, index: int, tensor: Tensor, why: str) -> ConfigError:
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return ConfigError(
        f"token_pipeline.cut: got none, {key}[{index}] ({dtype} {shape}) {why}; must say which dimension is the sequence, "
        f'use e.g. "cut": {{"{key}": [1, null]}}'
    )


def _sequence_length(tensors: Sequence[Tensor], key: str) -> int:
    flat = _flat(tensors)
    if not flat:
        raise _ambiguous(key, 0, tensors[0], "and no other one has the shape [batch, sequence]")
    first = flat[0][1].shape[1]
    for index, tensor in flat:
        if tensor.shape[1] != first:
            raise _ambiguous(key, index, tensor, f"is not of the same length as another one of {first}")
    return first


def _flat(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return tensors [batch, sequence] with their indices: integer ones, if there are any."""
    flat = [(index, tensor) for index, tensor in enumerate(tensors) if tensor.dim() == 2]
    return [(i, t) for i, t in flat if not t.is_floating_point() and t.dtype != torch.bool] or flat


def _infer(index: int, tensor: Tensor, total: int, key: str, batch: int) -> TensorCut:
    if tensor.shape == (total, total) and batch != total:
        return TensorCut(row=0, column=1)  # one mask for all sequences of the batch
    dimensions = [d for d in range(1, tensor.dim()) if tensor.shape[d] == total]
    last = tensor.dim() - 1
    if not dimensions:
        return WHOLE
    if len(dimensions) == 1:
        only = dimensions[0]
        if only == 1 and tensor.dim() != 3:
            return TensorCut(row=1)
        if only == last and all(size == 1 for size in tensor.shape[1:last]) and tensor.dim() > 2:
            return TensorCut(column=last)  # a key-padding mask [b, 1, 1, S]
        if only == 1 or (tensor.dim() == 4 and only == 2 and tensor.shape[1] == 1):
            return TensorCut(row=only)
    if dimensions == [last - 1, last] and (tensor.dim() == 4 or not tensor.is_floating_point()):
        return TensorCut(row=last - 1, column=last)
    raise _ambiguous(key, index, tensor, f"has the sequence length {total} in dimensions {dimensions}")


def _given_cuts(
    tensors: Sequence[Tensor], given: Sequence[int | Sequence[int] | None], key: str
) -> tuple[int, tuple[TensorCut, ...]]:
    if len(given) != len(tensors):
        raise ConfigError(
            f"token_pipeline.cut.{key}: got {len(given)} entries, must be one for each of the {len(tensors)} tensors, "
            "use null for one that stays whole"
        )
    cuts = []
    for index, (tensor, entry) in enumerate(zip(tensors, given, strict=True)):
        wanted = [] if entry is None else [entry] if isinstance(entry, int) else list(entry)
        if len(wanted) > 2 or any(not 1 <= d < tensor.dim() for d in wanted):
            raise ConfigError(
                f"token_pipeline.cut.{key}[{index}]: got {entry}, must be a dimension from 1 to {tensor.dim() - 1} of its "
                f"shape {list(tensor.shape)}, or [row, column], use null to leave it whole"
            )
        row, column = (*wanted, None, None)[:2]
        cuts.append(TensorCut(row, column))
    sizes = {t.shape[d] for t, cut in zip(tensors, cuts, strict=True) for d in (cut.row, cut.column) if d is not None}
    if len(sizes) != 1:
        raise ConfigError(
            f"token_pipeline.cut.{key}: got {shown(list(given))}, which are dimensions of {sorted(sizes) or 'no'} tokens, "
            "must be dimensions of one length, the sequence's, use e.g. [1]"
        )
    return sizes.pop(), tuple(cuts)

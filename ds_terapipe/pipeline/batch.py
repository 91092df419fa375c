"""Micro-batches of one step: their tensors, lengths and slices."""

from __future__ import annotations

import zlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.slicing import Span, TensorCut, as_tuple, part_of, plan_cuts, slice_lengths, spans
from ds_terapipe.pipeline.token_shares import check_length
from ds_terapipe.pipeline.transport.consensus import Header, check_labels
from ds_terapipe.schedule import Unit


def _there(value: Any) -> Any:
    return value


@dataclass
class StepBatch:
    """All micro-batches of a step. The first stage has inputs, the last labels, every stage ``spans``.

    The tensors stay on the host. ``load`` copies a micro-batch's to the device when its first slice runs, so that the
    inputs of only one micro-batch are on the device.
    """

    inputs: list[Any] = field(default_factory=list)
    input_cuts: list[tuple[TensorCut, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    label_cuts: list[tuple[TensorCut, ...]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    documents: dict[int, Documents] = field(default_factory=dict)  # of the micro-batches that have several, or padding
    everywhere: tuple[int, ...] = ()
    multiple: int = 1  # of tokens that every slice is
    signatures: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # of data, on the first stage, if slices are verified
    is_new: bool = False  # whether some replica's micro-batch is of a kind that was not
    spans: list[tuple[Span, ...]] = field(default_factory=list)
    is_cut: bool = False  # whether some replica's micro-batch is; its other slices may be padding that is left out
    load: Callable[[Any], Any] = _there
    _loaded: tuple[int, Any] | None = None  # a micro-batch and its inputs, until its last slice

    def adopt(self, header: Header) -> None:
        """Take over lengths, signatures and documents from the first stage's header."""
        self.lengths, self.signatures = list(header.lengths), list(header.signatures)
        self.everywhere, self.documents = header.everywhere, dict(header.documents)
        self.is_new = header.is_new

    def only(self, number: int) -> StepBatch:
        """Return one of the micro-batches as a batch of its own."""
        of_all = ("inputs", "input_cuts", "labels", "label_cuts", "lengths", "signatures", "spans")
        documents = {0: self.documents[number]} if number in self.documents else {}
        alone = {name: getattr(self, name)[number : number + 1] for name in of_all}
        return replace(self, **alone, documents=documents, _loaded=None)

    def cut(self, slices: int | Sequence[int], *, skips_padding: bool = False) -> None:
        """Cut every micro-batch into so many slices, or slices of these lengths; perhaps without those of padding only."""

        def cut(length: int) -> tuple[Span, ...]:
            # given ones have been checked, automatic ones may be more than a short sequence has tokens
            few = max(min(slices, length // self.multiple), 1) if isinstance(slices, int) else slices
            return spans(slice_lengths(length, few, self.multiple))

        self.spans = [cut(length) for length in self.lengths]
        self.is_cut = len(cut(max(self.everywhere or self.lengths))) > 1
        for number, documents in self.documents.items() if skips_padding else ():
            first, *others = self.spans[number]
            self.spans[number] = (first, *(span for span in others if span.start < documents.used))

    def slice_counts(self) -> tuple[int, ...]:
        """Number of slices of each micro-batch."""
        return tuple(len(micro_batch) for micro_batch in self.spans)

    def span(self, unit: Unit) -> Span:
        """Token positions of a unit."""
        return self.spans[unit.micro_batch][unit.slice]

    def is_last_slice(self, unit: Unit) -> bool:
        """Whether the unit completes its micro-batch in the forward direction."""
        return unit.slice == len(self.spans[unit.micro_batch]) - 1

    def cut_inputs(self, micro_batch: int, span: Span) -> Any:
        """Return the inputs of the first stage for a slice."""
        if self._loaded is None or self._loaded[0] != micro_batch:
            self._loaded = micro_batch, self.load(self.inputs[micro_batch])
        value, cuts = self._loaded[1], self.input_cuts[micro_batch]
        if span == self.spans[micro_batch][-1]:  # a micro-batch that is cut stays whole for its later slices
            self._loaded = None
        return part_of(value, cuts, span)

    def labels_of(self, micro_batch: int) -> Any:
        """Return a copy of the labels of a whole micro-batch: a loss may write into them."""
        return own(self.load(self.labels[micro_batch]))


def own(item: Any) -> Any:
    """Copy the tensors of a batch, in lists, tuples and dicts; an iterator may reuse their memory for the next one."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), item)


def read_items(pull: Callable[[], Any], count: int) -> list[Any]:
    """Return so many items. After an error the others are read too, so that all ranks go on at the same item."""
    items: list[Any] = []
    error: Exception | None = None
    for _ in range(count):
        try:
            items.append(pull())
        except Exception as problem:
            error = error or problem
            if isinstance(problem, StopIteration):
                break
    if error is not None:
        raise error
    return items


def read_step(
    pulled: Sequence[Any],
    config: TokenPipelineConfig,
    load: Callable[[Any], Any],
    *,
    inputs: bool,
    labels: bool,
    cut_labels: bool,
    documents_of: Callable[[Any], Documents | None] | None = None,
    multiple: int = 1,
    followed: MutableMapping[Any, Any] | None = None,
) -> StepBatch:
    """Check and cut the items of the data iterator: one (inputs, labels) per micro-batch, each a tensor or several.

    ``load``: see `StepBatch`. ``inputs``, ``labels``: whether this stage needs them; ``cut_labels``: whether its loss
    runs per slice; ``documents_of``: finds the documents in a micro-batch's inputs; ``multiple``: of tokens that a slice
    must be; ``followed``: see `plan_cuts`. Raises ConfigError for tensors that cannot be cut.
    """
    batch, cut, slices = StepBatch(load=load), config.cut or {}, config.slices
    of_labels: list[int] = []
    for item in pulled:
        check_item(item)
        if inputs:
            value = _tensors(item[0], "inputs")
            total, cuts = _plan(value, slices, cut.get("inputs"), "inputs", followed)
            batch.inputs.append(value)
            batch.input_cuts.append(cuts)
            batch.lengths.append(total)
            batch.signatures.append(_signature(as_tuple(value), cuts))
            if config.verify and slices != 1:
                batch.kinds.append(_kind(as_tuple(value), cuts))
            documents = None if documents_of is None else documents_of(value)
            if documents is not None:
                batch.documents[len(batch.lengths) - 1] = documents
            check_length(total, multiple)
            if not isinstance(slices, str):
                slice_lengths(total, slices, multiple)  # wrong lengths raise before any rank has started
        if labels:
            value = _tensors(item[1], "labels") if cut_labels else item[1]
            batch.labels.append(value)
            if cut_labels:
                total, cuts = _plan(value, slices, cut.get("labels"), "labels", followed)
                batch.label_cuts.append(cuts)
                of_labels.append(total)
    if inputs:
        check_labels(batch.lengths, of_labels)
    else:
        batch.lengths, batch.signatures = of_labels, [0] * len(of_labels)
    return batch


def _plan(
    value: Any, slices: int | Sequence[int] | str, given: Any, key: str, followed: MutableMapping[Any, Any] | None
) -> tuple[int, tuple[TensorCut, ...]]:
    tensors = as_tuple(value)
    if slices != 1:
        return plan_cuts(tensors, given, key, followed)
    try:  # one slice works for any model; the length is only reported
        total = plan_cuts(tensors, given, key)[0] if key == "inputs" else 0
    except ConfigError:
        total = 1
    return total, tuple(TensorCut() for _ in tensors)


def check_item(item: Any) -> None:
    """Refuse an item of an iterator that is no (inputs, labels).

    Raises:
        ConfigError: naming the item's type.
    """
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        got = "nothing" if item is None else type(item).__name__
        got += f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise ConfigError(
            f"the data iterator: got {got}, must yield (inputs, labels), use e.g. (tokens, labels) or ((tokens, mask), labels)"
        )


def _tensors(value: Any, key: str) -> Any:
    items = (value,) if isinstance(value, Tensor) else value
    if not isinstance(items, (tuple, list)) or not items or not all(isinstance(item, Tensor) for item in items):
        raise ConfigError(
            f"the data iterator: got {type(value).__name__} as {key}, must yield (inputs, labels), each a tensor or a tuple of "
            "tensors, use e.g. (tokens, labels) or ((tokens, mask), labels)"
        )
    return value if isinstance(value, Tensor) else tuple(items)


def _signature(tensors: Sequence[Tensor], cuts: Sequence[TensorCut]) -> int:
    """Checksum of types and shapes, without the dimensions that follow the tokens."""
    shapes = [
        (str(tensor.dtype), [None if dimension in cut else size for dimension, size in enumerate(tensor.shape)])
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    return zlib.crc32(repr(shapes).encode())


def _kind(tensors: Sequence[Tensor], cuts: Sequence[TensorCut]) -> int:
    """Checksum of how varied the tensors are: layers may do something else where there is no image, say, or no padding.

    Masks, which have a check of their own, and tensors on a device, for which the host would wait, count as varied.
    """
    kinds = [
        (str(tensor.dtype), tensor.dim(), cut.column is None and tensor.device.type == "cpu" and _variety(tensor))
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    return zlib.crc32(repr(kinds).encode())


def _variety(tensor: Tensor) -> str | bool:
    if not tensor.numel():
        return "none"
    one = tensor[(0,) * tensor.dim()]
    return not bool((tensor != one).any()) and ("a number" if bool(one) else "zeros")

"""The micro-batches of one step: what was read, how long they are, how they are cut."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.slicing import Span, TensorCut, as_tuple, part_of, plan_cuts, slice_lengths, spans
from ds_terapipe.pipeline.transport.consensus import Header
from ds_terapipe.schedule import Unit


def _there(value: Any) -> Any:
    return value


@dataclass
class StepBatch:
    """All micro-batches of a step. Inputs are there on the first stage, labels on the last, ``spans`` everywhere.

    They are where they were read, which for a device is the host: ``load`` brings a micro-batch's to the stage when its first
    slice runs, so that of all inputs one micro-batch's are on the device.
    """

    inputs: list[Any] = field(default_factory=list)
    input_cuts: list[tuple[TensorCut, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    label_cuts: list[tuple[TensorCut, ...]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    everywhere: tuple[int, ...] = ()
    signatures: list[int] = field(default_factory=list)
    spans: list[tuple[Span, ...]] = field(default_factory=list)
    load: Callable[[Any], Any] = _there
    _loaded: tuple[int, Any] | None = None  # a micro-batch and its inputs, as long as slices of it are to come

    def adopt(self, header: Header) -> None:
        """Take what the first stage announced."""
        self.lengths, self.signatures = list(header.lengths), list(header.signatures)
        self.everywhere = header.everywhere

    def cut(self, slices: int | Sequence[int]) -> None:
        """Cut every micro-batch into so many slices, or slices of these lengths."""
        self.spans = [spans(slice_lengths(length, slices)) for length in self.lengths]

    def slice_counts(self) -> tuple[int, ...]:
        """Number of slices of each micro-batch."""
        return tuple(len(micro_batch) for micro_batch in self.spans)

    def span(self, unit: Unit) -> Span:
        """Token positions of a unit."""
        return self.spans[unit.micro_batch][unit.slice]

    def is_last_slice(self, unit: Unit) -> bool:
        """True for the unit that completes its micro-batch in the forward direction."""
        return unit.slice == len(self.spans[unit.micro_batch]) - 1

    def cut_inputs(self, micro_batch: int, span: Span) -> Any:
        """Inputs of the first stage for a slice."""
        if self._loaded is None or self._loaded[0] != micro_batch:
            self._loaded = micro_batch, self.load(self.inputs[micro_batch])
        value, cuts = self._loaded[1], self.input_cuts[micro_batch]
        if span == self.spans[micro_batch][-1]:  # and not the whole of one that is cut, whose slices are to come
            self._loaded = None
        return part_of(value, cuts, span)

    def labels_of(self, micro_batch: int) -> Any:
        """Labels of the last stage for a whole micro-batch, in memory of their own: a loss may write into them."""
        return own(self.load(self.labels[micro_batch]))


def own(item: Any) -> Any:
    """Copy the tensors of a batch, in lists, tuples and dicts; an iterator may use their memory for the next one."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), item)


def read_step(
    pulled: Sequence[Any],
    config: TokenPipelineConfig,
    load: Callable[[Any], Any],
    *,
    inputs: bool,
    labels: bool,
    cut_labels: bool,
) -> StepBatch:
    """Check and cut what the data iterator gave: one (inputs, labels) per micro-batch, each a tensor or several.

    ``load``: as `StepBatch` has it. ``inputs``, ``labels``: whether this stage needs them; ``cut_labels``: whether its loss runs
    per slice. Raises ConfigError for tensors that can't be cut.
    """
    batch, cut, slices = StepBatch(load=load), config.cut or {}, config.slices
    for item in pulled:
        check_item(item)
        if inputs:
            value = _tensors(item[0], "inputs")
            total, cuts = _plan(value, slices, cut.get("inputs"), "inputs")
            batch.inputs.append(value)
            batch.input_cuts.append(cuts)
            batch.lengths.append(total)
            batch.signatures.append(_signature(as_tuple(value)))
            if not isinstance(slices, str):
                slice_lengths(total, slices)  # the error for lengths that don't fit comes before any rank has started
        if labels:
            value = _tensors(item[1], "labels") if cut_labels else item[1]
            batch.labels.append(value)
            if cut_labels:
                total, cuts = _plan(value, slices, cut.get("labels"), "labels")
                batch.label_cuts.append(cuts)
                if not inputs:
                    batch.lengths.append(total)
                    batch.signatures.append(0)
    return batch


def _plan(value: Any, slices: int | Sequence[int] | str, given: Any, key: str) -> tuple[int, tuple[TensorCut, ...]]:
    tensors = as_tuple(value)
    if slices != 1:
        return plan_cuts(tensors, given, key)
    try:  # whatever the model is, one slice is the whole of it; the length is only reported
        total = plan_cuts(tensors, given, key)[0] if key == "inputs" else 0
    except ConfigError:
        total = 1
    return total, tuple(TensorCut() for _ in tensors)


def check_item(item: Any) -> None:
    """Refuse what an iterator yields that is no (inputs, labels).

    Raises:
        ConfigError: saying what it is.
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


def _signature(tensors: Sequence[Tensor]) -> int:
    return zlib.crc32(repr([(tuple(t.shape), str(t.dtype)) for t in tensors]).encode())

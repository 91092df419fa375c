"""Loss of a micro-batch whose outputs come slice by slice, and its gradient for each slice.

Any ``loss_fn`` is exact on the concatenated outputs, which is the default. A loss that is known to be a sum over tokens
runs on each slice separately: it keeps one slice's logits at a time, and copies none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.inspection.differences import difference
from ds_terapipe.pipeline.slicing import Span, TensorCut, aliases, as_tuple, like
from ds_terapipe.schedule import Unit

_ALIKE = 1e-2  # difference of numbers that are the same but for rounding, also in 16 bits


@runtime_checkable
class TokenLoss(Protocol):
    """A ``loss_fn`` equal to ``token_sum(outputs, labels) / token_weight(labels)``.

    Optional methods: ``aligned(labels)`` returns the labels for the other two, token by token (a language model's are
    those of the next token). For a denominator of the whole step, ``step_weight(labels)`` returns a scalar or None from
    the labels of all micro-batches of this replica; ``begin_step(weight)`` gets its mean over the replicas.
    """

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Return the loss of a whole micro-batch, a scalar."""

    def token_sum(self, outputs: Any, labels: Any) -> Tensor:
        """Return the sum over the tokens of a slice, a scalar, from its outputs and labels."""

    def token_weight(self, labels: Any) -> Tensor:
        """Return the denominator, a scalar, from the labels of the whole micro-batch."""


class MicroBatchLoss:
    """Collects one micro-batch's outputs on the last stage, makes its loss and starts its backward passes.

    Args:
        loss_fn: loss of the PipelineModule; None: the model returns its loss.
        labels: labels of the whole micro-batch.
        label_cuts: cuts of the labels; None: not cut.
        output_cuts: per output tensor, where its tokens are (as the inspection has found); None for a whole micro-batch.
        spans: the slices of the micro-batch.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        labels: Any,
        label_cuts: Sequence[TensorCut] | None,
        output_cuts: Sequence[TensorCut] | None,
        spans: Sequence[Span],
    ) -> None:
        self._loss_fn, self._labels, self._label_cuts = loss_fn, labels, label_cuts
        self._output_cuts, self._spans = output_cuts, spans
        self._per_slice = not spans[0].is_whole and runs_per_slice(loss_fn)
        per_slice: Any = loss_fn if self._per_slice else None
        if hasattr(per_slice, "aligned"):
            self._labels = per_slice.aligned(labels)
        self._weight = None if per_slice is None else per_slice.token_weight(self._labels)
        self._outputs: list[Any] = []
        self._terms: list[Tensor | None] = []
        self._joined: Any = None
        self.value: Any = None  # the loss after the last slice; with a graph only if backward needs it
        self.outputs: Any = None  # outputs of the whole micro-batch, on request

    def add(self, outputs: Any, *, keep_outputs: bool = False) -> None:
        """Add the outputs of the next slice; the last one makes the loss."""
        if keep_outputs or not self._per_slice:
            self._outputs.append(outputs)
        complete = len(self._outputs) == len(self._spans)
        if self._per_slice:
            self._add_term(outputs)
        elif complete:
            if len(self._spans) > 1:
                self._joined = self._join(requires_grad=torch.is_grad_enabled())
                outputs = aliases(self._joined)
            self.value = outputs if self._loss_fn is None else self._loss_fn(outputs, self._labels)
        if keep_outputs and complete:
            self.outputs = self._join(requires_grad=False)

    def _add_term(self, outputs: Any) -> None:
        span = self._spans[len(self._terms)]
        labels = like(
            self._labels,
            [cut.apply(t, span) for t, cut in zip(as_tuple(self._labels), self._label_cuts or (), strict=True)],
        )
        term = self._loss_fn.token_sum(outputs, labels) / self._weight  # type: ignore[union-attr]
        self._terms.append(term)
        self.value = term.detach() if self.value is None else self.value + term.detach()

    def _join(self, *, requires_grad: bool) -> Any:
        if len(self._spans) == 1:
            return self._outputs[0]
        parts = [as_tuple(outputs) for outputs in self._outputs]
        joined = []
        for index, cut in enumerate(self._output_cuts or ()):
            pieces = [part[index].detach() for part in parts]
            self._check_pieces(pieces, cut)
            whole = pieces[0] if cut.row is None else torch.cat(pieces, dim=cut.row)
            wants = requires_grad and any(part[index].requires_grad for part in parts)
            joined.append(whole.requires_grad_(wants))
        return like(self._outputs[0], joined)

    def _check_pieces(self, pieces: Sequence[Tensor], cut: TensorCut) -> None:
        """Raise ConfigError for rows that are not one token each, as where samples and tokens share a dimension.

        Likewise for a number that is another one in some slice, as of an auxiliary loss that was zero in the inspection.
        """
        other = pieces[0]
        if cut.row is None and other.numel() == 1:
            other = next((piece for piece in pieces if difference(pieces[0], piece, None) > _ALIKE), other)
        if other is not pieces[0]:
            raise ConfigError(
                f"the model: got an output of one number, {float(pieces[0]):.6g} for a slice and {float(other):.6g} for another, "
                'must be one for all tokens, use outputs [batch, tokens, ...] and add up in loss_fn, or "slices": 1'
            )
        for piece, span in zip(pieces, self._spans, strict=True):
            if cut.row is not None and piece.shape[cut.row] != cut.rows(span):
                raise ConfigError(
                    f"the model: got outputs of shape {list(piece.shape)} for {span.length} tokens, must have as many in "
                    f"dimension {cut.row} as in the first micro-batch, use outputs [batch, tokens, ...]"
                )

    @property
    def waiting(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The latest outputs if they are kept until their backward, and the copies that join all once these are there."""
        latest = () if self._per_slice or not self._outputs else as_tuple(self._outputs[-1])
        return latest, () if self._joined is None else as_tuple(self._joined)

    def backward_whole(self, index: int, scale: Callable[[Tensor], Tensor]) -> None:
        """Run the backward of a loss that has seen all slices, before that of the last one's layers; it is in no slice itself."""
        if self._joined is not None and index == len(self._spans) - 1:
            scale(self.value).backward()
            self.value = self.value.detach()

    def backward(self, index: int, scale: Callable[[Tensor], Tensor]) -> None:
        """Run the backward of slice ``index``, in descending order. ``scale`` applies accumulation and loss scale."""
        if self._per_slice:
            term, self._terms[index] = self._terms[index], None
            assert term is not None
            scale(term).backward()
            return
        if len(self._spans) == 1:
            scale(self.value).backward()
            self._outputs.clear()
            return
        roots, gradients = [], []
        for output, whole, cut in zip(
            as_tuple(self._outputs[index]), as_tuple(self._joined), self._output_cuts or (), strict=True
        ):
            # an output that does not follow the tokens is the first slice's alone: all others have made it again
            if output.requires_grad and (cut.row is not None or index == 0):
                gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
                span = self._spans[index]
                roots.append(output)
                gradients.append(gradient if cut.row is None else gradient.narrow(cut.row, span.start, span.length))
        torch.autograd.backward(roots, gradients)
        self._outputs[index] = None
        if index == 0:
            self._joined = None


class StepLosses:
    """Losses of a step's micro-batches, on the last stage.

    Args:
        batch: batch of the step.
        loss_fn: as for `MicroBatchLoss`.
        output_cuts: likewise; None: nothing is cut.
        keep_outputs: whether to keep the whole outputs of the last micro-batch.
        sums: whether losses are added up.

    Attributes:
        values: loss of each finished micro-batch, detached, in order of completion.
        outputs: see ``keep_outputs``.
    """

    def __init__(
        self,
        batch: StepBatch,
        loss_fn: Callable[..., Any] | None,
        output_cuts: Sequence[TensorCut] | None,
        *,
        keep_outputs: bool = False,
        sums: bool = True,
    ) -> None:
        self._batch, self._loss_fn, self._output_cuts = batch, loss_fn, output_cuts
        self._keep_outputs, self._sums = keep_outputs, sums
        self._open: dict[int, MicroBatchLoss] = {}
        self.values: list[Any] = []
        self.outputs: Any = None

    def __len__(self) -> int:
        """Number of micro-batches whose loss is still needed."""
        return len(self._open)

    def add(self, unit: Unit, outputs: Any) -> None:
        """Add the outputs of a unit; the slices of a micro-batch come in ascending order."""
        m = unit.micro_batch
        if unit.slice == 0:
            self._open[m] = self._new(m)
        loss = self._open[m]
        loss.add(outputs, keep_outputs=self._keep_outputs)
        if not self._batch.is_last_slice(unit):
            return
        self.values.append(like(loss.value, [part.detach() for part in as_tuple(loss.value)]))
        if self._keep_outputs:
            self.outputs = loss.outputs
        if not torch.is_grad_enabled():
            del self._open[m]

    @property
    def total(self) -> Any:
        """Sum of the losses; None without ``sums``."""
        if not (self._sums and self.values):
            return None
        return like(self.values[0], [sum(of_all) for of_all in zip(*map(as_tuple, self.values), strict=True)])

    def waiting(self, unit: Unit) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tensors that wait for the backward of a unit whose outputs came last; see `MicroBatchLoss.waiting`."""
        open_loss = self._open.get(unit.micro_batch)
        return ((), ()) if open_loss is None else open_loss.waiting

    def backward_whole(self, unit: Unit, scale: Callable[[Tensor], Tensor]) -> None:
        """Run the backward pass of a unit's loss if it is that of all slices; see `MicroBatchLoss.backward_whole`."""
        self._open[unit.micro_batch].backward_whole(unit.slice, scale)

    def backward(self, unit: Unit, scale: Callable[[Tensor], Tensor]) -> None:
        """Start the backward pass of a unit; the slices of a micro-batch come in descending order."""
        self._open[unit.micro_batch].backward(unit.slice, scale)
        if unit.slice == 0:
            del self._open[unit.micro_batch]

    def _new(self, m: int) -> MicroBatchLoss:
        batch = self._batch
        label_cuts = batch.label_cuts[m] if batch.label_cuts else None
        return MicroBatchLoss(self._loss_fn, batch.labels_of(m), label_cuts, self._output_cuts, batch.spans[m])


def runs_per_slice(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether the loss is known to be a sum over tokens."""
    return isinstance(loss_fn, TokenLoss)


def check_loss(loss_fn: Callable[..., Any] | None) -> None:
    """Raise ConfigError for a model that cannot be cut without a ``loss_fn``."""
    if loss_fn is None:
        raise ConfigError(
            "token_pipeline.slices: got a PipelineModule without loss_fn, must have one so that the loss sees the whole "
            'sequence, use PipelineModule(..., loss_fn=...) or "slices": 1'
        )

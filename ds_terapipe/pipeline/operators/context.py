"""Position of the running computation: slice, micro-batch and layer.

Attention is the one operation of a causal Transformer that looks beyond its slice. A layer, a checkpoint inside a
layer, or a recomputation in the middle of a backward pass may call it. The call asks the context for the position of
the slice and for the keys and values of the earlier ones. A call is identified by (layer, number of the call in that
layer, micro-batch, slice); a call that cannot be placed is an error. A layer recomputed from its beginning is trusted;
whether it made the same keys again is checked before the optimiser steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.operators import compiled
from ds_terapipe.pipeline.operators.buffers import AttentionState
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import HIDES, Span
from ds_terapipe.pipeline.token_shares import TokenShares
from ds_terapipe.schedule import Unit

_RECOMPUTED, _FUTURE = "recomputed otherwise", "shown later tokens"


class PlacementError(RuntimeError):
    """An attention call that belongs to no known (layer, call, micro-batch, slice)."""


class CallKey(NamedTuple):
    """A call of attention within a micro-batch: number ``call`` of those that ``layer`` makes for a slice."""

    layer: int
    call: int


class CallForm(NamedTuple):
    """Form of an attention call, independent of the slice's length.

    ``causal``: ``is_causal`` is set without a mask; only known for several queries. The others are numbers of heads and
    head sizes.
    """

    causal: bool
    heads: int
    kv_heads: int
    size: int
    value_size: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> CallForm:
        """Return the form of a call: q [..., heads, slice, d], k [..., kv heads, slice, d], v [..., kv heads, slice,
        dv]."""
        queries, keys = q.shape, k.shape
        heads = queries[-3] if len(queries) > 2 else 1
        return cls(causal, heads, keys[-3] if len(keys) > 2 else 1, queries[-1], v.shape[-1])

    @property
    def headless(self) -> CallForm:
        """Form without numbers of heads: in attention over another dimension the slice's tokens are in their place."""
        return self._replace(heads=0, kv_heads=0)


class SliceContext:
    """The running unit, and the attention buffers of the micro-batches in flight."""

    current: SliceContext | None = None  # per process: backward passes run in autograd's own threads

    def __init__(self) -> None:
        self.span: Span | None = None
        self.dropout = True  # False while a model is compared with itself
        self.weight_gradients: WeightGradients | None = None  # set if they are made once per micro-batch
        self.keeper: WeightGradients | None = None  # the same, while a slice runs that is not the whole sequence
        self.streams: RandomStreams | None = None  # seeds random numbers, layer by layer
        self.shares: TokenShares | None = None  # tensor-parallel ranks that share a slice's tokens
        self.micro_batch = -1
        self.documents_of: Mapping[int, Documents | None] = {}  # documents of the step's micro-batches
        self.documents: Documents | None = None  # of the running one; None: every row is one document
        self.layer_text: Callable[[int], str] = "layer {}".format  # name of a layer in errors
        self._recomputing = False
        self.layer: int | None = None
        self._inside = False  # from the beginning to the end of `layer`
        self._call = 0
        self._placed: set[CallKey] = set()  # calls of the running slice
        self._states: dict[int, dict[CallKey, AttentionState]] = defaultdict(dict)
        self._notes: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._forms: dict[CallKey, CallForm] = {}  # of the model, not of a step
        # of the model too: calls over keys that are no tokens of the sequence, and keys of those that may be such calls
        self._apart: set[tuple[CallKey, CallForm]] = set()
        self._sizes: dict[tuple[CallKey, CallForm], int] = {}
        # by what is wrong and layer: whether it is, read when the step is over
        self._doubts: dict[tuple[str, int], torch.Tensor] = {}
        self.compiled = compiled.load()

    @contextmanager
    def forward(self, unit: Unit, span: Span) -> Iterator[None]:
        """Context manager around a slice's forward. Every slice must make the same attention calls in each layer."""
        micro_batch = unit.micro_batch
        self._placed = set()
        if span.start == 0:
            self.release(micro_batch)
        with self._running(unit, span, recomputing=False):
            yield
        if span.is_whole:
            return
        odd = sorted(self._placed ^ set(self._states[micro_batch]))
        if odd:
            raise PlacementError(
                f"{self.layer_text(odd[0].layer)}: its attention call {odd[0].call} is made for some slices of micro-batch "
                f"{micro_batch} and not for others (tokens {span.start} to {span.stop}); every slice must run the same calls"
            )

    @contextmanager
    def backward(self, unit: Unit, span: Span) -> Iterator[None]:
        """Context manager around the backward of a slice: attention calls in it are recomputations."""
        keeper = self.weight_gradients
        keeping = nullcontext() if keeper is None else keeper.backward(unit)
        with self._running(unit, span, recomputing=True), keeping:
            yield

    @contextmanager
    def _running(self, unit: Unit, span: Span, *, recomputing: bool) -> Iterator[None]:
        previous, fast_path = SliceContext.current, torch.backends.mha.get_fastpath_enabled()
        # the fused inference kernels of nn.TransformerEncoderLayer hide their attention from the override
        torch.backends.mha.set_fastpath_enabled(False)
        SliceContext.current = self
        self.span, self.micro_batch, self._recomputing = span, unit.micro_batch, recomputing
        self.documents = self.documents_of.get(unit.micro_batch)
        self.keeper = None if span.is_whole else self.weight_gradients
        self.layer, self._inside, self._call = None, False, 0
        try:
            yield
        finally:
            SliceContext.current = previous
            torch.backends.mha.set_fastpath_enabled(fast_path)
            self.span, self.documents, self.keeper, self.layer, self._inside = None, None, None, None, False

    def enter_layer(self, layer: int) -> None:
        """Begin layer ``layer`` of the ``PipelineModule``."""
        self.layer, self._inside, self._call = layer, True, 0
        if self.streams is not None and self.span is not None:
            first = 0 if self.shares is None else self.shares.rank * (self.span.length // self.shares.size)
            self.streams.enter(layer, self.micro_batch, self.span.start + first)

    def leave_layer(self) -> None:
        """End the layer; later recomputations of its parts do not tell their position."""
        self._inside = False

    def is_apart(self, form: CallForm, k: torch.Tensor, v: torch.Tensor, *, over_itself: bool) -> bool:
        """Whether the next attention call reads keys that are no tokens of the sequence, as those of an encoder.

        By chance these may be as many as the slice's tokens: ``over_itself``. Then it was another number in a slice of
        another length. The inspection begins with two such slices.
        """
        form = form.headless
        if self.layer is None or (self._recomputing and not self._inside):
            if not over_itself or all(form != apart for _, apart in self._apart):
                return not over_itself
            with _beside_checkpoint():
                return self._holding(*(t[(None,) * (4 - t.dim())] for t in (k, v))) is None
        key, keys = CallKey(self.layer, self._call), k.shape[-2]
        if not over_itself and not self._recomputing and self._sizes.get((key, form), keys) == keys:
            self._apart.add((key, form))
            self._states[self.micro_batch].pop(key, None)  # of a slice with as many tokens, before this one
        return not over_itself or (key, form) in self._apart

    def is_new(self, form: CallForm, keys: int) -> bool:
        """Whether no slice has made the next attention call, which is not causal by itself; notes it."""
        call = CallKey(-1 if self.layer is None else self.layer, self._call), form.headless
        is_new = call not in self._sizes
        self._sizes.setdefault(call, keys)
        return is_new

    def pass_call(self) -> None:
        """Count an attention call that needs no buffers."""
        self._call += 1

    def note_call(self, form: CallForm) -> None:
        """Note the form of the next attention call, in a slice of more than one token."""
        if self.layer is not None and not self._recomputing:
            self._forms[CallKey(self.layer, self._call)] = form

    def known_form(self) -> CallForm | None:
        """Return the form that the next attention call had in a slice of more than one token.

        That was an earlier slice, of any micro-batch, or one of the inspection. None if there was no such call, and in
        a recomputation, where the next call is unknown.
        """
        return None if self.layer is None or self._recomputing else self._forms.get(CallKey(self.layer, self._call))

    @property
    def is_recomputing(self) -> bool:
        """Whether a backward pass is running, so that attention calls are recomputations."""
        return self._recomputing

    def place(self, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
        """Return the buffers of the attention call with ``k``, ``v`` [b, kv heads, slice, d].

        Raises :class:`PlacementError` for a call that the micro-batch's first slice did not make.
        """
        assert self.span is not None
        if not self._recomputing:
            return self._forward_call(k, v)
        with _beside_checkpoint():
            return self._recomputed(k, v)

    def _forward_call(self, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
        span, states = self.span, self._states[self.micro_batch]
        assert span is not None
        if self.layer is None:
            raise PlacementError(
                "causal attention is called outside the layers of the PipelineModule: it can't be sliced"
            )
        key = CallKey(self.layer, self._call)
        self._call += 1
        self._placed.add(key)
        if span.start == 0:
            states[key] = AttentionState(k, v, span.total, self.compiled)
        state = states.get(key)
        if state is None or not state.fits(k, v) or state.filled < span.start:
            raise PlacementError(
                f"{self.layer_text(key.layer)}: attention call {key.call} of micro-batch {self.micro_batch} has no keys for "
                f"tokens 0 to {span.start}: the layer did not make this call, or not with these shapes, for the earlier slices"
            )
        return state

    def _recomputed(self, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
        states, span = self._states[self.micro_batch], self.span
        assert span is not None
        guess = CallKey(-1 if self.layer is None else self.layer, self._call)
        if self._inside and guess in states and states[guess].awaits(k, v, span):
            # a layer that runs again from its beginning makes its calls in their order
            self._call += 1
            self._doubt(_RECOMPUTED, states[guess].differs(k, v, span))
            return states[guess]
        # A checkpoint inside a layer recomputes just its own part, in reverse order, without telling its position. But
        # its keys and values equal those in the buffers, bit for bit, and so identify the call.
        key = self._holding(k, v)
        if key is not None:
            self._call = key.call + 1
            return states[key]
        where = "the first layer" if self.layer is None else self.layer_text(self.layer)
        raise self._not_recomputed(f"micro-batch {self.micro_batch}, tokens {span.start} to {span.stop},", where)

    def _holding(self, k: torch.Tensor, v: torch.Tensor) -> CallKey | None:
        """Return the call whose buffers await these keys and values, the expected one first; None if there is none."""
        states, span, guess = self._states[self.micro_batch], self.span, (self.layer, self._call)
        assert span is not None
        for key in sorted(states, key=lambda key: (key != guess, -key.layer, -key.call)):
            if states[key].awaits(k, v, span) and not states[key].differs(k, v, span):
                return key
        return None

    def note_future(self, mask: torch.Tensor, span: Span) -> None:
        """Note whether a mask over all tokens, of attention that is not causal by itself, shows a slice later ones."""
        rows = mask[..., span.start : span.stop, :] if mask.shape[-2] == span.total else mask
        future = rows[..., span.stop :]
        if future.numel():
            self._doubt(_FUTURE, (future if future.dtype == torch.bool else future > -HIDES).any())

    def _doubt(self, what: str, wrong: torch.Tensor) -> None:
        key = what, -1 if self.layer is None else self.layer
        self._doubts[key] = self._doubts[key] | wrong if key in self._doubts else wrong

    def check_step(self) -> None:
        """Raise an error if a layer's recomputation differed, or a mask showed it later tokens; waits for the device."""
        doubts, self._doubts = self._doubts, {}
        found = torch.stack(list(doubts.values())).tolist() if doubts else []
        for (what, layer), wrong in zip(doubts, found, strict=True):
            if wrong and what == _RECOMPUTED:
                raise self._not_recomputed("a step", self.layer_text(layer))
            if wrong:
                raise refuse_model(f"an attention mask shows later tokens to earlier ones ({self.layer_text(layer)})")

    def _not_recomputed(self, what: str, where: str) -> PlacementError:
        return PlacementError(
            f"recomputation for backward of {what} made keys that no attention call of the forward pass made (near {where}): is "
            "it deterministic, and does it restore the random state (preserve_rng_state)?"
        )

    def buffers(self, micro_batch: int) -> list[torch.Tensor]:
        """Return keys and values of all attention calls of a micro-batch."""
        return [buffer for state in self._states[micro_batch].values() for buffer in (state.k, state.v)]

    @property
    def notes(self) -> dict[Any, Any]:
        """Notes of layers about the running micro-batch; they end with it."""
        return self._notes[self.micro_batch]

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches whose attention buffers are held."""
        return len(self._states)

    def release(self, micro_batch: int) -> None:
        """Free the attention buffers and notes of a micro-batch."""
        self._states.pop(micro_batch, None)
        self._notes.pop(micro_batch, None)

    def clear(self) -> None:
        """Free all buffers, e.g. those that a failed step has left."""
        for kept in (self._states, self._notes, self._doubts):
            kept.clear()

    def describe(self) -> str:
        """Return the present position, for messages."""
        where = "outside the layers" if self.layer is None else self.layer_text(self.layer)
        return (
            f"{where}, micro-batch {self.micro_batch}, tokens {self.span.start} to {self.span.stop}"
            if self.span
            else where
        )


def _beside_checkpoint() -> AbstractContextManager[Any]:
    """Context manager without the mode of a selective checkpoint, which refuses operators that the forward pass did not call."""
    selective = isinstance(_get_current_dispatch_mode(), _CachedTorchDispatchMode)
    return _pop_mode_temporarily() if selective else nullcontext()


def current_span() -> Span | None:
    """Return the running slice; None if there is none, e.g. outside any engine.

    For layers that know positions not only from their inputs, such as rotary embeddings.
    """
    context = SliceContext.current
    return context.span if context is not None else None


def refuse_model(what: str, advice: str = "") -> ConfigError:
    """Return the error for a model that cannot be cut along its sequence."""
    advice = advice or 'use "slices": 1 or layers that mix tokens through causal scaled_dot_product_attention only'
    return ConfigError(f"token_pipeline.slices: got a model that can't be cut: {what}; {advice}")

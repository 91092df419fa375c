"""Positions of a batch's tokens, and the documents that they belong to.

Inputs of the pipeline have them as whole numbers [b, 1, 2 S]: the position of each token, and the number of its document. In our
engine the step's header brings them to all stages, as `Documents`, and attention goes by these. In DeepSpeed's own engine
the numbers go from stage to stage beside the hidden states, and attention has a mask.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.documents import PADDING, Documents
from ds_terapipe.pipeline.operators.context import SliceContext, current_span
from ds_terapipe.pipeline.slicing import Span

_KEPT = 8  # lengths of which cosines and sines are kept


def travelling(positions: Tensor, documents: Tensor) -> Tensor:
    """Join positions and document numbers, both [b, S], into one tensor [b, 1, 2 S]; see :class:`TokenPositions`."""
    return torch.cat([positions, documents], dim=1)[:, None]


def documents_of(inputs: Any) -> Documents | None:
    """Return the documents in the inputs of a pipeline, as `ds_terapipe.hf.batch` makes them."""
    if isinstance(inputs, Tensor):
        return None
    positions, numbers = inputs[1][:, 0].chunk(2, dim=1)
    return Documents.of(numbers, positions)


class TokenPositions:
    """Positions and documents of the tokens of a slice, or of a whole sequence.

    Args:
        given: as :func:`travelling` makes it; None: those of the running micro-batch's `Documents`, or positions 0, 1, 2, ...
            of one document.
        tokens: [b, s, ...] of the slice.

    Attributes:
        span: of the slice.
        positions: of all tokens of the micro-batch, [b | 1, S].
        documents: their numbers likewise; None: all are of one, or attention goes by `Documents`.
        rotary: cosines and sines of these positions, as :class:`Rotary` keeps them; None: those of 0, 1, 2, ...
    """

    def __init__(self, given: Tensor | None, tokens: Tensor) -> None:
        self.span = _span(tokens)
        self.documents: Tensor | None = None
        self.rotary: dict[Any, tuple[Tensor, Tensor]] | None = None
        self._mask: Tensor | None = None
        context = SliceContext.current
        packed = None if context is None else context.documents
        if packed is not None and context is not None:
            self.positions, self.rotary = packed.positions(tokens.device), context.notes.setdefault(Rotary, {})
        elif given is not None:
            (self.positions, numbers), self.rotary = given[:, 0].chunk(2, dim=1), {}
            only_behind = bool((numbers.diff(dim=1) <= 0).all()) and set(numbers.unique().tolist()) <= {PADDING, 1}
            self.documents = None if only_behind else numbers  # padding behind all tokens is seen by none of them
        else:
            self.positions = torch.arange(self.span.total, device=tokens.device)[None]

    @classmethod
    def of(cls, given: Tensor | None, tokens: Tensor) -> TokenPositions:
        """Return the places of the running slice; cached for all layers with the same tensor."""
        if given is None:
            return cls(given, tokens)
        known: TokenPositions | None = getattr(given, "_ds_terapipe_places", None)
        if known is None or known.span != _span(tokens):
            known = cls(given, tokens)
            vars(given)["_ds_terapipe_places"] = known
        return known

    @property
    def here(self) -> Tensor:
        """Positions of the slice's tokens, [b | 1, s]."""
        return self.positions[:, self.span.start : self.span.stop]

    @property
    def mask(self) -> Tensor | None:
        """Return the keys that a token may see besides causality, bool [b, 1, S, S]; None: all, or by `Documents`."""
        if self.documents is not None and self._mask is None:
            keys, rows = self.documents[:, None], self.documents[:, :, None]
            self._mask = ((keys > 0) & ((keys == rows) | (rows <= 0)))[:, None]
        return self._mask


def _span(tokens: Tensor) -> Span:
    """Return the span of tokens [b, s, ...]: the running slice, or all."""
    return current_span() or Span(0, tokens.shape[1], tokens.shape[1])


class Rotary:
    """A model's rotary embedding, for slices: cosines and sines of the whole micro-batch, cut for each slice.

    A module of its own for every new micro-batch, as those of the dynamic kind remember the longest sequence that they have
    seen. Nothing of it is among a layer's weights and buffers: these would be cast to 16 bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_type = "layer_type" in inspect.signature(module.forward).parameters
        self._plain: dict[Any, tuple[Tensor, Tensor]] = {}
        self._on: dict[torch.device, nn.Module] = {}

    def __call__(self, hidden: Tensor, places: TokenPositions, layer_type: str | None) -> tuple[Tensor, Tensor]:
        """(cosines, sines) of a slice's tokens, [b | 1, s, d] each, of the type of ``hidden`` [b, s, hidden]."""
        key = (layer_type if self._by_type else None, hidden.dtype, hidden.device)
        if places.rotary is None:
            cos, sin = self._known(self._plain, (places.span.total, *key), lambda: self._whole(hidden, places, *key))
        else:
            cos, sin = self._known(places.rotary, key, lambda: self._whole(hidden, places, *key))
        span = places.span
        return cos[:, span.start : span.stop], sin[:, span.start : span.stop]

    @staticmethod
    def _known(kept: dict[Any, tuple[Tensor, Tensor]], key: Any, make: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        if key not in kept:
            if len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            kept[key] = make()
        return kept[key]

    def _whole(self, hidden: Tensor, places: TokenPositions, layer_type: str | None, *_: Any) -> tuple[Tensor, Tensor]:
        device = hidden.device
        if device not in self._on:  # a copy from ordinary memory holds the host until the device has come to it
            self._on[device] = copy.deepcopy(self._module).to(device)
        module = copy.deepcopy(self._on[device])
        with torch.no_grad():
            cos, sin = module(hidden, places.positions, *([layer_type] if self._by_type else []))
        return cos, sin

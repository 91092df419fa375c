"""Positions of a batch's tokens, and the documents that they belong to.

Between stages there is no mask. What plain causal attention over positions 0, 1, 2, ... does not say travels as whole numbers
[b, 1, 2 S], whole with every slice: the position of every token of the micro-batch, and the number of its document (0: padding).
Rotary frequencies that depend on the longest sequence (longrope, dynamic) see all of them that way.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.context import SliceContext, current_span
from ds_terapipe.pipeline.slicing import Span

_KEPT = 8  # lengths of which cosines and sines are kept
PADDING = 0


def travelling(positions: Tensor, documents: Tensor) -> Tensor:
    """Join positions and document numbers, both [b, S], into one tensor [b, 1, 2 S]; see :class:`TokenPositions`."""
    return torch.cat([positions, documents], dim=1)[:, None]


class TokenPositions:
    """Positions and documents of the tokens of a slice, or of a whole sequence.

    Args:
        given: as :func:`travelling` makes it; None: positions 0, 1, 2, ..., one document.
        tokens: [b, s, ...] of the slice.

    Attributes:
        span: of the slice.
        positions: of all tokens of the micro-batch, [b | 1, S].
        documents: their numbers likewise, 0: padding; None: all are of one.
        rotary: cosines and sines of these positions, as :class:`Rotary` keeps them; in our engines for all slices of the
            micro-batch, each of which has a tensor of its own to say where it is.
    """

    def __init__(self, given: Tensor | None, tokens: Tensor) -> None:
        self.span = _span(tokens)
        self.documents: Tensor | None = None
        if given is None:
            self.positions = torch.arange(self.span.total, device=tokens.device)[None]
        else:
            self.positions, self.documents = given[:, 0].chunk(2, dim=1)
        self._mask: Tensor | None = None
        context = SliceContext.current
        self.rotary: dict[Any, tuple[Tensor, Tensor]] = {} if context is None else context.notes.setdefault(Rotary, {})

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
        """Return the keys that a token may see besides causality, bool [b, 1, s, stop]; None: all."""
        if self.documents is not None and self._mask is None:
            keys, start = self.documents[:, None, : self.span.stop], self.span.start
            rows = self.documents[:, start : self.span.stop, None]
            visible = (keys != PADDING) & ((keys == rows) | (rows == PADDING))
            self._mask = visible[:, None]
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
        if places.documents is None:
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

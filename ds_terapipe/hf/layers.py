"""Entries of a Hugging Face decoder's pipeline: the model's own modules, each with its ``forward``'s inputs.

Between them travel hidden states [b, s, hidden], alone or with what :mod:`ds_terapipe.hf.positions` says of the tokens.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.attention import place_windows
from ds_terapipe.hf.parts import without_adapter
from ds_terapipe.hf.positions import TokenPositions
from ds_terapipe.hf.source import Source
from ds_terapipe.pipeline.operators.context import SliceContext, current_span
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import defers

Hidden: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


def _parted(inputs: Any) -> tuple[Tensor, Tensor | None]:
    return (inputs[0], inputs[1]) if isinstance(inputs, tuple) else (inputs, None)


def _joined(hidden: Tensor, given: Tensor | None) -> Hidden:
    """Return the inputs of the next layer; in our engine all stages have the documents."""
    return hidden if given is None or current_span() is not None else (hidden, given)


class Embed(nn.Module):
    """Token ids [b, s] to hidden states: the word embedding and, where the model has one, a table of positions and dropout.

    ``words_only``: as the head of a model whose logits are tied, on a stage of its own.
    """

    def __init__(self, source: Source, words_only: bool = False) -> None:
        super().__init__()
        parts = source.parts
        self.tokens = source.take(parts.tokens)
        self.positions = None if parts.positions is None or words_only else source.take(parts.positions)
        self.dropout = None if parts.dropout is None or words_only else source.take(parts.dropout)

    def forward(self, inputs: Any) -> Hidden:
        tokens, given = _parted(inputs)
        hidden = self.tokens(tokens)
        if self.positions is not None:
            places = TokenPositions.of(given, tokens)
            rows = without_adapter(self.positions).num_embeddings
            if places.span.total > rows:
                raise ConfigError(
                    f"input_ids: got {places.span.total} tokens, must be at most the model's {rows} positions, use {rows}"
                )
            hidden = hidden + self.positions(places.here)
        if self.dropout is not None:
            hidden = self.dropout(hidden)
        if SliceContext.current is None and torch.is_grad_enabled() and not hidden.requires_grad:
            # DeepSpeed's own engine runs a stage backward whether or not something trains before it, and its checkpoints
            # train nothing of a layer whose input has no gradient
            hidden.requires_grad_()
        return _joined(hidden, given)


class Decoder(nn.Module):
    """A decoder layer."""

    def __init__(self, source: Source, index: int) -> None:
        super().__init__()
        self.layer = source.take(f"{source.parts.layers}.{index}")
        self._rotary, self._type = source.rotary, source.layer_type(index)
        place_windows(self.layer, self._type, source.config)

    def forward(self, inputs: Any) -> Hidden:
        hidden, given = _parted(inputs)
        places = TokenPositions.of(given, hidden)
        arguments: dict[str, Any] = {"attention_mask": places.mask, "position_ids": places.here}
        if self._rotary is not None:
            arguments["position_embeddings"] = self._rotary(hidden, places, self._type)
        outputs = self.layer(hidden, **arguments)
        return _joined(outputs[0] if isinstance(outputs, tuple) else outputs, given)


class Norm(nn.Module):
    """The layer between the last decoder layer and the head."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        assert source.parts.norm is not None
        self.norm = source.take(source.parts.norm)

    def forward(self, inputs: Any) -> Hidden:
        hidden, given = _parted(inputs)
        return _joined(self.norm(hidden), given)


class Head(nn.Module):
    """Hidden states to logits [b, s, vocabulary]."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.head = source.take(source.parts.head)
        self._softcap = source.softcap

    def forward(self, inputs: Any) -> Tensor:
        return _capped(self.head(_parted(inputs)[0]), self._softcap)


def tied_head(softcap: float | None) -> Any:
    """A head that is the word embedding's table: the ``forward_fn`` of a ``TiedLayerSpec``."""

    @defers
    def tied_logits(embed: Embed, inputs: Any) -> Tensor:
        return _capped(deferred_linear(_parted(inputs)[0], cast(Tensor, embed.tokens.weight)), softcap)

    return tied_logits


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap

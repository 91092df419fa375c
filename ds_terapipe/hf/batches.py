"""A batch as Hugging Face's collators make it, as inputs and labels of a pipeline."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.loss import IGNORED
from ds_terapipe.hf.positions import travelling
from ds_terapipe.pipeline.documents import COUNTED_PADDING

logger = logging.getLogger(__name__)

_KNOWN = ("input_ids", "attention_mask", "position_ids", "labels", "token_type_ids")
# what DataCollatorWithFlattening may add to position_ids, and says the same
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def batch(features: Mapping[str, Tensor]) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """Inputs and labels of a micro-batch; for ``engine.set_batch_fn`` or around a collator.

    Args:
        features: ``input_ids`` and ``labels`` [b, S] (those of the tokens themselves, -100 where none counts), and perhaps
            ``attention_mask`` [b, S] (1, or 0: padding) and ``position_ids`` [b | 1, S]. Positions that restart, with no
            attention mask, are packed documents, which do not see each other; beside a mask they are one, as for transformers.
            ``cu_seq_lens_q`` and the like, of transformers' ``DataCollatorWithFlattening``, say the same as its positions.

    Returns:
        (input_ids, labels), or ((input_ids, places), labels) where causal attention over positions 0, 1, 2, ... is not all:
        padding, positions of one's own, packed documents.

    Raises:
        ConfigError: no labels, shapes that don't fit, or what is not followed.
    """
    known = (*_KNOWN, *(_FLATTENED if features.get("position_ids") is not None else ()))
    unknown = [name for name in features if name not in known]
    if unknown:
        raise ConfigError(
            f"hf.batch: got {unknown[0]}, must be among {', '.join(_KNOWN)}, leave it out where the model does not need it"
        )
    tokens, labels = (_tensor(features, name) for name in ("input_ids", "labels"))
    mask, positions = (
        None if features.get(name) is None else _tensor(features, name) for name in ("attention_mask", "position_ids")
    )
    types = features.get("token_type_ids")
    if types is not None and bool(torch.as_tensor(types).any()):
        raise ConfigError("hf.batch: got token_type_ids other than 0, must be 0 or absent, use a model without them")
    for name, given in (("labels", labels), ("attention_mask", mask), ("position_ids", positions)):
        if given is not None and given.shape[1] != tokens.shape[1]:
            raise ConfigError(
                f"hf.batch: got {name} of shape {list(given.shape)}, must be that of input_ids, use {list(tokens.shape)}"
            )
    if mask is not None:
        _check_mask(mask, positions)
    if (mask is None or bool(mask.all())) and (positions is None or torch.equal(positions, _plain(positions))):
        return tokens, labels
    positions = _plain(tokens) if positions is None else positions.expand(tokens.shape).long()
    documents = _documents(positions) if mask is None else _padded(mask != 0, labels)
    return (tokens, travelling(positions, documents)), labels


def _tensor(features: Mapping[str, Any], name: str) -> Tensor:
    found = features.get(name)
    if not isinstance(found, Tensor) or found.dim() != 2:
        what = "none" if found is None else f"{type(found).__name__} {list(getattr(found, 'shape', []))}"
        raise ConfigError(
            f"hf.batch: got {what} for {name}, must be a tensor [batch, sequence], use e.g. DataCollatorForSeq2Seq(tokenizer) "
            "on samples with input_ids and labels"
        )
    return found


def _check_mask(mask: Tensor, positions: Tensor | None) -> None:
    """Refuse document numbers; log that positions beside a mask number no documents."""
    odd = mask[(mask != 0) & (mask != 1)]
    if odd.numel():
        raise ConfigError(
            f"hf.batch: got {odd[0].item()} in attention_mask, must be 1, or 0 for padding, use position_ids that restart "
            "with each document, without attention_mask"
        )
    if positions is not None and bool(mask.all()) and bool((_documents(positions) > 1).any()):
        _say_that_documents_are_one()


@functools.cache
def _say_that_documents_are_one() -> None:
    """Warn, once in a process."""
    logger.warning(
        "hf.batch: position_ids restart beside an attention_mask of ones: all tokens of a row are one document, as for "
        "transformers; leave attention_mask out where documents must not see each other"
    )


def _padded(real: Tensor, labels: Tensor) -> Tensor:
    """Number tokens as one document, and padding by whether the label that it predicts counts."""
    counts, behind = F.pad(labels[:, 1:] != IGNORED, (0, 1)), real.cummax(1).values
    in_front = ~behind & real.any(1, keepdim=True)  # there it sees nothing, and is run in any case
    return real.long().masked_fill(~real & counts & ~in_front, COUNTED_PADDING)


def _plain(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device)[None].expand(like.shape)


def _documents(positions: Tensor) -> Tensor:
    """Numbers from 1 on, a new one wherever a position does not follow the one before; transformers' rule."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(1) + 1

"""Samples of a micro-batch: a name for the inputs of each, and its outputs as bytes and back.

A sample is identified by its content. So data loaders need not number samples; an augmented sample, or one padded to
another length, is a different sample; and entries of one run serve the next run that begins with the same layers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.elastic.redistribute import has_samples, samples_of
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.slicing import as_tuple

_COUNT = struct.Struct("<I")


def rows_of(inputs: Any) -> int:
    """Return the number of samples; inputs that are for all samples count as one."""
    return max(samples_of(inputs), 1)


def names(inputs: Any, documents: Documents | None = None) -> list[str]:
    """Return a name for each sample: a hash of all its inputs, and of its documents."""
    tensors, rows = as_tuple(inputs), rows_of(inputs)
    views = [(tensor, _bytes(tensor)) for tensor in tensors]
    common = hashlib.blake2b(digest_size=16)
    for tensor, data in views:
        of_sample = has_samples(tensor, rows)
        common.update(
            repr((of_sample, str(tensor.dtype), tuple(tensor.shape[1:] if of_sample else tensor.shape))).encode()
        )
        if not of_sample:
            common.update(data)
    found = []
    for row in range(rows):
        one = common.copy()
        for tensor, data in views:
            if has_samples(tensor, rows):
                size = len(data) // rows
                one.update(data[row * size : (row + 1) * size])
        if documents is not None:
            one.update(documents.runs[row].tobytes())
        found.append(one.hexdigest())
    return found


def some_rows(inputs: Any, rows: Sequence[int]) -> Any:
    """Return the inputs of some samples of a micro-batch, in this order."""
    count = rows_of(inputs)
    taken = [tensor[list(rows)] if has_samples(tensor, count) else tensor for tensor in as_tuple(inputs)]
    return taken[0] if isinstance(inputs, Tensor) else tuple(taken)


def sample_dims(outputs: Any, others: Any, rows: int, other_rows: int) -> list[int | None] | None:
    """Return the dimension of each output that counts samples; None for an output that is for all of them.

    Found by comparing the shapes for two numbers of samples, so that equal sizes do not matter.

    Args:
        outputs, others: of ``rows`` and of ``other_rows`` samples.

    Returns:
        None where that can't be told.
    """
    found: list[int | None] = []
    if [one.dim() for one in as_tuple(outputs)] != [other.dim() for other in as_tuple(others)]:
        return None
    for one, other in zip(as_tuple(outputs), as_tuple(others), strict=True):
        changed = [d for d in range(one.dim()) if one.shape[d] != other.shape[d]]
        if len(changed) > 1 or any((one.shape[d], other.shape[d]) != (rows, other_rows) for d in changed):
            return None
        found.append(changed[0] if changed else None)
    return found


def encode(outputs: Any, dims: Sequence[int | None], row: int, smaller: bool) -> list[Any]:
    """Encode the outputs of one sample as bytes, in parts.

    Args:
        outputs: of a micro-batch, on the host.
        dims: of `sample_dims`.
        row: which sample.
        smaller: keep floating-point numbers as bf16.
    """
    about, parts = [], []
    for tensor, dim in zip(as_tuple(outputs), dims, strict=True):
        one = tensor if dim is None else tensor.narrow(dim, row, 1)
        kept = one.to(torch.bfloat16) if smaller and one.is_floating_point() else one
        about.append((list(one.shape), _name(one.dtype), _name(kept.dtype), dim))
        parts.append(_bytes(kept))
    head = json.dumps({"tuple": not isinstance(outputs, Tensor), "tensors": about}).encode()
    return [_COUNT.pack(len(head)), head, *parts]


def decode(entries: Sequence[memoryview]) -> Any:
    """Return the outputs of a micro-batch of these samples; None if they do not fit together (other padding)."""
    (size,) = _COUNT.unpack_from(entries[0])
    head = bytes(entries[0][: _COUNT.size + size])
    if any(bytes(entry[: len(head)]) != head for entry in entries):
        return None
    about, at, tensors = json.loads(head[_COUNT.size :]), len(head), []
    for shape, dtype, kept, dim in about["tensors"]:
        kind = getattr(torch, kept)
        count = int(np.prod(shape)) * kind.itemsize
        flats = [torch.frombuffer(bytearray(entry[at : at + count]), dtype=kind) for entry in entries] if count else []
        ones = [flat.view(shape) for flat in flats] or [torch.empty(shape, dtype=kind)] * len(entries)
        joined = ones[0] if dim is None else torch.cat(ones, dim)
        tensors.append(joined.to(getattr(torch, dtype)))
        at += count
    return tuple(tensors) if about["tuple"] else tensors[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values)

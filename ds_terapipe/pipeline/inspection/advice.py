"""Advice on a layer that cannot be cut: the line of its code that ignores earlier slices, and its replacement.

Two habits make most hand-written decoders fail. They number the tokens of a slice from 0, by ``torch.arange(n)`` or by
the first ``n`` rows of a table. And they write causal attention out, over the keys of the slice alone.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_terapipe.pipeline.operators.attention import is_causal_square
from ds_terapipe.pipeline.slicing import Span

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_USE_SDPA = "use torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
_USE_START = 'use start = getattr(ds_terapipe.current_span(), "start", 0) and count from start'


class SliceDiagnosis(TorchFunctionMode):
    """Mode that runs a layer on a slice with shifted positions, and detects attention written by hand.

    Args:
        span: the slice.

    Attributes:
        positions: the code that numbered tokens from 0, each as file, line and text.
        attention: what makes attention of the slice's tokens over themselves, and where.
    """

    def __init__(self, span: Span) -> None:
        super().__init__()
        self._span = span
        self.positions: list[str] = []
        self.attention: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            args = (args[0], self._later_rows(args[0], args[1]))
        result = func(*args, **(kwargs or {}))
        if name == "arange" and result.tolist() == list(range(self._span.length)):
            self.positions.append(_line_of_user())
            return result + self._span.start
        if name == "flex_attention":
            self.positions.clear()  # they may be its mask's
            self.attention.append(f"calls flex_attention at {_line_of_user()}")
        if name == "softmax" and is_causal_square(result > 0, self._span.length):
            self.attention.append(f"writes causal attention out at {_line_of_user()}")
        return result

    def _later_rows(self, table: Tensor, index: Any) -> Any:
        """Return the index with ``[:length]`` of a longer dimension moved to the slice's own rows."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if not any(isinstance(part, slice) for part in parts) or any(isinstance(part, Tensor) for part in parts):
            return index
        if any(part is Ellipsis for part in parts):
            at = next(number for number, part in enumerate(parts) if part is Ellipsis)
            given = sum(part is not None for part in parts) - 1
            parts[at : at + 1] = [slice(None)] * (table.dim() - given)
        dimension, length, moved = 0, self._span.length, False
        for number, part in enumerate(parts):
            if part is None:
                continue
            if isinstance(part, slice) and part.start in (None, 0) and part.stop == length and part.step in (None, 1):
                if table.shape[dimension] >= self._span.stop:
                    parts[number], moved = slice(self._span.start, self._span.stop), True
            dimension += 1
        if moved:
            self.positions.append(_line_of_user())
        return tuple(parts) if moved else index

    def advice(self, positions_are_all: bool) -> str:
        """Name the lines to change.

        Args:
            positions_are_all: whether the layer is correct once its positions start at the slice's start.

        Returns:
            The advice; empty if there is none.
        """
        found = []
        if self.positions and (positions_are_all or self.attention):
            found.append(f"it numbers the tokens of a slice from 0 at {self.positions[0]}, {_USE_START}")
        if self.attention and not positions_are_all:
            found.append(f"it {self.attention[0]}, {_USE_SDPA}")
        return "; ".join(found)


def _line_of_user() -> str:
    """Return file, number and text of the innermost line outside this package and PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(path).name}:{number} ({linecache.getline(path, number).strip()[:80]})"

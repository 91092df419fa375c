"""Records of what a step of an engine ran. A test that compares numbers asserts it: those of an uncut run prove nothing."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from ds_terapipe.pipeline.operators import core_attention, sdpa
from ds_terapipe.pipeline.operators.context import SliceContext


def lengths_of(total: int, slices: int | Sequence[int]) -> tuple[int, ...]:
    """Tokens of each slice of a sequence of ``total`` tokens, by what the documentation says of ``slices``."""
    return tuple(map(len, np.array_split(np.arange(total), slices))) if isinstance(slices, int) else tuple(slices)


class Ran:
    """The forward calls of attention in the last step that were cut, on this rank: how often for (layer, micro-batch, tokens)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.cut: Counter[tuple[int, int, int, int]] = Counter()

    def check(self, lengths: Sequence[Sequence[int]], layers: int | None = None) -> None:
        """Assert that the last step ran slices of these lengths, by micro-batch, and all of them in so many layers' attention.

        A layer calls attention once; with ``layers`` None as often as it likes, but for every slice equally often.
        """
        wanted = tuple(tuple(micro_batch) for micro_batch in lengths)
        slices, counts = self._engine.slices_run, self._engine.units_run
        assert slices == wanted, f"ran slices of {slices} tokens, not {wanted}"
        units = sum(map(len, wanted))
        stages = self._engine._runtime.stages.values()
        forward, back = units * len(stages), units * sum(stage.trains for stage in stages)
        assert counts == (forward, back), f"ran {counts} units, not {(forward, back)}"
        cut = [(m, micro_batch) for m, micro_batch in enumerate(wanted) if len(micro_batch) > 1]
        spans = [(m, sum(each[:index]), sum(each[: index + 1])) for m, each in cut for index in range(len(each))]
        seen = sorted({layer for layer, *_ in self.cut})
        if layers is not None:
            assert len(seen) == (layers if spans else 0), f"cut was the attention of layers {seen}, not of {layers}"
        for layer in seen:
            calls = {(m, start, stop): n for (at, m, start, stop), n in self.cut.items() if at == layer}
            often = 1 if layers is not None else max(calls.values())
            assert calls == dict.fromkeys(spans, often), f"layer {layer} called attention for {calls}, not for {spans}"


@contextmanager
def watched(engine: Any) -> Iterator[Ran]:
    """Watch what this engine runs, the only one that runs meanwhile."""
    ran, run = Ran(engine), engine._steps.run

    def noting(attention: Any) -> Any:
        def noted(context: SliceContext, *args: Any, **kwargs: Any) -> Any:
            if not context._recomputing and not context.span.is_whole:
                ran.cut[context.layer, context.micro_batch, context.span.start, context.span.stop] += 1
            return attention(context, *args, **kwargs)

        return noted

    def begun(*args: Any, **kwargs: Any) -> Any:  # a step begins, its inspection is over
        ran.cut.clear()
        return run(*args, **kwargs)

    ways = [sdpa, core_attention, *filter(None, [sys.modules.get("ds_terapipe.hf.attention")])]
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(mock.patch.object(way, "slice_attention", noting(way.slice_attention)))
        engine._steps.run = begun
        yield ran
        del engine._steps.run

"""Ways in which a token pipeline can be wrong and still run to its end."""

from __future__ import annotations

from typing import Any

from ds_terapipe.pipeline.buffers import AttentionState
from ds_terapipe.pipeline.spans import Span
from tests.mutants.harness import Check, Hit, Mutant


def _attends_to_itself(original: Any, hit: Hit) -> Any:
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, state: Any, span: Any, call: Any) -> Any:
        if span.start == 0:
            return original(ctx, q, k, v, mask, state, span, call)
        hit()
        state.write(k, v, span)
        alone = Span(0, span.length, span.length)
        return original(ctx, q, k, v, mask, AttentionState(k, v, span.length), alone, call)

    return forward


MUTANTS = (
    Mutant(
        "attention ignores earlier slices",
        "A slice attends to its own tokens only.",
        ("ds_terapipe.pipeline.attention:SliceAttention.forward",),
        _attends_to_itself,
        "engine, PP2",
    ),
)

CHECKS = (
    Check(
        "engine, PP2",
        "tests.pipeline.test_engine_parity:off_by",
        ("1f1b-2-M1-per token-untied-adamw-PP2xDP1-float32",),
        catches=("attention ignores earlier slices",),
    ),
)

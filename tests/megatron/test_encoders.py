"""BERT and ViT pipelines train as megatron-core's BertModel and a plain ViT do in one process, in every layout and engine."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.megatron.common import relative
from tests.megatron.encoder_training import Result, Training, alone, together, without_key_bias
from tests.megatron.encoders import Encoder
from tests.spawn import run_ranks

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
EXACT = torch.float64
OURS, ELASTIC = "TokenPipelineEngine", "ElasticPipelineEngine"
MOVES = {"frozen": ((1, 1), (3, 3)), "resize": ((3, 1),), "steps": 6}

TRAININGS = {
    "BERT": Training(Encoder("bert")),
    "BERT, exact": Training(Encoder("bert", dtype=EXACT), OURS),
    "BERT, rotary, untied, recomputed": Training(Encoder("bert", rope=True, tied=False, checkpoints=1, dtype=EXACT)),
    "BERT, classes": Training(Encoder("classifier", checkpoints=1, dtype=EXACT), OURS),
    "ViT": Training(Encoder("vit")),
    "ViT, exact": Training(Encoder("vit", pool="mean", dtype=EXACT), OURS),
    "BERT, frozen and reshaped": Training(Encoder("bert"), ELASTIC, **MOVES),
    "BERT, untied, frozen and reshaped": Training(Encoder("bert", tied=False), ELASTIC, **MOVES),
    "BERT, classes, frozen and reshaped": Training(Encoder("classifier"), ELASTIC, **MOVES),
    "ViT, frozen and reshaped": Training(Encoder("vit"), ELASTIC, **MOVES),
    "BERT, TP2": Training(Encoder("bert"), tensor=2, stages=1),
    "BERT, TP2, exact": Training(Encoder("bert", tied=False, dtype=EXACT), OURS, tensor=2, stages=1),
    "ViT, TP2": Training(Encoder("vit", dtype=EXACT), tensor=2, stages=1),
}


@cache
def trained() -> dict[str, tuple[Result, Result]]:
    """For each training what one process saw, and what two did."""
    cases = list(TRAININGS.values())
    references = run_ranks(alone, 1, cases)[0]
    return dict(zip(TRAININGS, zip(references, run_ranks(together, 2, cases)[0], strict=True), strict=True))


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_one_process_does(name: str) -> None:
    wanted, got = trained()[name]
    training = TRAININGS[name]
    limit = LIMITS[training.model.dtype]
    assert got.losses == pytest.approx(wanted.losses, rel=limit)
    assert len(set(got.losses)) == training.steps
    assert got.gradients.keys() == wanted.gradients.keys() == got.weights.keys()
    for what in ("gradients", "weights"):
        for key, value in getattr(wanted, what).items():
            other = getattr(got, what)[key]
            assert value.any(), f"{what} of {key} are zero"
            assert relative(without_key_bias(key, other), without_key_bias(key, value)) <= limit, f"{what} of {key}"

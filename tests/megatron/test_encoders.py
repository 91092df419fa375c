"""BERT and ViT pipelines train as megatron-core's BertModel and a plain ViT do in one process, in every layout and engine."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.megatron.common import relative
from tests.megatron.encoder_training import Result, Training, alone_and_refused, together, without_key_bias
from tests.megatron.encoders import Encoder
from tests.spawn import run_ranks

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
EXACT = torch.float64
OURS, ELASTIC = "TokenPipelineEngine", "ElasticPipelineEngine"
MOVES = {"frozen": ((1, 1), (3, 3)), "resize": ((3, 1),), "steps": 6}

KINDS = ("bert", "classifier", "vit")

TRAININGS = {
    "BERT": Training(Encoder("bert")),
    "BERT, classes": Training(Encoder("classifier", checkpoints=1, dtype=EXACT), OURS),
    "ViT": Training(Encoder("vit")),
    "BERT, exact": Training(Encoder("bert", dtype=EXACT), OURS),
    "BERT, rotary, untied, recomputed": Training(Encoder("bert", rope=True, tied=False, checkpoints=1, dtype=EXACT)),
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
def launched() -> tuple[list[Result], list[list[str]], list[Result]]:
    """Of all trainings what one process saw; what was refused; of all trainings what two processes saw."""
    cases = list(TRAININGS.values())
    models = [training.model for training in cases[: len(KINDS)]]
    references, refused = run_ranks(alone_and_refused, 1, cases, models)[0]
    return references, refused, run_ranks(together, 2, cases)[0]


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_one_process_does(name: str) -> None:
    number = list(TRAININGS).index(name)
    check(TRAININGS[name], launched()[0][number], launched()[2][number])


@pytest.mark.full
def test_tensor_parallel_stages_freeze_and_become_replicas() -> None:
    cases = [Training(Encoder(kind), ELASTIC, tensor=2, **MOVES) for kind in KINDS]
    references, _ = run_ranks(alone_and_refused, 1, cases, [])[0]
    for training, wanted, got in zip(cases, references, run_ranks(together, 4, cases)[0], strict=True):
        check(training, wanted, got)


def check(training: Training, wanted: Result, got: Result) -> None:
    """Losses, gradients of the first step and weights at the end are those of one process, in the shapes that it was to have."""
    limit = LIMITS[training.model.dtype]
    assert got.losses == pytest.approx(wanted.losses, rel=limit)
    assert len(set(got.losses)) == training.steps and got.shapes == shapes(training)
    assert got.gradients.keys() == wanted.gradients.keys() == got.weights.keys()
    for what in ("gradients", "weights"):
        for key, value in getattr(wanted, what).items():
            other = getattr(got, what)[key]
            assert value.any(), f"{what} of {key} are zero"
            assert relative(without_key_bias(key, other), without_key_bias(key, value)) <= limit, f"{what} of {key}"


def shapes(training: Training) -> list[tuple[int, int, int]]:
    """Frozen entries, stages and replicas of each step, as `MOVES` wants them or as they are at the start."""
    if training.frozen:
        return [(0, 2, 1), (1, 2, 1), (1, 2, 1), (3, 1, 2), (3, 1, 2), (3, 1, 2)]
    return [(0, training.stages, 1)] * training.steps


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_samples_are_not_cut(number: int) -> None:
    said = launched()[1][number]
    assert len(said) == 3
    for message in said:
        assert message == (
            "token_pipeline: layer 1.self_attention.core_attention (BidirectionalAttention) is attention that is not causal, "
            'must be causal where sequences are cut beside token_pipeline, use "slices": 1'
        )

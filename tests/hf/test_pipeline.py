"""Models of Hugging Face's families in a pipeline of their own layers, in slices, against the unmodified model in one process."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch

from ds_terapipe.errors import ConfigError
from tests.spawn import run_ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")

STEPS, MICRO_BATCHES = 5, 2
FAMILIES = (
    "llama", "llama, tied, dynamic", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt2", "gpt_neox",
)  # fmt: skip
KINDS = ("plain", "behind", "front", "packed", "shifted", "counted")
CUTS: dict[str, Any] = {"one": 1, "four": 4, "one-token slices": [1, 8, 1, 13, 1], "uneven": [11, 7, 5, 1]}
SCHEDULES = ("1f1b", "terapipe")
# Of this one transformers has "eager" attention only: its softmax is in fp32, and in fp64 a token that sees nothing is NaN.
EAGER = "gemma2"
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-6, "fp64, no casts": 1e-10}


def pairwise(each: int) -> list[tuple[str, ...]]:
    """For each family so many kinds of batches, in turn with cuts, schedules and types."""
    found = []
    for index, family in enumerate(FAMILIES):
        for number in range(each):
            turn = index + number
            kind = KINDS[(index * each + number) % len(KINDS)]
            cut = list(CUTS)[2 if number == 0 else turn % len(CUTS)]
            numbers = list(TOLERANCE)[turn % 3]
            if family == EAGER and numbers != "fp32":
                numbers = "fp32" if kind == "front" else "fp64, no casts"
            found.append((family, kind, cut, SCHEDULES[turn % 2], numbers))
    return found


def trained(rank: int, world: int, cases: list[tuple[str, ...]], steps: int) -> dict[Any, dict[str, float]]:
    """Differences from one process, of each case, on two stages."""
    return {case: one_case(case, 2, steps) for case in cases}


def trained_unseen(rank: int, world: int, cases: list[tuple[str, ...]]) -> dict[Any, dict[str, float]]:
    """As :func:`trained`, without the looks at the model that would refuse it first."""
    import ds_terapipe.hf.decoder_pipeline as building

    building.check_chain = lambda *_: None
    return {case: one_case(case, 2, 2, verify=False) for case in cases}


def one_case(case: tuple[str, ...], stages: int, steps: int = STEPS, verify: bool = True) -> dict[str, float]:
    """Of one case, on this rank."""
    from contextlib import nullcontext

    from tests.hf import families, pipelines

    family, kind, cut, schedule, numbers = case
    dtype = torch.float32 if numbers == "fp32" else torch.float64
    micro_batches = MICRO_BATCHES * torch.distributed.get_world_size() // stages
    batches = [[families.features(kind, 10 * step + m) for m in range(micro_batches)] for step in range(steps)]
    model = families.model_of(family, dtype)
    with pipelines.no_casts() if numbers == "fp64, no casts" else nullcontext():
        expected = pipelines.train_alone(model, batches)
        got = pipelines.train_in_pipeline(
            model, batches, {"slices": CUTS[cut], "schedule": schedule, "verify": verify}, dtype=dtype, stages=stages
        )
    differences = pipelines.compared(got, expected, model.config)
    if dtype == torch.float64 and not is_last(stages):
        assert differences.pop("losses") <= TOLERANCE["fp32"], "DeepSpeed hands the mean loss round in fp32"
    return differences


def is_last(stages: int) -> bool:
    """Whether this rank's losses are the stage's own, not what DeepSpeed makes of them."""
    world = torch.distributed.get_world_size()
    return torch.distributed.get_rank() == world - 1 and world == stages


def check(results: list[dict[Any, dict[str, float]]]) -> None:
    """Every rank's differences are within tolerance."""
    wrong = [
        (case, rank, differences)
        for rank, of_rank in enumerate(results)
        for case, differences in of_rank.items()
        if not all(value <= TOLERANCE[case[-1]] for value in differences.values())
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("each", [3, pytest.param(6, marks=pytest.mark.full)])
def test_every_family_trains_as_in_one_process(each: int) -> None:
    """Two stages; each family with some kinds of batches."""
    cases = pairwise(each)
    assert {(f, n) for f, *_, n in cases} == set(product(FAMILIES, TOLERANCE)) - {(EAGER, "fp64")}
    assert {kind for _, kind, *_ in cases} == set(KINDS) and {cut for *_, cut, _, _ in cases} == set(CUTS)
    check(run_ranks(trained, 2, cases, STEPS if each > 3 else 2, timeout=240))


FOUR = [
    ("llama", "front", "one-token slices", "1f1b", "fp32"),
    ("gpt2", "plain", "four", "terapipe", "fp32"),
    ("gemma2", "behind", "uneven", "terapipe", "fp32"),
    ("qwen3", "packed", "one-token slices", "1f1b", "fp32"),
]


def four(rank: int, world: int, whole: bool) -> list[dict[Any, dict[str, float]]]:
    """Four stages, then two stages of two replicas; ``whole``: all families on both."""
    every = [case for case in pairwise(3) if case[-1] == "fp32"]
    cases = (every, every) if whole else (FOUR[:2], FOUR[2:])
    return [{case: one_case(case, stages, STEPS) for case in some} for stages, some in zip((4, 2), cases, strict=True)]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_four_stages_and_two_stages_of_two_replicas(whole: bool) -> None:
    for results in zip(*run_ranks(four, 4, whole, timeout=240), strict=True):
        check(list(results))


CHECKPOINTED = {"pipeline": {"use_reentrant": False}}


def padded(rank: int, world: int) -> tuple[int, list[str]]:
    """Of a step of padded batches whose layers are recomputed: how often positions are worked out, and what the host reads."""
    from ds_terapipe import hf
    from ds_terapipe.hf.positions import Rotary
    from tests.hf.families import features, model_of
    from tests.pipeline.host_reads import host_reads
    from tests.pipeline.training import build_engine

    whole, made = Rotary._whole, []
    Rotary._whole = lambda *args: (made.append(args), whole(*args))[1]
    pipeline = hf.pipeline(model_of("llama"), num_stages=2, activation_checkpointing=True)
    engine = build_engine([], None, made=pipeline, token_pipeline={"slices": 4}, config=CHECKPOINTED)
    step = [hf.batch(features("front", number)) for number in range(MICRO_BATCHES)]
    engine.train_batch(iter(step))
    made.clear()
    with host_reads() as reads:
        engine.train_batch(iter(step))
    engine.destroy()
    return len(made), reads


def test_positions_of_a_micro_batch_are_worked_out_once_and_no_host_waits() -> None:
    assert run_ranks(padded, 2) == [(MICRO_BATCHES, [])] * 2


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a user writes it, of whole sequences."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def without_an_optimizer(model: Any, rank: int) -> str:
    """What is said where the second stage has none."""
    import ds_terapipe
    from ds_terapipe import hf
    from tests.hf.families import features

    made = hf.pipeline(copy.deepcopy(model), num_stages=2)
    given = {} if rank else {"optimizer": torch.optim.SGD(made.parameters(), lr=0.1)}
    config = {"train_micro_batch_size_per_gpu": 2, "token_pipeline": {"slices": 2}}
    engine, *_ = ds_terapipe.initialize(model=made, config=config, **given)
    with pytest.raises(ConfigError) as said:
        engine.train_batch(iter([hf.batch(features("plain", 1))]))
    engine.destroy()
    return str(said.value)


def without_the_key(rank: int, world: int) -> dict[str, Any]:
    """DeepSpeed's own engine and ours on the same pipelines; the loss that is a mean over the step."""
    from tests.hf import families, pipelines

    found: dict[str, Any] = {}
    for family, kind in (("llama", "plain"), ("gpt2", "front"), ("gemma2", "packed"), ("gpt_neox", "behind")):
        batches = [[families.features(kind, 10 * step + m) for m in range(MICRO_BATCHES)] for step in range(2)]
        model = families.model_of(family)
        theirs = pipelines.train_in_pipeline(model, batches, None)
        ours = pipelines.train_in_pipeline(model, batches, {"slices": [1, 22, 1]})
        found[family] = pipelines.compared(ours, theirs, model.config)
        found[f"{family} alone"] = pipelines.compared(theirs, pipelines.train_alone(model, batches), model.config)
        if family in ("llama", "gemma2"):  # recomputed layer by layer; a loss of one's own, which sees whole sequences
            again = {"loss": own_loss, "activation_checkpointing": True}
            for name, block in (("ours", {"slices": [1, 22, 1]}), ("theirs", None)):
                got = pipelines.train_in_pipeline(model, batches, block, config=CHECKPOINTED, **again)
                found[f"{family} recomputed, {name}"] = pipelines.compared(got, theirs, model.config)
    shorter = [
        {name: value[:, :17] for name, value in families.features("plain", 5).items()},
        families.features("plain", 6),
    ]
    alone = pipelines.train_alone(model, [shorter, shorter[::-1]])
    for name, block in (("ours", {"slices": 3}), ("theirs", None)):
        got = pipelines.train_in_pipeline(model, [shorter, shorter[::-1]], block)
        found[f"lengths that differ, {name}"] = pipelines.compared(got, alone, model.config)
    found["said"] = without_an_optimizer(model, rank)
    batches = [[families.features(kind, 7 * step) for kind in ("plain", "front")] for step in range(2)]
    for step in batches:
        step[1]["labels"][:, 4:] = -100
    model = families.model_of("llama")
    expected = pipelines.train_alone(model, batches, mean_over_step=True)
    for slices in (1, 4):
        got = pipelines.train_in_pipeline(model, batches, {"slices": slices}, mean_over="step")
        found[f"mean over the step, {slices}"] = pipelines.compared(got, expected, model.config)
    plain = pipelines.train_alone(model, batches)
    found["the means differ"] = {"losses": abs(plain.losses[0] / expected.losses[0] - 1)}
    return found


def test_the_same_script_without_the_key_and_means_over_a_step() -> None:
    """Under DeepSpeed's engine a pipeline has the same losses; ours also knows the labels of a whole step."""
    ranks = run_ranks(without_the_key, 2, timeout=240)
    for rank in ranks:
        assert rank.pop("said").startswith("optimizer: got none on a rank that trains, must be one on every rank")
    assert all(rank.pop("the means differ")["losses"] > 1e-3 for rank in ranks)
    check([{(name, "fp32"): differences for name, differences in rank.items()} for rank in ranks])


# ---------------------------------------------------------------------------------------------------- what mutants must not pass

ODD = [
    ("gpt2", "shifted", "four", "1f1b", "fp32"),
    ("llama, tied, dynamic", "plain", "four", "1f1b", "fp32"),
    ("gemma2", "packed", "four", "terapipe", "fp32"),
]


def off_by(mutant: str | None) -> float:
    """The largest difference of some models with odd features, in tolerances."""
    ranks = run_ranks(trained_unseen, 2, ODD, timeout=200, mutant=mutant)
    return max(
        value / TOLERANCE[case[-1]] for rank in ranks for case, found in rank.items() for value in found.values()
    )


def over_a_step(rank: int, world: int) -> dict[str, float]:
    """Of the loss that is a mean over the step."""
    import ds_terapipe.hf.decoder_pipeline as building
    from tests.hf import families, pipelines

    building.check_chain = lambda *_: None
    batches = [[families.features(kind, 7 * step) for kind in ("plain", "front")] for step in range(2)]
    for step in batches:
        step[1]["labels"][:, 4:] = -100
    model = families.model_of("llama")
    expected = pipelines.train_alone(model, batches, mean_over_step=True)
    got = pipelines.train_in_pipeline(model, batches, {"slices": 4, "verify": False}, mean_over="step")
    return pipelines.compared(got, expected, model.config)


def off_by_over_a_step(mutant: str | None) -> float:
    """As :func:`off_by`."""
    ranks = run_ranks(over_a_step, 2, timeout=120, mutant=mutant)
    return max(value for rank in ranks for value in rank.values()) / TOLERANCE["fp32"]

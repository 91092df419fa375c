"""MixedBatch in DeepSpeed's engines and ours: every step's LR, batch, shapes and samples; resumed runs; refusals."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime import dataloader
from torch import Tensor
from torch.utils.data import DataLoader

from tests.mutants.claims import holds
from tests.optim.phase_runs import (
    LRS,
    MICRO,
    SAMPLES,
    STEPS,
    data_parallel,
    lamb_warmup,
    loaded_back,
    own_iterator,
    plain_resumed,
    reference,
    refusals,
    whole_run,
)
from tests.pipeline.training import worst
from tests.spawn import launched, run_ranks

TOKENS = {"slices": 3, "verify": False}
ENGINES: dict[str, dict[str, Any] | None] = {"DeepSpeed's": None, "ours": TOKENS}


def loading_itself() -> Any:
    """DeepSpeed starts processes that load: none here, a test's process may not have children."""
    return mock.patch.object(dataloader, "DataLoader", lambda *a, **k: DataLoader(*a, **{**k, "num_workers": 0}))


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with loading_itself():
        # Plain engines first: DeepSpeed 0.19.8 keeps a pipeline's groups for every engine that comes later.
        found: dict[str, Any] = {"plain": data_parallel(False), "zero": data_parallel(True)}
        found |= {"resumed": plain_resumed(f"{folder}/plain")}
        found |= {name: whole_run(keys, f"{folder}/{name}") for name, keys in ENGINES.items()}
        found |= {"own_iterator": own_iterator(), "refusals": refusals(), "back": loaded_back(f"{folder}/back")}
        found |= {"lamb": lamb_warmup()}
    return found


ranks = launched(worker, 2, timeout=240, folder=True)


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return reference([list(range(SAMPLES))])


def close(losses: list[float], expected: list[float]) -> bool:
    # sums of fp32 in another order, as in all comparisons of engines with one process
    return losses == pytest.approx(expected, rel=1e-5)


def without_zero_gradients(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if float(tensor.abs().max()) > 0}


def check_steps(steps: list[Any], first_stage: bool, slices: int = 1, start: int = 0) -> None:
    for number, (found, phase, micro, lr) in enumerate(
        zip(steps, STEPS[start:], MICRO[start:], LRS[start:], strict=True)
    ):
        used, batch, pieces, shapes = found
        assert used == pytest.approx(lr, rel=1e-12)
        assert (batch, pieces) == (phase["batch_size"], phase["batch_size"] // micro)
        if first_stage:
            lengths = {-(-phase["seq_length"] // slices), phase["seq_length"] // slices}
            expected = {(micro, length) for length in lengths}
            # before its first step, our engine finds the sequence's dimension with slices of two and three tokens
            assert shapes >= expected if slices > 1 and number == 0 else shapes == expected


@pytest.mark.parametrize("name", ENGINES)
def test_every_step_of_a_pipeline(ranks: list[dict[str, Any]], by_hand: dict[str, Any], name: str) -> None:
    slices = (ENGINES[name] or {"slices": 1})["slices"]
    for rank, found in enumerate(ranks):
        whole = found[name]["whole"]
        check_steps(whole["steps"], rank == 0, slices)
        assert close(whole["losses"], by_hand["losses"])
        assert worst(without_zero_gradients(whole["weights"]), by_hand["weights"]) <= 1e-5
        assert whole["counted"] == (7, 30, 2)
        assert found[name]["last"] == (2, 2, 1)


@pytest.mark.parametrize("name", ENGINES)
def test_every_sample_once_an_epoch(ranks: list[dict[str, Any]], name: str) -> None:
    expected = [phase["seq_length"] for phase in STEPS for _ in range(phase["batch_size"])]
    for found in ranks:
        assert found[name]["asked"] == [(i % SAMPLES, length) for i, length in enumerate(expected)]


@pytest.mark.parametrize("start", [2, 3])
@pytest.mark.parametrize("name", ENGINES)
def test_resumed_bit_for_bit(ranks: list[dict[str, Any]], name: str, start: int) -> None:
    for rank, found in enumerate(ranks):
        whole, resumed = found[name]["whole"], found[name][start]
        assert resumed["losses"] == whole["losses"][start:]
        check_steps(resumed["steps"], rank == 0, (ENGINES[name] or {"slices": 1})["slices"], start)
        assert resumed["counted"] == whole["counted"]
        for key, tensor in whole["weights"].items():
            assert torch.equal(resumed["weights"][key], tensor), key


def test_going_back_to_the_phase_before(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["back"] == ((6, 6), True, True)


def test_an_iterator_of_the_users_own(ranks: list[dict[str, Any]], by_hand: dict[str, Any]) -> None:
    for rank, found in enumerate(ranks):
        own = found["own_iterator"]
        assert "register_dataset(dataset)" in own["unregistered"]
        check_steps(own["registered"]["steps"], rank == 0)
        assert close(own["registered"]["losses"], by_hand["losses"])
        assert "worker processes hold batches of the old length" in own["read ahead"]
        assert own["anew"] == 5


def test_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        told = found["refusals"]
        assert "ConfigError: scheduler.params.phases[1].batch_size: got 6, must be a multiple of" in told["division"]
        assert "data of type OneLength, must have a method set_seq_length(n)" in told["no method"]
        assert told["one length"] == "none"
        assert (
            "[4, 4], which add up to 8 tokens, must add up to scheduler.params.phases[1].seq_length (16)"
            in told["slices"]
        )


@pytest.mark.parametrize("zero", [False, True], ids=["fp32", "bf16 zero1"])
def test_every_step_of_a_plain_engine(ranks: list[dict[str, Any]], zero: bool) -> None:
    for found in ranks:
        plain = found["zero" if zero else "plain"]
        rows = list(zip(LRS, STEPS, MICRO, strict=True))
        if not zero:
            rows.insert(1, rows[1])  # the step that was skipped is tried again with the same LR, in the same phase
        assert len(plain["used"]) == len(rows)
        for (used, batch, pieces, shape), (lr, phase, micro) in zip(plain["used"], rows, strict=True):
            assert used == pytest.approx(lr, rel=1e-12)
            assert (batch, pieces) == (2 * phase["batch_size"], phase["batch_size"] // micro)
            assert shape == (micro, phase["seq_length"])
        assert [count for _, _, count in plain["skipped"]] == [phase["batch_size"] // micro for _, phase, micro in rows]
        phases = [index for _, index, _ in plain["skipped"]]
        assert phases == ([0, 1, 1, 1, 2, 2, 2] if zero else [0, 0, 1, 1, 1, 2, 2, 2])
        assert plain["counted"] == sum(2 * phase["batch_size"] for _, phase, _ in rows)
        if zero:  # ZeRO's own copy
            assert plain["pieces"] == [phase["batch_size"] // micro for _, phase, micro in rows]


def test_a_plain_engine_equals_training_by_hand(ranks: list[dict[str, Any]]) -> None:
    assert all(found["resumed"]["difference"] <= 1e-5 for found in ranks)


def test_a_plain_engine_resumed_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["resumed"]["now"] == (12, 6, pytest.approx(LRS[3], rel=1e-12))
        assert found["resumed"]["losses"] and found["resumed"]["same"]


def test_lamb_warmup_with_a_batch_that_deepspeed_computes(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["lamb"] == pytest.approx([0.1, 0.2, 0.2, 0.1], rel=1e-12)


def middle(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with loading_itself():
        return whole_run(None, str(Path(folder) / "three"), (3,), stages=3)


def test_a_stage_without_data_switches_too(tmp_path: Path, by_hand: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(middle, 3, str(tmp_path), timeout=180)):
        check_steps(found["whole"]["steps"], rank == 0)
        assert close(found["whole"]["losses"], by_hand["losses"])
        assert found[3]["losses"] == found["whole"]["losses"][3:]
        assert (found["asked"] == []) == (rank == 1)


def one_engine(rank: int, world_size: int, name: str, folder: str) -> dict[str, Any]:
    with loading_itself():
        return {name: whole_run(ENGINES[name], folder, (3,))}


def phases_are_run(mutant: str | None, name: str) -> bool:
    """Whether phases, samples and a resumed run are right with this engine under a mutant; for ``tests.mutants``."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(one_engine, 2, name, folder, timeout=240, mutant=mutant)
    expected = reference([list(range(SAMPLES))])
    steps = holds(test_every_step_of_a_pipeline, found, expected, name)
    samples = holds(test_every_sample_once_an_epoch, found, name)
    return holds(test_resumed_bit_for_bit, found, name, 3) and steps and samples

"""MixedBatch in DeepSpeed's engines and ours: every step's LR, batch, shapes and samples; resumed runs."""

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.optim import phase_runs
from tests.optim.phase_runs import LRS, MICRO, ROWS, SAMPLES, SKIPPING, STEPS, reference, whole_run
from tests.pipeline.test_engine_data import loading_here
from tests.pipeline.training import Trace, worst
from tests.spawn import launched

ENGINES: dict[str, dict[str, Any] | None] = {"DeepSpeed's": None, "ours": {"slices": 3, "verify": False}}
Ranks = list[dict[Any, Any]]


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with loading_here():
        # Plain engines first: DeepSpeed 0.19.8 keeps a pipeline's groups for every engine that comes later.
        found: dict[str, Any] = {"zero": phase_runs.plain_run(f"{folder}/zero", zero=True)}
        found |= {name: phase_runs.plain_run(f"{folder}/plain", resumes=name == "again") for name in ("plain", "again")}
        found["ours"] = whole_run(ENGINES["ours"], f"{folder}/ours")
        return found | {"own_iterator": phase_runs.own_iterator()}


def with_a_middle(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with loading_here():
        return {"DeepSpeed's": whole_run(None, folder, stages=3)}


ranks, three = launched(worker, 2, timeout=240, folder=True), launched(with_a_middle, 3, timeout=180, folder=True)


@pytest.fixture
def pipelines(ranks: Ranks, three: Ranks) -> dict[str, Ranks]:
    """By engine; of DeepSpeed's three stages the second has no data."""
    return {"ours": ranks, "DeepSpeed's": three}


@pytest.fixture(scope="module")
def by_hand() -> Trace:
    return reference([list(range(SAMPLES))])


def check_steps(steps: list[Any], first_stage: bool, slices: int = 1, start: int = 0) -> None:
    rows = zip(steps, STEPS[start:], MICRO[start:], LRS[start:], strict=True)
    for number, ((used, batch, pieces, shapes), phase, micro, lr) in enumerate(rows):
        assert used == pytest.approx(lr, rel=1e-12)
        assert (batch, pieces) == (phase["batch_size"], phase["batch_size"] // micro)
        if first_stage:
            expected = {(micro, -(-phase["seq_length"] // slices)), (micro, phase["seq_length"] // slices)}
            # before its first step, our engine finds the sequence's dimension with slices of two and three tokens
            assert shapes >= expected if slices > 1 and number == 0 else shapes == expected


@pytest.mark.parametrize("name", ENGINES)
def test_every_step_of_a_pipeline(pipelines: dict[str, Ranks], by_hand: Trace, name: str) -> None:
    """LR, batch and shapes are the phase's, every sample comes once an epoch, and all equals training by hand."""
    samples = [phase["seq_length"] for phase in STEPS for _ in range(phase["batch_size"])]
    for rank, found in enumerate(pipelines[name]):
        whole, reads = found[name]["whole"], rank in (0, len(pipelines[name]) - 1)
        check_steps(whole["steps"], rank == 0, (ENGINES[name] or {"slices": 1})["slices"])
        assert whole["losses"] == pytest.approx(by_hand.losses, rel=1e-5)
        weights = {key: tensor for key, tensor in whole["weights"].items() if float(tensor.abs().max()) > 0}
        assert worst(weights, by_hand.weights) <= 1e-5
        assert whole["counted"] == (7, 30, 2) and found[name]["last"] == (2, 2, 1)
        assert found[name]["asked"] == [(i % SAMPLES, length) for i, length in enumerate(samples) if reads]


@pytest.mark.parametrize("start", [2, 3])
@pytest.mark.parametrize("name", ENGINES)
def test_resumed_bit_for_bit(pipelines: dict[str, Ranks], name: str, start: int) -> None:
    for rank, found in enumerate(pipelines[name]):
        whole, resumed = found[name]["whole"], found[name][start]
        assert resumed["losses"] == whole["losses"][start:] and resumed["counted"] == whole["counted"]
        check_steps(resumed["steps"], rank == 0, (ENGINES[name] or {"slices": 1})["slices"], start)
        assert all(torch.equal(resumed["weights"][key], tensor) for key, tensor in whole["weights"].items())


def test_an_iterator_of_the_users_own(ranks: Ranks, by_hand: Trace) -> None:
    for rank, found in enumerate(ranks):
        own = found["own_iterator"]
        assert "register_dataset(dataset)" in own["unregistered"]
        check_steps(own["registered"]["steps"], rank == 0)
        assert own["registered"]["losses"] == pytest.approx(by_hand.losses, rel=1e-5)
        assert "worker processes hold batches of the old length" in own["read ahead"]


@pytest.mark.parametrize("zero", [False, True], ids=["fp32", "bf16 zero1"])
def test_every_step_of_a_plain_engine(ranks: Ranks, zero: bool) -> None:
    for found in ranks:
        plain = found["zero" if zero else "plain"]
        rows = ROWS if zero else SKIPPING
        pieces = [phase["batch_size"] // micro for _, phase, micro in rows]
        assert plain["steps"] == [
            (pytest.approx(lr, rel=1e-12), 2 * phase["batch_size"], count, {(micro, phase["seq_length"])})
            for (lr, phase, micro), count in zip(rows, pieces, strict=True)
        ]
        assert plain["counted"][:2] == (len(rows), sum(2 * phase["batch_size"] for _, phase, _ in rows))
        assert len(plain["losses"]) == sum(pieces)
        assert plain["restarted"] == LRS[:1]  # the schedule's, not that of the optimizer's last step


def test_a_plain_engine_equals_training_by_hand_and_resumes_bit_for_bit(ranks: Ranks) -> None:
    orders = [list(DistributedSampler(phase_runs.Texts(SAMPLES), 2, replica)) for replica in range(2)]
    by_hand = reference(orders, scale=2, rows=SKIPPING).weights
    for found in ranks:
        straight, resumed = found["plain"], found["again"]
        assert worst(straight["weights"], by_hand) <= 1e-5
        assert resumed["steps"] == straight["steps"][3:]
        assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
        assert all(torch.equal(tensor, straight["weights"][name]) for name, tensor in resumed["weights"].items())

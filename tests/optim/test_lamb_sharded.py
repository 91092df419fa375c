"""A layer's trust ratio is that of the whole layer, however tensor parallelism, ZeRO and the pipeline cut it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.mutants import applied
from tests.mutants.claims import holds
from tests.optim.sharded import Case, Rank, assembled, full_tensors, names_on, train, unsharded
from tests.spawn import run_ranks

TOLERANCE = 1e-6
"""The parameters are of the size 0.1 and move by 0.005 a step; the sums of norms may round in another order."""

CASES = {
    1: [
        Case("flat over 1", data=1),
        Case("flat over 1, a group at a time", data=1, by_group=True),
        Case("flat over 1, split attention", data=1, splits=True),
    ],
    2: [
        Case("flat over 2", data=2),
        Case("flat over 2, a group at a time", data=2, by_group=True),
        Case("flat over 2, clipped", data=2, clips=True),
        Case("flat over 2, split attention", data=2, splits=True),
        Case("tensor parallel", tensor=2),
        Case("tensor parallel, clipped", tensor=2, clips=True),
        Case("tensor parallel, split attention", tensor=2, splits=True),
        Case("tensor parallel, weight norms held", tensor=2, arguments={"weight_norm_clip": (0.3, 0.9)}),
        Case("two stages, tied", stages=2),
        Case("two stages, tied, clipped", stages=2, clips=True),
        Case("flat over 2, excluded", data=2, arguments={"exclude": "bias_norm"}),
        Case("flat over 2, deepspeed", data=2, arguments={"mode": "deepspeed"}),
        Case("flat over 2, plain", data=2, arguments={"backend": "plain"}),
    ],
    3: [
        Case("flat over 3", data=3, clips=True),
        Case("flat over 3, a group at a time, split attention", data=3, by_group=True, splits=True),
    ],
    4: [
        Case("tensor parallel x flat over 2", data=2, tensor=2, clips=True),
        Case("tensor parallel x flat over 2, a group at a time, split attention", 2, 2, by_group=True, splits=True),
        Case("two stages x flat over 2, tied", data=2, stages=2, clips=True),
        Case("two stages x tensor parallel, tied", tensor=2, stages=2, clips=True),
    ],
}


def test_one_process_is_unsharded() -> None:
    for number, case in enumerate(CASES[1]):
        check(case, [train(0, 1, CASES[1])[number]])


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """What two processes found in all that is asked of two: starting processes takes most of the time."""
    return run_ranks(as_two, 2)


def as_two(rank: int, world: int) -> dict[str, Any]:
    return {"trained": train(rank, world, CASES[2]), "refused": refuse(rank), **no_steps(rank, world)}


def no_steps(rank: int, world: int) -> dict[str, Any]:
    skipping = [Case("flat", data=2), Case("tensor parallel", tensor=2), Case("tied", stages=2)]
    return {"skipped": skip_together(rank, world, skipping), "primed": primes(rank)}


def test_two_ranks_are_unsharded(two_ranks: list[dict[str, Any]]) -> None:
    for number, case in enumerate(CASES[2]):
        check(case, [found["trained"][number] for found in two_ranks])


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_are_unsharded(ranks: int) -> None:
    results = run_ranks(train, ranks, CASES[ranks])
    for number, case in enumerate(CASES[ranks]):
        check(case, [result[number] for result in results])


def check(case: Case, results: Sequence[tuple[dict, dict]]) -> None:
    """The ranks' pieces and ratios are those of one process with whole parameters, and the ratios the same on all."""
    for what, error in errors(case, results).items():
        assert error <= 1, f"{case.name}: {what} is off by {error} tolerances"
    for layer in unsharded(case)[1]:
        found = ratios_of(layer, results)
        assert len(found) == 1, f"{case.name}: the ranks have {found} for {layer}"


def ratios_of(layer: str, results: Sequence[tuple[dict, dict]]) -> set[float]:
    return {ratios[layer] for _, ratios in results if layer in ratios}


def errors(case: Case, results: Sequence[tuple[dict, dict]]) -> dict[str, float]:
    """How far parameters and ratios are from those of one process with whole parameters, in tolerances."""
    expected, ratios = unsharded(case)
    found = {}
    for stage in range(case.stages):
        for name, tensor in assembled(case, [pieces for pieces, _ in results], stage).items():
            found[f"{name} of stage {stage}"] = (tensor - expected[name]).abs().max().item() / TOLERANCE
    for layer, ratio in ratios.items():
        furthest = max(abs(each - ratio) for each in ratios_of(layer, results))
        found[f"the ratio of {layer}"] = furthest / (TOLERANCE * ratio)
    return found


def off_by(mutant: str | None, *names: str) -> float:
    """The largest error in these cases under a mutant, in tolerances; for ``tests.mutants``."""
    everything = {case.name: case for cases in CASES.values() for case in cases}
    cases = [everything[name] for name in names]
    (ranks,) = {case.ranks for case in cases}
    if ranks == 1:
        with applied(mutant):
            results = [train(0, 1, cases)]
    else:
        results = run_ranks(train, ranks, cases, mutant=mutant)
    return max(max(errors(case, [result[number] for result in results]).values()) for number, case in enumerate(cases))


def test_the_cuts_are_inside_layers() -> None:
    """What the tests above are about: a partition ends within a matrix, and elsewhere on another stage."""
    sizes = {name: tensor.numel() for name, tensor in full_tensors(0).items()}
    decayed = [sizes[name] for name in ("embedding", "qkv.weight", "projection.weight")]
    ends = {sum(decayed[:i]) for i in range(4)}
    assert {-(-(sum(decayed) + 2) // ranks) for ranks in (2, 3)}.isdisjoint(ends)
    case = Case("tied", data=2, stages=2)
    assert names_on(case, 0).index("embedding") != names_on(case, 1).index("embedding")


def skip_together(rank: int, world: int, cases: Sequence[Case]) -> list[tuple[bool, int]]:
    """A gradient that is inf on the last rank alone: did anything move, and how many steps were skipped."""
    results = []
    for case in cases:
        mine = Rank(case, rank)
        mine.set_gradients(full_tensors(100))
        mine.step()
        before = {name: values.clone() for name, (_, _, values) in mine.pieces().items()}
        mine.set_gradients(full_tensors(101))
        if rank == world - 1:
            tensor = mine.flats[0] if mine.flats else next(iter(mine.parameters.values()))
            tensor.grad.view(-1)[0] = torch.inf
        mine.step()
        still = all(torch.equal(before[name], values) for name, (_, _, values) in mine.pieces().items())
        results.append((still, mine.optimizer.skipped_steps))
    return results


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["skipped"] == [(True, 1)] * 3


def refuse(rank: int) -> list[str]:
    """What is said where the other parts of a layer are not known."""
    messages = []
    for case in (Case("tensor parallel", tensor=2), Case("tied", stages=2)):
        mine = Rank(case, rank)
        mine.optimizer._groups = type(mine.optimizer._groups)()
        mine.set_gradients(full_tensors(100))
        try:
            mine.step()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")
        dist.barrier()
    return messages


def test_unknown_ranks_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    first, last = (found["refused"] for found in two_ranks)
    assert "marked tensor_model_parallel" in first[0] and first[0] == last[0]
    assert first[1] == "" and "tied weight" in last[1]


def primes(rank: int) -> list[float]:
    """A first step in which one rank's gradients are all zero, and the other's are not: it counts on both."""
    mine = Rank(Case("flat", data=2), rank)
    mine.set_gradients({name: torch.zeros_like(tensor) for name, tensor in full_tensors(100).items()})
    mine.step()
    steps = [values["step"] for values in mine.optimizer.state_dict()["state"].values()]
    if rank == 0:
        for flat in mine.flats:
            flat.grad.fill_(0.1)
    mine.step()
    return steps + [values["step"] for values in mine.optimizer.state_dict()["state"].values()]


def test_a_priming_step_is_one_on_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["primed"] for found in two_ranks] == [[0, 0, 1, 1]] * 2


def no_step_is_made(mutant: str | None) -> bool:
    """Whether the two tests before hold under a mutant; for ``tests.mutants``."""
    found = run_ranks(no_steps, 2, mutant=mutant)
    skips = holds(test_a_bad_gradient_on_one_rank_skips_the_step_on_all, found)
    return holds(test_a_priming_step_is_one_on_all_ranks, found) and skips

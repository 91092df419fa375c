"""A training whose layers freeze and whose pipeline reshapes is the training in one process that freezes the same.

None of the models has a key bias, or another parameter whose true gradient is zero: every tensor is compared.
"""

from __future__ import annotations

import pytest

from tests.elastic.training import MODELS, Case, elastic_runs, off, reference
from tests.spawn import launched

LIMIT, USUAL = 1e-4, 1e-5  # what is promised, of a loss and of a tensor by norm; what rounding leaves of it

CASES = {
    "gpt": Case("gpt", "adamw", 2, ((6, 1), (12, 3), (18, 5)), ((12, 1), (24, 2)), scheduler="lambda"),
    "classifier": Case("classifier", "lamb", 2, ((6, 1), (12, 2), (18, 6)), ((12, 1), (24, 2)), slices=None),
    "tied": Case("tied", "sgd", 2, ((6, 1), (12, 3), (18, 5)), ((12, 1), (24, 2)), scheduler="warmup"),
}
trained = launched(elastic_runs, 2, list(CASES.values()), timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_training_in_one_process(trained, name):
    check(CASES[name], [found[[*CASES].index(name)] for found in trained])


def check(case, ranks):
    """All that must hold of a training."""
    check_numbers(case, ranks)
    check_shapes(case, ranks)
    check_settings(case, ranks)
    check_verified(case, ranks)
    for found in ranks:
        assert found["wrong"] == [] and found["same"] and found["is_elastic"]


def check_numbers(case, ranks):
    """Losses of all steps on all ranks, and weights: every tensor of the model on some rank, every copy."""
    losses, weights = off(case, ranks)
    assert losses <= USUAL <= LIMIT and weights <= USUAL, (losses, weights)
    assert {name for found in ranks for name in found["weights"]} == set(reference(case).weights)


def check_shapes(case, ranks):
    """Every step ran in its shape with its layers frozen, and what had to move did, no more."""
    assert len(case.transitions) >= 3 and case.steps >= 28
    idle = 0
    for found in ranks:
        for step, (frozen, shape, forward_only, units) in enumerate(found["seen"]):
            stages = case.stages_at(step)
            replicas = len(ranks) // stages
            assert frozen == case.frozen(step)
            assert shape == (stages, replicas, case.size, case.batch // replicas // case.size), step
            assert forward_only == (frozen > 0)
            idle += units[0] > 0 and units[1] == 0
        stages, replicas, _, micro_batches = found["seen"][-1][1]
        assert found["grid"] == (stages, replicas, stages, replicas)
        assert found["micro_batches"] == (micro_batches, micro_batches, case.batch)
        moved, freezes = {step for step, *_ in found["moves"]}, {step for step, _ in case.freeze}
        # where more is frozen, layers may be divided anew
        assert moved - freezes <= {step for step, _ in case.resize} <= moved
    last = case.steps - 1
    if case.frozen(last) > len(MODELS[case.model][0]()) - case.stages_at(last):  # however the layers are divided
        assert idle > 0, "no place had only frozen layers"
    for moves in zip(*(found["moves"] for found in ranks), strict=True):
        sent, lacked = (sum(move[n] for move in moves) for n in (1, 2))
        # a copy of a tied layer is overwritten though it is there
        assert sent == lacked or (case.model == "tied" and sent > lacked)
    assert any(sent > 0 for found in ranks for _, sent, _ in found["moves"])


def check_verified(case, ranks):
    """Before the first step all entries were compared whole and sliced, and none again when it had gone elsewhere."""
    entries = [entry for found in ranks for entry in found["verified"]]
    times = 0 if case.slices is None else len(ranks) // case.stages
    assert sorted(entries) == sorted(times * list(range(len(MODELS[case.model][0]()))))


def check_settings(case, ranks):
    """Rates, decay and the position of the schedule, by parameter: of all that is trained, somewhere."""
    wanted = reference(case).settings
    for found in ranks:
        assert found["settings"] == {name: wanted[name] for name in found["settings"]}
        assert found["rate"] == ranks[0]["rate"]
    assert {name for found in ranks for name in found["settings"]} == set(wanted)
    assert (len(set(wanted.values())) > 1) == (case.optimizer == "adamw")

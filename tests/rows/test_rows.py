"""Every row trains as one process does: losses, gradients, weights, through freezes, reshapes and checkpoints.

``-k`` with a row's name, or a part of it, runs it alone.
"""

import os
import tempfile
from typing import Any

import numpy as np
import pytest

from tests.pool import Launch
from tests.rows.reference import references
from tests.rows.row import FACTORS, Layout, Row, few_rows, rows
from tests.rows.train import Found, Trained, train
from tests.spawn import values_of

LIMITS = {"fp64": 1e-10}
FP32 = 1e-5
# times the error of one process in the same 16 bits; products that two ranks add up are rounded twice more
NARROW = {1: 1.2, 2: 1.3}
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # of a loss from such logits


def launch_of(row: Row) -> Launch:
    """The training in one process, and then on the row's ranks."""

    # the stand-in finds the same races, whatever the number of queues
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(row.queues), "CUDA_MODULE_LOADING": "EAGER"}
    env["STAND_IN_RACES"] = str(int(row.queues > 1))

    def run() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            alone = values_of(references, 1, row)
            return [alone[0], values_of(train, row.layout.ranks, row, folder, timeout=200.0, env=env)]

    return Launch(str(row), row.layout.ranks, run)


ROWS = few_rows() if os.environ.get("TESTS_ROWS") == "few" else rows()
LAUNCHES = {row: launch_of(row) for row in ROWS}


def test_rows_have_every_value() -> None:
    for name, values in FACTORS.items():
        assert {getattr(row, name) for row in rows()} == set(values), name
        few = {getattr(row, name) for row in few_rows()}
        assert few == (set(values) if name != "layout" else {Layout(2, 1, 1), Layout(2, 1, 2), Layout(1, 2, 1)}), name


@pytest.mark.parametrize(("row", "launch"), LAUNCHES.items(), ids=map(str, LAUNCHES))
def test_a_row_trains_as_one_process_does(row: Row, launch: Launch) -> None:
    alone, ranks = launch.results()
    problems = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found.wrong]
    compare = narrow_differences if row.is_narrow else differences
    problems += compare(row, ranks[0].trained, alone, 0)
    if row.saved_after is not None:
        problems += compare(row, ranks[0].again, alone, row.saved_after)
        problems += [] if row.resume == "elsewhere" else other_bits(row, ranks)
    if row.cache and row.freeze != "none":
        problems += [] if sum(found.read for found in ranks) else ["nothing is read from the cache"]
    assert not problems, "\n".join([*problems, f"alone: python -m pytest tests/rows -k {row}"])


def differences(row: Row, got: Trained, alone: dict[str, Trained], begin: int) -> list[str]:
    """Losses, tensors of the first gradient and of the weights that are off by more than rounding."""
    limit, wanted, found = LIMITS.get(row.precision, FP32), alone["own"], []
    for step, (a, b) in enumerate(zip(got.losses, wanted.losses[begin:], strict=True), begin):
        found.append((abs(a - b) / abs(b), f"loss of step {step}"))
    assert got.weights.keys() == wanted.weights.keys()
    found += [(_off(row, name, got.weights, wanted.weights), f"weight {name}") for name in wanted.weights]
    if begin == 0:
        found += [(_off(row, name, got.gradients, wanted.gradients), f"gradient {name}") for name in wanted.gradients]
    return [f"{what}: off by {error:.1e}" for error, what in found if not error <= limit]


def _off(row: Row, name: str, some: dict[str, Any], others: dict[str, Any]) -> float:
    a, b = (_without_key_bias(row, name, np.asarray(each[name], dtype=np.float64)) for each in (some, others))
    norm = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / (norm if norm else 1.0)


def _without_key_bias(row: Row, name: str, value: Any) -> Any:
    """A key bias adds the same to all scores of a query: its true gradient is zero, what optimizers make of it is rounding."""
    biased = row.model == "megatron" and name.endswith("linear_qkv.bias")
    return value.reshape(4, 3, -1)[:, [0, 2]] if biased else value  # of each head the query, the key, the value


def narrow_differences(row: Row, got: Trained, alone: dict[str, Trained], begin: int) -> list[str]:
    """Errors against wide numbers that are more than those of one process in the same 16 bits.

    All tensors together: the error of a small one is a matter of luck, and of the processor.
    """
    own, exact = (alone[each]._replace(losses=alone[each].losses[begin:]) for each in ("own", "exact"))
    found = []
    for what in ("losses", "weights") if begin else Trained._fields:
        error, usual = (_together(row, getattr(each, what), getattr(exact, what)) for each in (got, own))
        usual = max(usual, ROUNDING[row.precision[:4]]) if what == "losses" else usual
        if not error <= NARROW[row.layout.tensor] * usual:
            found.append(f"{what}: off by {error:.1e}, one process by {usual:.1e}")
    return found


def _together(row: Row, some: Any, exact: Any) -> float:
    if isinstance(exact, list):
        return float(np.linalg.norm(np.subtract(some, exact)) / np.linalg.norm(exact))
    assert some.keys() == exact.keys()
    a, b = (
        np.concatenate([_without_key_bias(row, n, np.asarray(each[n], dtype=np.float64)).ravel() for n in exact])
        for each in (some, exact)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def other_bits(row: Row, ranks: list[Found]) -> list[str]:
    """Whether a run that goes on from its checkpoint in the same layout has other bits than the run that was not interrupted."""
    whole, again = ranks[0].trained, ranks[0].again
    assert again is not None
    same = whole.losses[row.saved_after :] == again.losses
    same = same and all(np.array_equal(whole.weights[name], again.weights[name]) for name in whole.weights)
    return [] if same else ["resumed, the bits are others"]

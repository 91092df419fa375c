"""The compute order of each schedule, a stage at a time.

``terapipe`` is the order of TeraPipe (Li et al., ICML 2021, arXiv 2102.07988): every unit forward, then every unit
backward, in exact reverse. ``1f1b`` is one-forward-one-backward at the level of slices (Seq1F1B, arXiv 2406.03488): its
activations are bounded by the stages and the slices of one micro-batch, whatever the batch.

Both obey what causal attention demands. A slice reads the keys and values of the slices before it, so slices go forward
in ascending order; its own keys and values get gradients from the slices after it, so they go backward in descending
order.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Op, Unit

NAMES = ("terapipe", "1f1b")


def order(name: str, stages: int, slices: Sequence[int]) -> list[list[Action]]:
    """Computations of one training step in the order in which each stage runs them.

    Args:
        name: ``"terapipe"`` or ``"1f1b"``.
        stages: number of pipeline stages.
        slices: number of slices of each micro-batch; they may differ.

    Returns:
        One list of FORWARD and BACKWARD actions per stage, each unit once forward and once backward.

    Raises:
        ValueError: unknown name, no stage, no micro-batch, or a micro-batch without slices.
    """
    _check(stages, slices)
    _check_name(name)
    forward = _ascending(slices)
    if name == "terapipe":
        backward = forward[::-1]
    else:
        # First in first out over micro-batches, last in first out over the slices of one.
        backward = [Unit(m, i) for m, count in enumerate(slices) for i in reversed(range(count))]
    return [_alternate(stage, forward, backward, _warm_up(name, stage, stages, slices)) for stage in range(stages)]


def forward_only(stages: int, slices: Sequence[int]) -> list[list[Action]]:
    """Computations of one evaluation step: every unit forward, micro-batches and slices ascending.

    Arguments and errors as in `order`, but for the name.
    """
    _check(stages, slices)
    return [[Action(Op.FORWARD, stage, unit) for unit in _ascending(slices)] for stage in range(stages)]


def peak_live_units(name: str, stages: int, slices: Sequence[int]) -> list[int]:
    """Largest number of units per stage that have run forward but not yet backward, so whose activations are held.

    ``terapipe`` holds all units of the step. ``1f1b`` holds at most ``stages - stage + max(slices) - 1``. Arguments and
    errors as in `order`.
    """
    _check(stages, slices)
    _check_name(name)
    total = sum(slices)
    return [min(total, _warm_up(name, stage, stages, slices) + 1) for stage in range(stages)]


def _warm_up(name: str, stage: int, stages: int, slices: Sequence[int]) -> int:
    """Forwards that a stage runs before its first pair of one forward and one backward."""
    total = sum(slices)
    if name == "terapipe":
        return total
    # stages - stage - 1 forwards fill the stages below, as in 1F1B over micro-batches. The other max(slices) - 1 are
    # there because a micro-batch goes backward from its last slice, so all its slices must have gone forward first.
    return min(total, stages - stage - 1 + max(slices) - 1)


def _alternate(stage: int, forward: list[Unit], backward: list[Unit], warm_up: int) -> list[Action]:
    forwards = [Action(Op.FORWARD, stage, unit) for unit in forward]
    backwards = [Action(Op.BACKWARD, stage, unit) for unit in backward]
    pairs = len(forwards) - warm_up
    steady = [action for pair in zip(forwards[warm_up:], backwards[:pairs], strict=True) for action in pair]
    return forwards[:warm_up] + steady + backwards[pairs:]


def _ascending(slices: Sequence[int]) -> list[Unit]:
    return [Unit(m, i) for m, count in enumerate(slices) for i in range(count)]


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"schedule: got {name!r}, must be one of {', '.join(repr(n) for n in NAMES)}")


def _check(stages: int, slices: Sequence[int]) -> None:
    if stages < 1:
        raise ValueError(f"stages: got {stages}, must be at least 1")
    if not slices or min(slices) < 1:
        raise ValueError(f"slices: got {list(slices)}, must list one positive number of slices for each micro-batch")

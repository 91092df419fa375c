"""Steps come to their end where all streams of a device share one queue, as CUDA_DEVICE_MAX_CONNECTIONS=1 has it."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.schedule import NAMES, Placement, ScheduleError, as_placement, forward_only, order, replay, validate
from ds_terapipe.schedule.hardware_queue import COMPUTE, Entry, dispatch, program_of, queue_deadlock
from ds_terapipe.schedule.lower import with_messages, with_weight_gradients
from tests.schedule import strategies
from tests.schedule.strategies import grid_of

SHAPES = [(1, 4), (2, 4), (4, 1), (4, 4)]  # micro-batches, slices of each


def lowered(name: str, placement: Placement, slices: list[int], weights: bool) -> Any:
    grid = with_messages(order(name, placement, slices), placement)
    return with_weight_gradients(grid, placement) if weights and max(slices) > 1 else grid


def ended(programs: Any) -> bool:
    at = dispatch(programs)
    return all(at[rank] == len(program) for rank, program in programs.items())


@settings(deadline=None)
@given(strategies.names, strategies.placements() | strategies.in_turn, strategies.few_or_long, st.booleans())
def test_every_order_comes_to_its_end_on_any_placement(name, placement, slices, weights):
    for grid in (lowered(name, placement, slices, weights), with_messages(forward_only(placement, slices), placement)):
        assert not queue_deadlock(grid) and not queue_deadlock(grid, posted_ahead=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_two_receives_ahead_lock_up(name, stages, shape):
    grid = lowered(name, as_placement(stages), [shape[1]] * shape[0], weights=True)
    assert not queue_deadlock(grid)
    assert queue_deadlock(grid, posted_ahead=2)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_collectives_beside_the_messages_come_to_their_end_and_in_another_order_they_do_not(name, stages):
    grid = lowered(name, as_placement(stages), [2, 3], weights=True)
    programs = {place: program_of(row) for place, row in enumerate(grid)}
    every = product(programs, range(2), range(2))  # two replicas, and two ranks that share the tensors
    ranks = {rank: with_collectives(programs[rank[0]], rank, 2, 2, stages, (0, stages - 1)) for rank in every}
    assert len(ranks) == 4 * stages and ended(ranks)
    own = {entry.joins[0] for entry in ranks[0, 0, 0] if entry.joins and entry.stream == entry.joins[0]}
    assert own == {"labels", "tensor parallel", "tied weights", "gradients", "norm", "loss"}
    for rank in [(0, 0, 0), (stages - 1, 1, 0)]:  # these two sum gradients before tied weights
        program, streams = ranks[rank], [entry.stream for entry in ranks[rank]]
        one, two = map(streams.index, ("tied weights", "gradients"))
        program[one], program[two] = program[two]._replace(after=program[one].after), program[one]
    assert not ended(ranks)


def with_collectives(
    program: Any, rank: Any, tensor_parallel: int, replicas: int, places: int, tied: tuple[int, ...]
) -> list[Entry]:
    """The program of a (place, replica, tensor-parallel index), with what else is collective in a step, on one backend."""
    (place, replica, index), counted = rank, Counter()
    entries, new_index = [], []

    def collective(name: str, members: Any, ranks: int) -> None:
        """A sum on its group's stream, behind the computations so far; those that come wait for it."""
        counted[name] += 1
        if ranks > 1:
            computed = [number for number, entry in enumerate(entries) if entry.stream == COMPUTE][-1:]
            at = entries[-1].action if entries else 0
            entries.append(Entry(name, at, tuple(computed), (name, members, counted[name]), ranks))
            entries.append(Entry(COMPUTE, at, (len(entries) - 1,)))

    collective("labels", (place, index), replicas)
    for entry in program:
        joins = None if entry.joins is None else (entry.joins, replica, index)
        entries.append(entry._replace(after=tuple(new_index[i] for i in entry.after), joins=joins))
        if entry.stream == COMPUTE and not entry.after:
            collective("tensor parallel", (place, replica), tensor_parallel)
        new_index.append(len(entries) - 1)
    if place in tied:
        collective("tied weights", (replica, index), len(tied))
    collective("gradients", (place, index), replicas)
    collective("norm", replica, places * tensor_parallel)
    collective("loss", (replica, index), places)
    return entries


def test_an_order_that_only_more_queues_let_through_is_refused_before_the_first_step():
    units = [f"{m}.0" for m in range(8)]
    grid = grid_of(
        " ".join([f"0F{u} 0SEND_F{u}" for u in units] + [f"0RECV_B{u} 0B{u}" for u in units]),
        " ".join(f"1RECV_F{u} 1F{u} 1B{u} 1SEND_B{u}" for u in units),
    )
    assert not replay(grid, lambda action: 1).stuck
    with pytest.raises(ScheduleError, match=r"stages 0, 1 wait for ever with CUDA_DEVICE_MAX_CONNECTIONS=1") as raised:
        validate(grid, [1] * 8)
    assert str(raised.value).count("holds what was issued after it") == 2

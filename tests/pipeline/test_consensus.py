"""Ranks of a job agree, whatever another job of the same launch does meanwhile."""

import time
from typing import Any

from ds_terapipe.job import Job, error_of
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.process_groups import close_groups
from tests.spawn import launched


def two_jobs(rank: int, world_size: int) -> list[Any]:
    """Agree within each half of the launch at the same time, in rounds of its own; return the results of this half."""
    job = Job([0, 1] if rank < 2 else [2, 3])
    watchdog = Watchdog(None, 60.0, job=job)
    watchdog._publish()
    consensus = Consensus(watchdog)
    rounds = [consensus.decide(lambda: rank) for _ in range(3 + rank // 2 * 20)]
    error = error_of(lambda: consensus.agree(KeyError("x") if rank == 3 else None))
    others, until = list[int](), time.monotonic() + 30.0
    while not others and time.monotonic() < until:  # a position is written without waiting, and read before its rank closes
        others = sorted(watchdog._positions.of_others() or {})
    told = [job.together(lambda: rank), consensus.gather(rank), str(error)]
    watchdog.close()
    close_groups([consensus.group, job.group])
    return [{*rounds}, *told, others]


ranks = launched(two_jobs, 4)


def test_two_jobs_of_one_launch_agree_at_the_same_time(ranks):
    """None knows of the other: decisions, numbers, errors and positions are those of its own ranks."""
    for rank, found in enumerate(ranks):
        first, other = rank // 2 * 2, rank ^ 1
        error = ("None", "None", "rank 3 failed: KeyError: 'x'", "'x'")[rank]
        assert found == [{first}, rank, [first, first + 1], error, [other]]

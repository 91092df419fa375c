"""Training that reads what frozen layers put out: which samples are read, by whom, and what stays for a run that goes on."""

from __future__ import annotations

import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.nn import functional

from ds_terapipe.elastic.cache import outputs as outputs_of_cache
from tests.elastic.samples import Texts
from tests.elastic.training import Case, data_of, engine_of, reference_on, writing
from tests.pipeline.models import FrozenBlock
from tests.pipeline.training import difference
from tests.spawn import launched, mark, run_to_exit

PERIOD = 2  # steps after which the samples come again
EXACT, BF16 = {"enabled": True}, {"enabled": True, "dtype": "bf16"}
CASES = {
    "two freezes": (Case("texts", "adamw", 2, ((2, 2), (6, 4)), ((4, 1),), steps=10), EXACT),
    "by hand": (Case("writing", "adamw", 2, (), (), slices=None, steps=5), EXACT),
    "bf16 entries": (Case("texts", "sgd", 2, ((1, 2),), (), steps=12), BF16),
}
RESUMED = Case("texts", "adamw", 2, ((2, 2),), ((5, 1),), steps=12)
OVER = threading.Event()  # of this process: its step


class DroppingBlock(FrozenBlock):
    """That its user has frozen, and in which training would drop half."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(hidden), 0.5, self.training)


def write_when_the_step_is_over(write: Any) -> Any:
    """The order in which a thread's work comes last."""

    def late(*args: Any) -> None:
        assert OVER.wait(60)
        write(*args)

    return late


def steps_of(case: Case) -> list[list[Any]]:
    """Its batches, of which the first few come again and again."""
    return [data_of(case)[number % PERIOD] for number in range(case.steps)]


def written(engine: Any) -> None:
    """Wait for the outputs of a step; one as short as these would be over before."""
    if engine._shelf is not None and engine._shelf.cache is not None:
        for job in engine._shelf.cache._writing:
            job.result()


def training(name: str) -> Any:
    """Losses, after each step the counts of this rank, and weights."""
    case, cache = CASES[name]
    specs = [writing()[0], LayerSpec(DroppingBlock), *writing()[2:]] if name == "by hand" else None
    engine = engine_of(case, config={"elastic_pipeline": case.elastic(cache=cache)}, specs=specs)
    losses, counts = [], []
    for step in steps_of(case):
        OVER.clear()
        losses.append(float(engine.train_batch(iter(step))))
        OVER.set()
        written(engine)
        torch.distributed.barrier()
        counts.append(replace(engine.cache_counts))
    weights = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, counts, weights


def resumed(folder: str) -> Any:
    """A run that shuffles and is stopped, and one that goes on from its checkpoint with what it had kept."""
    config = {"elastic_pipeline": RESUMED.elastic(cache=EXACT, data={"shuffle": True, "seed": 3})}
    engine = engine_of(RESUMED, training_data=Texts(24), config=config)
    for _ in range(8):
        engine.train_batch()
    before = engine.evaluate(Texts(5))
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch()) for _ in range(3)]
    written(engine)
    engine._shelf.keep, run = True, engine._shelf.run
    torch.distributed.barrier()
    engine.destroy()
    engine = engine_of(RESUMED, training_data=Texts(24), config=config)
    engine.load_checkpoint(folder)
    evaluated, again = (before, engine.evaluate(Texts(5))), [float(engine.train_batch()) for _ in range(3)]
    counts, same = replace(engine.cache_counts), engine._shelf.run == run
    torch.distributed.barrier()
    engine.destroy()
    return losses, again, evaluated, counts, same, run


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    # these layers take less than a file: whether reading pays is another test's
    outputs_of_cache.OutputCache._compare = lambda self: None
    found = {"resumed": resumed(folder)}
    outputs_of_cache.OutputCache._write = write_when_the_step_is_over(outputs_of_cache.OutputCache._write)
    return {**found, **{name: training(name) for name in CASES}}


ranks = launched(worker, 2, timeout=240, folder=True)


@pytest.mark.parametrize("name", CASES)
def test_training_with_the_cache_is_the_training_that_computes(ranks: Any, name: str) -> None:
    case, cache = CASES[name]
    exact = reference_on(case, steps_of(case))
    for losses, _, weights in (rank[name] for rank in ranks):
        assert losses == pytest.approx(exact.losses, rel=1e-5 if cache == EXACT else 1e-2)
        if cache == EXACT:
            assert max(difference(tensor, exact.weights[key]) for key, tensor in weights.items()) <= 1e-4
        else:
            assert losses != pytest.approx(exact.losses, rel=1e-7)  # rounded it was


@pytest.mark.parametrize("name", CASES)
def test_samples_are_read_from_the_second_time_on(ranks: Any, name: str) -> None:
    case, counts = CASES[name][0], [rank[name][1] for rank in ranks]
    begin = min((step for step, _ in case.freeze), default=0)
    last, following = ([of_rank[begin + PERIOD - n] for of_rank in counts] for n in (1, 0))
    assert all(each.read == 0 for of_rank in counts for each in of_rank[: begin + PERIOD])
    assert sum(each.computed for each in last) == sum(each.kept for each in last) == PERIOD * case.batch
    # each rank that reads computes its first micro-batch, too, to see whether what it reads is right
    assert sum(each.read for each in following) + 2 * case.size >= case.batch
    assert sum(each.kept for each in following) == PERIOD * case.batch


def test_who_gets_frozen_layers_reads_what_others_have_written_and_a_deeper_freeze_goes_on_from_it(ranks: Any) -> None:
    case, counts = CASES["two freezes"][0], [rank["two freezes"][1] for rank in ranks]
    assert counts[1][3].read == 0 < counts[1][5].read  # rank 1 has had no frozen layer before step 4
    deeper = [of_rank[6 + PERIOD - 1] for of_rank in counts]
    assert sum(each.continued for each in deeper) == PERIOD * case.batch
    assert sum(each.computed for each in deeper) == 0 and all(each.kept == each.continued for each in deeper)
    assert all(of_rank[-1].read > 0 for of_rank in counts)


def test_a_run_that_goes_on_reads_what_the_last_one_kept(ranks: Any) -> None:
    for losses, again, (before, behind), counts, same, run in (rank["resumed"] for rank in ranks):
        assert same and losses == pytest.approx(again, rel=1e-6) and behind == pytest.approx(before, rel=1e-6)
        assert counts.read > 0 and counts.kept == 0 and counts.computed == RESUMED.size  # the first, to check it
        assert not any(path.name == run for root in Path("/dev/shm").glob("ds_terapipe-*") for path in root.iterdir())


def ends(rank: int, world_size: int) -> None:
    """As train.py says what is wrong, in a line."""
    engine = engine_of(RESUMED, config={"elastic_pipeline": RESUMED.elastic(cache=EXACT)})
    for step in steps_of(RESUMED)[:4]:
        engine.train_batch(iter(step))
    mark(f"run-{engine._shelf.run}")
    try:
        engine.train_batch(iter([]))
    except StopIteration:
        raise SystemExit("no data") from None


def test_entries_stay_for_a_run_that_goes_on_after_any_error() -> None:
    exits = run_to_exit(ends, 2)
    assert all(end.code for end in exits), [end.output for end in exits]
    (run,) = {name for end in exits for name in re.findall(r"MARK run-(\w+)", end.output)}
    left = [path for root in Path("/dev/shm").glob("ds_terapipe-*") for path in root.iterdir() if path.name == run]
    for path in left:
        shutil.rmtree(path)
    assert left, [end.output for end in exits]

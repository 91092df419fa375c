"""Training that reads what frozen layers put out is training that computes it: losses, weights, reshapes, resumed runs."""

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
from tests.elastic.samples import Texts, micro_batch_of
from tests.elastic.training import Case, data_of, engine_of, reference_on, writing
from tests.pipeline.models import FrozenBlock
from tests.pipeline.training import difference
from tests.spawn import launched, mark, run_ranks, run_to_exit

PERIOD = 3  # steps after which the samples come again
EXACT, BF16 = {"enabled": True}, {"enabled": True, "dtype": "bf16"}
CASES = {
    "slices, two freezes": (Case("texts", "adamw", 2, ((3, 2), (9, 4)), ((6, 1),), steps=15), EXACT),
    "tied, LAMB": (Case("tied texts", "lamb", 2, ((3, 2),), (), slices=None, steps=9), EXACT),
    "images": (Case("classifier", "sgd", 2, ((3, 2),), ((5, 1),), slices=None, steps=10), EXACT),
    "checkpointed": (Case("texts", "adamw", 2, ((3, 1), (7, 3)), ((7, 1),), slices=None, steps=12), EXACT),
    "by hand": (Case("writing", "adamw", 2, (), (), slices=None, steps=8), EXACT),
    "bf16 entries": (Case("texts", "sgd", 2, ((3, 2),), ((6, 1),), steps=100), BF16),
}
LOSS, LOSS_BF16, WEIGHTS = 1e-5, 1e-2, 1e-4


class DroppingBlock(FrozenBlock):
    """That its user has frozen, and in which training would drop half."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(hidden), 0.5, self.training)


def by_hand() -> list[Any]:
    """The case's model with dropout in a frozen layer, which runs in eval mode where its outputs are kept."""
    specs = writing()
    return [specs[0], LayerSpec(DroppingBlock), *specs[2:]]


over = threading.Event()  # of this process: its step


def write_when_the_step_is_over(write: Any) -> Any:
    """The order in which a thread's work comes last."""

    def late(*args: Any) -> None:
        assert over.wait(60)
        write(*args)

    return late


def steps_of(case: Case) -> list[list[Any]]:
    """Its batches, of which the first few come again and again."""
    return [data_of(case)[number % PERIOD] for number in range(case.steps)]


def train(engine: Any, case: Case, steps: list[list[Any]]) -> tuple[list[float], list[Any]]:
    """Losses, and after each step what became of the samples of this rank."""
    losses, counts = [], []
    replicas = torch.distributed.get_world_size() // case.stages
    share = case.batch // case.size // replicas
    mine = slice(engine.grid.data_parallel_id * share, None) if replicas > 1 else slice(None)
    for step in steps:
        over.clear()
        losses.append(float(engine.train_batch(iter(step[mine][:share]))))
        over.set()
        shelf = engine._shelf
        if shelf is not None and shelf.cache is not None:
            for job in shelf.cache._writing:
                job.result()  # a step as short as these would be over before its outputs are written
        torch.distributed.barrier()
        counts.append(replace(engine.cache_counts))
    return losses, counts


def trainings(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    # these layers take less than a file: whether reading pays is another test's
    outputs_of_cache.OutputCache._compare = lambda self: None
    outputs_of_cache.OutputCache._write = write_when_the_step_is_over(outputs_of_cache.OutputCache._write)
    found = {}
    for name in names:
        case, cache = CASES[name]
        more = {"specs": by_hand()} if name == "by hand" else {}
        config = {"elastic_pipeline": case.elastic(cache=cache)}
        if name == "checkpointed":
            config["pipeline"] = {"activation_checkpoint_interval": 2, "use_reentrant": False}
        engine = engine_of(case, config=config, **more)
        losses, counts = train(engine, case, steps_of(case))
        weights = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
        found[name] = losses, counts, weights
        engine.destroy()
    return found


ranks = launched(trainings, 2, list(CASES), timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_training_that_computes(ranks, name):
    case, cache = CASES[name]
    exact = reference_on(case, steps_of(case))
    limit = LOSS if cache == EXACT else LOSS_BF16
    for of_rank in ranks:
        losses, _, weights = of_rank[name]
        assert losses == pytest.approx(exact.losses, rel=limit)
        if cache == EXACT:
            assert max(difference(tensor, exact.weights[key]) for key, tensor in weights.items()) <= WEIGHTS
    if cache == BF16:
        assert ranks[0][name][0] != pytest.approx(exact.losses, rel=1e-7)  # rounded it was


@pytest.mark.parametrize("name", CASES)
def test_samples_are_read_from_the_second_time_on(ranks, name):
    case, _ = CASES[name]
    counts = [of_rank[name][1] for of_rank in ranks]
    begin = min((step for step, _ in case.freeze), default=0)
    last, next_ = begin + PERIOD - 1, begin + PERIOD
    assert all(each.read == 0 for of_rank in counts for each in of_rank[:next_])
    assert sum(of_rank[last].computed for of_rank in counts) == PERIOD * case.batch
    assert sum(of_rank[last].kept for of_rank in counts) == PERIOD * case.batch
    # each rank that reads computes its first micro-batch, too, to see whether what it reads is right
    assert sum(of_rank[next_].read for of_rank in counts) + 2 * case.size >= case.batch
    assert sum(of_rank[next_].kept for of_rank in counts) == PERIOD * case.batch
    for step, _ in case.resize:
        if step >= next_ and step not in dict(case.freeze):
            # this rank has had no frozen layer before, and reads what the other one has written
            assert ranks[1][name][1][step - 1].read == 0 < ranks[1][name][1][step + 1].read


def test_a_deeper_freeze_goes_on_from_what_was_kept(ranks):
    case, _ = CASES["slices, two freezes"]
    deeper = [of_rank["slices, two freezes"][1][9 + PERIOD - 1] for of_rank in ranks]
    assert sum(each.continued for each in deeper) == PERIOD * case.batch
    assert sum(each.computed for each in deeper) == 0 and all(each.kept == each.continued for each in deeper)
    assert all(of_rank["slices, two freezes"][1][-1].read > 0 for of_rank in ranks)


# --------------------------------------------------------------------------------------------- checkpoints, evaluation, data

RESUMED = Case("texts", "adamw", 2, ((2, 2),), ((5, 1),), steps=12)


def resumed(rank: int, world_size: int, folder: str) -> Any:
    """A run that is stopped, and one that goes on from its checkpoint with what it had kept."""
    outputs_of_cache.OutputCache._compare = lambda self: None
    config = {"elastic_pipeline": RESUMED.elastic(cache=EXACT, data={"shuffle": True, "seed": 3})}
    engine = engine_of(RESUMED, training_data=Texts(24), config=config)
    for _ in range(8):
        engine.train_batch()
    before = engine.evaluate(Texts(5))
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch()) for _ in range(3)]
    for job in engine._shelf.cache._writing:
        job.result()
    engine._shelf.keep = True
    run = engine._shelf.run
    torch.distributed.barrier()
    engine.destroy()
    engine = engine_of(RESUMED, training_data=Texts(24), config=config)
    engine.load_checkpoint(folder)
    assert engine.evaluate(Texts(5)) == pytest.approx(before, rel=1e-6)
    again = [float(engine.train_batch()) for _ in range(3)]
    counts = replace(engine.cache_counts)
    same = engine._shelf.run == run
    torch.distributed.barrier()
    engine.destroy()
    return losses, again, counts, same, run


def test_a_run_that_goes_on_reads_what_the_last_one_kept(tmp_path):
    for losses, again, counts, same, run in run_ranks(resumed, 2, str(tmp_path), timeout=200):
        assert same and losses == pytest.approx(again, rel=1e-6)
        assert counts.read > 0 and counts.kept == 0 and counts.computed == RESUMED.size  # the first, to check it
        assert not any(path.name == run for root in Path("/dev/shm").glob("ds_terapipe-*") for path in root.iterdir())


def ends(rank: int, world_size: int, how: str) -> None:
    engine = engine_of(RESUMED, config={"elastic_pipeline": RESUMED.elastic(cache=EXACT)})
    steps = steps_of(RESUMED)
    for step in steps[:4]:
        engine.train_batch(iter(step))
    mark(f"run-{engine._shelf.run}")
    if how == "of no data":  # as train.py says what is wrong, in a line
        try:
            engine.train_batch(iter([]))
        except StopIteration:
            raise SystemExit("no data") from None
    if how == "interrupted":
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "stays"),
    [("of no data", True), ("well", False), pytest.param("interrupted", True, marks=pytest.mark.full)],
)
def test_entries_stay_for_a_run_that_goes_on_after_any_error(how: str, stays: bool) -> None:
    exits = run_to_exit(ends, 2, how)
    assert all((end.code == 0) == (not stays) for end in exits), [end.output for end in exits]
    (run,) = {name for end in exits for name in re.findall(r"MARK run-(\w+)", end.output)}
    left = [path for root in Path("/dev/shm").glob("ds_terapipe-*") for path in root.iterdir() if path.name == run]
    for path in left:
        shutil.rmtree(path)
    assert bool(left) == stays, [end.output for end in exits]


def test_a_loader_that_shuffles(tmp_path):
    """Each sample once for each epoch, in other micro-batches every time."""
    case = Case("texts", "adamw", 2, ((3, 2),), (), steps=12)
    for losses, counts in run_ranks(shuffled, 2, timeout=100):
        assert losses == pytest.approx(shuffled_reference(case), rel=LOSS)
        assert counts[-1] is None or counts[-1][0] > 30


def shuffled_order() -> list[list[int]]:
    from ds_terapipe.elastic.sampler import SampleOrder

    order = SampleOrder(24, True, 5)
    return [order.between(step * 8, step * 8 + 8) for step in range(12)]


def shuffled_reference(case: Case) -> list[float]:
    data = Texts(24)
    steps = [[micro_batch_of(data, step[n : n + 2]) for n in range(0, 8, 2)] for step in shuffled_order()]
    return reference_on(case, steps).losses


def shuffled(rank: int, world_size: int) -> Any:
    outputs_of_cache.OutputCache._compare = lambda self: None
    case = Case("texts", "adamw", 2, ((3, 2),), (), steps=12)
    config = {"elastic_pipeline": case.elastic(cache=EXACT, data={"shuffle": True, "seed": 5})}
    engine = engine_of(case, training_data=Texts(24), config=config)
    losses, counts = [], []
    for _ in range(case.steps):
        losses.append(float(engine.train_batch()))
        counts.append((engine.cache_counts.read, engine.cache_counts.computed) if rank == 0 else None)
    engine.destroy()
    return losses, counts

"""Training that reads what frozen layers put out: which samples, by whom, what stays for a run that goes on; and the files."""

import errno
import os
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.nn import functional

from ds_terapipe.elastic.cache import outputs as outputs_of_cache, store
from ds_terapipe.elastic.cache.session import CacheSession
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.settings import CacheSettings
from tests.elastic.samples import Texts
from tests.elastic.training import MODELS, Case, data_of, engine_of, reference_on, weights
from tests.pipeline.models import FrozenBlock
from tests.pipeline.training import difference
from tests.spawn import launched, mark, run_to_exit

PERIOD = 2  # steps after which the samples come again
EXACT, BF16 = {"enabled": True}, {"enabled": True, "dtype": "bf16"}
CASES = {
    "two freezes": (Case("texts", "adamw", 2, ((2, 2), (6, 4)), ((4, 1),), steps=10), EXACT),
    "by hand": (Case("writing", "adamw", 2, (), (), slices=None, steps=5), EXACT),
    "by hand on two stages": (Case("mostly frozen", "adamw", 2, (), (), slices="auto", steps=5), EXACT),
    "bf16 entries": (Case("texts", "sgd", 2, ((1, 2),), (), steps=6), BF16),
}
SLOW = {"slow": (Case("texts", "adamw", 2, ((1, 3), (5, 4)), ((9, 1),), steps=7), EXACT)}  # only the first stage knows it
RESUMED = Case("texts", "adamw", 2, ((2, 2),), ((5, 1),), steps=12)
OVER = threading.Event()  # of this process: its step


class DroppingBlock(FrozenBlock):
    """A block that its user has frozen, with dropout of one half in training; counts samples."""

    rows = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows += len(hidden)
        return functional.dropout(super().forward(hidden), 0.5, self.training)


def write_when_the_step_is_over(write: Any) -> Any:
    """The order in which a thread's work comes last."""

    def late(*args: Any) -> None:
        assert OVER.wait(60)
        write(*args)

    return late


def steps_of(case: Case) -> list[list[Any]]:
    return [data_of(case)[number % PERIOD] for number in range(case.steps)]


def written(engine: Any) -> None:
    """Wait for the outputs of a step; one as short as these would be over before."""
    session = engine._controller.caching
    if session.cache is not None:
        for job in session.cache._writing:
            job.result()


def training(case: Case, cache: dict[str, Any]) -> Any:
    """Losses, after each step the counts of this rank, and weights."""
    specs = [LayerSpec(DroppingBlock) if each.typename is FrozenBlock else each for each in MODELS[case.model][0]()]
    engine = engine_of(case, config={"elastic_pipeline": case.elastic(cache=cache)}, specs=specs)
    losses, counts = [], []
    for step in steps_of(case):
        OVER.clear()
        losses.append(float(engine.train_batch(iter(step))))
        OVER.set()
        written(engine)
        torch.distributed.barrier()
        counts.append(replace(engine.cache_counts))
    found = losses, counts, weights(engine)
    rows = sum(each.rows for each in engine.module.modules() if isinstance(each, DroppingBlock))
    assert case.slices or rows in (0, counts[-1].computed), "a pass for a comparison does not count"
    engine.destroy()
    return found


def on_disk(folder: str) -> dict[str, Any]:
    """Entries in a folder of the test's own: in memory, a launch beside it removes those of runs that have ended."""
    return {**EXACT, "memory_gb": 1e-9, "disk_path": folder}


def resumed(folder: str) -> Any:
    """A run that shuffles and is stopped, and one that goes on from its checkpoint with what it had kept."""
    config = {"elastic_pipeline": RESUMED.elastic(cache=on_disk(folder), data={"shuffle": True, "seed": 3})}
    engine = engine_of(RESUMED, training_data=Texts(24), config=config)
    for _ in range(8):
        engine.train_batch()
    before = engine.evaluate(Texts(5))
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch()) for _ in range(3)]
    written(engine)
    session = engine._controller.caching
    session._has_failed, run = lambda: True, session.run
    torch.distributed.barrier()
    engine.destroy()
    engine = engine_of(RESUMED, training_data=Texts(24), config=config)
    engine.load_checkpoint(folder)
    evaluated, again = (before, engine.evaluate(Texts(5))), [float(engine.train_batch()) for _ in range(3)]
    counts, same = replace(engine.cache_counts), engine._controller.caching.run == run
    torch.distributed.barrier()
    engine.destroy()
    return losses, again, evaluated, counts, same, run


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    outputs_of_cache.OutputCache._compare = lambda self: self._give_up("computing is faster")
    found = {"slow": training(*SLOW["slow"])}
    # these layers take less than a file: whether reading pays is another test's
    outputs_of_cache.OutputCache._compare = lambda self: None
    found["resumed"] = resumed(folder)
    outputs_of_cache.OutputCache._write = write_when_the_step_is_over(outputs_of_cache.OutputCache._write)
    return {**found, **{name: training(*given) for name, given in CASES.items()}}


ranks = launched(worker, 2, timeout=240, folder=True)


@pytest.mark.parametrize("name", SLOW | CASES)
def test_training_with_the_cache_is_the_training_that_computes(ranks: Any, name: str) -> None:
    case, cache = (SLOW | CASES)[name]
    exact = reference_on(case, steps_of(case))
    for losses, _, found in (rank[name] for rank in ranks):
        assert losses == pytest.approx(exact.losses, rel=1e-5 if cache == EXACT else 1e-2)
        if cache == EXACT:
            assert max(difference(tensor, exact.weights[key]) for key, tensor in found.items()) <= 1e-4
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


def ends(rank: int, world_size: int, folder: str) -> None:
    engine = engine_of(RESUMED, config={"elastic_pipeline": RESUMED.elastic(cache=on_disk(folder))})
    for step in steps_of(RESUMED)[:4]:
        engine.train_batch(iter(step))
    written(engine)
    mark(f"run-{engine._controller.caching.run}")
    try:
        engine.train_batch(iter([]))
    except StopIteration:
        raise SystemExit("no data") from None


def test_entries_stay_for_a_run_that_goes_on_after_any_error(tmp_path: Path) -> None:
    exits = run_to_exit(ends, 2, str(tmp_path))
    assert all(end.code for end in exits), [end.output for end in exits]
    (run,) = {name for end in exits for name in re.findall(r"MARK run-(\w+)", end.output)}
    left = [path for path in tmp_path.glob(f"ds_terapipe-*/{run}/**/*") if path.name not in ("lock", "used")]
    assert any(path.is_file() for path in left), [end.output for end in exits]


def test_the_cache_is_told_of_frozen_weights_and_attributes_that_a_script_changes_and_of_functions_that_are_added() -> None:
    session, layer, levels = CacheSession(CacheSettings(enabled=True)), torch.nn.Linear(2, 2), []
    layers = [layer]
    session.cache = Mock(is_out=lambda count: False, begin=lambda level, earlier: levels.append(level))
    for change, told in ((str, 1), (str, 1), (lambda: setattr(layer.weight, "data", layer.weight + 1), 2), (layer.zero_grad, 2),
                         (lambda: layer.bias.detach().add_(1), 3), (lambda: setattr(layer, "scale", 2.0), 4),
                         (lambda: layers.append(torch.tanh), 5)):  # fmt: skip
        change()
        session.note(layers)
        session.begin(layers, {})
        layer.calls = len(levels)  # by its own forward
        session.end(layers)
        assert len(levels) == len({*levels}) == told


PARTS = [b"head", bytes(range(256)) * 8]
WHOLE = b"".join(PARTS)


def test_a_damaged_entry_is_none(tmp_path: Path) -> None:
    """A flipped bit anywhere, header too, or an entry that is cut off anywhere."""
    one, rng = Tier(tmp_path, "one", None), random.Random(0)
    for number in range(100):
        name = f"a/{number}"
        assert one.write(name, [*PARTS, bytes([number])])
        path = tmp_path / "one" / name
        data = bytearray(path.read_bytes())
        where = rng.randrange(len(data) * 8) if number >= 40 else number * 8
        if number % 3:
            data[where // 8] ^= 1 << where % 8
        else:
            del data[where // 8 :]
        path.write_bytes(data)
        assert one.read(name) is None, (number, where)
        assert one.write(name, PARTS) and bytes(one.read(name)) == WHOLE


def test_the_limit_is_of_all_processes_and_of_a_run_alone_and_no_space_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    one, other = Tier(tmp_path, "one", 5000), Tier(tmp_path, "one", 5000)
    assert one.write("a", PARTS) and other.write("b", PARTS)
    assert not one.write("c", PARTS) and one.full and not other.write("c", PARTS)
    assert one.write("a", PARTS)  # in the place of what it had
    other.remove("a")
    assert one.write("c", PARTS) and not one.full
    another = Tier(tmp_path, "other", 3000)
    assert another.write("a", [b"its own"]) and not another.write("b", PARTS * 2)
    assert another.write("empty", []) and another.read("empty") == b""
    another.close(keep=True)
    another = Tier(tmp_path, "other", 1)  # what goes on with less room has that of its entries
    assert another.write("a", [b"in turn"]) and another.read("a") == b"in turn" and not another.write("b", [b"3"])
    another.close(keep=False)
    assert not (tmp_path / "other").exists() and bytes(one.read("c")) == WHOLE
    before = one.used_bytes
    monkeypatch.setattr(store.os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert not one.write("d", [b"1"]) and one.full and not one.write("c", [b"other"])
    assert one.used_bytes == before and bytes(one.read("c")) == WHOLE
    assert sorted(os.listdir(tmp_path / "one")) == ["b", "c", "lock", "used"]


CHILD = """
import sys, time
from pathlib import Path
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.settings import CacheSettings
number, root = int(sys.argv[2]), Path(sys.argv[1])
tier = Tier(root, "child", 200_000)
for n in range(300):
    tier.write(f"{n % 7}/{n}", [bytes([number]) * 900])
found = [tier.read(f"{n % 7}/{n}") for n in range(300)]
print(all(len(set(bytes(each))) == 1 for each in found if each is not None), flush=True)
time.sleep(60)
"""


def test_processes_write_at_once_and_a_dead_run_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    children = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(2)]
    try:  # never half of one and half of the other
        assert [child.stdout.readline() for child in children if child.stdout is not None] == ["True\n"] * 2
        Tier(tmp_path, "one", None)
        entries = (path for path in (tmp_path / "child").rglob("*") if path.name not in ("lock", "used"))
        assert 100_000 < sum(path.stat().st_size for path in entries if path.is_file()) <= 200_000
    finally:
        for child in children:
            child.kill()
            child.wait()
    Tier(tmp_path, "two", None)
    assert not (tmp_path / "child").exists() and (tmp_path / "one").is_dir()

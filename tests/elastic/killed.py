"""A training with transitions and saves that is killed and started again with the same command, and what must come of it.

:func:`train` is the user's script; :func:`run_whole` runs it undisturbed, :func:`run_killed` kills a rank of it, again and again.
"""

import json
import os
import random
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_terapipe.elastic.cache.outputs import OutputCache
from tests.elastic.samples import Texts
from tests.elastic.training import Case, engine_of, weights
from tests.pipeline.models import SEED
from tests.pipeline.operations import operations
from tests.spawn import Exit, run_to_exit

PROCESSES, SAMPLES, STEPS, EVERY = 2, 20, 16, 2
CASE = Case("dropping texts", "adamw", 2, freeze=((3, 1), (9, 3)), resize=((4, 1), (8, 2), (12, 1)), scheduler="lambda")
ENDS_WITHIN_S = 200.0
OPERATIONS = (16, 3)  # of files in a save, about, on each rank


def tag_at(step: int) -> str:
    """Names of their own and, twice in a row, one that is overwritten, while ``latest`` says that name or another."""
    return f"epoch/{step}" if step % (3 * EVERY) == 0 else "last"


class Kill(NamedTuple):
    """The death of rank ``victim`` behind a ``share`` of the steps that are left of the run.

    It comes ``delay_s`` after such a step; or in the next save, before the ``operation``-th file operation or ``halfway`` through
    it, see ``tests.pipeline.operations``. The run begins when there is an engine: before that PyTorch makes groups, waits
    without end for a rank that is dead, and leaves it to the launcher.
    """

    victim: int
    share: float
    operation: int | None = None
    halfway: bool = False
    delay_s: float = 0.0


def random_kills(dice: random.Random, count: int) -> list[Kill]:
    kills = []
    for _ in range(count):
        victim, share = dice.randrange(PROCESSES), dice.random()
        in_save = Kill(victim, share, dice.randrange(OPERATIONS[victim]), dice.random() < 0.5)
        kills.append(in_save if dice.random() < 0.5 else Kill(victim, share, delay_s=dice.random() / 2))
    return kills


def train(rank: int, world_size: int, where: Path, name: str, kill: Kill | None, cached: bool) -> None:
    """The user's script: train to the end, from the latest checkpoint on where there is one.

    All is in ``where``, under the ``name`` of this attempt. With ``cached`` outputs of frozen layers are kept, and used by the
    next attempt.
    """
    if cached:
        OutputCache._compare = lambda self: None  # type: ignore[method-assign]  # these layers take less than a file
    saves, progress = where / "checkpoints", where / f"{name}.{rank}.progress"
    torch.manual_seed(SEED)
    engine = engine_of(
        CASE, training_data=Texts(SAMPLES),
        token_pipeline={"slices": CASE.slices, "timeout_s": ENDS_WITHIN_S}, module={"seed_layers": False},
        config={"elastic_pipeline": CASE.elastic(cache={"enabled": cached})},
    )  # fmt: skip
    type(engine._layer_times).costs = lambda self: None  # else stages are cut by times, which other work on the machine changes
    engine.load_checkpoint(str(saves))
    begin = engine.global_steps
    note(progress, "from", begin)
    if begin:
        torch.manual_seed(os.getpid())  # dropout has to go on with what the checkpoint says
    dies_after = begin + int(kill.share * (STEPS - begin)) if kill is not None and kill.victim == rank else STEPS
    for step in range(begin, STEPS):
        if step == dies_after and kill.operation is None:
            timer = threading.Timer(kill.delay_s, die)
            timer.daemon = True
            timer.start()
        note(progress, step + 1, float(engine.train_batch()).hex())
        if (step + 1) % EVERY == 0:
            at = kill.operation if step >= dies_after else None
            with operations(die, at, at is not None and kill.halfway) as begun:
                engine.save_checkpoint(str(saves), tag_at(step + 1))
            (where / f"{name}.{rank}.operations.{step + 1}").write_text(json.dumps(begun))
    torch.save(weights(engine), where / f"{name}.{rank}.weights")
    (where / f"{name}.{rank}.read").write_text(str(engine.cache_counts.read))
    engine.destroy()


def note(progress: Path, *words: Any) -> None:
    """Write down where it began, or a step and its loss: lines are whole wherever the process dies."""
    with progress.open("ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Undisturbed(NamedTuple):
    losses: dict[str, str]  # of every step, in hexadecimal
    weights: list[dict[str, torch.Tensor]]  # at the end, of every rank
    operations: list[dict[int, list[str]]]  # of every rank and every step with a save, by name
    cached: bool = False  # as in `train`


def run_whole(folder: Path, cached: bool = False) -> Undisturbed:
    folder.mkdir(parents=True)
    ends = run(folder, "whole", None, cached)
    assert [end.code for end in ends] == [0] * PROCESSES, "\n".join(end.output for end in ends)
    ranks, saves = range(PROCESSES), range(EVERY, STEPS + 1, EVERY)
    assert all((int((folder / f"whole.{rank}.read").read_text()) > 0) == cached for rank in ranks)
    losses = {step: found.pop() for step, found in losses_of(folder).items()}
    found = [{step: json.loads((folder / f"whole.{rank}.operations.{step}").read_text()) for step in saves} for rank in ranks]
    return Undisturbed(losses, weights_of(folder, "whole"), found, cached)


def losses_of(folder: Path) -> dict[str, set[str]]:
    """The losses that ranks of all attempts have written down for each step."""
    found: dict[str, set[str]] = {}
    for path in folder.glob("*.progress"):
        for line in path.read_text().splitlines()[1:]:
            step, loss = line.split()
            found.setdefault(step, set()).add(loss)
    return found


def weights_of(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{name}.{rank}.weights") for rank in range(PROCESSES)]


class Row(NamedTuple):
    kill: Kill
    resumed: int  # the step after which the checkpoint was saved that the attempt went on from; 0 for the start
    where: str
    died: bool  # not where the run was over before
    said: str  # by the other rank, in one line
    wrong: tuple[str, ...]  # with that


def run_killed(kills: Sequence[Kill], whole: Undisturbed, folder: Path) -> tuple[list[Row], list[str]]:
    """Kill the run at each of ``kills``, then let it end; return a row for each kill, and the first errors found."""
    folder.mkdir(parents=True)
    rows: list[Row] = []
    while len(rows) < len(kills) and (not rows or rows[-1].died):
        rows.append(attempt(kills[len(rows)], whole, folder, f"attempt{len(rows)}"))
        if rows[-1].wrong:
            return rows, []
    ends = run(folder, "end", None, whole.cached)
    wrong = [f"rank {end.rank} ended with {end.code}: {end.output[-2000:]}" for end in ends if end.code != 0]
    return rows, wrong or unlike(whole, folder)


def run(folder: Path, *args: Any) -> list[Exit]:
    return run_to_exit(train, PROCESSES, folder, *args, timeout=ENDS_WITHIN_S)


def attempt(kill: Kill, whole: Undisturbed, folder: Path, name: str) -> Row:
    ends = run(folder, name, kill, whole.cached)
    died = ends[kill.victim].code == -signal.SIGKILL
    begin, *steps = (folder / f"{name}.{kill.victim}.progress").read_text().splitlines()
    where = f"{len(steps)} steps later{'' if kill.operation is None else f', operation {kill.operation} of a save'}"
    return Row(kill, int(begin.split()[1]), where, died, *(survived(kill, ends) if died else ("", ())))


_TELLS = r"waited .* (for|from|to) .*|Connection (closed|reset|refused) by peer.*|Broken pipe.*|failed to recv.*"


def survived(kill: Kill, ends: Sequence[Exit]) -> tuple[str, tuple[str, ...]]:
    """The last words of the other rank, and what is wrong with them."""
    (end,) = [end for end in ends if end.rank != kill.victim]
    # where this package waits, it says for whom; DeepSpeed's barriers and torch's store say that the connection is closed
    lines = [found[0] for line in end.output.splitlines() if (found := re.search(_TELLS, line, re.I))]
    if end.code in (1, 70) and lines:
        return lines[-1], ()
    return "", (f"rank {end.rank} ended with {end.code}: {end.output[-2000:]}",)


def unlike(whole: Undisturbed, folder: Path) -> list[str]:
    """Losses and weights that are not, to the bit, those of the undisturbed run."""
    losses = losses_of(folder)
    odd = [step for step, loss in whole.losses.items() if losses.get(step) != {loss}]
    wrong = [f"loss of step {step}: {sorted(losses.get(step, ()))}, must be {whole.losses[step]}" for step in odd]
    for rank, (found, wanted) in enumerate(zip(weights_of(folder, "end"), whole.weights, strict=True)):
        assert found.keys() == wanted.keys()
        wrong += [f"{name} of rank {rank}" for name, weight in wanted.items() if not torch.equal(found[name], weight)]
    return wrong

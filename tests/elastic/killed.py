"""A training with transitions and saves that is killed and started again with the same command, and what must come of it.

:func:`train` is the user's script; :func:`run_whole` runs it undisturbed, :func:`run_killed` kills a rank of it, again and again.
"""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_terapipe.elastic.cache.outputs import OutputCache
from ds_terapipe.job import Job
from ds_terapipe.pipeline.checkpoints import WholeFolder, tag_of
from tests.elastic.samples import Texts
from tests.elastic.training import Case, engine_of, weights
from tests.pipeline.models import SEED
from tests.pipeline.operations import operations
from tests.spawn import Exit, run_to_exit

PROCESSES, SAMPLES, STEPS, EVERY = 2, 20, 16, 2
CASE = Case("dropping texts", "adamw", 2, freeze=((3, 1), (9, 3)), resize=((4, 1), (8, 2), (12, 1)), scheduler="lambda")
ENDS_WITHIN_S = 200.0


def tag_at(step: int) -> str:
    """Names of their own and, twice in a row, one that is overwritten, while ``latest`` says that name or another."""
    return f"epoch/{step}" if step % (3 * EVERY) == 0 else "last"


class Aim(NamedTuple):
    """The ``operation``-th file operation of the save after ``step``, see ``tests.pipeline.operations``; or a delay after it."""

    step: int
    operation: int | None
    halfway: bool = False
    delay: float = 0.0


def train(rank: int, world_size: int, where: Path, name: str, aims: dict[int, Aim], cached: bool) -> None:
    """The user's script: train to the end, from the latest checkpoint on where there is one.

    All is in ``where``, under the ``name`` of this attempt. ``aims`` say by rank where it has to die. With ``cached`` outputs
    of frozen layers are kept, and used by the next attempt.
    """
    if cached:
        OutputCache._compare = lambda self: None  # type: ignore[method-assign]  # these layers take less than a file
    saves, progress, aim = where / "checkpoints", where / f"{name}.{rank}.progress", aims.get(rank)
    torch.manual_seed(SEED)
    engine = engine_of(
        CASE, training_data=Texts(SAMPLES),
        token_pipeline={"slices": CASE.slices, "timeout_s": ENDS_WITHIN_S}, module={"seed_layers": False},
        config={"elastic_pipeline": CASE.elastic(cache={"enabled": cached})},
    )  # fmt: skip
    type(engine._layer_times).costs = lambda self: None  # else stages are cut by times, which other work on the machine changes
    note(progress, "built")
    engine.load_checkpoint(str(saves))
    if engine.global_steps:
        torch.manual_seed(os.getpid())  # dropout has to go on with what the checkpoint says
    while True:
        step = engine.global_steps
        if aim is not None and (aim.step, aim.operation) == (step, None):
            timer = threading.Timer(aim.delay, die)
            timer.daemon = True
            timer.start()
        if step == STEPS:
            break
        loss = float(engine.train_batch())
        step += 1
        note(progress, step, loss.hex())
        if step % EVERY == 0:
            at = aim.operation if aim is not None and aim.step == step else None
            with operations(die, at, at is not None and aim.halfway) as begun:
                engine.save_checkpoint(str(saves), tag_at(step))
            (where / f"{name}.{rank}.operations.{step}").write_text(json.dumps(begun))
    torch.save(weights(engine), where / f"{name}.{rank}.weights")
    (where / f"{name}.{rank}.read").write_text(str(engine.cache_counts.read))
    engine.destroy()


def note(progress: Path, *words: Any) -> None:
    """Write down a step, its loss and when it was over: lines are whole wherever the process dies."""
    line = " ".join(map(str, [*words, time.monotonic()])) + "\n"
    with progress.open("ab", buffering=0) as file:
        file.write(line.encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Undisturbed(NamedTuple):
    losses: dict[int, str]  # of every step, in hexadecimal
    weights: list[dict[str, torch.Tensor]]  # at the end, of every rank
    step_s: float  # mean seconds of a step, with its save
    operations: list[dict[int, list[str]]]  # of every rank and every step with a save, by name
    cached: bool = False  # as in `train`


def run_whole(folder: Path, cached: bool = False) -> Undisturbed:
    folder.mkdir(parents=True)
    ends = run(folder, "whole", {}, cached)
    assert [end.code for end in ends] == [0] * PROCESSES, "\n".join(end.output for end in ends)
    ranks, saves = range(PROCESSES), range(EVERY, STEPS + 1, EVERY)
    assert all((int((folder / f"whole.{rank}.read").read_text()) > 0) == cached for rank in ranks)
    losses = {step: found.pop() for step, found in losses_of(folder).items()}
    times = [float(line.split()[-1]) for line in (folder / "whole.0.progress").read_text().splitlines()]
    found = [{step: json.loads((folder / f"whole.{rank}.operations.{step}").read_text()) for step in saves} for rank in ranks]
    return Undisturbed(losses, weights_of(folder, "whole"), (times[-1] - times[0]) / STEPS, found, cached)


def losses_of(folder: Path) -> dict[int, set[str]]:
    """The losses that ranks of all attempts have written down for each step."""
    found: dict[int, set[str]] = {}
    for path in folder.glob("*.progress"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3:
                found.setdefault(int(words[0]), set()).add(words[1])
    return found


def weights_of(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{name}.{rank}.weights") for rank in range(PROCESSES)]


class Kill(NamedTuple):
    """One kill of rank ``victim``.

    ``share``: of the steps that are left of the run, or of the file operations, at which it happens. The run begins when there is
    an engine: before that PyTorch makes groups, waits without end for a rank that is dead, and leaves it to the launcher.
    """

    victim: int
    share: float
    # the kind of file operation in a save, or "any"; "step": as one begins; None: any time
    operation: str | None = None
    halfway: bool = False  # in the middle of the operation


class Row(NamedTuple):
    kill: Kill
    resumed: int  # the step after which the checkpoint was saved that the attempt went on from; 0 for the start
    where: str
    died: bool  # not where the run was over before
    said: str  # by the other rank, in one line
    wrong: tuple[str, ...]  # found after it


def random_kills(dice: random.Random, count: int) -> list[Kill]:
    """So many kills, half of them aimed into a save."""
    half = lambda: dice.random() < 0.5  # noqa: E731
    return [Kill(dice.randrange(PROCESSES), dice.random(), "any" if half() else None, half()) for _ in range(count)]


def run_killed(kills: Sequence[Kill], whole: Undisturbed, folder: Path) -> tuple[list[Row], list[str]]:
    """Kill the run so many times, then let it end: a row for each kill, and what is wrong in the end.

    Where something is wrong after a kill there is no more to find out, and no further attempt.
    """
    folder.mkdir(parents=True)
    rows: list[Row] = []
    while len(rows) < len(kills) and (not rows or rows[-1].died):
        rows.append(attempt(kills[len(rows)], whole, folder, f"attempt{len(rows)}"))
        if rows[-1].wrong:
            return rows, []
    ends = run(folder, "end", {}, whole.cached)
    wrong = [f"rank {end.rank} ended with {end.code}: {end.output[-2000:]}" for end in ends if end.code != 0]
    return rows, wrong or unlike(whole, folder)


def run(folder: Path, *args: Any) -> list[Exit]:
    return run_to_exit(train, PROCESSES, folder, *args, timeout=ENDS_WITHIN_S)


def attempt(kill: Kill, whole: Undisturbed, folder: Path, name: str) -> Row:
    resumed = step_of(folder / "checkpoints")
    if kill.operation in (None, "step") or not (places := saves_after(whole, resumed, kill)):
        steps = kill.share * (STEPS - resumed)
        after, delay = resumed + int(steps), 0.0 if kill.operation == "step" else steps % 1 * whole.step_s
        aim = Aim(after, None, delay=delay)
        where = f"{delay:.2f} s after {f'step {after}' if after > resumed else 'the checkpoint was loaded'}"
    else:
        aim = places[int(kill.share * len(places))]
        where = f"save after step {aim.step}, operation {aim.operation}"
    ends = run(folder, name, {kill.victim: aim}, whole.cached)
    died = ends[kill.victim].code == -signal.SIGKILL
    return Row(kill, resumed, where, died, *(survived(kill, ends) if died else ("", ())))


def saves_after(whole: Undisturbed, resumed: int, kill: Kill) -> list[Aim]:
    """The operations that a kill may be aimed at."""
    return [
        Aim(step, number, kill.halfway)
        for step, names in whole.operations[kill.victim].items()
        for number, name in enumerate(names)
        if step > resumed and kill.operation in ("any", name)
    ]


_TELLS = r"waited .* (for|from|to) .*|Connection (closed|reset|refused) by peer.*|Broken pipe.*|failed to recv.*"


def survived(kill: Kill, ends: Sequence[Exit]) -> tuple[str, tuple[str, ...]]:
    """The last words of the other rank, and what is wrong with them."""
    (end,) = [end for end in ends if end.rank != kill.victim]
    # where this package waits, it says for whom; DeepSpeed's barriers and torch's store say that the connection is closed
    lines = [found[0] for line in end.output.splitlines() if (found := re.search(_TELLS, line, re.I))]
    if end.code in (1, 70) and lines:
        return lines[-1], ()
    return "", (f"rank {end.rank} ended with {end.code}: {end.output[-2000:]}",)


def step_of(saves: Path) -> int:
    """After which step the latest checkpoint was saved; 0 where there is none."""
    tag = tag_of(saves, None)
    if tag is None:
        return 0
    WholeFolder(saves, tag, True, Job([0])).recover()  # as a load begins
    return int(torch.load(saves / tag / "mp_rank_00_model_states.pt", weights_only=False)["global_steps"])


def unlike(whole: Undisturbed, folder: Path) -> list[str]:
    """Losses and weights that are not, to the bit, those of the undisturbed run."""
    losses = losses_of(folder)
    odd = [step for step, loss in whole.losses.items() if losses.get(step) != {loss}]
    wrong = [f"loss of step {step}: {sorted(losses.get(step, ()))}, must be {whole.losses[step]}" for step in odd]
    for rank, (found, wanted) in enumerate(zip(weights_of(folder, "end"), whole.weights, strict=True)):
        assert found.keys() == wanted.keys()
        wrong += [f"{name} of rank {rank}" for name, weight in wanted.items() if not torch.equal(found[name], weight)]
    return wrong

"""The simulator against the real engine on 4, 8 and 16 stages, on a machine with two cores.

``python -m tests.benchmarks.emulation`` trains a model whose layers sleep for their modelled time
(tests/benchmarks/emulated.py) in as many processes as there are stages: token slices, schedules and messages are the
engine's own. It prints for each number of processes the step unsliced, in eight equal slices and in the slices that the
planner chooses, simulated and measured, and whether they agree within 5% and slices bring what they should.

The model, in seconds for a slice of l tokens after c: forward 0.006 + 0.00675 l + 1.5e-5 l (c + (l + 1) / 2), backward
twice that, for sequences of 160 tokens and slices of at least 8. So no pass is below 60 ms, and 20 slices cost a tenth more than
none. The simulator is told these times and nothing else: messages take no time there, and neither do the engine's own work,
the optimiser and the lateness of sleeps, together some 2 ms for a forward and a backward. All that is in the error, and so is
whatever else runs on the machine and makes a process wake late. Against that the processes ask for real-time priority, which
root has; where it isn't granted the output says so. ``--quick`` (two processes, 32 tokens) shows that the benchmark works.
The whole takes about seven minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.choose import Request, choose
from ds_terapipe.plan.evaluate import StepTimes
from tests.benchmarks.emulated import Case, SleepCost, Taken, run_cases
from tests.benchmarks.measure import WrongResult
from tests.spawn import run_ranks

SCHEDULES = ("terapipe", "1f1b")
SHORTEST = 8
COST = SleepCost(fixed=0.006, token=0.00675, pair=1.5e-5)
ENOUGH_S = 13.0  # long steps are steady: of those, fewer
ERROR_LIMIT = 0.05
SPEEDUP_PROCESSES, SPEEDUP_SEQUENCES, SPEEDUP = 16, 2, 5.0
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """One case on ``processes`` stages: simulated seconds, those of every measured step, and whether all processes had
    real-time priority in them."""

    processes: int
    case: Case
    simulated: float
    steps: tuple[float, ...]
    first_in_line: bool = True

    @property
    def measured(self) -> float:
        """Seconds of the fastest step."""
        return min(self.steps)

    @property
    def error(self) -> float:
        """Measured above simulated, relative to simulated."""
        return self.measured / self.simulated - 1


@dataclass(frozen=True)
class Verdict:
    """A target in words, and whether it is met."""

    words: str
    met: bool


def cases_for(cost: SleepCost, processes: int, sequences: int, tokens: int, slices: Sequence[int]) -> list[Case]:
    """Unsliced 1F1B, then for each schedule the equal slices and the planner's, each once."""
    cases = [Case("1f1b", sequences, (tokens,))]
    for schedule in SCHEDULES:
        request = Request(tokens, processes, sequences, schedule, granularity=1, min_length=SHORTEST)
        cuts = [*(slice_lengths(tokens, count) for count in slices), tuple(choose(cost, request).slices)]
        cases += [Case(schedule, sequences, cut) for cut in dict.fromkeys(cuts) if len(cut) > 1]
    return cases


def check_losses(cases: Sequence[Case], ranks: Sequence[Sequence[Taken]]) -> None:
    """All cases of so many sequences trained the same in their first step. Raises WrongResult."""
    seen: dict[int, float] = {}
    for index, case in enumerate(cases):
        for rank, taken in enumerate(ranks):
            loss = taken[index].loss
            if not math.isclose(loss, seen.setdefault(case.sequences, loss), rel_tol=LOSS_TOLERANCE):
                raise WrongResult(f"{case} has loss {loss} on rank {rank}, others have {seen[case.sequences]}")


def measure(
    cost: SleepCost, processes: int, cases: Sequence[Case], steps: int, enough_s: float, log: str = os.devnull
) -> list[Row]:
    """Run the cases in new processes. Raises WrongResult when they train differently, AssertionError when one fails."""
    simulated = [StepTimes(cost, processes, case.sequences).seconds(case.schedule, case.lengths) for case in cases]
    timeout = 120 + 2 * steps * sum(simulated)
    ranks = run_ranks(run_cases, processes, cost, cases, steps, enough_s, log, timeout=timeout)
    check_losses(cases, ranks)
    rows = []
    for case, seconds, *taken in zip(cases, simulated, *ranks, strict=True):
        rows.append(Row(processes, case, seconds, tuple(taken[0].seconds), all(rank.first_in_line for rank in taken)))
    return rows


def unsliced(rows: Sequence[Row], row: Row) -> Row | None:
    """The uncut case that ``row`` is compared with."""
    alike = (other for other in rows if other.processes == row.processes and other.case.sequences == row.case.sequences)
    return next((other for other in alike if len(other.case.lengths) == 1), None)


def table(rows: Sequence[Row]) -> list[str]:
    """One line per case."""
    lines = ["processes  schedule  sequences  slices  simulated s  measured s   error  times unsliced"]
    for row in rows:
        whole = unsliced(rows, row)
        speedup = (
            f"{whole.measured / row.measured:.2f} (simulated {whole.simulated / row.simulated:.2f})" if whole else ""
        )
        lines.append(
            f"{row.processes:9}  {row.case.schedule:>8}  {row.case.sequences:9}  {len(row.case.lengths):6}  "
            f"{row.simulated:11.3f}  {row.measured:10.3f}  {row.error:+6.1%}  {speedup}"
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Each target for which there are rows, the errors by number of processes."""
    found = []
    for processes in dict.fromkeys(row.processes for row in rows):
        worst = max((row for row in rows if row.processes == processes), key=lambda row: abs(row.error))
        words = f"{processes} processes: worst error {worst.error:+.1%}, limit {ERROR_LIMIT:.0%}"
        found.append(Verdict(words, abs(worst.error) <= ERROR_LIMIT))
    cut = [
        row
        for row in rows
        if (row.processes, row.case.sequences) == (SPEEDUP_PROCESSES, SPEEDUP_SEQUENCES) and len(row.case.lengths) > 1
    ]
    if cut and (whole := unsliced(rows, cut[0])) is not None:
        best = min(cut, key=lambda row: row.measured)
        ratio = whole.measured / best.measured
        words = (
            f"{SPEEDUP_PROCESSES} processes, {SPEEDUP_SEQUENCES} sequences: {len(best.case.lengths)} slices "
            f"({best.case.schedule}) {ratio:.2f}x unsliced, target {SPEEDUP:.0f}x"
        )
        found.append(Verdict(words, ratio >= SPEEDUP))
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.emulation", description=__doc__.split("\n\n")[0])

    def numbers(least: int) -> Callable[[str], list[int]]:
        def read(text: str) -> list[int]:
            if not all(part.isdecimal() and int(part) >= least for part in text.split(",")):
                raise argparse.ArgumentTypeError(f"got {text}, must be numbers from {least} up, e.g. 4,8")
            return [int(part) for part in text.split(",")]

        return read

    parser.add_argument("--processes", type=numbers(2), help="stages (default 4,8,16; 2 with --quick)")
    parser.add_argument("--sequences", type=numbers(1), help="in a step (default 2; 1 with --quick)")
    parser.add_argument(
        "--slices", type=numbers(1), help="equal ones, beside the planner's (default 8; 4 with --quick)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help=f"measured per case, until {ENOUGH_S:g} s are full (default 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument(
        "--log", metavar="FILE", default=os.devnull, help="the processes' own output (default: nowhere)"
    )
    parser.add_argument("--quick", action="store_true", help="two processes, 32 tokens: does the benchmark work?")
    options = parser.parse_args(arguments)
    options.tokens = 32 if options.quick else 160
    options.processes = options.processes or ([2] if options.quick else [4, 8, 16])
    options.sequences = options.sequences or ([1] if options.quick else [2])
    options.slices = options.slices or ([4] if options.quick else [8])
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}, must be at least 1")
    if max(options.slices) * SHORTEST > options.tokens:
        parser.error(f"--slices: got {max(options.slices)}, must be at most {options.tokens // SHORTEST}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 when a target is missed, or cases trained differently."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    say = logging.getLogger(__name__).info
    rows: list[Row] = []
    for processes in options.processes:
        cases = [
            case
            for sequences in options.sequences
            for case in cases_for(COST, processes, sequences, options.tokens, options.slices)
        ]
        say(f"{processes} processes: {len(cases)} cases")
        try:
            rows += measure(COST, processes, cases, options.steps, ENOUGH_S, options.log)
        except WrongResult as error:
            print(f"wrong result: {error}")
            return 1
    found = verdicts(rows)
    print("\n".join(table(rows)))
    if not all(row.first_in_line for row in rows):
        print(
            "no real-time priority: other programs delay the emulated stages, errors mean something where there are none"
        )
    print("\n".join(f"{verdict.words}: {'met' if verdict.met else 'missed'}" for verdict in found))
    if options.json:
        write_json(options.json, COST, options.tokens, rows, found)
    return int(not all(verdict.met for verdict in found))


def write_json(path: str, cost: SleepCost, tokens: int, rows: Sequence[Row], found: Sequence[Verdict]) -> None:
    """Everything measured, every step included."""
    data = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
        "model": {**asdict(cost), "tokens": tokens},
        "rows": [
            {**asdict(row), "slices": len(row.case.lengths), "measured": row.measured, "error": row.error}
            for row in rows
        ],
        "targets": [asdict(verdict) for verdict in found],
    }
    with open(path, "w") as file:
        json.dump(data, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())

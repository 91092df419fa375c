"""The simulator against the real engine on 4, 8 and 16 stages, on a machine with two cores.

``python -m tests.benchmarks.emulation`` trains a model whose layers sleep for their modelled time
(tests/benchmarks/emulated.py) in as many processes as there are stages. It prints for each the step unsliced, in eight
equal slices and in the slices that the planner chooses, simulated and measured. Messages, the engine's own work and the
lateness of sleeps take no time in the simulator: all that is in the error. The whole takes seven minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.choose import Request, choose
from ds_terapipe.plan.evaluate import StepTimes
from tests.benchmarks import measure
from tests.benchmarks.emulated import Case, SleepCost, run_cases
from tests.spawn import run_ranks

# No pass is below 60 ms, and 20 slices cost a tenth more than none.
COST = SleepCost(fixed=0.006, token=0.00675, pair=1.5e-5)
SHORTEST, SEQUENCES = 8, 2
ENOUGH_S = 13.0  # long steps are steady: of those, fewer
ERROR_LIMIT = 0.05


class Row(NamedTuple):
    """A case on so many stages: seconds simulated and of the fastest step, and whether the system let it come first."""

    processes: int
    case: Case
    simulated: float
    measured: float
    first_in_line: bool = True

    @property
    def error(self) -> float:
        return self.measured / self.simulated - 1


def cases_for(processes: int, sequences: int, tokens: int, slices: int) -> list[Case]:
    """Unsliced 1F1B, then for each schedule the equal slices and the planner's, each once."""
    cases = [Case("1f1b", sequences, (tokens,))]
    for schedule in ("terapipe", "1f1b"):
        request = Request(tokens, processes, sequences, schedule, granularity=1, min_length=SHORTEST)
        cuts = [tuple(slice_lengths(tokens, slices)), tuple(choose(COST, request).slices)]
        cases += [Case(schedule, sequences, cut) for cut in dict.fromkeys(cuts) if len(cut) > 1]
    return cases


def run(processes: int, cases: Sequence[Case], steps: int) -> list[Row]:
    """Run the cases in new processes. Raises WrongResult where they train differently."""
    simulated = [StepTimes(COST, processes, case.sequences).seconds(case.schedule, case.lengths) for case in cases]
    ranks = run_ranks(run_cases, processes, COST, cases, steps, ENOUGH_S, timeout=120 + 2 * steps * sum(simulated))
    check_losses([taken.loss for rank in ranks for taken in rank])
    return [
        Row(processes, case, seconds, min(taken[0].seconds), all(one.first_in_line for one in taken))
        for case, seconds, *taken in zip(cases, simulated, *ranks, strict=True)
    ]


def check_losses(losses: Sequence[float]) -> None:
    """All cases train the same in their first step."""
    if not all(math.isclose(loss, losses[0], rel_tol=1e-5) for loss in losses):
        raise measure.WrongResult(f"first steps have the losses {losses}")


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each case; the first of a number of processes is the unsliced one, which the others are compared with."""
    lines = ["processes  schedule  slices  simulated s  measured s   error  times unsliced"]
    for row in rows:
        whole = next(one for one in rows if one.processes == row.processes)
        lines.append(
            f"{row.processes:9}  {row.case.schedule:>8}  {len(row.case.lengths):6}  {row.simulated:11.3f}  {row.measured:10.3f}  "
            f"{row.error:+6.1%}  {whole.measured / row.measured:.2f} (simulated {whole.simulated / row.simulated:.2f})"
        )
    worst = max((row.error for row in rows), key=abs)
    lines.append(
        f"worst error {worst:+.1%}, limit {ERROR_LIMIT:.0%}: {'met' if abs(worst) <= ERROR_LIMIT else 'missed'}"
    )
    if not all(row.first_in_line for row in rows):
        lines.append("INCONCLUSIVE, no real-time priority: other programs delay the emulated stages")
    return lines


def stages(text: str) -> list[int]:
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"got {text}, must be numbers from 2 up, e.g. 4,8")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = measure.parser("emulation", __doc__)
    options.add_argument("--processes", type=stages, help="stages (default 4,8,16; 2 with --quick)")
    options.add_argument(
        "--steps", type=int, default=3, help=f"measured per case, until {ENOUGH_S:g} s are full (default 3)"
    )
    options = options.parse_args(arguments)
    tokens, slices, sequences = (32, 4, 1) if options.quick else (160, 8, SEQUENCES)
    rows: list[Row] = []
    for processes in options.processes or ([2] if options.quick else [4, 8, 16]):
        cases = cases_for(processes, sequences, tokens, slices)
        measure.say(f"{processes} processes: {len(cases)} cases")
        rows += run(processes, cases, options.steps)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

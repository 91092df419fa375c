"""A training step of a GPT in two processes: token slices against DeepSpeed's pipeline and what else there is.

``python -m tests.benchmarks.token_pipeline`` prints, for 1, 2, 4 and 8 sequences in micro-batches of one, the seconds
per step of every column (tests/benchmarks/columns.py), the ratio to DeepSpeed's PipelineEngine and the peak memory;
then the bound, an account of what is missing to it, and whether the targets are met. tests/benchmarks/rounds.py says
how the figures are taken. DeepSpeed's engine is run twice: what the two differ by is the noise. ``--quick`` runs a
tiny model through all of it and shows that the benchmark works, not how fast anything is.

``--model llama`` has Hugging Face's Llama of the same sizes, with two key heads, in place of the GPT; its targets are those at
one sequence.

``--before PATH`` runs our own columns of another checkout in the same rounds: whether a change has cost anything is a
ratio of two columns, e.g. ``--batches 1 --columns ours1,ours4 --before ../main``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from tests.benchmarks import gpt
from tests.benchmarks.account import Account, account, measure_costs
from tests.benchmarks.columns import COLUMNS, ONLY_GPT, SLICES, Column, Workload, in_one_process, of_checkout
from tests.benchmarks.measure import Result, Settings, WrongResult, measure
from tests.benchmarks.rounds import CLEAN_ROUNDS_NEEDED, verdict

CUT = tuple(count for count in SLICES if count > 1)
WIDTH = 14


@dataclass(frozen=True)
class Target:
    """Times DeepSpeed's speed that ``column`` must reach at ``sequences``; ``best`` is the best number of slices above
    one. What the two DeepSpeed columns differ by does not count.
    """

    sequences: int
    column: str
    ratio: float


TARGETS = (
    (Target(1, "best", 1.45), Target(2, "best", 1.15), Target(8, "best", 0.98))
    + tuple(Target(sequences, "ours1", 0.97) for sequences in (1, 2, 4, 8))
    + (Target(1, "auto", 1.5), Target(8, "auto", 1.0))
)
# How much slower than the best equal slices the planner's choice may be.
AUTO_SLOWER = 1.06


@dataclass(frozen=True)
class DeepSpeedTime:
    """The faster of the two DeepSpeed columns in seconds, and their relative difference (infinity with only one)."""

    seconds: float
    noise: float


def deepspeed_time(result: Result) -> DeepSpeedTime | None:
    """None when both DeepSpeed columns are missing."""
    times = [time for name in ("deepspeed", "deepspeed2") if (time := result.seconds(name)) is not None]
    noise = max(times) / min(times) - 1 if len(times) == 2 else math.inf
    return DeepSpeedTime(min(times), noise) if times else None


def best_slices(result: Result) -> int | None:
    """The fastest number of slices above one, None when none was run."""
    times = {count: time for count in CUT if (time := result.seconds(f"ours{count}")) is not None}
    return min(times, key=times.__getitem__) if times else None


def table(results: Mapping[int, Result], names: Sequence[str]) -> list[str]:
    """Two lines per batch: seconds (ratio to DeepSpeed), and MB of the fullest process above its imported libraries."""
    lines = ["B   " + "".join(_title(name).rjust(WIDTH) for name in names)]
    for sequences, result in results.items():
        reference = deepspeed_time(result)
        times, memories = [], []
        for name in names:
            seconds, memory = result.seconds(name), result.memory.get(name)
            ratio = f" ({reference.seconds / seconds:.2f})" if reference and seconds else ""
            times.append("failed" if seconds is None else f"{seconds:.3f}{ratio}")
            above = max((rank.highest_mb - rank.imported_mb for rank in memory), default=0) if memory else None
            memories.append("" if above is None else f"{above:.0f} MB")
        lines.append(f"{sequences:<4}" + "".join(cell.rjust(WIDTH) for cell in times))
        lines.append("    " + "".join(cell.rjust(WIDTH) for cell in memories))
        known = reference is not None and math.isfinite(reference.noise)
        noise = f"; DeepSpeed's two columns differ by {100 * reference.noise:.1f}%" if known else "; noise unknown"
        state = "" if result.minima.conclusive else f"; INCONCLUSIVE, fewer than {CLEAN_ROUNDS_NEEDED} clean"
        tried = f"{result.minima.clean} clean rounds of {result.minima.tried}"
        lines.append(f"      {tried}, two at once {result.minima.slowdown:.2f}x slower than one{noise}{state}")
        lines += [f"      {_title(name)} failed: {reason}" for name, reason in result.failures.items()]
    return lines


def _title(name: str) -> str:
    own = "auto" if name == "auto-before" else name.replace("before", "ours")
    return COLUMNS[own].title.replace("ours", "before" if "before" in name else "ours")


def target_lines(results: Mapping[int, Result]) -> list[str]:
    """One line per target whose batch was run."""
    lines = []
    for target in TARGETS:
        if target.sequences not in results:
            continue
        result = results[target.sequences]
        column = f"ours{best_slices(result)}" if target.column == "best" else target.column
        reference, seconds = deepspeed_time(result), result.seconds(column)
        if reference is None or seconds is None:
            lines.append(f"B={target.sequences}  {target.column}: not measured")
            continue
        ratio = reference.seconds / seconds
        outcome = verdict(ratio, target.ratio, reference.noise, result.minima.conclusive)
        words = COLUMNS[column].title
        lines.append(f"B={target.sequences}  {words}: {ratio:.3f}x DeepSpeed, target {target.ratio:.2f}x: {outcome}")
    return lines + [line for sequences, result in results.items() if (line := auto_line(sequences, result))]


def auto_line(sequences: int, result: Result) -> str | None:
    """The planner's choice against the best equal slices, None when it was not run."""
    auto = result.seconds("auto")
    equal = {count: time for count in SLICES if (time := result.seconds(f"ours{count}")) is not None}
    if auto is None:
        return None
    if missing := [str(count) for count in SLICES if count not in equal]:
        return f"B={sequences}  auto: not compared with the best equal slices, {', '.join(missing)} not measured"
    best = min(equal, key=equal.__getitem__)
    ratio = auto / equal[best]
    outcome = verdict(AUTO_SLOWER / ratio, 1.0, 0.0, result.minima.conclusive)
    return f"B={sequences}  auto: {ratio:.3f}x the time of the best equal slices ({best}), at most {AUTO_SLOWER}: {outcome}"


def accounts(
    results: Mapping[int, Result], shape: gpt.Shape, settings: Settings, say: Callable[[str], None]
) -> list[Account]:
    """What is missing to the bound at each batch's best number of slices."""
    best = {sequences: count for sequences, result in results.items() if (count := best_slices(result)) is not None}
    known = {sequences: time for sequences in best if (time := results[sequences].seconds("one")) is not None}
    if not known:
        return []
    slices = sorted({best[sequences] for sequences in known})
    say(f"cost of cutting: one stage with {', '.join(map(str, [1, *slices]))} slices")
    columns = [in_one_process(count) for count in [1, *slices]]
    whole = measure(columns, Workload(shape, 1), settings, say)
    cut = {count: time for count in [1, *slices] if (time := whole.seconds(f"whole{count}")) is not None}
    costs = measure_costs(shape, slices, cut, settings.timeout, settings.log)
    found = []
    for sequences, one_process in known.items():
        count, result = best[sequences], results[sequences]
        step = result.seconds(f"ours{count}")
        assert step is not None
        found.append(account(sequences, count, step, one_process, result.minima.contention, costs))
    return found


def account_lines(found: Sequence[Account], results: Mapping[int, Result]) -> list[str]:
    """One line per batch: bound, step, and the parts between them in seconds."""
    lines = []
    for one in found:
        reference = deepspeed_time(results[one.sequences])
        ratio = f" ({reference.seconds / one.bound:.2f}x DeepSpeed)" if reference else ""
        cutting = "not measured" if one.cutting is None else f"{one.cutting:.3f}"
        lines.append(
            f"B={one.sequences}, {one.slices} slices: bound {one.bound:.3f} s{ratio}, step {one.step:.3f} s; missing "
            f"{one.step - one.bound:.3f} = cutting {cutting} + two at once {one.two_at_once:.3f} + imbalance "
            f"{one.imbalance:.3f} + messages {one.messages:.3f} + Python and the rest {one.rest:.3f}"
        )
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.token_pipeline", description=__doc__.split("\n\n")[0]
    )

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in COLUMNS]:
            raise argparse.ArgumentTypeError(f"got {','.join(unknown)}, must be among {','.join(COLUMNS)}")
        return chosen

    def numbers(text: str) -> list[int]:
        if not all(part.isdecimal() and int(part) for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"got {text}, must be positive numbers, e.g. 1,2,4,8")
        return [int(part) for part in text.split(",")]

    parser.add_argument("--rounds", type=int, help="clean rounds wanted per batch (default 5; 1 with --quick)")
    parser.add_argument("--attempts", type=int, help="rounds tried at most per batch (default: 3 times --rounds)")
    parser.add_argument("--batches", type=numbers, help="sequences per step (default 1,2,4,8; 1,2 with --quick)")
    parser.add_argument(
        "--steps", type=int, help="steps of a column in a round, the fastest counts (default 2; 1 from B=4)"
    )
    parser.add_argument("--columns", type=names, help=f"of {','.join(COLUMNS)} (default all that have the model)")
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt", help="llama: Hugging Face's (default gpt)")
    parser.add_argument("--sequence", type=int, help="tokens (default 1024; 128 with --quick)")
    parser.add_argument("--before", metavar="PATH", help="another checkout, whose own columns are run beside these")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument("--log", metavar="FILE", default=os.devnull, help="the workers' own output (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a worker (default 300)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the benchmark work?")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.attempts = options.attempts or (options.rounds if options.quick else 3 * options.rounds)
    available = [name for name in COLUMNS if options.model == "gpt" or name not in ONLY_GPT]
    options.columns = options.columns or available
    if missing := [name for name in options.columns if name not in available]:
        parser.error(f"--columns: got {missing[0]}, which has no {options.model}")
    options.batches = options.batches or ([1, 2] if options.quick else [1, 2, 4, 8])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 when a column failed or trained something else than the others."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    say = logging.getLogger(__name__).info
    shape = replace(gpt.QUICK if options.quick else gpt.Shape(), family=options.model)
    shape = replace(shape, sequence=options.sequence or shape.sequence)
    settings = Settings(options.rounds, options.attempts, 1, 16, options.timeout, options.log)
    if options.quick:
        settings = replace(settings, probe_repeats=2, patience=0)
    results: dict[int, Result] = {}
    names = [column.name for name in options.columns for column in with_before(name, options.before)]
    try:
        for sequences in options.batches:
            say(f"B={sequences}: starting {len(options.columns)} columns")
            chosen = [column for name in options.columns for column in with_before(name, options.before)]
            taken = replace(settings, steps=steps_in_round(options, sequences))
            results[sequences] = measure(chosen, Workload(shape, sequences), taken, say)
        found = accounts(results, shape, replace(settings, steps=steps_in_round(options, 1)), say)
    except WrongResult as error:
        print(f"wrong result: {error}")
        return 1
    sections = {
        "Seconds per step (times DeepSpeed's speed); MB above the imported libraries": table(results, names),
        "Bound (one process / stages x (1 + bubble)) and what is missing to it": account_lines(found, results),
        "Targets": target_lines(results),
        **({"Against the other checkout": before_lines(results)} if options.before else {}),
    }
    for title, lines in sections.items():
        print("\n".join(["", title, *(lines or ["not measured"])]))
    if options.json:
        steps = {sequences: steps_in_round(options, sequences) for sequences in results}
        write_json(options.json, shape, settings, steps, results, found)
    return int(any(result.failures for result in results.values()))


def with_before(name: str, checkout: str | None) -> list[Column]:
    """A column and, where it is ours, the same one of another checkout."""
    column, ours = COLUMNS[name], name.startswith("ours") or name == "auto"
    return [column, *([of_checkout(column, checkout)] if checkout and ours else [])]


def before_lines(results: Mapping[int, Result]) -> list[str]:
    """How much longer each of our columns takes than the same one of another checkout."""
    lines = []
    names = {f"ours{count}": (f"before{count}", f"{count} slices") for count in SLICES}
    for sequences, result in results.items():
        for name, (other, title) in {**names, "auto": ("auto-before", "auto")}.items():
            now, before = result.seconds(name), result.seconds(other)
            if now is None or before is None:
                continue
            state = "" if result.minima.conclusive else ", inconclusive"
            clean = [one.seconds for one in result.minima.rounds if one.clean]
            median = statistics.median(one[name] / one[other] for one in clean) if clean else math.nan
            ratios = f"minima {now / before - 1:+.1%}, median of {len(clean)} rounds {median - 1:+.1%}"
            lines.append(f"B={sequences}  {title}: {before:.3f} s before, {now:.3f} s now: {ratios}{state}")
    return lines


def steps_in_round(options: argparse.Namespace, sequences: int) -> int:
    """Steps of a column in a round."""
    return int(options.steps or (2 if sequences <= 2 else 1))


def write_json(
    path: str,
    shape: gpt.Shape,
    settings: Settings,
    steps: Mapping[int, int],
    results: Mapping[int, Result],
    found: Sequence[Account],
) -> None:
    """Everything measured, every round and probe included."""
    data = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
        "shape": asdict(shape),
        "settings": {name: value for name, value in asdict(settings).items() if name not in ("log", "steps")},
        "steps": {str(sequences): count for sequences, count in steps.items()},
        "batches": {str(sequences): asdict(result) for sequences, result in results.items()},
        "accounts": [{**asdict(one), "rest": one.rest} for one in found],
    }
    plain = json.loads(json.dumps(data), parse_constant=lambda _: None)  # JSON knows no infinity
    with open(path, "w") as file:
        json.dump(plain, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())

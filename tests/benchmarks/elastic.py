"""A training step of a GPT whose first layers are frozen: in the pipeline, out of it, and what leaving it costs.

``python -m tests.benchmarks.elastic`` trains 2 and 4 sequences in micro-batches of one, in two processes, with the
embedding and half of the layers frozen, then with three quarters. Columns (tests/benchmarks/elastic_columns.py): ours
unfrozen on two stages, ours frozen on two stages (``kept``), on two replicas (``reshaped``), there with the outputs of
the frozen layers read (``cached``) and in the shape that it chooses itself (``measured``), and DeepSpeed's own engine
with the same layers frozen from the start, on the partitions
that it runs and as two replicas from the start. Then the time that a transition takes beside the steps around it, and what
fifty reshapes leave behind. tests/benchmarks/rounds.py says how the figures are taken. ``--quick`` runs a tiny model
through all of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from tests.benchmarks import gpt
from tests.benchmarks.columns import SETTLING, Workload
from tests.benchmarks.elastic_columns import (
    OURS_UNFROZEN,
    PLACES,
    Timed,
    of_deepspeed,
    of_ours,
    reshaped_often,
    timed_transitions,
)
from tests.benchmarks.measure import Result, Settings, WrongResult, measure
from tests.benchmarks.rounds import CLEAN_ROUNDS_NEEDED, Probe, probe, verdict
from tests.benchmarks.workers import WorkerError, Workers
from tests.pipeline.footprint import Footprint

QUICK = replace(gpt.QUICK, layers=4)
WIDTH = 13
# Of a transition's extra time: so many training steps at most.
TRANSITION_STEPS = 3.0
MEMORY_GROWTH = 0.02
CHOSEN = 1.05  # of the best shape's time: what is chosen takes at most so much


@dataclass(frozen=True)
class Target:
    """With this part of the layers frozen ``kind``'s fastest column takes at most ``share`` of the seconds of ``of``'s."""

    part: float
    of: str
    share: float
    kind: str = "reshaped"


TARGETS = (
    Target(0.5, "ours", 0.70),
    Target(0.5, "deepspeed", 0.80),
    Target(0.5, "ours", 0.55, "cached"),
    Target(0.75, "ours", 0.55),
)


@dataclass(frozen=True)
class Case:
    """A batch of so many sequences with ``frozen`` layer modules frozen, the embedding among them."""

    sequences: int
    frozen: int
    part: float

    @property
    def title(self) -> str:
        return f"B={self.sequences}, embedding + {self.frozen - 1}"


def cases(shape: gpt.Shape, batches: Sequence[int], parts: Sequence[float]) -> list[Case]:
    """Every batch with every part of the layers frozen."""
    return [Case(batch, 1 + int(part * shape.layers), part) for part in parts for batch in batches]


def fastest(result: Result, kind: str) -> tuple[str, float] | None:
    """The column of a kind (what its name begins with, up to figures or a dash) that is fastest, and its seconds."""
    times = {
        name: seconds
        for name in result.minima.seconds
        if _kind(name) == kind and (seconds := result.seconds(name)) is not None
    }
    return min(times.items(), key=lambda item: item[1]) if times else None


def _kind(name: str) -> str:
    return "ours" if name in OURS_UNFROZEN else name.partition("-")[0].rstrip("0123456789")


def table(results: Mapping[Case, Result]) -> list[str]:
    """Two lines per case: columns, and their seconds with the share of our unfrozen step."""
    lines = []
    for case, result in results.items():
        reference = fastest(result, "ours")
        names = [*result.minima.seconds, *(name for name in result.failures if name not in result.minima.seconds)]
        cells = []
        for name in names:
            seconds = result.seconds(name)
            share = f" ({seconds / reference[1]:.2f})" if reference and seconds else ""
            cells.append("failed" if seconds is None else f"{seconds:.3f}{share}")
        state = "" if result.minima.conclusive else f"; INCONCLUSIVE, fewer than {CLEAN_ROUNDS_NEEDED} clean"
        tried = f"{result.minima.clean} clean rounds of {result.minima.tried}"
        lines += [
            f"{case.title} frozen: {tried}, two at once {result.minima.slowdown:.2f}x slower than one{state}",
            "  " + "".join(name.rjust(WIDTH) for name in names),
            "  " + "".join(cell.rjust(WIDTH) for cell in cells),
        ]
        lines += [f"    {name} failed: {reason}" for name, reason in result.failures.items()]
    return lines


def target_lines(results: Mapping[Case, Result]) -> list[str]:
    """One line per target and case with that part frozen."""
    lines = []
    for case, result in results.items():
        for target in (one for one in TARGETS if one.part == case.part):
            ours, other = fastest(result, target.kind), fastest(result, target.of)
            if ours is None or other is None:
                lines.append(f"{case.title}: {target.of} or {target.kind} not measured")
                continue
            share = ours[1] / other[1]
            outcome = verdict(target.share / share, 1.0, 0.0, result.minima.conclusive)
            lines.append(
                f"{case.title}: {ours[0]} takes {share:.3f} of {other[0]}, at most {target.share:.2f}: {outcome}"
            )
        lines += _chosen_lines(case, result)
    return lines


def _chosen_lines(case: Case, result: Result) -> list[str]:
    """The shapes that were measured and chosen, beside the better of those that were given, with the same slices."""
    lines = []
    for name in (name for name in result.minima.seconds if _kind(name) == "measured"):
        slices = name.partition("-")[2]
        given = {other: result.seconds(other) for other in (f"kept-{slices}", f"reshaped-{slices}")}
        known = {other: seconds for other, seconds in given.items() if seconds is not None}
        chosen = result.seconds(name)
        if chosen is None or len(known) < len(given):
            continue
        best = min(known, key=known.__getitem__)
        share = chosen / known[best]
        outcome = verdict(CHOSEN / share, 1.0, 0.0, result.minima.conclusive)
        lines.append(f"{case.title}: {name} takes {share:.3f} of {best}, at most {CHOSEN:.2f}: {outcome}")
    return lines


@dataclass(frozen=True)
class Transition:
    """A change of shape: ``stages`` after it; seconds beside those of so many steps until the second step's end, and until
    all steps in the new shape are ended; seconds of a step there and before it."""

    stages: int
    until_second: float
    in_all: float
    step: float
    step_before: float

    @property
    def steps(self) -> float:
        """In steps of the faster of the two shapes."""
        return max(self.until_second, self.in_all) / min(self.step, self.step_before)


def transitions_in(steps: Sequence[Timed], stay: int) -> list[Transition]:
    """From the seconds of a run's steps, ``stay`` in each shape, of which the last half is steady."""
    shapes = [steps[start : start + stay] for start in range(0, len(steps), stay)]
    # with few steps the first two are the unsteady ones
    first_steady = max(2, stay // 2) if stay > 3 else 2
    steady = [min(one.seconds for one in shape[first_steady:]) for shape in shapes]
    found = []
    for number in range(1, len(shapes)):
        shape, step = shapes[number], steady[number]
        extra = [one.seconds - step for one in shape[:first_steady]]
        found.append(Transition(shape[0].stages, sum(extra[:2]), sum(extra), step, steady[number - 1]))
    return found


def time_transitions(
    shape: gpt.Shape, case: Case, slices: int | str, settings: Settings, say: Callable[[str], None]
) -> list[tuple[bool, list[Transition]]]:
    """Runs in fresh workers until enough were clean by the probes around them: (clean, transitions)."""
    runs: list[tuple[bool, list[Transition]]] = []
    stay, count = (SETTLING + 6, 1) if slices == "auto" else (5, 2)
    while len(runs) < settings.attempts and sum(clean for clean, _ in runs) < settings.rounds:
        with Workers(PLACES, ("deepspeed", "ds_terapipe"), settings.log, settings.timeout) as pair:
            before = _quiet(pair, settings)
            ranks = pair.call(timed_transitions, Workload(shape, case.sequences), slices, case.frozen, stay, count)
            after = probe(pair, settings.probe_repeats)
        slowest = [max(same, key=lambda one: one.seconds) for same in zip(*ranks, strict=True)]
        clean = before.clean and after.clean
        runs.append((clean, transitions_in(slowest, stay)))
        say(f"transitions, {case.title}, slices {slices}: run {len(runs)} {'clean' if clean else 'dropped'}")
    return runs


def _quiet(pair: Workers, settings: Settings) -> Probe:
    found = probe(pair, settings.probe_repeats)
    for _ in range(settings.patience):
        if found.clean:
            break
        found = probe(pair, settings.probe_repeats)
    return found


def transition_lines(case: Case, slices: int | str, runs: Sequence[tuple[bool, list[Transition]]]) -> list[str]:
    """Of the first transition, which freezes, and of the later ones: medians over clean runs, over all where there is none."""
    clean = [found for good, found in runs if good]
    used = clean or [found for _, found in runs]
    lines = []
    for title, some in (
        ("first, with what is frozen", [found[0] for found in used]),
        ("later", [one for found in used for one in found[1:]]),
    ):
        if not some:
            continue
        steps = statistics.median(one.steps for one in some)
        outcome = verdict(TRANSITION_STEPS / max(steps, 1e-9), 1.0, 0.0, len(clean) >= CLEAN_ROUNDS_NEEDED)
        second, whole = (
            statistics.median(seconds)
            for seconds in zip(*((one.until_second, one.in_all) for one in some), strict=True)
        )
        lines.append(
            f"{case.title}, slices {slices}, {title}: {second:.3f} s until the second step, {whole:.3f} s in all, {steps:.2f} "
            f"training steps, at most {TRANSITION_STEPS:.0f}: {outcome} ({len(clean)} clean runs of {len(runs)})"
        )
    return lines


def footprints(workload: Workload, frozen: int, count: int, settings: Settings) -> list[tuple[Footprint, Footprint]]:
    """What fresh workers hold after the tenth and the last reshape, by rank.

    They have one arena of memory: glibc gives threads of new groups up to eight a core, one by one, and what it keeps in each is
    a few megabytes of a process that has just begun, however often it is reshaped.
    """
    os.environ["MALLOC_ARENA_MAX"] = "1"
    try:
        with Workers(PLACES, ("deepspeed", "ds_terapipe"), settings.log, settings.timeout) as pair:
            return pair.call(reshaped_often, workload, 1, frozen, count)
    finally:
        del os.environ["MALLOC_ARENA_MAX"]


def growth_lines(found: Sequence[tuple[Footprint, Footprint]], count: int) -> list[str]:
    """One line per rank: what it holds after the tenth reshape and after the last."""
    lines = []
    for rank, (tenth, last) in enumerate(found):
        counts = {
            name: (getattr(tenth, name), getattr(last, name)) for name in ("files", "threads", "groups", "shared")
        }
        resident = last.resident / tenth.resident - 1
        good = all(after <= before for before, after in counts.values()) and resident < MEMORY_GROWTH
        words = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in counts.items())
        lines.append(
            f"rank {rank}, after 10 and {count} reshapes: {words}, resident {tenth.resident / 2**20:.0f} -> "
            f"{last.resident / 2**20:.0f} MB ({resident:+.1%}): {'pass' if good else 'miss'}"
        )
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.elastic", description=__doc__.split("\n\n")[0])

    def numbers(text: str) -> list[int]:
        if not all(part.isdecimal() and int(part) for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"got {text}, must be positive numbers, e.g. 2,4")
        return [int(part) for part in text.split(",")]

    def slices(text: str) -> list[int | str]:
        return ["auto" if part == "auto" else numbers(part)[0] for part in text.split(",")]

    def parts(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser.add_argument("--rounds", type=int, help="clean rounds wanted per case (default 5; 1 with --quick)")
    parser.add_argument("--attempts", type=int, help="rounds tried at most per case (default: 3 times --rounds)")
    parser.add_argument("--batches", type=numbers, help="sequences per step (default 2,4; 2 with --quick)")
    parser.add_argument("--parts", type=parts, help="of the layers to freeze (default 0.5,0.75; 0.5 with --quick)")
    parser.add_argument("--slices", type=slices, help="of our columns (default 1,4, auto is one; 4 with --quick)")
    parser.add_argument("--layers", type=int, help="of the model (default 8; 4 with --quick)")
    parser.add_argument("--hidden", type=int, help="its width (default 512; 64 with --quick)")
    parser.add_argument("--vocabulary", type=int, help="its tokens (default 1024; 128 with --quick)")
    parser.add_argument("--columns", type=lambda text: text.split(","), help="names among the table's (default all)")
    parser.add_argument(
        "--steps", type=int, default=2, help="steps of a column in a round, the fastest counts (default 2)"
    )
    parser.add_argument(
        "--transitions", type=int, help="clean runs wanted of transitions (default 3, 1 with --quick; 0: none)"
    )
    parser.add_argument(
        "--reshapes", type=int, default=50, help="of one run, whose footprint is looked at (default 50; 0: none)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument("--log", metavar="FILE", default=os.devnull, help="the workers' own output (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a worker (default 600)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the benchmark work?")
    options = parser.parse_args(arguments)
    usual = {"rounds": 5, "batches": [2, 4], "parts": [0.5, 0.75], "slices": [1, 4], "transitions": 3}
    quick = {"rounds": 1, "batches": [2], "parts": [0.5], "slices": [4], "transitions": 1}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.attempts = options.attempts or (1 if options.quick else 3) * max(options.rounds, 1)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 when a column failed or trained something else than the others."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    say = logging.getLogger(__name__).info
    shape = QUICK if options.quick else gpt.Shape()
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "vocabulary") if getattr(options, name)}
    shape = replace(shape, **sizes)
    settings = Settings(options.rounds, options.attempts, options.steps, 16, options.timeout, options.log)
    if options.quick:
        settings = replace(settings, probe_repeats=2, patience=0)
    results: dict[Case, Result] = {}
    sections: dict[str, list[str]] = {}
    data: dict[str, object] = {}
    chosen = cases(shape, options.batches, options.parts)
    try:
        for case in chosen if options.rounds else []:
            say(f"{case.title} frozen: starting")
            columns = [*of_ours(case.frozen, options.slices), *of_deepspeed(shape, case.frozen)]
            columns = [column for column in columns if options.columns is None or column.name in options.columns]
            results[case] = measure(columns, Workload(shape, case.sequences), settings, say)
        sections["Seconds per step (share of our fastest unfrozen step)"] = table(results)
        sections["Targets"] = target_lines(results)
        few = replace(settings, rounds=options.transitions, attempts=3 * options.transitions)
        few = replace(few, attempts=few.rounds) if options.quick else few
        for case in chosen[: len(options.batches)] if options.transitions else []:
            for slices in options.slices:
                runs = time_transitions(shape, case, slices, few, say)
                sections.setdefault("Transitions", []).extend(transition_lines(case, slices, runs))
                data[f"transitions {case.title}, {slices}"] = [
                    {"clean": clean, "transitions": [asdict(one) for one in found]} for clean, found in runs
                ]
        if options.reshapes:
            found = footprints(Workload(shape, chosen[0].sequences), chosen[0].frozen, options.reshapes, settings)
            sections["Footprint"] = growth_lines(found, options.reshapes)
    except (WrongResult, WorkerError) as error:
        print(f"wrong result: {error}")
        return 1
    for title, lines in sections.items():
        print("\n".join(["", title, *(lines or ["not measured"])]))
    if options.json:
        write_json(options.json, shape, results, sections, data)
    return int(any(result.failures for result in results.values()))


def write_json(
    path: str,
    shape: gpt.Shape,
    results: Mapping[Case, Result],
    sections: Mapping[str, Sequence[str]],
    data: Mapping[str, object],
) -> None:
    """Everything measured, every round and probe included."""
    whole = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
        "shape": asdict(shape),
        "cases": {case.title: asdict(result) for case, result in results.items()},
        **data,
        "lines": {title: list(lines) for title, lines in sections.items()},
    }
    plain = json.loads(json.dumps(whole), parse_constant=lambda _: None)  # JSON knows no infinity
    with open(path, "w") as file:
        json.dump(plain, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())

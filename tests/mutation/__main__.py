"""Which mechanical changes to the package the tests notice.

    python -m tests.mutation map --out map.json              # once: which test files run which lines, and how long they take
    python -m tests.mutation run --map map.json --out killed.json --pure 200 --engine 100 --seed 0

``run`` draws mutants by seed from lines that some test runs. For each it runs the test files that come to its line, the
quickest first, until one fails. It lists what survives, and apart from that what ran into a time limit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.runs import ROOT, run_tests

PURE = ("schedule", "plan", "tracing", "elastic.policies", "elastic.shapes", "elastic.sampler", "elastic.settings", "config",
        "optim.lamb", "optim.schedules", "pipeline.slicing", "clipping")  # fmt: skip
ENGINE = ("pipeline", "elastic", "hf", "optim", "megatron")
SELECTED = "not full"
_SLACK_S = 90.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    mapping = commands.add_parser("map", help="which test files run which lines")
    mapping.add_argument("--out", type=Path, required=True)
    mapping.add_argument("--each", nargs="*", default=[], metavar="FILE", help="files whose tests are run one by one")
    mapping.add_argument("--jobs", type=int, default=2)
    mapping.add_argument("files", nargs="*", help="test files; default all")
    mapping.set_defaults(action=_map)
    running = commands.add_parser("run", help="draw mutants and run the tests that come to them")
    running.add_argument("--map", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--mutants", type=Path, help="a result whose mutants are taken, in place of a draw")
    running.add_argument("--pure", type=int, default=200)
    running.add_argument("--engine", type=int, default=100)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--most-s", type=float, default=240.0, help="seconds of tests for a mutant")
    running.set_defaults(action=_run)
    options = parser.parse_args(argv)
    options.action(options)
    return 0


def _map(options: Any) -> None:
    units = []
    for file in options.files or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")):
        units += _tests_in(file) if file in options.each else [file]
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    written = threading.Lock()

    def look(unit: str) -> None:
        about = _lines_of(unit)
        with written:
            found[unit] = about
            options.out.write_text(json.dumps(found))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(look, [unit for unit in units if unit not in found]))


def _lines_of(unit: str) -> dict[str, Any]:
    """The lines that tests run, in all their processes."""
    with tempfile.NamedTemporaryFile() as lines:
        begin = time.monotonic()
        code, text = run_tests(["-m", SELECTED, unit], {"MUTANT_LINES": lines.name}, 1800.0)
        seconds = time.monotonic() - begin
        seen = sorted(set(Path(lines.name).read_text().split()))
    print(f"{unit}: {seconds:.0f} s, {len(seen)} lines, exit {code}", flush=True)
    if code == 1:
        print(text[-2000:])
    return {"seconds": seconds, "code": code, "lines": seen}


def _tests_in(file: str) -> list[str]:
    code, text = run_tests(["-m", SELECTED, file, "--collect-only"], {}, 300.0)
    assert code == 0, text
    return [line for line in text.splitlines() if line.startswith(file + "::")]


def draw(known: dict[str, Any], pure: int, engine: int, seed: int) -> list[tuple[str, Mutant]]:
    """Mutants of lines that some test runs, by module and number; always the same for a seed."""
    lines = {line for unit in known.values() for line in unit["lines"]}
    pools: dict[str, list[tuple[str, Mutant]]] = {"pure": [], "engine": []}
    for path in sorted((ROOT / "ds_terapipe").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        inner = name.partition(".")[2]
        kind = "pure" if inner.startswith(PURE) else "engine" if inner.startswith(ENGINE) else None
        if kind is not None:
            pools[kind] += [(name, m) for m in mutants_of(path.read_text()) if f"{name}:{m.line}" in lines]
    drawn = random.Random(seed)
    return drawn.sample(pools["pure"], pure) + drawn.sample(pools["engine"], engine)


def _run(options: Any) -> None:
    known = {unit: about for unit, about in json.loads(options.map.read_text()).items() if about["code"] == 0}
    if options.mutants:
        chosen = [(row["module"], _again(row), row["by"]) for row in json.loads(options.mutants.read_text())]
    else:
        chosen = [(*each, "") for each in draw(known, options.pure, options.engine, options.seed)]
    known = {unit: about for unit, about in known.items() if (ROOT / unit.partition("::")[0]).exists()}
    begin = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda each: _judge(*each, known, options.most_s), chosen))
    options.out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        if row["fate"] != "killed":
            print(f"{row['fate']}: {row['module']}:{row['line']} {row['kind']}: {row['was']} -> {row['becomes']}")
    print(f"{dict(Counter(row['fate'] for row in rows))} in {time.monotonic() - begin:.0f} s")


def _again(row: dict[str, Any]) -> Mutant:
    """The same change in the module as it is now."""
    path = ROOT.joinpath(*row["module"].split(".")).with_suffix(".py")
    same = [
        m
        for m in mutants_of(path.read_text())
        if (m.kind, m.was, m.becomes) == (row["kind"], row["was"], row["becomes"])
    ]
    return min(same, key=lambda mutant: abs(mutant.line - row["line"]))


def _judge(module: str, mutant: Mutant, first: str, known: dict[str, Any], most_s: float) -> dict[str, Any]:
    here = f"{module}:{mutant.line}"
    units = [(about["seconds"], unit) for unit, about in known.items() if here in about["lines"]]
    units.sort(key=lambda each: (each[1] != first, *each))  # what killed it before comes first
    fate, by, spent, runs = "survived", "", 0.0, 0
    for seconds, unit in units:
        if runs and spent + seconds > most_s:
            break
        begin = time.monotonic()
        code, _ = run_tests(["-m", SELECTED, unit], {"MUTANT": f"{module}:{mutant.index}"}, 3 * seconds + _SLACK_S)
        spent, runs = spent + time.monotonic() - begin, runs + 1
        if code != 0:
            fate, by = ("timeout" if code is None else "killed"), unit
            break
    row = {
        "module": module,
        **vars(mutant),
        "fate": fate,
        "by": by,
        "units": len(units),
        "runs": runs,
        "seconds": round(spent, 1),
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())

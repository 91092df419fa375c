"""Which mechanical changes to the package the tests notice.

    python -m tests.mutation map --out map.json              # once: which test files run which lines, and how long they take
    python -m tests.mutation run --map map.json --out killed.json
    python -m tests.mutation run --map map.json --out again.json --mutants killed.json  # the same ones

``run`` draws mutants by seed from lines that some test runs. For each it runs the test files that come to its line, the
quickest first, until one fails. It lists what survives, and apart from that what ran into a time limit.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.runs import ROOT, run_tests

PURE = ("schedule", "plan", "tracing", "elastic.policies", "elastic.shapes", "elastic.sampler", "elastic.settings", "config",
        "blocks", "rules", "optim.lamb", "optim.schedules", "pipeline.slicing", "clipping")  # fmt: skip
ENGINE = ("pipeline", "elastic", "hf", "optim", "megatron")
DRAWN_PURE, DRAWN_ENGINE = 200, 100
SELECTED, JOBS = "not full", 2
SLACK_S, MOST_S = 90.0, 240.0  # of a test file beyond three times its seconds; of all tests for a mutant


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="tests.mutation", description=__doc__, formatter_class=formatter)
    parser.add_argument("command", choices=("map", "run"))
    parser.add_argument("--out", type=Path, required=True, help="the result; a map that is there is gone on with")
    parser.add_argument("--map", type=Path, help="run: what map has written")
    parser.add_argument("--mutants", type=Path, help="run: a result whose mutants are taken, in place of a draw")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    (_map if options.command == "map" else _run)(options)


def _map(options: Any) -> None:
    """Find the lines that the tests of each file run, in all their processes."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    written = threading.Lock()

    def look(file: str) -> None:
        begin = time.monotonic()
        with tempfile.NamedTemporaryFile() as lines:
            code, text = run_tests(["-m", SELECTED, file], {"MUTANT_LINES": lines.name}, 1800.0)
            seen = sorted(set(Path(lines.name).read_text().split()))
        seconds = time.monotonic() - begin
        print(f"{file}: {seconds:.0f} s, {len(seen)} lines, exit {code}", *[text[-2000:]] * (code == 1), flush=True)
        with written:
            found[file] = {"seconds": seconds, "code": code, "lines": seen}
            options.out.write_text(json.dumps(found))

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(look, [file for file in files if file not in found]))


def draw(known: dict[str, Any], seed: int) -> list[tuple[str, Mutant, str]]:
    """Mutants of lines that some test runs, by module; always the same for a seed. No test is known to kill them."""
    lines = {line for unit in known.values() for line in unit["lines"]}
    pools: dict[str, list[tuple[str, Mutant]]] = {"pure": [], "engine": []}
    for path in sorted((ROOT / "ds_terapipe").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        inner = name.partition(".")[2]
        kind = "pure" if inner.startswith(PURE) else "engine" if inner.startswith(ENGINE) else None
        if kind is not None:
            pools[kind] += [(name, m) for m in mutants_of(path.read_text()) if f"{name}:{m.line}" in lines]
    drawn = random.Random(seed)
    chosen = drawn.sample(pools["pure"], DRAWN_PURE) + drawn.sample(pools["engine"], DRAWN_ENGINE)
    return [(*each, "") for each in chosen]


def again(rows: Sequence[dict[str, Any]]) -> list[tuple[str, Mutant, str]]:
    """The same changes in the modules as they are now, and the tests that killed them."""
    found = []
    for row in rows:
        path = ROOT.joinpath(*row["module"].split(".")).with_suffix(".py")
        change = [row[name] for name in ("kind", "was", "becomes")]
        same = [one for one in mutants_of(path.read_text()) if [one.kind, one.was, one.becomes] == change]
        found.append((row["module"], min(same, key=lambda one: abs(one.line - row["line"])), row["by"]))
    return found


def _run(options: Any) -> None:
    known = json.loads(options.map.read_text())
    known = {unit: about for unit, about in known.items() if about["code"] == 0 and (ROOT / unit).exists()}
    taken = json.loads(options.mutants.read_text()) if options.mutants else None
    chosen = again(taken) if taken else draw(known, options.seed)
    begin = time.monotonic()
    with ThreadPoolExecutor(JOBS) as pool:
        rows = list(pool.map(lambda each: _judge(*each, known), chosen))
    options.out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        if row["fate"] != "killed":
            print(f"{row['fate']}: {row['module']}:{row['line']} {row['kind']}: {row['was']} -> {row['becomes']}")
    print(f"{dict(Counter(row['fate'] for row in rows))} in {time.monotonic() - begin:.0f} s")


def _judge(module: str, mutant: Mutant, first: str, known: dict[str, Any]) -> dict[str, Any]:
    here = f"{module}:{mutant.line}"
    units = [(about["seconds"], unit) for unit, about in known.items() if here in about["lines"]]
    units.sort(key=lambda each: (each[1] != first, *each))  # the test that killed it before comes first
    row = {"module": module, **vars(mutant), "fate": "survived", "by": "", "units": len(units), "runs": 0, "seconds": 0}
    for seconds, unit in units:
        if row["runs"] and row["seconds"] + seconds > MOST_S:
            break
        begin = time.monotonic()
        code, _ = run_tests(["-m", SELECTED, unit], {"MUTANT": f"{module}:{mutant.index}"}, 3 * seconds + SLACK_S)
        row |= {"runs": row["runs"] + 1, "seconds": round(row["seconds"] + time.monotonic() - begin, 1)}
        if code != 0:
            row |= {"fate": "timeout" if code is None else "killed", "by": unit}
            break
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()

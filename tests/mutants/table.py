"""What each check made of each mutant, as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tests.mutants.harness import CAUGHT, checks, mutants

NEUTRAL = "(neutral)"


def mutant_table(found: Iterable[tuple[str, str, float]]) -> list[str]:
    """A row for each mutant that ran, a column for each check; ``found`` has mutant, check and the factor over the tolerance.

    Columns are numbered and named below: names of tests are long.
    """
    factors = {(mutant, check): factor for mutant, check, factor in found}
    columns = [check for check in checks() if any(check == ran for _, ran in factors)]
    rows = [row for row in (NEUTRAL, *mutants()) if any(row == ran for ran, _ in factors)]
    width = max(map(len, rows), default=0)
    lines = [" " * width + "".join(f"{f'[{n}]':>9}" for n in range(1, len(columns) + 1))]
    lines += [f"{row:<{width}}" + "".join(f"{_cell(row, check, factors):>9}" for check in columns) for row in rows]
    lines += [f"[{n}] {check}" for n, check in enumerate(columns, start=1)]
    return [*lines, "-: not about it, ...: not run, X: missed"]


def _cell(row: str, check: str, factors: dict[tuple[str, str], float]) -> str:
    factor = factors.get((row, check))
    if factor is None:
        return "..." if row == NEUTRAL or row in checks()[check].catches else "-"
    missed = factor > 1.0 if row == NEUTRAL else factor <= CAUGHT
    figure = "fails" if math.isinf(factor) else f"{factor:.2g}" if row == NEUTRAL else f"{factor:.1e}"
    return f"{figure} X" if missed else figure

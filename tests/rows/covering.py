"""Covering arrays: few rows in which every pair of values of two factors occurs (pairwise testing)."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

_TRIES = 12  # rows that are made before the best one is kept
_MOST = 200  # tries after which a pair counts as impossible

Choice = tuple[str, Any]


class Rule:
    """A combination of values that there can be: ``holds`` of the values of ``factors``, or of those that it names."""

    def __init__(self, holds: Callable[..., bool], *factors: str) -> None:
        self.holds, self.factors = holds, factors or tuple(signature(holds).parameters)


def covering(factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule], seed: int = 0) -> list[dict[str, Any]]:
    """Make rows that cover all pairs of values that the rules allow; the same rows for the same arguments.

    Greedy, after Cohen et al., "The AETG system" (IEEE TSE 23(7), 1997). The seed is of the order in which values are tried.
    """
    drawn = random.Random(seed)
    wanted = {frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(factors, 2) for x in factors[a] for y in factors[b]}
    order = sorted(wanted, key=lambda pair: sorted(map(repr, pair)))
    rows: list[dict[str, Any]] = []
    for pair in order:
        if pair not in wanted:
            continue
        found: list[dict[str, Any]] = []
        for tried in range(_MOST):
            row = _row(factors, rules, pair, wanted, drawn)
            found += [row] if row is not None else []
            if found and tried >= _TRIES:
                break
        if found:
            best = max(found, key=lambda row: len(wanted & _pairs(row)))
            rows.append({name: best[name] for name in factors})
            wanted -= _pairs(best)
    return rows


def _row(
    factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule], pair: frozenset[Choice], wanted: set[frozenset[Choice]],
    drawn: random.Random,
) -> dict[str, Any] | None:  # fmt: skip
    """Complete a pair by the values that add most wanted pairs, in a random order; None where that meets no allowed value."""
    row: dict[str, Any] = dict(pair)
    if not _allowed(row, rules):
        return None
    rest = [name for name in factors if name not in row]
    drawn.shuffle(rest)
    for name in rest:
        values = [value for value in factors[name] if _allowed({**row, name: value}, rules)]
        if not values:
            return None
        row[name] = max(
            values, key=lambda value: (sum(frozenset({(name, value), c}) in wanted for c in row.items()), drawn.random())
        )
    return row


def _allowed(row: Mapping[str, Any], rules: Sequence[Rule]) -> bool:
    return all(rule.holds(*(row[n] for n in rule.factors)) for rule in rules if all(n in row for n in rule.factors))


def _pairs(row: Mapping[str, Any]) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}

"""Defects that tests must find: a test that no defect makes fail proves nothing.

A :class:`Mutant` breaks one place of the package in the processes of a test, and counts what it broke. A :class:`Check` is a
test's own measure, apart from its assertion: how far a result is from what it must be, in tolerances. A mutant is caught when
that is above :data:`CAUGHT`; an exception or a process that hangs catches nothing. :mod:`tests.test_mutants` runs them.

Any module of this package that has ``MUTANTS`` and ``CHECKS``, tuples of these, takes part.
"""

from tests.mutants.harness import (
    CAUGHT,
    Check,
    Hit,
    Mutant,
    NeverRan,
    applied,
    checks,
    installed,
    mutants,
    neutral,
    verify_hits,
)

__all__ = [
    "CAUGHT",
    "Check",
    "Hit",
    "Mutant",
    "NeverRan",
    "applied",
    "checks",
    "installed",
    "mutants",
    "neutral",
    "verify_hits",
]

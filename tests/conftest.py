"""Settings of all tests."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

from tests.mutants.table import mutant_table

# Two cores may be shared with anything: how long an example takes to run or to make says nothing.
settings.register_profile("ds_terapipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ds_terapipe")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what each check made of each mutant, see test_mutants.py."""
    found = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "mutant"
    ]
    if not found:
        return
    terminalreporter.section("mutants: how far off in tolerances")
    for line in mutant_table(found):
        terminalreporter.write_line(line)

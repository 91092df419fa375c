"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Two cores may be shared with anything: how long an example takes to run or to make says nothing.
settings.register_profile("ds_terapipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ds_terapipe")

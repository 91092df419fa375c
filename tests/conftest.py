"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Two cores may be shared with anything: how long one example takes says nothing.
settings.register_profile("ds_terapipe", deadline=None)
settings.load_profile("ds_terapipe")

"""Schedules for property tests: up to 8 stages, 8 micro-batches, 8 slices each, even and uneven."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_terapipe.schedule import NAMES

stages = st.integers(1, 8)
names = st.sampled_from(NAMES)
even_slices = st.builds(lambda count, each: [each] * count, st.integers(1, 8), st.integers(1, 8))
uneven_slices = st.lists(st.integers(1, 8), min_size=1, max_size=8)
slices = even_slices | uneven_slices

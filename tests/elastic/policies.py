"""Policies for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ds_terapipe.elastic.policies import freeze


@contextlib.contextmanager
def registered(name: str, cls: type[freeze.FreezePolicy]) -> Iterator[None]:
    freeze.register_policy(name, cls)
    try:
        yield
    finally:
        del freeze._POLICIES[name]

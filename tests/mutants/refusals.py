"""What tests/mutants/hugging_face.py takes from here."""

from __future__ import annotations

from typing import Any

from ds_terapipe.errors import ConfigError
from tests.mutants.harness import Hit


def _lets_pass(original: Any, hit: Hit) -> Any:
    def check(*args: Any) -> None:
        try:
            original(*args)
        except ConfigError:
            hit()

    return check

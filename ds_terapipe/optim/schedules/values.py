"""Checks of the values in ``scheduler.params``, and the errors that name their keys. Imports the standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ds_terapipe.errors import LARGEST_COUNT, ConfigError, bad_value, is_finite, nearest

PATH = "scheduler.params"
DECAYS = ("peak", "start")


def known_keys(path: str, params: object, known: tuple[str, ...], required: tuple[str, ...]) -> Mapping[str, Any]:
    """``params`` as a block whose keys are known and whose required ones are there.

    Raises:
        ConfigError: naming the key that is not known, or missing.
    """
    if not isinstance(params, Mapping):
        raise bad_value(path, params, f"a block with {', '.join(required)}", "{...}")
    for key in params:
        if key not in known:
            near = nearest(str(key), known)
            raise ConfigError(f"{path}.{key}: unknown key, must be one of {', '.join(known)}, use {near or known[0]}")
    for key in required:
        if key not in params:
            others = ", ".join(name for name in required if name != key)
            rule = f"there beside {others}" if others else "there"
            raise ConfigError(f"{path}.{key}: missing, must be {rule}, use e.g. {_EXAMPLES[key]}")
    return params


_EXAMPLES: Mapping[str, object] = {
    "reference_lr": 6.25e-4, "reference_batch_size": 512, "total_steps": 15625, "warmup_ratio": 0.1,
    "steps": 7038, "batch_size": 65536, "seq_length": 128, "lr": 6e-3, "phases": '[{"steps": 7038, ...}, ...]',
}  # fmt: skip


def count(path: str, value: object, least: int = 1) -> int:
    """An integer from ``least`` to ``LARGEST_COUNT``; 7038.0 counts as one.

    Raises:
        ConfigError: naming ``path``.
    """
    whole = is_finite(value) and float(value).is_integer()  # type: ignore[arg-type]
    if not whole or not least <= value <= LARGEST_COUNT:  # type: ignore[operator]
        rule = f"a whole number of at least {least} and at most {LARGEST_COUNT}"
        raise bad_value(path, value, rule, f"e.g. {max(least, 100)}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def number(path: str, value: object, *, above: float | None = None, most: float = math.inf) -> float:
    """A finite number, above ``above`` or at least 0, and at most ``most``.

    Raises:
        ConfigError: naming ``path``.
    """
    low = is_finite(value) and (value > above if above is not None else value >= 0)  # type: ignore[operator]
    if not low or value > most:  # type: ignore[operator]
        bound = f"a number above {above:g}" if above is not None else "a number of at least 0"
        upper = f" and at most {most:g}" if most < math.inf else ""
        raise bad_value(path, value, bound + upper, "e.g. 0.1" if most <= 1 else "e.g. 1e-3")
    return float(value)  # type: ignore[arg-type]


def decay_settings(path: str, params: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """The keys ``end_lr``, ``power``, ``decay_from`` of a block, checked, with their defaults."""
    decay_from = params.get("decay_from", "peak")
    if decay_from not in DECAYS:
        raise bad_value(f"{path}.decay_from", decay_from, f"one of {', '.join(DECAYS)}", '"peak"')
    return {
        "end_lr": number(f"{path}.end_lr", params.get("end_lr", 0.0), most=peak),
        "power": number(f"{path}.power", params.get("power", 1.0), above=0.0),
        "decay_from": decay_from,
    }


def warmup_setting(path: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The one key of ``warmup_ratio`` and ``warmup_steps`` in a block, with its value checked.

    Raises:
        ConfigError: for none or both, or a wrong value.
    """
    given = [key for key in ("warmup_ratio", "warmup_steps") if key in params]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        raise ConfigError(
            f"{path}: got {got}, must have one of warmup_ratio and warmup_steps, use e.g. warmup_ratio 0.1 or warmup_steps 0"
        )
    (key,) = given
    path = f"{path}.{key}"
    return {key: number(path, params[key], most=1.0) if key == "warmup_ratio" else count(path, params[key], least=0)}

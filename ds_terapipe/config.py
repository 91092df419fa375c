"""The keys of ``ds_config.json`` that this package reads, checked value by value.

The models stand on DeepSpeed's ``DeepSpeedConfigModel``, which is built with ``strict=True`` here: otherwise it drops
every key whose value is the string ``"auto"`` before it is looked at.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import Field, ValidationError, field_validator

from .errors import LARGEST_COUNT, ConfigError, bad_value, is_finite, nearest, shown
from .schedule import NAMES

TOKEN_PIPELINE = "token_pipeline"
AUTO = "auto"
SLICES_RULE = 'a positive number, a list of lengths or "auto"'
LARGEST_GB = 10**9  # 1e18 bytes fit 64 bits
LARGEST_64 = 2**63 - 1
YEAR_S = 31536000  # in some 300 years a process group counts over, and its operations end at once
_GONE = {"pack_weights": "weights are no longer packed"}

Layout = Literal["auto", "bsh", "sbh"]
WeightGradients = Literal["auto", "micro_batch", "slice"]
Dimensions = int | list[int] | None


class Block(DeepSpeedConfigModel):
    """An immutable block of keys.

    Raises:
        ConfigError: an unknown key or a value that breaks its rule; only the first is reported.
    """

    PATH: ClassVar[str]
    """Path of the block, the prefix of its keys in errors."""

    def __init__(self, strict: bool = True, **data: Any) -> None:
        try:
            super().__init__(strict=strict, **data)
        except ValidationError as error:
            raise first_error(error, self.PATH, type(self)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            # an engine has long been built from it: a value that changes here would change nothing there
            use = self.use_instead(name)
            raise ConfigError(f"{self.PATH}.{name}: got an assignment, must stay as it was read, use {use}")
        super().__setattr__(name, value)

    @classmethod
    def use_instead(cls, name: str) -> str:
        """The remedy that an error names for an assignment to a key."""
        return "another configuration for a new engine"


class TokenPipelineConfig(Block):
    """The block ``token_pipeline``."""

    PATH: ClassVar[str] = TOKEN_PIPELINE

    enabled: bool = True
    """Whether the block counts at all; ``false`` is the same as leaving it out."""

    slices: int | list[int] | Literal["auto"] = "auto"
    """Number of equal slices (a remainder is spread), the length in tokens of every slice, or chosen from measurements."""

    schedule: str = "auto"
    """Order of the work: every slice forward and then backward in reverse, or one forward, one backward.

    ``auto`` is chosen with the slices where they are ``auto``, and else ``1f1b``.
    """

    granularity: int = 8
    """Unequal automatic slices are multiples of so many tokens, and no automatic slice is shorter."""

    memory_gb: float | None = None
    """Limit of activations and buffers on a device, in 1e9 bytes; default: the free memory, no limit on a CPU."""

    plan_path: str | None = None
    """A plan to run by, as ``ds_terapipe plan`` or a run has written it."""

    measurements_path: str | None = None
    """File of measurements, written, and read if made on the same system; none by default."""

    layout: Layout = "auto"
    """Position of the sequence in tensors between layers: [b, s, h], [s, b, h], or found by comparing shapes."""

    cut: dict[str, list[Dimensions] | None] | None = Field(default=None)
    """Per tensor of the inputs and the labels, the dimension or dimensions to cut, or null to keep it whole.

    Both keys, ``inputs`` and ``labels``, are there after validation; None means that the general rule holds.
    """

    verify: bool = True
    """Whether the first batch is run whole and sliced, and compared module by module, before the first step."""

    weight_gradients: WeightGradients = "auto"
    """Weight gradients of linear layers and embeddings: made once per micro-batch (faster), or per slice (less memory).

    ``auto`` is ``slice`` with activation checkpointing or ``torch_autocast``, else ``micro_batch``.
    """

    timeout_s: float = 600.0
    """Seconds that a stage waits for another before the run ends with a report."""

    trace_path: str | None = None
    """File for a Chrome trace of some steps, all ranks in it; none by default."""

    trace_steps: list[int] | None = None
    """First and last step of the trace, counted from 1 as in the log; by default the third to the fifth of the run."""

    @classmethod
    def use_instead(cls, name: str) -> str:
        return "engine.set_slices(...)" if name in ("slices", "schedule") else super().use_instead(name)

    @field_validator("enabled", "verify", mode="before")
    @classmethod
    def _check_switch(cls, value: object, info: Any) -> bool:
        return switch(_path(info.field_name), value, cls.model_fields[info.field_name].default)

    @field_validator("slices", mode="before")
    @classmethod
    def _check_slices(cls, value: object) -> int | list[int] | str:
        key = _path("slices")
        if value == AUTO:
            return AUTO
        if isinstance(value, (list, tuple)):
            if not value or not all(is_count(length) for length in value):
                raise bad_value(key, value, f"{SLICES_RULE}, each a positive integer", "e.g. [256, 128, 128]")
            return [int(length) for length in value]
        if not is_count(value):
            raise bad_value(
                key, value, SLICES_RULE, shown(AUTO) if isinstance(value, str) and nearest(value, (AUTO,)) else "e.g. 8"
            )
        return int(value)  # type: ignore[call-overload, no-any-return]

    @field_validator("schedule", mode="before")
    @classmethod
    def _check_schedule(cls, value: object) -> str:
        return one_of(_path("schedule"), value, (AUTO, *NAMES), AUTO)

    @field_validator("layout", mode="before")
    @classmethod
    def _check_layout(cls, value: object) -> str:
        return one_of(_path("layout"), value, get_args(Layout), "auto")

    @field_validator("weight_gradients", mode="before")
    @classmethod
    def _check_weight_gradients(cls, value: object) -> str:
        return one_of(_path("weight_gradients"), value, get_args(WeightGradients), "auto")

    @field_validator("cut", mode="before")
    @classmethod
    def _check_cut(cls, value: object) -> dict[str, list[Dimensions] | None] | None:
        key = _path("cut")
        if value is None:
            return None
        if not isinstance(value, Mapping) or not value:
            raise bad_value(key, value, "a block with inputs, labels or both", 'e.g. {"inputs": [1, null]}')
        for name in value:
            if name not in ("inputs", "labels"):
                raise unknown_key(key, name, ("inputs", "labels"))
        return {name: _cut_list(f"{key}.{name}", value.get(name)) for name in ("inputs", "labels")}

    @field_validator("timeout_s", mode="before")
    @classmethod
    def _check_timeout(cls, value: object) -> float:
        rule = f"a positive number of seconds, at most a year ({YEAR_S})"
        return positive(_path("timeout_s"), value, rule, "e.g. 600", most=YEAR_S)

    @field_validator("trace_path", "plan_path", "measurements_path", mode="before")
    @classmethod
    def _check_path(cls, value: object, info: Any) -> str | None:
        example = info.field_name.replace("_path", ".json")
        return name_of(_path(info.field_name), value, "the name of a file", example)

    @field_validator("granularity", mode="before")
    @classmethod
    def _check_granularity(cls, value: object) -> int:
        return count(_path("granularity"), value, "a positive number of tokens", "e.g. 8")

    @field_validator("memory_gb", mode="before")
    @classmethod
    def _check_memory(cls, value: object) -> float | None:
        return gigabytes(_path("memory_gb"), value, "e.g. 16")

    @field_validator("trace_steps", mode="before")
    @classmethod
    def _check_trace_steps(cls, value: object) -> list[int] | None:
        if value is None:
            return None
        pair = list(value) if isinstance(value, (list, tuple)) else []
        if len(pair) != 2 or not all(map(is_count, pair)) or pair[0] > pair[1]:
            raise bad_value(_path("trace_steps"), value, "the first and the last step, counted from 1", "e.g. [3, 5]")
        return [int(step) for step in pair]


def parse(config: Mapping[str, Any]) -> TokenPipelineConfig | None:
    """The block ``token_pipeline`` of a DeepSpeed configuration.

    Args:
        config: the whole configuration, as DeepSpeed reads it from the file.

    Returns:
        The checked block, or None where it is absent or has ``"enabled": false``.

    Raises:
        ConfigError: the block is not one, has an unknown key, or a value that breaks its rule.
    """
    if TOKEN_PIPELINE not in config:
        return None
    block = config[TOKEN_PIPELINE]
    if not isinstance(block, Mapping):
        raise bad_value(TOKEN_PIPELINE, block, "a block of keys", 'e.g. {"slices": 8}')
    if block.get("enabled") is False:
        return None
    for name in block:
        if name in _GONE:
            raise ConfigError(f"{_path(name)}: got {shown(block[name])}, must be absent ({_GONE[name]}), leave it out")
        if name not in TokenPipelineConfig.model_fields:
            raise unknown_key(TOKEN_PIPELINE, name, TokenPipelineConfig.model_fields)
    settings = TokenPipelineConfig(strict=True, **block)
    if settings.trace_steps is not None and settings.trace_path is None:
        rule = "absent without trace_path, the file for them"
        raise bad_value(_path("trace_steps"), settings.trace_steps, rule, 'e.g. "trace_path": "trace.json"')
    for name in ("plan_path", "measurements_path", "memory_gb", "granularity"):
        written = name in settings.model_fields_set and getattr(settings, name) is not None
        if settings.slices != AUTO and written:
            rule = 'absent beside slices that are given, it belongs to "slices": "auto"'
            raise bad_value(_path(name), getattr(settings, name), rule, "one of the two")
    return settings


def _path(name: str) -> str:
    return f"{TOKEN_PIPELINE}.{name}"


def switch(key: str, value: object, default: bool) -> bool:
    """``value`` where it is true or false, else an error with the default."""
    if not isinstance(value, bool):
        raise bad_value(key, value, "true or false", str(default).lower())
    return value


def positive(key: str, value: object, rule: str, use: str, most: float = math.inf) -> float:
    """``value`` as a finite number above 0 and at most ``most``, else an error."""
    if not is_finite(value) or not 0 < value <= most:  # type: ignore[operator]
        raise bad_value(key, value, rule, use)
    return float(value)  # type: ignore[arg-type]


def gigabytes(key: str, value: object, use: str) -> float | None:
    """``value`` as an amount of memory, or None; else an error."""
    if value is None:
        return None
    return positive(key, value, f"a positive number of 1e9 bytes{_bound(value, LARGEST_GB)}", use, most=LARGEST_GB)


def name_of(key: str, value: object, rule: str, example: str) -> str | None:
    """``value`` where it is the name of a file or folder, or None; else an error with the example."""
    if value is not None and not _names_a_file(value):
        raise bad_value(key, value, rule, shown(example))
    return value  # type: ignore[return-value]


def _names_a_file(value: object) -> bool:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        return False
    return True


def is_count(value: object, least: int = 1, most: int = LARGEST_COUNT) -> bool:
    """Whether a value is an integer from ``least`` to ``most``; bool is refused."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and least <= value <= most  # type: ignore[operator]


def count(key: str, value: object, rule: str, use: str, least: int = 1, most: int = LARGEST_COUNT) -> int:
    """``value`` as an integer from ``least`` to ``most``, else an error."""
    if not is_count(value, least, most):
        raise bad_value(key, value, rule + _bound(value, most), use)
    return int(value)  # type: ignore[call-overload, no-any-return]


def _bound(value: object, most: int) -> str:
    """The end of a rule that a value breaks by being too large."""
    return f", at most {most}" if isinstance(value, (int, float)) and value > most else ""


def one_of(key: str, value: object, names: Sequence[str], default: str) -> str:
    """``value`` where it is one of the names, else an error with the nearest of them, or with the default."""
    if value in names:
        return str(value)
    use = (nearest(value, names) if isinstance(value, str) else None) or default
    listed = " or ".join(shown(name) for name in names)
    raise bad_value(key, value, listed, shown(use))


def _cut_list(key: str, value: object) -> list[Dimensions] | None:
    rule = "a list with one entry per tensor: a dimension (1 or more, 0 is the batch), a list of them, or null"
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value:
        raise bad_value(key, value, rule, "e.g. [1, null]")
    entries: list[Dimensions] = []
    for entry in value:
        several = isinstance(entry, (list, tuple)) and bool(entry)
        dimensions = list(entry) if several else [entry]
        if entry is not None and (not all(map(is_count, dimensions)) or len(set(dimensions)) < len(dimensions)):
            raise bad_value(key, value, rule, "e.g. [1, [2, 3], null]")
        entries.append(None if entry is None else [int(d) for d in dimensions] if several else int(entry))
    return entries


def unknown_key(block: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a key that a block does not have."""
    near = nearest(str(name), known)
    use = shown(near) if near else "one of them"
    return ConfigError(f"{block}: unknown key {shown(name)}, must be one of {', '.join(known)}, use {use}")


def first_error(error: ValidationError, block: str, model: type[DeepSpeedConfigModel]) -> ConfigError:
    """The first thing that pydantic found wrong in a block, as one line."""
    errors = sorted(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    first = errors[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return unknown_key(block, name, model.model_fields)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    path = ".".join([block, *(str(part) for part in first["loc"])])
    return ConfigError(f"{path}: got {shown(first['input'])}, {first['msg']}")

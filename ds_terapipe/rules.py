"""Refusals of keys of ``ds_config.json`` beside others: rows of tables, and one function that looks at a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .errors import bad_value

_ABSENT = object()


class Rule(NamedTuple):
    """A key of the configuration and the values of it that are refused.

    Attributes:
        path: of the key, in nested blocks.
        refused: whether a value is; not asked where the key is absent.
        must: rule of the value, to follow "must be"; ``{beside}`` in it is the block that the user has written.
        use: replacement, to follow "use".
        when: whether the rule holds in a configuration.
    """

    path: str
    refused: Callable[[Any], bool]
    must: str
    use: str
    when: Callable[[Mapping[str, Any]], bool] = lambda config: True


def check(rules: Iterable[Rule], config: Mapping[str, Any], beside: str = "") -> None:
    """Raise for the first rule that a configuration breaks.

    Raises:
        ConfigError: naming the key, its value, the rule and the value to use.
    """
    for rule, value in broken(rules, config):
        raise bad_value(rule.path, value, rule.must.replace("{beside}", beside), rule.use)


def broken(rules: Iterable[Rule], config: Mapping[str, Any]) -> Iterator[tuple[Rule, Any]]:
    """The rules that a configuration breaks, each with the value of its key."""
    for rule in rules:
        value = at(config, rule.path, _ABSENT)
        if value is not _ABSENT and rule.refused(value) and rule.when(config):
            yield rule, value


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path of nested blocks, the default where a block or the key is missing."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name, default) if isinstance(value, Mapping) else default
    return value


def is_given(value: Any) -> bool:
    """Whether a value is there: null is the same as none."""
    return value is not None


def is_true(value: Any) -> bool:
    """Whether DeepSpeed takes a value as true."""
    return value is True or (isinstance(value, (int, float)) and value != 0)


def above(limit: int) -> Callable[[Any], bool]:
    """The test whether a value is a number above a limit."""
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value > limit


def offloads(value: Any) -> bool:
    """Whether a block ``offload_optimizer`` or ``offload_param`` asks for it: DeepSpeed's default is ``"device": "none"``."""
    return isinstance(value, Mapping) and value.get("device", "none") not in ("none", None)


def autocasts_to_fp16(value: Any) -> bool:
    """Whether the block ``torch_autocast`` asks for it."""
    if not isinstance(value, Mapping) or not is_true(value.get("enabled")):
        return False
    return str(value.get("dtype", "")).lower().removeprefix("torch.") in ("fp16", "float16", "half")

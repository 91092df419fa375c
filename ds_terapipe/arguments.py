"""Arguments of a call of ``deepspeed.initialize``: its configuration, wherever it stands, and all by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

IN_ARGS = ("deepscale_config", "deepspeed_config")  # names of a configuration in the argument ``args``

Initialize = Callable[..., tuple[Any, Any, Any, Any]]


def configuration_of(original: Initialize, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any] | None:
    """The configuration as DeepSpeed would read it, or None for one that DeepSpeed has to complain about."""
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        config = given.get("config") if given.get("config") is not None else given.get("config_params")
        for name in IN_ARGS:
            named = getattr(given.get("args"), name, None)
            if named is not None and config is not None:
                return None
            config = named if config is None else config
        if isinstance(config, str):
            # DeepSpeed's own reader: comments in the file, duplicate keys and base64 are its rules.
            from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

            config = load_ds_config(config)
    except Exception:
        return None
    return config if isinstance(config, Mapping) else None


@contextmanager
def replaced_configuration(given: dict[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
    """Put a configuration where a call has its own: in its arguments ``given``, or in the object ``args`` for so long."""
    named = next((name for name in ("config", "config_params") if given.get(name) is not None), None)
    if named is not None:
        given[named] = config
        yield
        return
    args = given["args"]
    name = next(each for each in IN_ARGS if getattr(args, each, None) is not None)
    own = getattr(args, name)
    setattr(args, name, config)
    try:
        yield
    finally:
        setattr(args, name, own)


def by_name(original: Initialize, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call by name, including another wrapper's ``**kwargs``."""
    signature = inspect.signature(original)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given

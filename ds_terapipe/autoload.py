"""The entry point that PyTorch runs at the end of ``import torch``. Standard library only; it cannot raise.

DeepSpeed may be imported after torch, or be the one that imports torch and so be half imported itself when this runs.
Both cases meet in one place: a class put over the module ``deepspeed``, whose property ``initialize`` hands out the
wrapped function when somebody first asks for it. ``from deepspeed import initialize`` asks the same way. The class goes
away after that.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from .names import KEYS, LOADING, QUEUES, TYPES
from .trainers import cover_plugin

SWITCH = "DS_TERAPIPE_AUTOLOAD"

logger = logging.getLogger(__name__)


def load() -> None:
    """Leave a hook on ``deepspeed.initialize``, whether DeepSpeed is imported already, just now or later.

    Does nothing with ``DS_TERAPIPE_AUTOLOAD=0``. Never raises, and can be called any number of times.
    """
    try:
        if is_off():
            return
        if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watch())
        _cover(sys.modules.get("deepspeed"))
        cover_plugin()
    except Exception:
        logger.debug("no hook on deepspeed.initialize", exc_info=True)


def is_off() -> bool:
    """Whether the environment turns the hook off."""
    return os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "no", "off")


class _Watch:
    """Finds no module; being asked for a submodule of DeepSpeed or accelerate, it knows that this is being imported."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith(("deepspeed.", "accelerate.")):
            try:
                _cover(sys.modules.get("deepspeed"))
                cover_plugin()
            except Exception:
                logger.debug("no hook on deepspeed.initialize", exc_info=True)


def _cover(module: ModuleType | None) -> None:
    if module is None or isinstance(getattr(type(module), "initialize", None), property):
        return
    if hasattr(vars(module).get("initialize"), "ds_terapipe_original"):
        return
    plain = type(module)
    if _is_asked_for():
        _prepare()

    def uncover(covered: ModuleType) -> None:
        covered.__class__ = plain
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]

    def read(covered: ModuleType) -> Any:
        if "initialize" not in vars(covered):
            raise AttributeError(f"module {covered.__name__!r} has no attribute 'initialize'")
        try:
            from .register import install

            install(covered)
        except Exception as reason:
            return guard(vars(covered)["initialize"], reason)
        uncover(covered)
        return vars(covered)["initialize"]

    def write(covered: ModuleType, value: Any) -> None:
        vars(covered)["initialize"] = value

    def delete(covered: ModuleType) -> None:
        del vars(covered)["initialize"]

    module.__class__ = type(plain.__name__, (plain,), {"initialize": property(read, write, delete)})


def _is_asked_for() -> bool:
    """Whether the command line has a configuration with our keys."""
    options = ("--deepspeed_config", "--deepscale_config")
    after = dict(zip(sys.argv, [*sys.argv[1:], ""], strict=False))
    given = [after.get(option) for option in options]
    given += [word.partition("=")[2] for word in sys.argv if word.partition("=")[0] in options]
    return any(_names_us(value) for value in given)


def _prepare() -> None:
    """Do what cannot wait for ``deepspeed.initialize``."""
    from .build_locks import say_waits

    say_waits()  # for compilations, which may precede it
    if os.environ.get(QUEUES) == "1":  # see refusals.check_hardware_queue; CUDA reads it as it starts
        os.environ.setdefault(LOADING, "EAGER")


def guard(original: Callable[..., Any], reason: Exception) -> Callable[..., Any]:
    """Run ``deepspeed.initialize`` after a failure of the hook; a configuration with our keys raises the reason.

    Raises:
        RuntimeError: (the returned function) the configuration has one of our keys.
    """

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if any(_names_us(value) for value in _configurations([*args, *kwargs.values()])):
            problem = f"{type(reason).__name__}: {reason}"
            raise RuntimeError(
                f"the configuration asks for ds_terapipe, which could not be loaded ({problem}), reinstall it or remove its keys"
            ) from reason
        return original(*args, **kwargs)

    return initialize


def _configurations(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield value
        yield getattr(value, "deepspeed_config", None)


def _names_us(config: Any) -> bool:
    if isinstance(config, dict):
        blocks = [(config.get(block), names) for block, names in TYPES.items()]
        return any(key in config for key in KEYS) or any(
            isinstance(block, dict) and block.get("type") in names for block, names in blocks
        )
    if isinstance(config, str) and os.path.isfile(config):
        with open(config, encoding="utf-8", errors="replace") as file:
            text = file.read()
        return any(f'"{name}"' in text for name in (*KEYS, *(name for names in TYPES.values() for name in names)))
    return False

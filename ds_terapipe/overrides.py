"""Methods of one DeepSpeed engine that are replaced on the object: other engines, and its class, stay as they are.

Attributes of any object are replaced for a while.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any


def override(engine: Any, name: str, function: Callable[..., Any]) -> None:
    """Have ``engine.name(*args)`` call ``function(engine, original, *args)``, where ``original`` is the method so far.

    The engine is held weakly: an attribute that held it would make it garbage that only the cycle collector frees.
    """
    before, here = vars(engine).get(name), weakref.ref(engine)

    def overriding(*args: Any, **kwargs: Any) -> Any:
        engine = here()
        if engine is None:
            raise ReferenceError(f"{name}: got a call after the engine was collected, must have the engine, keep it")
        original = before or MethodType(getattr(type(engine), name), engine)
        return function(engine, original, *args, **kwargs)

    functools.update_wrapper(overriding, getattr(type(engine), name))
    vars(overriding)["__signature__"] = inspect.signature(getattr(engine, name))  # a bound method's, without ``self``
    setattr(engine, name, overriding)


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Context manager in which an object, or a module of Python's, has these values as attributes of its own."""
    own = vars(holder)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)

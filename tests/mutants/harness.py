"""How a mutant gets into a process, what it counts there, and what a check must say of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

CAUGHT = 10.0
_NEUTRAL = "neutral: "
_SEPARATOR = "; "

Hit = Callable[[], None]


class NeverRan(AssertionError):
    """A mutant that changed nothing on any rank: what a test says of it is worth nothing."""


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
        name: what messages and tables call it.
        breaks: what is wrong with it in place, in one sentence.
        places: what is replaced, each as ``"package.module:attribute"`` or ``"package.module:Class.attribute"``. A function that
            another module imports by name is replaced where it is used, in that module.
        replacement: ``replacement(original, hit)`` returns what stands in for the original (a function; of a property its
            getter; a plain value for a plain value). It calls ``hit()`` whenever it really changes something.
        cheapest: name of the check that ``make test`` runs for it.
    """

    name: str
    breaks: str
    places: tuple[str, ...]
    replacement: Callable[[Any, Hit], Any]
    cheapest: str


@dataclass(frozen=True)
class Check:
    """A test's measure.

    Attributes:
        name: of the test, for messages and tables.
        measure: ``"package.module:function"``; ``function(mutant, *args)`` runs what the test runs, under the mutant of that
            name in all of its processes (None: under none), and returns how far off the result is in tolerances of the test (a
            float), or whether the claim holds (a bool) where it is one of yes or no.
        args: further arguments of it.
        catches: names of the mutants that it must catch.
        blind: the other mutants of its module, by name, with why it cannot see them.
    """

    name: str
    measure: str
    args: tuple[Any, ...] = ()
    catches: tuple[str, ...] = ()
    blind: Mapping[str, str] = field(default_factory=dict)

    def run(self, mutant: str | None) -> float:
        """How far off the result is under a mutant, in tolerances; of a claim of yes or no 0 where it holds, else infinity."""
        owner, name = _owner(self.measure)
        value = getattr(owner, name)(mutant, *self.args)
        if isinstance(value, bool):
            return 0.0 if value else math.inf
        if not math.isfinite(value):
            raise AssertionError(f"{self.name}: {value} under {mutant!r} is not a difference")
        return float(value)


def _modules() -> Iterator[Any]:
    import tests.mutants as package

    for found in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        if hasattr(module, "MUTANTS"):
            yield module


def _by_name(kind: str) -> dict[str, Any]:
    everything: dict[str, Any] = {}
    for module in _modules():
        for one in getattr(module, kind):
            assert one.name not in everything, f"two {kind.lower()} are called {one.name!r}"
            everything[one.name] = one
    return everything


@functools.cache
def mutants() -> dict[str, Mutant]:
    """All mutants by name."""
    return _by_name("MUTANTS")


@functools.cache
def checks() -> dict[str, Check]:
    """All checks by name."""
    return _by_name("CHECKS")


def neutral(names: Iterable[str]) -> str:
    """A name, too: of the patch that replaces what these mutants replace by something that does what was there."""
    return _NEUTRAL + _SEPARATOR.join(names)


def _members(name: str) -> tuple[list[Mutant], bool]:
    """The mutants that a name stands for, and whether they are to do no harm."""
    harmless = name.startswith(_NEUTRAL)
    names = name.removeprefix(_NEUTRAL).split(_SEPARATOR) if harmless else [name]
    return [mutants()[one] for one in names], harmless


@contextmanager
def installed(name: str | None) -> Iterator[Counter[str]]:
    """The mutant of this name is in place in this process; yields its hits, by name (of a neutral one, of all its members).

    None installs nothing. Whoever collects the hits of all processes hands them to :func:`verify_hits`.
    """
    hits: Counter[str] = Counter()
    with ExitStack() as stack:
        members, harmless = _members(name) if name is not None else ([], False)
        for mutant in members:
            hits[mutant.name] = 0
            for place in mutant.places:
                stack.enter_context(_replaced(mutant, place, harmless, hits))
        yield hits


@contextmanager
def applied(name: str | None) -> Iterator[Counter[str]]:
    """As :func:`installed`, for a test that has one process. Raises NeverRan in the end if nothing was hit."""
    with installed(name) as hits:
        yield hits
    verify_hits(name, [hits])


def verify_hits(name: str | None, hits: Iterable[Mapping[str, int]]) -> None:
    """Raise NeverRan if the mutant, or a member of a neutral one, hit nothing in any of these processes."""
    if name is None:
        return
    total: Counter[str] = Counter()
    for each in hits:
        total.update(each)
    silent = [mutant.name for mutant in _members(name)[0] if not total[mutant.name]]
    if silent:
        raise NeverRan(f"{name}: {', '.join(silent)} changed nothing on any rank")


def _owner(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


@contextmanager
def _replaced(mutant: Mutant, place: str, harmless: bool, hits: Counter[str]) -> Iterator[None]:
    owner, name = _owner(place)
    own = name in vars(owner)  # else it is inherited
    there = inspect.getattr_static(owner, name)
    original, wrap = _unwrapped(there)

    def hit() -> None:
        hits[mutant.name] += 1

    replacement = _passes_on(original, hit) if harmless else mutant.replacement(original, hit)
    setattr(owner, name, wrap(replacement))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, there)
        else:
            delattr(owner, name)


def _unwrapped(there: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What is replaced of an attribute, and how the replacement becomes one like it."""
    if isinstance(there, (staticmethod, classmethod)):
        return there.__func__, type(there)
    if isinstance(there, property):
        return there.fget, lambda getter: property(getter, there.fset, there.fdel)
    return there, lambda replacement: replacement


def _passes_on(original: Any, hit: Hit) -> Any:
    if not callable(original):
        hit()
        return original

    @functools.wraps(original)
    def same(*args: Any, **kwargs: Any) -> Any:
        hit()
        return original(*args, **kwargs)

    return same

"""Random numbers that a dataset or a collate function draws: they follow from a seed, on every rank alike.

Both ends of a pipeline read a sample, the inputs on one rank and the labels on another. So a mask or a crop must be the
same in both. Draws come from the process's generators, or from some that the dataset or the function holds itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.layer_range import held_by

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# the operating system's generator has no state
_ENDS = (str, bytes, int, float, type(None), type, ModuleType, Tensor, np.ndarray, nn.Module, random.SystemRandom)
_MOST = 256  # objects that are looked at, the nearest first
_FEW = 32  # entries of a list or dict that is looked into


def reproducibly(seed: int, holders: Sequence[Any], read: Callable[[], Any]) -> Any:
    """Return what a function reads, while all generators begin at a seed; they go on as before.

    Args:
        seed: of all draws.
        holders: objects and functions that may hold generators.
        read: is called again where the first call makes a generator, which begins as on no other rank.
    """
    known = generators_of(holders)
    with drawing(seed, known):
        result = read()
    if len(now := generators_of(holders)) <= len(known):
        return result
    with drawing(seed, now):
        return read()


def generators_of(holders: Sequence[Any]) -> list[Any]:
    """Return the generators in objects: in their attributes, and in functions' closures, defaults and global names."""
    found, waiting, seen = [], deque(holders), set[int]()
    while waiting and len(seen) < _MOST:
        each = waiting.popleft()
        if isinstance(each, _ENDS) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _KINDS):
            found.append(each)
        elif isinstance(each, (dict, list, tuple)):
            waiting += (each.values() if isinstance(each, dict) else each) if len(each) <= _FEW else ()
        elif isinstance(each, partial):
            waiting += (each.func, *each.args, *each.keywords.values())
        else:
            waiting += held_by(each)
    return found


@contextmanager
def drawing(seed: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Context manager in which generators, and this process's of host numbers, begin at a seed; they go on as before."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with ExitStack() as during:
        for number, generator in enumerate(generators):
            during.callback(_seeded(generator, mixed(seed, number)))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(of_torch)


def _seeded(generator: Any, seed: int) -> Callable[[], Any]:
    """Seed a generator; return what brings it back to its state."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        generator.manual_seed(seed)
        return partial(generator.set_state, state)
    if isinstance(generator, random.Random):
        python = generator.getstate()
        generator.seed(seed)
        return partial(generator.setstate, python)
    if isinstance(generator, np.random.RandomState):
        legacy = generator.get_state()
        generator.seed(seed % 2**32)
        return partial(generator.set_state, legacy)
    bits = generator.bit_generator
    numpy, bits.state = bits.state, type(bits)(seed).state
    return partial(setattr, bits, "state", numpy)


def mixed(*numbers: int) -> int:
    """Mix numbers into a seed of 64 bits; with seed + epoch, seed 1 would repeat seed 0 one epoch earlier."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])

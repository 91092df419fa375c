"""Defects that the tests must notice, each as a change of text and the test that fails under it.

Each module here has a tuple ``KNOWN`` of :class:`Known`, by area. An interpreter that runs under a defect reads them before
anything else, so they import nothing but this.
"""

import importlib
import pkgutil
from typing import NamedTuple


class Known(NamedTuple):
    """One defect."""

    name: str  # what is wrong, in a few words
    module: str  # below ``ds_terapipe``, e.g. ``pipeline.slicing``
    was: str  # the text that is replaced, which occurs once in the module
    becomes: str
    test: str  # what fails under it, as pytest takes it; several words where an option like ``-k`` is among them

    def applied(self, module: str, source: str) -> str:
        """The source of a module of the package under this defect."""
        return source.replace(self.was, self.becomes) if module == f"ds_terapipe.{self.module}" else source


def known() -> tuple[Known, ...]:
    """All defects, by area and place."""
    modules = sorted(found.name for found in pkgutil.iter_modules(__path__))
    return tuple(each for name in modules for each in importlib.import_module(f"{__name__}.{name}").KNOWN)


def by_name(name: str) -> Known:
    return next(each for each in known() if each.name == name)

"""Defects that the tests must notice, each as a change of text and the test that fails under it.

The standard library only: every interpreter that runs under a mutant imports this before anything else.
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """One defect.

    Attributes:
        name: what tables and ``-k`` call it.
        module: below ``ds_terapipe``, e.g. ``pipeline.slicing``.
        was, becomes: the text that is replaced; ``was`` occurs once in the module.
        test: what fails under it, as pytest takes it, options included.
    """

    name: str
    module: str
    was: str
    becomes: str
    test: str

    def applied(self, module: str, source: str) -> str:
        """The source of a module of the package under this defect."""
        return source.replace(self.was, self.becomes) if module == f"ds_terapipe.{self.module}" else source


KNOWN: tuple[Known, ...] = ()


def by_name(name: str) -> Known:
    """The defect of this name."""
    return next(each for each in KNOWN if each.name == name)

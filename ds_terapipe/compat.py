"""Private names of DeepSpeed, Megatron, PyTorch and transformers that the package relies on: are they there?

``private_names.ini`` lists them by the file that uses them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from configparser import ConfigParser
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from .errors import ConfigError

logger = logging.getLogger(__name__)


class Tested(NamedTuple):
    """A package, the module with its version, and the versions that the tests have run on: from ``first`` on, below ``below``."""

    name: str
    module: str
    first: str
    below: str

    @property
    def version(self) -> str:
        """The one that is installed."""
        return str(importlib.import_module(self.module).__version__)

    @property
    def holds(self) -> bool:
        """Whether the installed version is one of them."""
        from packaging.version import Version

        return bool(Version(self.first).release <= Version(self.version).release < Version(self.below).release)

    def texts(self) -> tuple[str, str, str]:
        """The version that is installed, the tested range, and the command that installs one of it."""
        install = f"pip install '{self.name.lower()}>={self.first},<{self.below}'"
        return f"{self.name} {self.version}", f"{self.first} or newer, below {self.below}", install


DEEPSPEED = Tested("DeepSpeed", "deepspeed", "0.19.8", "0.20")
MEGATRON_CORE = Tested("megatron-core", "megatron.core", "0.16", "0.20")


class Name(NamedTuple):
    """A private name as ``module:attribute.path`` or ``module:function#name``, and the file of this package that uses it."""

    path: str
    file: str

    @property
    def package(self) -> str:
        """The package that the name is of."""
        return self.path.partition(":")[0].partition(".")[0]


@functools.cache
def names() -> tuple[Name, ...]:
    """Return all names of the list."""
    listed = ConfigParser(interpolation=None, delimiters=["="])
    listed.optionxform = str  # type: ignore[assignment, method-assign]  # files and names have capitals
    listed.read_string(Path(__file__).with_name("private_names.ini").read_text(encoding="utf-8"))
    return tuple(
        Name(f"{owner}{'.' if ':' in owner else ':'}{name}", file)
        for owner in listed.sections()
        for file, used in listed[owner].items()
        for name in used.split()
    )


def exists(path: str) -> bool:
    """Whether ``module:attribute.path`` or ``module:function#name`` is there."""
    module, _, rest = path.partition(":")
    attributes, _, used = rest.partition("#")
    try:
        value: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return False
    return not used or used in _names_in(getattr(value, "ds_terapipe_original", value))


def _names_in(function: Any) -> set[str]:
    """Names of globals, attributes, arguments and string keys that a function's code uses, inner functions included."""
    codes = [getattr(function, "__code__", None)]
    found: set[str] = set()
    for code in codes:
        if isinstance(code, CodeType):
            found.update(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
            found.update(constant for constant in code.co_consts if isinstance(constant, str))
            codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return found


def missing(package: str) -> list[str]:
    """Return the paths of the names of a package that its installed version lacks."""
    return [name.path for name in names() if name.package == package and not exists(name.path)]


def require(key: str = "token_pipeline") -> None:
    """Raise if the installed DeepSpeed lacks a name; log an untested version.

    Args:
        key: the requesting key, the beginning of the message.

    Raises:
        ConfigError: naming the missing names.
    """
    if gone := missing("deepspeed"):
        found, wanted, use = DEEPSPEED.texts()
        raise ConfigError(f"{key}: {found} lacks {', '.join(gone)}, must be {wanted}, use {use}")
    say_untested(DEEPSPEED, key)


_SAID: set[Tested] = set()  # of which a line has been written in this process


def say_untested(tested: Tested, key: str) -> None:
    """Warn once, on the launch's first process, of a version that no test has run on. It is used all the same."""
    if tested.holds or tested in _SAID or os.environ.get("RANK", "0") != "0":
        return
    _SAID.add(tested)
    found, _, use = tested.texts()
    logger.warning(f"{key}: got {found}, which no test has run on, use {use} where something fails")

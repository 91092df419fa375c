"""Puts a mutant into the package, or marks its lines as run, in every interpreter that has this folder on PYTHONPATH.

``MUTANT``: ``module:index``, or ``known:name`` of known/.
``MUTANT_LINES``: a file, to which each process appends ``module:line`` of the lines that it runs.
"""

import importlib
import importlib.machinery
import os
import sys

_TARGET, _, _INDEX = os.environ.get("MUTANT", "").partition(":")
_LINES = os.environ.get("MUTANT_LINES")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):  # never from a cached file
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data, path, *, _optimize=-1):
        code = source = data.decode()
        if _LINES:
            code = importlib.import_module("tests.mutation.operators").traced(source)
        elif _TARGET == "known":
            code = importlib.import_module("tests.mutation.known").by_name(_INDEX).applied(self.name, source)
        elif self.name == _TARGET:
            code = importlib.import_module("tests.mutation.operators").mutated(source, int(_INDEX))
        return compile(code, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module):
        if _LINES:
            module.__dict__["__mutant_line__"] = _marker(self.name)
        super().exec_module(module)


def _marker(name):
    seen = set()
    file = os.open(_LINES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def mark(line):
        if line not in seen:
            seen.add(line)
            os.write(file, f"{name}:{line}\n".encode())

    return mark


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "ds_terapipe" and not fullname.startswith("ds_terapipe."):
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


if _TARGET or _LINES:
    sys.meta_path.insert(0, _Finder)

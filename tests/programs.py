"""Whether a command line would be accepted: by the program's own parser, which is caught before the program does anything."""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
from deepspeed.launcher import runner
from torch.distributed import run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ds_terapipe"
ASSIGNMENT = re.compile(r"[A-Z][A-Z_0-9]*=\S*")
# Programs of other repositories, which two pages are about: of their arguments, those that DeepSpeed adds are checked.
MEGATRON_DEEPSPEED, MEGATRON_LM = "docs/how-to/megatron_deepspeed.md", "docs/how-to/from_megatron_lm.md"
ELSEWHERE = ("pretrain_gpt.py", "pretrain_bert.py")


def commands(shell: str) -> list[list[str]]:
    """The words of each command of a piece of shell: one a line, or joined by ``&&``; comments are left out."""
    found = []
    for line in shell.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            found.append(words[:end])
            words = words[end + 1 :]
    return found


def check(command: Sequence[str]) -> str:
    """The kind of a command that its program would take. Raises AssertionError where it would not."""
    if ASSIGNMENT.fullmatch(command[0]):
        check_setting(command[0])
        return check(command[1:]) if command[1:] else "setting"
    program, *arguments = command
    kinds = {
        "make": _make, "pip": _pip, **dict.fromkeys(("python", "python3"), _python),
        "ds_terapipe": lambda words: _ours("ds_terapipe.cli", words),
        "deepspeed": lambda words: _launch(runner.parse_args, words, "user_script", "user_args"),
        "torchrun": lambda words: _launch(run.parse_args, words, "training_script", "training_script_args"),
    }  # fmt: skip
    assert program in kinds or program.endswith(".py"), f"no such program: {program}"
    return kinds.get(program, lambda words: _script(program, words))(arguments) or program


def check_setting(setting: str) -> None:
    """Raise AssertionError unless this repository reads a variable, or torch or DeepSpeed where they look for it."""
    name = setting.partition("=")[0]
    readers = [ROOT / "setup.py", *(ROOT / "ds_terapipe").rglob("*.py"), *(ROOT / "configs").glob("*.sh")]
    for module in ("torch", "deepspeed.accelerator.real_accelerator"):
        readers.append(Path(importlib.util.find_spec(module).origin))
    found = any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in readers)
    assert found, f"no program reads the variable {name}"


def _make(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, given, _ = argument.partition("=")
        pattern = rf"^{name} \?=" if given else rf"^{name}:.*\n\t"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {'setting' if given else 'target'} {name}"


def _pip(arguments: Sequence[str]) -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    extras = {"", *metadata("ds_terapipe").get_all("Provides-Extra")}
    assert arguments[0] == "install", f"pip: only install is known here, not {arguments[0]}"
    for name in (word for word in arguments[1:] if not word.startswith("-")):
        package, _, wanted = name.removesuffix("]").partition("[")
        known = extras >= set(wanted.split(",")) if package in (".", "ds_terapipe") else f"\n{name.lower()}==" in pinned
        assert known, f"pip: {name} is not in constraints.txt, or names an extra that is none of {extras}"


def _python(arguments: Sequence[str]) -> str:
    if arguments[0] != "-m":
        return _script(arguments[0], arguments[1:])
    _ours(arguments[1], arguments[2:])
    return "python -m"


def _script(name: str, arguments: Sequence[str]) -> str:
    if name in ELSEWHERE:
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        _accept(parser, [word for word in arguments if word.startswith("--deepspeed") or word.endswith("ds_config.json")])
        return "elsewhere"
    path = ROOT / name
    assert path.is_file(), f"there is no {name}"
    if arguments or "add_argument" in path.read_text(encoding="utf-8"):
        _accept(_parser(name), arguments)
    return "script"


def _launch(parse: Callable[[list[str]], Any], arguments: Sequence[str], script: str, its_arguments: str) -> str:
    with _strictly():
        options = parse(list(arguments))
    return _script(getattr(options, script), getattr(options, its_arguments))


def _ours(module: str, arguments: Sequence[str]) -> None:
    assert importlib.util.find_spec(module), f"there is no module {module}"
    _accept(_parser(module), arguments)


@functools.cache
def _parser(program: str) -> argparse.ArgumentParser:
    """The parser that the ``main`` of a module, or a script of the repository, is about to use."""
    script = program.endswith(".py")
    main = runpy.run_path(str(ROOT / program))["main"] if script else importlib.import_module(program).main
    found: list[argparse.ArgumentParser] = []

    def catch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found.append(parser)
        raise KeyboardInterrupt  # which no program handles

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", catch),
        mock.patch.object(sys, "argv", [program]),
        contextlib.suppress(KeyboardInterrupt),
    ):
        main()
    return found[0]


def _accept(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Raise unless the parser takes the arguments; those that it requires besides may be missing, for prose leaves them out."""
    if list(arguments) != ["--help"]:
        for action in _actions(parser):
            action.required = False
            if not action.option_strings and action.nargs is None:
                action.nargs = "?"
    with _strictly():
        parser.parse_args(list(arguments))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of all subcommands, too, but not what chooses among these."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action


def _error(parser: argparse.ArgumentParser, message: str) -> None:
    raise AssertionError(f"{parser.prog}: {message}")


@contextlib.contextmanager
def _strictly() -> Iterator[None]:
    """Parsers meanwhile take no abbreviated option. ``--help`` ends a program, which is fine; any other end is a refusal."""
    said = io.StringIO()
    parser = mock.patch.multiple(argparse.ArgumentParser, error=_error, _get_option_tuples=lambda self, option: [])
    try:
        with parser, contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit as end:
        if end.code not in (0, None):
            raise AssertionError(said.getvalue().strip() or f"exit status {end.code}") from None

"""Checkpoints that are read though a file is damaged, foreign or of another save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.mutants.harness import Check, Hit, Mutant


def _finds_nothing(original: Any, hit: Hit) -> Any:
    def problem(*args: Any) -> None:
        if original(*args) is not None:
            hit()

    return problem


def _lets_pass(original: Any, hit: Hit) -> Any:
    def check(*args: Any) -> None:
        try:
            original(*args)
        except ValueError:
            hit()

    return check


def _value(value: Any) -> Callable[[Any, Hit], Any]:
    def replacement(original: Any, hit: Hit) -> Any:
        hit()
        return value

    return replacement


def _never(original: Any, hit: Hit) -> Any:
    def answer(*args: Any) -> bool:
        if original(*args):
            hit()
        return False

    return answer


BYTES = "files are read that are not as they were saved"
PAGES = "pages that change places have the checksum that they had"
LAYERS = "layers are read whatever weights are in the files"
STALE = "what DeepSpeed saved over a checkpoint is called damaged"

MUTANTS = (
    Mutant(
        BYTES,
        "A file is read whatever its checksum.",
        ("ds_terapipe.manifest:Manifest._problem",),
        _finds_nothing,
        "damage, every file of a checkpoint",
    ),
    Mutant(
        PAGES,
        "Rows of the checksum's blocks are as long as half a page.",
        ("ds_terapipe.manifest:_COLUMNS",),
        _value(256),
        "damage, the checksum",
    ),
    Mutant(
        LAYERS,
        "Weights of other names or shapes are left to load_state_dict, which other ranks are past.",
        ("ds_terapipe.pipeline.saved_files:_check_layer",),
        _lets_pass,
        "damage, files of another model",
    ),
    Mutant(
        STALE,
        "The writer of the files is not looked at.",
        ("ds_terapipe.manifest:_by_others",),
        _never,
        "damage, another save",
    ),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)


def _check(name: str, measure: str, catches: tuple[str, ...], why: str, args: tuple[Any, ...] = ()) -> Check:
    return Check(name, measure, args, catches, {other: why for other in _NAMES if other not in catches})


_TESTS = "tests.pipeline.test_damage:"
CHECKS = (
    _check(
        "damage, every file of a checkpoint",
        _TESTS + "damages_are_named",
        (BYTES,),
        "changes files in place, and bytes that make other sums",
    ),
    _check(
        "damage, the checksum",
        "tests.mutants.claims:passes",
        (PAGES,),
        "reads no checkpoint",
        (_TESTS + "test_what_sums_alone_would_not_see",),
    ),
    _check("damage, files of another model", _TESTS + "foreign_files_are_named", (LAYERS,), "there is no manifest"),
    _check("damage, another save", _TESTS + "overwritten_is_told", (STALE, BYTES), "every file is another one"),
)

"""What counts as a claim that does not hold: a test's own comparison that fails, and nothing else."""

from __future__ import annotations

import functools

import pytest

from tests.mutants.claims import holds, passes, refused_or_let_pass


def equal(one: object, other: object) -> None:
    assert one == other


def refuses(number: int) -> None:
    with pytest.raises(ValueError, match="too large"):
        if number > 9:
            raise ValueError("too large" if number > 99 else "odd")


def written(tmp_path: object, text: str) -> None:
    (tmp_path / "file").write_text(text)
    assert (tmp_path / "file").read_text() == "text"


def indexes(found: list[int]) -> None:
    assert found[0] == 1


def test_a_comparison_of_a_test_says_whether_a_claim_holds() -> None:
    assert holds(equal, 1, 1) and not holds(equal, 1, 2)
    assert holds(refuses, 100)
    assert not holds(refuses, 50), "refused for something else"
    assert not holds(refuses, 1), "not refused"


def test_other_errors_pass() -> None:
    with pytest.raises(IndexError):
        holds(indexes, [])
    with pytest.raises(pytest.skip.Exception):
        holds(functools.partial(pytest.skip, "not here"))


def test_an_assertion_of_the_package_is_no_comparison() -> None:
    names: dict[str, object] = {}
    exec(compile("def check():\n    assert 0, 'of the package'", "ds_terapipe/somewhere.py", "exec"), names)

    def calls_it() -> None:
        names["check"]()  # type: ignore[operator]

    with pytest.raises(AssertionError, match="of the package"):
        holds(calls_it)


def test_a_test_runs_with_its_arguments_and_a_folder_of_its_own() -> None:
    assert passes(None, f"{__name__}:written", "text") and not passes(None, f"{__name__}:written", "other")


def test_another_error_than_a_refusal_is_none() -> None:
    told = [{"a key": ("ConfigError", "a key: got 1"), "another": ("nothing", "")}]
    assert refused_or_let_pass(told) == told
    with pytest.raises(RuntimeError, match="a key: AssertionError"):
        refused_or_let_pass([{"a key": ("AssertionError", "elsewhere")}])

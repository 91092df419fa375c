"""The words of a schedule: actions as text, and stages on places."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe import schedule
from ds_terapipe.schedule import Action, Op, PlacedStage, Placement, Unit, as_placement
from tests.schedule import strategies

number = st.integers(0, 10**6)
units = st.builds(Unit, number, number)


@given(st.builds(Action, st.sampled_from(Op), number, units))
def test_text_parses_back(action):
    parsed = Action.from_text(str(action))
    assert parsed == action and isinstance(parsed.op, Op) and isinstance(parsed.unit, Unit)
    assert Unit.from_text(str(action.unit)) == action.unit


@given(st.text(alphabet="0123FB.SENDRCV_ -", max_size=12))
def test_only_the_exact_text_parses(text):
    try:
        assert str(Action.from_text(text)) == text
    except ValueError:
        return


@pytest.mark.parametrize(
    ("kind", "example", "texts"),
    [
        (Action, r"2F0\.3", ["", "2F03", "2X0.3", "02F0.3", "-1F0.3", "2F0.3 ", "2F0.3\n", "2SEND_0.3", "٢F0.3"]),
        (Unit, r"0\.3", ["", "3", "0.3.1", "00.3", "0.3\n"]),
    ],
)
def test_other_text_is_refused(kind, example, texts):
    for text in texts:
        with pytest.raises(ValueError, match=rf"{kind.__name__.lower()}: got .* e\.g\. {example}"):
            kind.from_text(text)


@pytest.mark.parametrize(
    ("text", "counterpart"),
    [("1SEND_F0.3", "2RECV_F0.3"), ("1RECV_F0.3", "0SEND_F0.3"), ("1SEND_B0.3", "0RECV_B0.3"), ("1RECV_B0.3", "2SEND_B0.3")],
)  # fmt: skip
def test_a_message_has_a_counterpart(text, counterpart):
    action = Action.from_text(text)
    assert str(action.counterpart) == counterpart and action.peer == action.counterpart.stage
    assert action.counterpart.counterpart == action and Action.from_text("1F0.3").counterpart is None


def test_the_package_imports_the_standard_library_alone():
    files = list(Path(schedule.__file__).parent.rglob("*.py"))
    assert len(files) >= 12
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            own = [name for name in names if not name.startswith("ds_terapipe.schedule")]
            assert {name.split(".")[0] for name in own} <= sys.stdlib_module_names, f"{file.name}: {own}"


def test_a_plain_placement_is_a_stage_on_each_place():
    plain = Placement.plain(3, [0, 2, 3, 7])
    assert plain.stages == (PlacedStage(0, 0, 2), PlacedStage(1, 2, 3), PlacedStage(2, 3, 7))
    assert plain.is_plain and (plain.places, plain.first_place, plain.last_place) == (3, 0, 2)
    assert as_placement(plain) is plain and as_placement(3) == Placement.plain(3)
    assert not Placement.of([1, 0]).is_plain and not Placement.of([0, 0]).is_plain


@given(strategies.placements())
def test_every_message_has_two_ends(placement):
    for stage in range(len(placement.stages) - 1):
        assert placement.sends_forward(stage) == placement.receives_forward(stage + 1)
        assert placement.receives_backward(stage) == placement.sends_backward(stage + 1)
        assert placement.sends_backward(stage + 1) <= placement.goes_backward(stage)
        assert placement.sends_forward(stage) == (placement.place_of(stage) != placement.place_of(stage + 1))
    held = [stage for place in range(placement.places) for stage in placement.stages_on(place)]
    assert sorted(held) == list(range(len(placement.stages)))


def test_a_placement_is_a_key_that_travels():
    one = Placement.of([0, 1, 0])
    assert one == Placement.of((0, 1, 0), [0, 1, 2, 3]) == pickle.loads(pickle.dumps(one))
    assert len({one, Placement.of([0, 1, 0], forward_only=1), Placement.of([0, 1, 0], [0, 1, 2, 4])}) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(()), "placement: got no stages"),
        (lambda: Placement.plain(0), "stages: got 0, must be at least 1"),
        (lambda: Placement.of([0, 2]), r"got stages on places \[0, 2\], must be on 0, 1, ... without a gap"),
        (lambda: Placement.of([-1, 0]), "without a gap"),
        (lambda: Placement.of([0, 1], [0, 2]), "got 2 boundaries, must be one more than the 2 stages"),
        (
            lambda: Placement.of([0, 1], [0, 2, 2]),
            "layers 2 to 2 for stage 1, must start at layer 2 and stop at a later",
        ),
        (lambda: Placement.of([0, 1], [-1, 2, 3]), "must start at layer 0"),
        (lambda: Placement((PlacedStage(0, 0, 2), PlacedStage(1, 3, 4))), "stage 1, must start at layer 2"),
        (lambda: Placement.plain(2, forward_only=3), "forward_only: got 3, must be 0 to the number of stages, 2"),
        (lambda: Placement.plain(2, forward_only=-1), "forward_only: got -1"),
        (lambda: Placement.interleaved(2, 0), "got 0 chunks on each of 2 places"),
    ],
)
def test_what_is_no_placement(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)

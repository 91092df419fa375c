from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe import schedule
from ds_terapipe.schedule import Action, Op, Unit

_number = st.integers(0, 10**6)
_units = st.builds(Unit, _number, _number)
_actions = st.builds(Action, st.sampled_from(Op), _number, _units)


@given(_units)
def test_unit_text_parses_back(unit):
    assert Unit.from_text(str(unit)) == unit


@given(_actions)
def test_action_text_parses_back(action):
    parsed = Action.from_text(str(action))
    assert parsed == action
    assert isinstance(parsed.op, Op)
    assert isinstance(parsed.unit, Unit)


def test_text_forms():
    assert str(Action(Op.FORWARD, 2, Unit(0, 3))) == "2F0.3"
    assert str(Action(Op.SEND_FORWARD, 1, Unit(0, 3))) == "1SEND_F0.3"
    assert repr([Action(Op.RECV_BACKWARD, 10, Unit(12, 0))]) == "[10RECV_B12.0]"


@given(st.text(alphabet="0123FB.SENDRCV_ -", max_size=12))
def test_only_the_exact_text_parses(text):
    try:
        action = Action.from_text(text)
    except ValueError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "2F03", "2X0.3", "02F0.3", "2F0.03", "-1F0.3", "2F0.3 ", "2F0.3\n", "2SEND_0.3", "٢F0.3"]
)
def test_other_action_text_is_refused(text):
    with pytest.raises(ValueError, match=r"action: got .* e\.g\. 2F0\.3"):
        Action.from_text(text)


@pytest.mark.parametrize("text", ["", "3", "0.3.1", "00.3", "0.3\n"])
def test_other_unit_text_is_refused(text):
    with pytest.raises(ValueError, match=r"unit: got .* e\.g\. 0\.3"):
        Unit.from_text(text)


@pytest.mark.parametrize(
    ("text", "counterpart"),
    [
        ("1SEND_F0.3", "2RECV_F0.3"),
        ("1RECV_F0.3", "0SEND_F0.3"),
        ("1SEND_B0.3", "0RECV_B0.3"),
        ("1RECV_B0.3", "2SEND_B0.3"),
    ],
)
def test_counterpart_of_a_message(text, counterpart):
    action = Action.from_text(text)
    assert str(action.counterpart) == counterpart
    assert action.peer == action.counterpart.stage
    assert action.counterpart.counterpart == action


def test_a_computation_has_no_peer():
    action = Action.from_text("1F0.3")
    assert action.peer is None
    assert action.counterpart is None
    assert action.op.is_compute


def test_the_package_imports_the_standard_library_alone():
    files = list(Path(schedule.__file__).parent.glob("*.py"))
    assert len(files) >= 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level != 1:
                names = [node.module]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names, f"{file.name}: {names}"

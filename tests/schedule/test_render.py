"""Schedules as text and as pictures."""

import re

import pytest

from ds_terapipe.schedule import Panel, Placement, grid_text, order, timelines_svg, with_messages
from tests.schedule.test_simulate import seconds


def test_a_whole_grid_is_a_table():
    lines = ["step   stage 0   stage 1", "   0   0F0.0     1F0.0", "   1   0F0.1     1F0.1"]
    lines += ["   2   0B0.1     1B0.1", "   3   0B0.0     1B0.0"]
    assert grid_text(order("1f1b", 2, [2])) == "\n".join(lines)
    assert grid_text([[]]) == "step   stage 0" and "[end]" in grid_text([[]], {0: 0})


def test_marked_stages_are_shown_with_their_neighbourhood():
    grid = with_messages(order("1f1b", 2, [2, 2]))
    text = grid_text(grid, {0: 5, 1: len(grid[1])}, {0: "waits"})
    assert re.search(r"   5  \[0SEND_F1.0\] .*<-- stage 0: waits\n", text)
    assert re.search(r"\[end\] +<-- stage 1$", text, re.MULTILINE) and "0F0.0" not in text
    text = grid_text(order("terapipe", 40, [8] * 8), {20: 60, 28: 60})
    assert "[20F7.4]" in text and re.search(r"stage 23 +\.\.\. +stage 25", text) and len(text.splitlines()) == 1 + 7 + 2


def test_columns_and_rows_are_places_where_they_are_not_stages():
    placement = Placement.of([0, 1, 0])
    grid = order("1f1b", placement, [1])
    lines = grid_text(grid, {1: 1}, {1: "waits"}, placement).splitlines()
    assert lines[0] == "step   place 0   place 1"
    assert any(line.rstrip().endswith("<-- place 1: waits") and "[1B0.0]" in line for line in lines)
    panels = [Panel.of("one", grid, seconds, placement), Panel.of("other", order("1f1b", 2, [1]), seconds)]
    both = timelines_svg(panels)
    assert both.count(">place ") == both.count(">stage ") == 2
    for intervals in ([], [[], []]):  # of other places or actions
        with pytest.raises(ValueError, match="shorter"):
            timelines_svg([Panel("one", grid, intervals)])

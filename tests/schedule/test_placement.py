"""Stages on places: who sends what to whom, and what is no placement."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given

from ds_terapipe.schedule import PlacedStage, Placement, as_placement

from . import strategies


def test_plain_is_a_stage_on_each_place() -> None:
    plain = Placement.plain(3, [0, 2, 3, 7])
    assert plain.stages == (PlacedStage(0, 0, 2), PlacedStage(1, 2, 3), PlacedStage(2, 3, 7))
    assert plain.is_plain and (plain.places, plain.first_place, plain.last_place) == (3, 0, 2)
    assert as_placement(plain) is plain and as_placement(3) == Placement.plain(3)
    assert not Placement.of([1, 0]).is_plain and not Placement.of([0, 0]).is_plain


def test_interleaved_goes_around() -> None:
    around = Placement.interleaved(2, 3, forward_only=1)
    assert around == Placement.of([0, 1, 0, 1, 0, 1], range(7), 1)
    assert [around.stages_on(place) for place in range(2)] == [(0, 2, 4), (1, 3, 5)]


def test_both_ends_on_one_place() -> None:
    folded = Placement.of([0, 1, 1, 0], forward_only=1)
    assert (folded.places, folded.first_place, folded.last_place) == (2, 0, 0)
    assert [folded.sends_forward(stage) for stage in range(4)] == [True, False, True, False]
    assert [folded.receives_forward(stage) for stage in range(4)] == [False, True, False, True]
    # nothing goes back to stage 0, and stages 1 and 2 are on one place
    assert [folded.sends_backward(stage) for stage in range(4)] == [False, False, False, True]
    assert [folded.receives_backward(stage) for stage in range(4)] == [False, False, True, False]
    assert [folded.goes_backward(stage) for stage in range(4)] == [False, True, True, True]


@given(strategies.placements())
def test_every_message_has_two_ends(placement: Placement) -> None:
    for stage in range(len(placement.stages) - 1):
        assert placement.sends_forward(stage) == placement.receives_forward(stage + 1)
        assert placement.receives_backward(stage) == placement.sends_backward(stage + 1)
        assert placement.sends_backward(stage + 1) <= placement.goes_backward(stage)
        assert placement.sends_forward(stage) == (placement.place_of(stage) != placement.place_of(stage + 1))
    held = [stage for place in range(placement.places) for stage in placement.stages_on(place)]
    assert sorted(held) == list(range(len(placement.stages)))


def test_a_key_that_travels() -> None:
    one, other = Placement.of([0, 1, 0]), Placement.of((0, 1, 0), [0, 1, 2, 3])
    assert one == other and hash(one) == hash(other) and pickle.loads(pickle.dumps(one)) == one
    assert len({one, Placement.of([0, 1, 0], forward_only=1), Placement.of([0, 1, 0], [0, 1, 2, 4])}) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(()), "placement: got no stages"),
        (lambda: Placement.plain(0), "stages: got 0, must be at least 1"),
        (lambda: Placement.of([0, 2]), r"got stages on places \[0, 2\], must be on 0, 1, ... without a gap"),
        (lambda: Placement.of([1, 2]), "without a gap"),
        (lambda: Placement.of([-1, 0]), "without a gap"),
        (lambda: Placement.of([0, 1], [0, 2]), "got 2 boundaries, must be one more than the 2 stages"),
        (
            lambda: Placement.of([0, 1], [0, 2, 2]),
            "got layers 2 to 2 for stage 1, must start at layer 2 and stop at a later",
        ),
        (lambda: Placement.of([0, 1], [-1, 2, 3]), "must start at layer 0"),
        (lambda: Placement((PlacedStage(0, 0, 2), PlacedStage(1, 3, 4))), "stage 1, must start at layer 2"),
        (lambda: Placement.plain(2, forward_only=3), "forward_only: got 3, must be 0 to the number of stages, 2"),
        (lambda: Placement.plain(2, forward_only=-1), "forward_only: got -1"),
        (lambda: Placement.interleaved(2, 0), "got 0 chunks on each of 2 places"),
    ],
)
def test_what_is_no_placement(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)

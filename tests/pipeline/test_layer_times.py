"""Times of single layers: of a stage without processes, by a clock that the layers themselves move; then of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_terapipe.pipeline.autotune import engine_facts, layer_times
from ds_terapipe.pipeline.autotune.layer_times import LayerTimes
from ds_terapipe.pipeline.autotune.phases import ROUNDS
from ds_terapipe.plan import MeasuredCost
from ds_terapipe.schedule import Action, Op
from tests.pipeline.models import Block, Embedding, Head, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import launched


class Clock:
    """Moves by what the layers take, and by ``tick`` whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.time, self._tick = 0.0, tick

    def now(self) -> float:
        self.time += self._tick
        return self.time

    def seconds(self, mark: float, start: float) -> float:
        return mark - start


class Takes(torch.autograd.Function):
    """``x`` itself, in so many seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, clock: Clock, forward: float, backward: float) -> Any:
        ctx.clock, ctx.backward_s = clock, backward
        clock.time += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.clock.time += ctx.backward_s
        return gradient, None, None, None


class Place:
    """Runs the stages of a place, by number, as an engine does.

    The loss takes 10 forward and 20 backward, weight gradients 30; waiting 1000 is no layer's.
    """

    def __init__(self, interval: int = 0, **stages: Any) -> None:
        self.clock = Clock()
        self.stages: dict[int, Any] = {}
        for number, layers in stages.items():
            functions = [lambda x, layer=layer: layer(self.clock, x) for layer in layers]
            self.stages[int(number[1:])] = SimpleNamespace(
                functions=functions, checkpoint_interval=interval, timed=True
            )
        self.layers = [stage.functions for stage in self.stages.values()]
        self.times = LayerTimes(list(self.stages.values()), torch.device("cpu"))
        self.times._clock = self.clock
        self.losses: dict[int, Any] = {}

    def step(self, actions: str = "0F0.0 0B0.0", wanted: bool = True) -> Any:
        with self.times.step(wanted):
            execute = self.times.recording(self.execute)
            for action in map(Action.from_text, actions.split()):
                execute(action)
                self.clock.time += 1000
        assert [stage.functions for stage in self.stages.values()] == self.layers
        return self.times.costs()

    def execute(self, action: Action) -> None:
        if action.op is Op.WEIGHT_GRADIENTS:
            self.clock.time += 30
        elif action.op is Op.FORWARD:
            value: Any = torch.ones(2, requires_grad=True)
            for layer in self.stages[action.stage].functions:
                value = layer(value)
            value = value[0] if isinstance(value, tuple) else value
            self.losses[action.stage] = Takes.apply(value, self.clock, 10.0, 20.0).sum()
        elif action.op is Op.BACKWARD:
            self.losses[action.stage].backward()


def takes(forward: float, backward: float) -> Any:
    return lambda clock, x: Takes.apply(x, clock, forward, backward)


def pair(clock: Clock, x: Any) -> Any:
    """Makes a pair, or hands the second of it on."""
    first, second = x if isinstance(x, tuple) else (x, x * 2)
    return Takes.apply(first, clock, 5.0, 6.0), second


def same(clock: Clock, x: Any) -> Any:
    return x


NO_GRADIENT = [lambda clock, x: x.detach(), takes(1, 100), lambda clock, x: x.clone().requires_grad_(), takes(3, 4)]
STAGES = {
    "the loss is in the last layer": ([takes(1, 2), takes(3, 4), takes(5, 6)], (3.0, 7.0, 11.0 + 30.0)),
    "pairs and identities": ([takes(1, 2), pair, same, pair], (3.0, 11.0, 0.0, 11.0 + 30.0)),
    "layers without gradient": (NO_GRADIENT, (0.0, 1.0, 0.0, 7.0 + 30.0)),
}


@pytest.mark.parametrize(("layers", "seconds"), STAGES.values(), ids=STAGES)
def test_layers_take_what_they_take(layers, seconds):
    place = Place(s0=layers)
    place.step()
    assert place.times.seconds() == seconds


def test_a_step_that_is_not_wanted_is_not_timed_and_nothing_is_told_twice():
    place = Place(s0=[takes(1, 2)])
    assert place.step(wanted=False) is place.times.seconds() is None
    place.step()
    assert place.times.seconds() == (33.0,) and place.times.seconds() is None


def test_a_slow_repeat_does_not_count():
    slow = iter([0.0, 100.0, 0.0, 0.0])
    place = Place(s0=[takes(1, 2), lambda clock, x: Takes.apply(x, clock, 3 + next(slow), 4)])
    for _ in range(2):
        place.step("0F0.0 0B0.0 0F1.0 0B1.0")
    assert place.times.seconds() == (3.0, 7.0 + 30.0)


def test_layers_that_do_not_run_one_after_the_other_or_are_checkpointed_are_not_known():
    place = Place(s0=[takes(1, 2), takes(3, 4)])
    once = place.execute
    place.execute = lambda action: [once(action) for _ in range(2 if action.op is Op.FORWARD else 1)]
    assert place.step() is None
    assert Place(interval=1, s0=[takes(1, 2)]).step() is None


def test_an_error_leaves_the_layers_as_they_were():
    def fails(clock: Clock, x: Any) -> Any:
        raise ValueError("no")

    place = Place(s0=[takes(1, 2), fails])
    with pytest.raises(ValueError, match="no"):
        place.step()
    assert place.stages[0].functions is place.layers[0] and place.times.seconds() is None


def two_stages() -> Place:
    return Place(s0=[takes(1, 2), takes(3, 4)], s4=[takes(5, 6), takes(7, 8), takes(9, 10)])


def test_stages_of_one_place_are_timed_each_by_itself():
    place = two_stages()
    costs = place.step("0F0.0 0F1.0 4F0.0 4B0.0 0B0.0 4F1.0 0B1.0 4B1.0")
    assert costs == ((1, 3 + 10, 5, 7, 9 + 10), (2, 4 + 20, 6, 8, 10 + 20))
    assert place.times.seconds() == (3, 37, 11, 15, 49)


def test_a_stage_that_goes_forward_only_takes_nothing_backward():
    place, costs = two_stages(), ((1, 13, 5, 7, 19), (0, 0, 6, 8, 30))
    assert place.step("0F0.0 4F0.0 4B0.0") == costs == place.times.costs()  # as often as one likes
    assert place.times.seconds() == (1, 13, 11, 15, 49) and place.times.seconds() is None
    assert place.times.costs() == costs
    assert place.step("0F0.0") is None, "of the other stage nothing was seen"


def test_slices_add_up_and_weight_gradients_are_spread_as_the_backward_is():
    forward, backward = two_stages().step("0F0.0 0F0.1 4F0.0 4B0.0 4F0.1 4SEND_F0.1 4B0.1 4W0.0")
    assert forward == (2, 26, 10, 14, 38)
    assert backward == pytest.approx((0, 0, *(2 * each * (1 + 30 / 88) for each in (6, 8, 30))))


# ----------------------------------------------------------------------------------------------------------------- a run

RAN = Clock(tick=1e-4)


class Slow(Block):
    """A block that takes long."""

    def forward(self, hidden: Any) -> Any:
        RAN.time += 0.03
        return super().forward(hidden)


def lines_of(kinds: list[type], checkpoint: int = 0, **keys: str) -> list[str]:
    """Log lines about the stages in a run of these layers, three on each of two, until it is planned."""
    said: list[str] = []
    engine_facts.emit, layer_times.new_clock = said.append, lambda device: RAN
    engine = build_engine(
        [LayerSpec(kind) for kind in kinds], masked_loss, token_pipeline={"slices": "auto", **keys},
        module={"activation_checkpoint_interval": checkpoint}, config={"pipeline": {"use_reentrant": False}},
    )  # fmt: skip
    train(engine, steps_of(1 + 2 * ROUNDS, 2))  # sequences of 24 tokens are tried in two slices and in one
    assert engine._cutting.state()["plans"]
    engine.destroy()
    return [line for line in said if "slowest stage" in line]


def worker(rank: int, world_size: int, folder: str) -> tuple[dict[str, list[str]], Any]:
    unbalanced, path = [Embedding, Slow, Slow, Block, Block, Head], f"{folder}/costs.json"
    found = {
        "unbalanced": lines_of(unbalanced, measurements_path=path),
        "from the file": lines_of(unbalanced, measurements_path=path),
        "balanced": lines_of([Embedding, Block, Slow, Slow, Block, Head]),
        "checkpointed": lines_of(unbalanced, checkpoint=1),
    }
    return found, MeasuredCost.load(path).layers


ranks = launched(worker, 2, folder=True)


def test_stages_that_are_out_of_balance_are_said_once_on_rank_0(ranks):
    (first, layers), (second, _) = ranks
    (line,) = first["unbalanced"]
    assert line.startswith("plan: stages of 2,4 layers would take ")
    assert line.endswith("begin the stages of the PipelineModule at its layers 0, 2 in place of 0, 3")
    assert first["from the file"] == [line] and first["balanced"] == first["checkpointed"] == []
    assert not any(second.values())
    assert all(0.03 < seconds < 0.04 for seconds in layers.stages[0][1:])

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


class Stage:
    """Runs layers as an engine does; the loss takes 10 forward and 20 backward, waiting 1000 is no layer's."""

    def __init__(self, *layers: Any, interval: int = 0, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        functions = [lambda x, layer=layer: layer(self.clock, x) for layer in layers]
        self.layers: Any = SimpleNamespace(functions=functions, checkpoint_interval=interval, timed=True)
        self.times = LayerTimes([self.layers], torch.device("cpu"))
        self.times._clock = self.clock

    def step(self, micro_batches: int = 1, wanted: bool = True) -> Any:
        with self.times.step(wanted):
            execute = self.times.recording(self.execute)
            for m in range(micro_batches):
                for op in "FB":
                    execute(Action.from_text(f"0{op}{m}.0"))
                    self.clock.time += 1000
        return self.times.seconds()

    def execute(self, action: Action) -> None:
        if action.op is Op.FORWARD:
            value: Any = torch.ones(2, requires_grad=True)
            for layer in self.layers.functions:
                value = layer(value)
            value = value[0] if isinstance(value, tuple) else value
            self.loss = Takes.apply(value, self.clock, 10.0, 20.0).sum()
        else:
            self.loss.backward()


def takes(forward: float, backward: float) -> Any:
    return lambda clock, x: Takes.apply(x, clock, forward, backward)


def pair(clock: Clock, x: Any) -> Any:
    """Makes a pair, or hands the second of it on."""
    first, second = x if isinstance(x, tuple) else (x, x * 2)
    return Takes.apply(first, clock, 5.0, 6.0), second


def same(clock: Clock, x: Any) -> Any:
    return x


STAGES = {
    "the loss is in the last layer": ([takes(1, 2), takes(3, 4), takes(5, 6)], (3.0, 7.0, 11.0 + 30.0)),
    "pairs and identities": ([takes(1, 2), pair, same, pair], (3.0, 11.0, 0.0, 11.0 + 30.0)),
    "layers without gradient": (
        [lambda clock, x: x.detach(), takes(1, 100), lambda clock, x: x.clone().requires_grad_(), takes(3, 4)],
        (0.0, 1.0, 0.0, 7.0 + 30.0),
    ),
}


@pytest.mark.parametrize(("layers", "seconds"), STAGES.values(), ids=STAGES)
def test_layers_take_what_they_take(layers, seconds):
    assert Stage(*layers).step() == seconds


def test_a_step_that_is_not_wanted_is_not_touched():
    stage = Stage(takes(1, 2))
    layers = stage.layers.functions
    assert stage.step(wanted=False) is None and stage.layers.functions is layers
    assert stage.step() == (33.0,) and stage.layers.functions is layers
    assert stage.times.seconds() is None  # what was told is not told again


def test_a_slow_repeat_does_not_count():
    slow = iter([0.0, 100.0, 0.0, 0.0])
    stage = Stage(takes(1, 2), lambda clock, x: Takes.apply(x, clock, 3 + next(slow), 4))
    stage.step(micro_batches=2)
    assert stage.step(micro_batches=2) == (3.0, 7.0 + 30.0)


def test_layers_that_do_not_run_one_after_the_other_or_are_checkpointed_are_not_known():
    stage = Stage(takes(1, 2), takes(3, 4))
    once = stage.execute
    stage.execute = lambda action: [once(action) for _ in range(2 if action.op is Op.FORWARD else 1)]
    assert stage.step() is None
    assert Stage(takes(1, 2), interval=1).step() is None


def test_an_error_leaves_the_layers_as_they_were():
    def fails(clock: Clock, x: Any) -> Any:
        raise ValueError("no")

    stage = Stage(takes(1, 2), fails)
    layers = stage.layers.functions
    with pytest.raises(ValueError, match="no"):
        stage.step()
    assert stage.layers.functions is layers and stage.times.seconds() is None


class Place:
    """Two stages of one place in any order of actions, each as in :class:`Stage`; weight gradients take 30."""

    def __init__(self) -> None:
        self.clock = Clock()
        first, second = [takes(1, 2), takes(3, 4)], [takes(5, 6), takes(7, 8), takes(9, 10)]
        self.stages = {0: Stage(*first, clock=self.clock), 4: Stage(*second, clock=self.clock)}
        self.times = LayerTimes([stage.layers for stage in self.stages.values()], torch.device("cpu"))
        self.times._clock = self.clock

    def step(self, actions: str) -> Any:
        with self.times.step(True):
            execute = self.times.recording(self.execute)
            for action in map(Action.from_text, actions.split()):
                execute(action)
                self.clock.time += 1000
        return self.times.costs()

    def execute(self, action: Action) -> None:
        if action.op is Op.WEIGHT_GRADIENTS:
            self.clock.time += 30
        elif action.op.is_compute:
            self.stages[action.stage].execute(action)


def test_stages_of_one_place_are_timed_each_by_itself():
    place = Place()
    layers = [stage.layers.functions for stage in place.stages.values()]
    costs = place.step("0F0.0 0F1.0 4F0.0 4B0.0 0B0.0 4F1.0 0B1.0 4B1.0")
    assert costs == ((1, 3 + 10, 5, 7, 9 + 10), (2, 4 + 20, 6, 8, 10 + 20))
    assert place.times.seconds() == (3, 37, 11, 15, 49)
    assert [stage.layers.functions for stage in place.stages.values()] == layers


def test_a_stage_that_goes_forward_only_takes_nothing_backward():
    place, costs = Place(), ((1, 13, 5, 7, 19), (0, 0, 6, 8, 30))
    assert place.step("0F0.0 4F0.0 4B0.0") == costs == place.times.costs()  # as often as one likes
    assert place.times.seconds() == (1, 13, 11, 15, 49) and place.times.seconds() is None
    assert place.times.costs() == costs
    assert place.step("0F0.0") is None, "of the other stage nothing was seen"


def test_slices_add_up_and_weight_gradients_are_spread_as_the_backward_is():
    forward, backward = Place().step("0F0.0 0F0.1 4F0.0 4B0.0 4F0.1 4SEND_F0.1 4B0.1 4W0.0")
    assert forward == (2, 26, 10, 14, 38)
    assert backward == pytest.approx((0, 0, *(2 * each * (1 + 30 / 88) for each in (6, 8, 30))))


# ----------------------------------------------------------------------------------------------------------------- a run

RAN = Clock(tick=1e-4)


class Slow(Block):
    """A block that takes long."""

    def forward(self, hidden: Any) -> Any:
        RAN.time += 0.03
        return super().forward(hidden)


def lines_of(kinds: list[type], folder: str = "", checkpoint: int = 0) -> list[str]:
    """What is said about the stages in a run of these layers, three on each of two, until it is planned."""
    said: list[str] = []
    engine_facts.emit, layer_times.new_clock = said.append, lambda device: RAN
    keys = {"slices": "auto", **({"measurements_path": f"{folder}/costs.json"} if folder else {})}
    engine = build_engine(
        [LayerSpec(kind) for kind in kinds],
        masked_loss,
        token_pipeline=keys,
        module={"partition_method": "uniform", "activation_checkpoint_interval": checkpoint},
        config={"pipeline": {"use_reentrant": False}},
    )
    train(engine, steps_of(1 + 2 * ROUNDS, 2))  # sequences of 24 tokens are tried in two slices and in one
    assert engine._cutting.state()["plans"]
    engine.destroy()
    return [line for line in said if "slowest stage" in line]


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    unbalanced = [Embedding, Slow, Slow, Block, Block, Head]
    found: dict[str, Any] = {
        "unbalanced": lines_of(unbalanced, folder),
        "from the file": lines_of(unbalanced, folder),
        "balanced": lines_of([Embedding, Block, Slow, Slow, Block, Head]),
        "checkpointed": lines_of(unbalanced, checkpoint=1),
    }
    return {**found, "layers": MeasuredCost.load(f"{folder}/costs.json").layers}


ranks = launched(worker, 2, folder=True)


def test_stages_that_are_out_of_balance_are_said_once_on_rank_0(ranks):
    first, second = ranks
    (line,) = first["unbalanced"]
    assert line.startswith("plan: stages of 2,4 layers would take ")
    assert line.endswith("begin the stages of the PipelineModule at its layers 0, 2 in place of 0, 3")
    assert first["from the file"] == [line] and first["balanced"] == first["checkpointed"] == []
    assert not any(second[run] for run in ("unbalanced", "from the file", "balanced", "checkpointed"))
    assert all(0.03 < seconds < 0.04 for seconds in first["layers"].stages[0][1:])

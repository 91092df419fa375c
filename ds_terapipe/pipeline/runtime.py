"""Stages and links of a rank: everything of an engine that depends on the placement of the model's stages.

An engine keeps one runtime and builds another when stages move; both can be alive together. The schedule decides the
actions of a step; the runtime runs each action with its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.layer_range import Layer
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.operators.interception import Interception
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.recording.accounting import LiveUnits, StepMemory
from ds_terapipe.pipeline.slicing import TensorCut, as_tuple, like
from ds_terapipe.pipeline.stage import Autocast, GradientRules, Stage
from ds_terapipe.pipeline.token_shares import TokenShares
from ds_terapipe.pipeline.transport.boundary import check_sendable
from ds_terapipe.pipeline.transport.channels import open_channels
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.p2p import Described, Links
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.process_groups import close_groups
from ds_terapipe.schedule import Action, Channel, Grid, Op, Placement, Unit


@dataclass(frozen=True)
class Step:
    """A step of training or evaluation: ``grid`` over ``batch``.

    ``losses``: only on the rank with the model's last stage. ``first_micro_batch``: number of micro-batches of other
    replicas before this pipeline's; random streams use this global numbering.
    """

    number: int
    batch: StepBatch
    grid: Grid
    losses: StepLosses | None = None
    first_micro_batch: int = 0


class PipelineRuntime:
    """The stages of one rank on a placement, and their links to other ranks; built by `build`.

    Args:
        view: view of this rank.
        stages: stages on this rank, by number.
        links: links to the stages of other places.
        watchdog: times and bounds the waits.
        channels: process groups of the links, which `close` destroys.
    """

    def __init__(
        self,
        view: RankView,
        stages: dict[int, Stage],
        links: Links,
        watchdog: Watchdog,
        channels: Mapping[Channel, Any] = MappingProxyType({}),
    ) -> None:
        self.view, self.placement, self.stages, self.links = view, view.placement, stages, links
        first = next(iter(stages.values()))  # these are the same for all stages of a place
        self.memory, self.autocast = first.memory, first.autocast
        self.shares, self._streams = first.context.shares, first.context.streams
        self.live = LiveUnits()
        self.interception: Interception | None = None
        self._watchdog, self._channels = watchdog, channels
        self._deferring: tuple[int, ...] | None = None
        self._observers: list[Observer] = []  # of the present step
        self._batch = StepBatch()
        # tensors by the action that takes them: a forward or backward pass, or the message to another place
        self._waiting: dict[tuple[Op, int, Unit], Any] = {}

    @classmethod
    def build(
        cls,
        placement: Placement,
        pipelines: Sequence[Sequence[int]],
        functions: Mapping[int, Layer],
        *,
        device: torch.device,
        watchdog: Watchdog,
        gradients: GradientRules,
        module: Any = None,
        memory: StepMemory | None = None,
        autocast: Autocast = nullcontext,
        streams: RandomStreams | None = None,
        first_stage: Callable[..., Stage] = Stage,
        host_group: Any = None,
        shares: TokenShares | None = None,
    ) -> PipelineRuntime:
        """Build the runtime of this rank; collective over all pipelines.

        Args:
            placement: stages on places.
            pipelines: global ranks of every pipeline of the job, by place.
            functions: the model's layers on this place, by their number in the model.
            device: device of the layers.
            watchdog: times and bounds the waits.
            gradients: hooks around backward passes.
            module: the ``PipelineModule`` of the layers, if there is one.
            memory: measures the memory of units, on request.
            autocast: context of the layers' mixed precision.
            streams: seeds the layers' random numbers in training steps; None: the process's own state.
            first_stage: factory of the model's first stage.
            host_group: group of all ranks for messages in host memory; None: the job's.
            shares: ranks that share the tokens of a slice; None: each has all of them.
        """
        view, memory = RankView.of(placement, watchdog.job.rank, pipelines), memory or StepMemory()
        stages = {}
        for number in view.stages:
            _, first, stop = placement.stages[number]
            stages[number] = (Stage if number else first_stage)(
                number, [functions[layer] for layer in range(first, stop)], first, module=module, gradients=gradients,
                trains=placement.goes_backward(number), memory=memory, autocast=autocast, streams=streams,
            )  # fmt: skip
            stages[number].context.shares = shares
        channels = open_channels(placement, pipelines, watchdog, device)
        links = Links(view, channels, device, watchdog, watchdog.job.host_group if host_group is None else host_group)
        return cls(view, stages, links, watchdog, channels)

    def intercept(self) -> None:
        """Make attention run slices, and layers defer weight gradients; engines that never cut do not call this."""
        if self.interception is None:
            self.interception = Interception(
                layer for stage in self.stages.values() for layer in stage.layers.functions
            )

    def deferring(self, consensus: Consensus) -> tuple[int, ...]:
        """Return the stages that defer weight gradients on any rank; collective at the first call."""
        if self._deferring is None:
            mine = [number for number, stage in self.stages.items() if defers(stage, self.interception)]
            self._deferring = tuple(sorted({number for numbers in consensus.gather(mine) for number in numbers}))
        return self._deferring

    @property
    def multiple(self) -> int:
        """Number of tokens that every slice must be a multiple of."""
        return 1 if self.shares is None else self.shares.size

    @property
    def is_inspected(self) -> bool:
        """Whether the sequence dimensions of every stage are known."""
        return all(stage.dims is not None for stage in self.stages.values())

    @property
    def output_cuts(self) -> Sequence[TensorCut] | None:
        """Sequence dimensions of the model's outputs; None on other ranks, or before the first cut."""
        stage = self.stages.get(len(self.placement.stages) - 1)
        return None if stage is None or stage.dims is None else stage.dims.outputs

    @property
    def boundary_cuts(self) -> dict[int, Sequence[TensorCut]]:
        """How the tensors of this place's boundaries follow the tokens; empty before the first cut."""
        cuts: dict[int, Sequence[TensorCut]] = {}
        for number, stage in self.stages.items():
            if stage.dims is not None:
                cuts[number - 1], cuts[number] = stage.dims.inputs, stage.dims.outputs
        return cuts

    def run(self, step: Step, observers: Sequence[Observer] = ()) -> None:
        """Run this place's row of the grid."""
        row = step.grid[self.view.place]
        self._watchdog.begin(step.number, step.grid, self.view)
        self._observers = [each for each in (self._watchdog, self.memory, *observers) if each.watches]
        try:
            for each in self._observers:
                each.step_begins()
            self.begin(step, row)
            self.links.begin(row, _described(step.batch, torch.is_grad_enabled()), self.boundary_cuts)
            inside_out = self._observers[::-1]
            for index, action in enumerate(row):
                for each in self._observers:
                    each.action_begins(index, action)
                self.execute(action)
                for each in inside_out:
                    each.action_ends(action)
            self.links.finish()
            for stage in self.stages.values():
                stage.context.check_step()
            for each in self._observers:
                each.step_ends()
        finally:
            self.end()

    def begin(self, step: Step, row: Sequence[Action]) -> None:
        """Begin a step; this place runs the actions in ``row``."""
        self._batch = step.batch
        apart = {action.stage for action in row if action.op is Op.WEIGHT_GRADIENTS}
        last = len(self.placement.stages) - 1
        for number, stage in self.stages.items():
            stage.begin(step.batch, step.losses if number == last else None, number in apart)
        if self._streams is not None and torch.is_grad_enabled():
            self._streams.begin(step.number, step.first_micro_batch)
        self.live.begin()

    def end(self) -> None:
        """End the step, after an error too: drop everything that it left."""
        self._waiting.clear()
        for stage in self.stages.values():
            stage.end()
        if self._streams is not None:
            self._streams.end()
        self._batch, self._observers = StepBatch(), []

    def execute(self, action: Action) -> None:
        """Run one action of this place."""
        if action.op is Op.WEIGHT_GRADIENTS:
            self.stages[action.stage].make_weight_gradients(action.unit, action.group)
        else:
            self._ACTIONS[action.op](self, action.stage, action.unit)

    def _forward(self, number: int, unit: Unit) -> None:
        stage, span = self.stages[number], self._batch.span(unit)
        if number == 0:
            inputs = self._batch.cut_inputs(unit.micro_batch, span)
        else:
            inputs = self._waiting.pop((Op.FORWARD, number, unit))
        outputs = stage.forward(unit, inputs)
        self.live.forward(number, unit, span, held=stage.trains and torch.is_grad_enabled())
        if number == len(self.placement.stages) - 1:
            return
        check_sendable(outputs, stage.layers.last)
        if self.placement.sends_forward(number):
            self._waiting[Op.SEND_FORWARD, number, unit] = outputs
        else:
            self._waiting[Op.FORWARD, number + 1, unit] = _handed_over(outputs)

    def _backward(self, number: int, unit: Unit) -> None:
        gradients = self.stages[number].backward(unit, self._waiting.pop((Op.BACKWARD, number, unit), None))
        self.live.backward(number, unit)
        if self.placement.sends_backward(number):
            self._waiting[Op.SEND_BACKWARD, number, unit] = gradients
        elif number > 0 and self.placement.goes_backward(number - 1):
            self._waiting[Op.BACKWARD, number - 1, unit] = gradients

    def _receive_forward(self, number: int, unit: Unit) -> None:
        inputs = self._waiting[Op.FORWARD, number, unit] = self.links.receive_forward(number, unit)
        for each in self._observers:
            each.message(number, "received", inputs)

    def _send_forward(self, number: int, unit: Unit) -> None:
        outputs = self._waiting.pop((Op.SEND_FORWARD, number, unit))
        for each in self._observers:
            each.message(number, "sent", outputs)
        self.links.send_forward(number, unit, outputs)

    def _receive_backward(self, number: int, unit: Unit) -> None:
        self._waiting[Op.BACKWARD, number, unit] = self.links.receive_backward(number, unit)

    def _send_backward(self, number: int, unit: Unit) -> None:
        self.links.send_backward(number, unit, self._waiting.pop((Op.SEND_BACKWARD, number, unit)))

    @property
    def left_over(self) -> int:
        """Sum of tensors and live units that no action has taken, and of the stages'; 0 after a step."""
        return len(self._waiting) + sum(stage.left_over for stage in self.stages.values()) + self.live.count

    def leave(self) -> None:
        """Restore the model's modules; local, idempotent."""
        if self.interception is not None:
            self.interception.close()
            self.interception = None

    def close(self) -> None:
        """Restore the model's modules, and release stages and process groups; collective, idempotent.

        Must not be called after a step that failed: messages may still be in flight, and their receivers may be gone.
        """
        self.leave()
        self.stages.clear()
        self.links.close()
        close_groups(self._channels.values())
        self._channels = {}

    _ACTIONS: dict[Op, Callable[[Any, int, Unit], None]] = {
        Op.FORWARD: _forward,
        Op.BACKWARD: _backward,
        Op.SEND_FORWARD: _send_forward,
        Op.RECV_FORWARD: _receive_forward,
        Op.SEND_BACKWARD: _send_backward,
        Op.RECV_BACKWARD: _receive_backward,
    }


def defers(stage: Stage, interception: Interception | None) -> bool:
    """Whether a weight of the stage has its gradient deferred; a bias is deferred only with its weight."""
    if interception is None or not stage.trains:
        return False
    weights = (p for module in stage.layers.modules for p in module.parameters() if p.dim() == 2)
    return any(weight.requires_grad and id(weight) in interception.deferred for weight in weights)


def _handed_over(outputs: Any) -> Any:
    """Return a stage's outputs for the next stage on the same place: leaves, as if they had been received."""
    return like(outputs, [t.detach().requires_grad_(t.requires_grad) for t in as_tuple(outputs)])


def _described(batch: StepBatch, training: bool) -> Described:
    """Return the key of a unit's shapes, which leaves its tokens out, and its tokens."""
    signatures, spans = batch.signatures, batch.spans  # not the batch, since links keep this function
    return lambda unit: ((signatures[unit.micro_batch], unit.slice > 0, training), spans[unit.micro_batch][unit.slice])

"""Interleaved 1F1B, to be drawn and timed beside the schedules that the engine runs.

A device has several chunks of the model instead of one stage: chunk c of device d is virtual stage ``c K + d`` of K devices, so a
micro-batch goes around all devices once for each chunk. Filling and draining the pipeline then takes steps of one chunk instead
of one stage, for more messages and more live activations. The order is that of Narayanan et al. 2021 (arXiv 2104.04473,
section 2.2), as Megatron runs it: micro-batches in groups of K, a chunk at a time, so their number is a multiple of K.

Rows of the grid are devices; ``Action.stage`` is the virtual stage. The engine does not execute such a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .actions import Action, Grid, Op, Unit
from .replay import Span


class InterleavedRun(NamedTuple):
    """A timed step: ``spans[device][i]`` belongs to ``grid[device][i]``; ``busy`` seconds and ``peak_units`` by device.

    ``peak_units`` counts pairs of micro-batch and chunk that are live at once, from their forward to their backward.
    """

    grid: Grid
    spans: list[list[Span]]
    makespan: float
    busy: tuple[float, ...]
    peak_units: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of all devices' time in which they compute nothing, 0 to 1."""
        whole = len(self.busy) * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0


def interleaved_order(devices: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Computations of one step in the order in which each device runs them.

    Args:
        devices: of the pipeline, K.
        chunks: of the model on each device; with one it is plain 1F1B with a longer warm-up.
        micro_batches: a multiple of ``devices``.

    Raises:
        ValueError: a number below 1, or micro-batches that are no multiple of the devices.
    """
    if min(devices, chunks, micro_batches) < 1 or micro_batches % devices:
        raise ValueError(
            f"interleaved: got {micro_batches} micro-batches on {devices} devices with {chunks} chunks each, must be positive "
            "numbers, the micro-batches a multiple of the devices"
        )
    return [_row(device, devices, chunks, micro_batches) for device in range(devices)]


def run_interleaved(
    devices: int,
    chunks: int,
    micro_batches: int,
    compute: Callable[[Action], float],
    message: Callable[[Action], float] | None = None,
) -> InterleavedRun:
    """Times a step: every action ends at the longest path to it.

    Args:
        devices, chunks, micro_batches: as in `interleaved_order`.
        compute: seconds of a FORWARD or BACKWARD action of a virtual stage, weight gradients included.
        message: seconds of a SEND action of a virtual stage; it leaves once the earlier ones of its channel (one direction
            between two devices) are through, and the sender goes on at once. None: messages take no time.

    Raises:
        ValueError: as `interleaved_order`.
    """
    grid = interleaved_order(devices, chunks, micro_batches)
    state = _State(devices, devices * chunks - 1, compute, message)
    spans: list[list[Span]] = [[] for _ in grid]
    left = sum(map(len, grid))
    while left:
        before = left
        for device, row in enumerate(grid):
            while len(spans[device]) < len(row):
                free = spans[device][-1].end if spans[device] else 0.0
                span = state.run(row[len(spans[device])], free)
                if span is None:
                    break
                spans[device].append(span)
                left -= 1
        assert left < before, "the order of interleaved 1F1B has no deadlock"
    busy = tuple(sum(span.end - span.start for span in row) for row in spans)
    return InterleavedRun(grid, spans, max(row[-1].end for row in spans), busy, tuple(map(_peak, grid)))


class _State:
    """What has arrived where, while a grid is run."""

    def __init__(
        self, devices: int, last: int, compute: Callable[[Action], float], message: Callable[[Action], float] | None
    ) -> None:
        self._devices, self._last, self._compute, self._message = devices, last, compute, message
        self._arrived: dict[Action, float] = {}  # by the computation that waits for it
        self._channels: dict[tuple[int, Op], float] = {}

    def run(self, action: Action, free: float) -> Span | None:
        """When the action runs on a device that is free from ``free`` on; None while its input is on no way yet."""
        op, stage, unit = action
        starts_here = stage == (0 if op is Op.FORWARD else self._last)
        if not starts_here and action not in self._arrived:
            return None
        start = max(free, self._arrived.get(action, 0.0))
        span = Span(start, start + self._compute(action))
        if stage != (self._last if op is Op.FORWARD else 0):
            target = Action(op, stage + (1 if op is Op.FORWARD else -1), unit)
            self._arrived[target] = self._sent(action, span.end)
        return span

    def _sent(self, action: Action, ended: float) -> float:
        if self._message is None or self._devices == 1:
            return ended
        send = Op.SEND_FORWARD if action.op is Op.FORWARD else Op.SEND_BACKWARD
        channel = action.stage % self._devices, send
        leaves = max(ended, self._channels.get(channel, 0.0))
        self._channels[channel] = leaves + self._message(Action(send, action.stage, action.unit))
        return self._channels[channel]


def _row(device: int, devices: int, chunks: int, micro_batches: int) -> list[Action]:
    total = micro_batches * chunks
    # two steps for each device below, one there and one back, and all chunks but the last of the first group
    warm_up = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)

    def action(op: Op, index: int) -> Action:
        group, place = divmod(index, devices * chunks)
        chunk, member = divmod(place, devices)
        if op is Op.BACKWARD:
            chunk = chunks - 1 - chunk
        return Action(op, chunk * devices + device, Unit(group * devices + member, 0))

    row = [action(Op.FORWARD, index) for index in range(warm_up)]
    for index in range(total - warm_up):
        row += [action(Op.FORWARD, warm_up + index), action(Op.BACKWARD, index)]
    return row + [action(Op.BACKWARD, index) for index in range(total - warm_up, total)]


def _peak(row: list[Action]) -> int:
    live = peak = 0
    for action in row:
        live += 1 if action.op is Op.FORWARD else -1
        peak = max(peak, live)
    return peak

"""Choice of the next shape, or the next partition into stages, from times of the running pipeline.

``"resize": {"policy": "measured"}`` and ``"partition": "measured"`` predict a step in every shape that there could be
(``predict.py``) from times of the live layers, once whenever other layers are frozen. All of it is collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from ds_terapipe.elastic.moves.start import places_for
from ds_terapipe.elastic.policies.resize import Shape, shapes
from ds_terapipe.elastic.shapes.costs import nbytes
from ds_terapipe.elastic.shapes.history import shape_text
from ds_terapipe.elastic.shapes.predict import Choice, Machine, Prediction, choose, predict
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.clock import Clock
from ds_terapipe.pipeline.recording.accounting import highest_allocated
from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.shared_weights import split
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.plan.costs.memory import GIGABYTE

_FIRST, _LAST = 1, 2  # first and last step of a shape, counted from 0, whose layers are timed
_SMALL, _LARGE, _REPEATS = 1 << 14, 1 << 21, 3  # elements and repetitions of the timed all-reduces
_CHANGE_STEPS = 3.0  # assumed duration of a change in steps, until one has been measured


class ShapeSelector:
    """Times the layers of an engine, predicts its step in other shapes, and chooses one.

    Args:
        engine: the engine; this class does not change its shape.
        consensus: consensus of the job.

    Attributes:
        change_seconds: seconds of the last change; None before the first.
    """

    def __init__(self, engine: Any, consensus: Consensus) -> None:
        self._engine, self._consensus = engine, consensus
        self._settings = engine.elastic_pipeline
        self._clock: Clock = engine._clock
        self._machine: Machine | None = None
        self._limit: float | None = None  # memory limit of a rank in bytes
        self._beside = 0.0  # bytes of a rank beyond the prediction
        self._decided: int | None = None  # number of frozen entries at the last decision
        self._expected: float | None = None  # predicted seconds of a step in this shape
        self.change_seconds: float | None = None
        self._update: tuple[Any, Any] | None = None
        self._said = False
        self.begin()

    # -------------------------------------------------------------------------------------------------- what is measured

    def begin(self) -> None:
        """Begin another placement."""
        self._seconds: list[float] = []  # of its steps

    def restart(self) -> None:
        """Begin another batch: measure and decide again."""
        self._decided = self._expected = None
        self.begin()

    @property
    def times_layers(self) -> bool:
        """Whether the layers of the running step are timed."""
        return _FIRST <= len(self._seconds) <= _LAST

    @property
    def _weighs(self) -> bool:
        """Whether memory matters: on a CPU only if the configuration sets a limit."""
        limited = self._settings.resize.memory_gb is not None or self._engine.device.type == "cuda"
        return limited and self._decides

    @property
    def _decides(self) -> bool:
        return "measured" in (self._settings.resize.policy, self._settings.partition)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager around a step that times it, and measures its memory."""
        engine, weighs = self._engine, self.times_layers and self._weighs
        if weighs:
            engine._memory.begin(engine.module.parameters())
        started = time.perf_counter()
        yield
        if len(self._seconds) <= _LAST:  # one stage alone does not wait
            self._clock.wait()
        self._seconds.append(time.perf_counter() - started)
        if weighs:
            engine._controller.mover.costs.memory = engine._memory.end()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context manager that times the optimiser."""
        begin = self._clock.now()
        yield
        if self.times_layers:
            self._update = begin, self._clock.now()

    # ---------------------------------------------------------------------------------------------------- what is decided

    def decide(self, frozen: int) -> Prediction | None:
        """Choose shape and parts for so many frozen entries; None if nothing is to be decided yet.

        Called before every step. It decides if more entries are frozen, or if layers have just been timed.
        """
        if not self._decides:
            return None
        timed = len(self._seconds) == _LAST + 1
        if timed and self._expected is not None:
            self._compare()
        if self._decided == frozen or not (timed or frozen != self._engine.frozen_layers):
            return None
        costs, measured = self._engine._controller.mover.costs.now(self._engine)
        if not measured:
            self._say_untimed()
            return None
        engine, slices = self._engine, len(self._engine.slices_run[0])
        machine = self._machine = self._machine or self._measure_machine()
        now, chunks = engine.shape, ModelChunks(engine.module)
        parts, places = chunks.parts, chunks.places
        if self._decided is None:
            self._know_memory(predict(now, costs, machine, engine.frozen_layers, slices, parts, places))
        first = max(frozen, engine.untrained_layers)
        costs = replace(costs, forward=tuple(engine._controller.caching.forward_seconds(costs.forward, first)))
        present = predict(now, costs, machine, first, slices, parts, places)
        others = []
        for shape in self._candidates(frozen):
            on = places_for(engine, shape.stages)
            each = predict(shape, costs, machine, first, slices, places=on)
            if (shape, each.parts) != (now, parts) and not split(engine._shared, each.parts, on):
                others.append(each)
        change = _CHANGE_STEPS * present.seconds if self.change_seconds is None else self.change_seconds
        limit = None if self._limit is None else self._limit - self._beside
        found = self._consensus.decide(lambda: choose(present, others, limit, _steps_left(engine), change))
        self._decided = frozen
        if engine.global_rank == 0:
            emit(self._line(present, others, found, measured=timed and frozen == engine.frozen_layers))
        self._expected = None if found.taken == present else found.taken.seconds
        taken: Prediction | None = found.taken
        return taken

    def _measure_machine(self) -> Machine:
        trained = nbytes(p for p in self._engine.module.parameters() if p.requires_grad)
        seconds = 0.0
        if self._update:
            begin, end = self._update
            seconds = self._clock.seconds(end, begin)
        # clipping makes ranks wait for each other; the last one to arrive does not wait
        update = min(self._consensus.gather(seconds / max(trained, 1.0)))
        return Machine(*self._reduction(), update)

    def _reduction(self) -> tuple[float, float]:
        """Return seconds per byte that a rank sends in an all-reduce, and seconds of a small all-reduce."""
        job, device = self._consensus.job, self._engine.device
        ranks = len(job.ranks)
        if ranks == 1:
            return 0.0, 0.0
        seconds = []
        for count in (_SMALL, _LARGE):
            tensor, taken = torch.zeros(count, device=device), []
            for _ in range(_REPEATS):
                self._consensus.gather(None)  # all ranks begin together
                started = time.perf_counter()
                with self._engine._watchdog.waiting("all ranks to add up what is timed", counts=False):
                    torch.distributed.all_reduce(tensor, group=job.group)
                    self._clock.wait()
                taken.append(time.perf_counter() - started)
            seconds.append(max(self._consensus.gather(min(taken))))
        sent = 2 * (ranks - 1) / ranks * 4 * (_LARGE - _SMALL)
        return max(seconds[1] - seconds[0], 0.0) / sent, seconds[0]

    def _candidates(self, frozen: int) -> list[Shape]:
        """Return the possible shapes; the present one if its layers may be repartitioned."""
        engine, micro_batch = self._engine, self._engine.start_shape.micro_batch
        tensor, batches = engine.grid.model_parallel_size, [batch for batch, _ in engine._controller.data.batches]
        possible = shapes(engine.world_size, tensor, engine.train_batch_size(), micro_batch, batches)
        recut = self._settings.partition == "measured" or frozen > 0 or engine.frozen_layers > 0
        return [
            shape
            for shape in possible
            if shape.stages <= len(ModelChunks(engine.module).specs)
            and (recut if shape == engine.shape else self._settings.resize.policy == "measured")
        ]

    def _know_memory(self, start: Prediction) -> None:
        """Set the memory limit of a rank: the configured one, else on a GPU the peak in the starting shape."""
        given, peak = self._settings.resize.memory_gb, self.peak_bytes()
        if peak is not None:
            self._limit = max(self._consensus.gather(float(peak)))
            self._beside = max(self._limit - start.peak_bytes, 0.0)
        if given is not None:
            self._limit = given * GIGABYTE

    def peak_bytes(self) -> float | None:
        """Return this process's peak memory on its device so far; None on a CPU."""
        device = self._engine.device
        return float(highest_allocated(device)) if device.type == "cuda" else None

    # -------------------------------------------------------------------------------------------------------- what is told

    def _line(self, present: Prediction, others: Sequence[Prediction], choice: Choice, measured: bool) -> str:
        took = f", measured {min(self._seconds[_FIRST:]):.3f} s" if measured else ""
        said = [f"as it is, {present.seconds:.3f} s{took}"]
        for each in others:
            gigabytes = (each.peak_bytes + self._beside) / GIGABYTE
            why = f", but a rank holds {gigabytes:.2f} GB" if each in choice.too_large else ""
            taken = " (taken)" if each == choice.taken else ""
            cut = "-".join(str(b - a) for a, b in zip(each.parts, each.parts[1:], strict=False))
            shape = shape_text(each.shape, self._engine.token_pipeline.stages_per_place > 1)
            said.append(f"{shape} of {cut} layers, {each.seconds:.3f} s{why}{taken}")
        return f"elastic_pipeline: a step is predicted to take: {'; '.join(said)}"

    def _say_untimed(self) -> None:
        """Warn once if no later step is timed either."""
        if self._engine.global_rank == 0 and self._engine.module.activation_checkpoint_interval and not self._said:
            emit(
                'elastic_pipeline: "measured" changes nothing beside activation checkpointing, where layers are not timed, use '
                'e.g. "resize": {"policy": [[1000, 1]]}'
            )
        self._said = True

    def _compare(self) -> None:
        if self._engine.global_rank == 0:
            seconds = min(self._seconds[_FIRST:])
            emit(f"elastic_pipeline: a step takes {seconds:.3f} s, and was predicted to take {self._expected:.3f} s")
        self._expected = None


def _steps_left(engine: Any) -> float:
    """Return the steps left by the scheduler's total, under DeepSpeed's name or else torch's and this package's."""
    scheduler = engine.lr_scheduler
    total = getattr(scheduler, "total_num_steps", getattr(scheduler, "total_steps", None))
    if not isinstance(total, (int, float)):  # none, or a user's scheduler means something else by the name
        return math.inf
    return max(float(total) - float(engine.global_steps), 0.0)

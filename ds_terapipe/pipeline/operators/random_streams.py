"""Random numbers independent of the pipeline's shape: each layer has its own stream for each unit of each step.

Dropout draws from a process's generators, so its numbers depend on earlier draws in that process: on its layers, the
order of the schedule, the number of replicas. Here the generators are seeded before a layer runs, in a recomputation
too, with a hash of the position in the training: (seed, step, global micro-batch, layer, first token of this rank).

The default generators are for numbers that all tensor-parallel ranks draw alike; their seed is independent of the
shard. Megatron's states, which its tracker keeps by name, differ between shards.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch

_WITH_TRACKERS = "megatron.core.tensor_parallel.random", "deepspeed.runtime.activation_checkpointing.checkpointing"
_ALIKE = "data-parallel-rng"  # Megatron's state that is the same on all tensor-parallel ranks


class RandomStreams:
    """Seeds a process's generators before every layer of a training step, and restores them afterwards.

    Outside a step, e.g. in an evaluation, nothing is changed. Seeding waits for no device.

    Args:
        seed: seed of the run, the same on all ranks; the attribute may be changed between steps.
        device: device of the layers, whose default generator is seeded besides the CPU's.
        shard: this rank's tensor-parallel index, for Megatron's states.
    """

    def __init__(self, seed: int, device: torch.device | None = None, shard: int = 0) -> None:
        self.seed, self._shard = seed, shard
        self._device = device if device is not None and device.type != "cpu" else torch.device("cpu")
        self._own = torch.Generator(self._device)  # used to make states for trackers
        self._before: TorchStates | None = None  # states before the running step; None outside a step
        self._step = self._first = 0

    def begin(self, step: int, first_micro_batch: int = 0) -> None:
        """Begin a training step.

        Args:
            step: its number in the run.
            first_micro_batch: global number of this replica's micro-batch 0 in the step.
        """
        self.end()  # of a step that failed
        self._step, self._first = step, first_micro_batch
        self._before = TorchStates(self._device)

    def enter(self, layer: int, micro_batch: int, first_token: int) -> None:
        """Seed the generators for a layer and the tokens of a micro-batch of this replica from ``first_token`` on."""
        if self._before is None:
            return
        key = struct.pack("<Q4q", self.seed % 2**64, self._step, self._first + micro_batch, layer, first_token)
        seed = _hash(key)
        for generator in self._before.generators:
            generator.manual_seed(seed)
        for tracker in self._before.trackers:
            for name, state in tracker.states_.items():
                shard = 0 if name == _ALIKE else 1 + self._shard
                of_name = _hash(key + struct.pack("<q", shard) + name.encode())
                if isinstance(state, torch.Generator):
                    state.manual_seed(of_name)
                else:
                    tracker.states_[name] = self._own.manual_seed(of_name).get_state()

    def end(self) -> None:
        """End the step, after an error too: restore the generators."""
        if self._before is not None:
            self._before.restore()
            self._before = None


class TorchStates:
    """Saved states of torch's default generators and of Megatron's trackers.

    Args:
        device: device whose default generator is saved besides the CPU's.

    Attributes:
        generators, trackers: the saved objects.
    """

    def __init__(self, device: torch.device) -> None:
        self.generators, self.trackers = [torch.default_generator, *_default(device)], list(_trackers())
        self._states = [generator.get_state() for generator in self.generators]
        self._tracked = [{name: _kept(state) for name, state in each.states_.items()} for each in self.trackers]

    def restore(self) -> None:
        """Restore the states."""
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)
        for tracker, states in zip(self.trackers, self._tracked, strict=True):
            for name, state in states.items():
                there = tracker.states_.get(name)
                if isinstance(there, torch.Generator):
                    there.set_state(state)
                else:
                    tracker.states_[name] = state


def _hash(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _default(device: torch.device) -> Iterator[torch.Generator]:
    """Yield the default generator of a device that is not the CPU."""
    if device.type == "cpu":
        return
    backend: Any = torch.get_device_module(device)
    yield backend.default_generators[backend.current_device() if device.index is None else device.index]


def _trackers() -> Iterator[Any]:
    """Yield Megatron-core's tracker, and DeepSpeed's that Megatron-DeepSpeed uses, if they hold any state."""
    for module in _WITH_TRACKERS:
        tracker = getattr(sys.modules.get(module), "_CUDA_RNG_STATE_TRACKER", None)
        if getattr(tracker, "states_", None):
            yield tracker


def _kept(state: Any) -> Any:
    """Return a copy of a state."""
    return state.get_state() if isinstance(state, torch.Generator) else state

"""What a step takes, counted by the allocator, and what the memory model says of it: within 5%, also in cuts not measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_terapipe.pipeline.recording.accounting import StepMemory
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.memory import MemoryModel, Peaks, calibrated, memory_use
from tests.spawn import run_ranks

LENGTH, BATCH, BLOCKS, MEASURED = 48, 32, 12, (8, 4)
# slices, schedule, micro-batches, weight gradients
SETTINGS: dict[str, tuple[int | list[int], str, int, str]] = {
    "uncut": (1, "1f1b", 1, "slice"),
    "two slices": (2, "1f1b", 1, "micro_batch"),
    "four slices": (4, "1f1b", 1, "slice"),
    "four slices, once": (4, "1f1b", 1, "micro_batch"),
    "uneven": ([18, 15, 9, 6], "1f1b", 1, "micro_batch"),
    "three micro-batches": (4, "1f1b", 3, "micro_batch"),
    "terapipe": (4, "terapipe", 3, "micro_batch"),
    "terapipe, by slice": (8, "terapipe", 2, "slice"),
}


class Counted:
    """The peak of this process's tensors on the CPU, by what PyTorch's allocator reports to the profiler."""

    def __init__(self) -> None:
        self._profile: Any = None

    def begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()

    def taken(self) -> float:
        self._profile.stop()
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        there = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            there += event.nbytes()
            most = max(most, there)
        return float(most)


def measure(rank: int, world: int) -> dict[str, Any]:
    """The model, calibrated by steps in 8 slices and in 4: of every setting what it says and what was counted, on this rank."""
    from tests.pipeline.models import gpt, mean_loss, micro_batch
    from tests.pipeline.training import build_engine

    found: dict[str, Any] = {}

    def step(engine: Any, memory: StepMemory, micro_batches: int) -> Any:
        memory.begin(engine.module.parameters())
        memory.note_peak(engine.module.parameters())
        batches = iter([micro_batch(n, length=LENGTH, batch=BATCH, masked=False) for n in range(micro_batches)])
        engine.train_batch(batches if engine.is_first_stage() or engine.is_last_stage() else None)
        return memory.end()

    for weights in ("slice", "micro_batch"):
        for micro_batches in sorted({m for _, _, m, w in SETTINGS.values() if w == weights}):
            settings = {"slices": MEASURED[0], "schedule": "1f1b", "weight_gradients": weights}
            engine = build_engine(
                gpt(BLOCKS), mean_loss, token_pipeline=settings, micro_batches=micro_batches, batch=BATCH, stages=world
            )
            memory, once, measured = engine._memory, weights == "micro_batch", []
            memory._peak = Counted() if engine.device.type == "cpu" else memory._peak
            step(engine, memory, micro_batches)
            for slices in MEASURED:
                engine.set_slices(slices, "1f1b")
                taken = step(engine, memory, micro_batches)
                said = engine._consensus.gather((taken, memory.taken))
                measured.append(Peaks(slice_lengths(LENGTH, slices), tuple(peak for _, peak in said)))
            stages = {stage: one for of_rank, _ in said for stage, one in of_rank.items()}
            model = MemoryModel(tuple(stages[stage] for stage in sorted(stages)))
            model = calibrated(model, measured, "1f1b", micro_batches, once)
            for name, (slices, schedule, of_setting, its) in SETTINGS.items():
                if (its, of_setting) == (weights, micro_batches):
                    engine.set_slices(slices, schedule)
                    step(engine, memory, micro_batches)
                    lengths = slice_lengths(LENGTH, slices)
                    found[name] = memory_use(model, schedule, lengths, micro_batches, once)[rank].total, memory.taken
            engine.destroy()
    return found


def compared(ranks: list[dict[str, Any]]) -> None:
    """Every setting of every rank is within 5%; prints them all before it says which is not."""
    for rank, found in enumerate(ranks):
        assert set(SETTINGS) == set(found)
        for name, (said, counted) in found.items():
            print(
                f"stage {rank}, {name}: {said / 1e6:.2f} MB said, {counted / 1e6:.2f} counted, {said / counted - 1:+.1%}"
            )
    for rank, found in enumerate(ranks):
        for name, (said, counted) in found.items():
            assert said == pytest.approx(counted, rel=0.05), f"stage {rank}, {name}"


def test_the_model_says_what_eight_settings_take() -> None:
    compared(run_ranks(measure, 2, timeout=240))


class Given:
    """A peak that is known beforehand."""

    def begin(self) -> None:
        pass

    def taken(self) -> float:
        return 1000.0


def test_gradients_of_weights_are_no_part_of_a_peak() -> None:
    first, second, frozen = (torch.nn.Parameter(torch.zeros(10)) for _ in range(3))
    first.grad = torch.zeros(10)
    frozen.requires_grad_(False)
    memory = StepMemory(Given())
    memory.note_peak([first, second, frozen])
    memory.runs()
    memory.ran()
    assert memory.taken == 960.0, "one is there already, one is to come"
    memory.runs()
    memory.ran()
    assert memory.taken == 960.0, "of a step that nobody watches nothing is learned"
    unknown = StepMemory()
    unknown.note_peak([first])
    unknown.ran()
    assert unknown.taken is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_model_says_what_a_device_takes() -> None:
    compared(run_ranks(measure, 1, timeout=240, env={"DS_ACCELERATOR": "cuda"}))

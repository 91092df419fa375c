"""Memory of a step, counted by the allocator and by the memory model: within 5%, also in cuts not measured."""

import os
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.utils.checkpoint import checkpoint

from ds_terapipe.pipeline.recording.accounting import StepMemory
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.memory import MemoryModel, Peaks, calibrated, memory_use
from tests.pipeline.models import HIDDEN, Block, Embedding, Head, gpt, mean_loss, micro_batch
from tests.pipeline.training import allow_fp16, build_engine
from tests.spawn import launched, run_ranks

MARK = "an action of the step is over"
LENGTH, BATCH, BLOCKS, MEASURED = 48, 16, 6, (8, 4, 2)
ON_CPU = os.environ.get("DS_ACCELERATOR", "cpu") == "cpu"
# on a device enough that the allocator's rounding to 512 bytes is no part of what is measured
FEW = 2 if ON_CPU else 32


# layers that hand a second tensor on, [b, s, 16 hidden]: made by the first, used by the last
Wide = type("Wide", (Embedding,), {"forward": lambda self, x: ((y := Embedding.forward(self, x)), torch.cat([y] * 16, -1))})
Beside = type("Beside", (Block,), {"forward": lambda self, x: (Block.forward(self, x[0]), x[1])})
Joined = type("Joined", (Head,), {"forward": lambda self, x: Head.forward(self, x[0] + x[1][..., :HIDDEN])})
BESIDE = [LayerSpec(layer) for layer in (Wide, *[Beside] * 4, Joined)]
# without the states of random generators, which are larger than what such small layers keep
RECOMPUTED = {
    "activation_checkpoint_interval": 1,
    "activation_checkpoint_func": partial(checkpoint, use_reentrant=True, preserve_rng_state=False),
    "checkpointable_layers": ["Block"],
}
ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 500_000}}  # 2 MB in every step, whatever its slices
FP16 = {"fp16": {"enabled": True, "loss_scale": 1.0}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"specs": gpt(BLOCKS)}, "16 bits": {"specs": gpt(BLOCKS), "module": RECOMPUTED, "config": FP16},
    "two tensors": {"specs": BESIDE}, "ZeRO-1": {"specs": gpt(BLOCKS), "config": ZERO},
}  # fmt: skip
# slices, schedule, micro-batches, weight gradients, sequences of a micro-batch, model
SETTINGS: dict[str, tuple[int | list[int], str, int, str, int, str]] = {
    "two slices": (2, "1f1b", 1, "micro_batch", BATCH, "gpt"), "uneven": ([18, 15, 9, 6], "1f1b", 1, "micro_batch", BATCH, "gpt"),
    "terapipe": (4, "terapipe", 3, "micro_batch", BATCH, "gpt"), "terapipe, by slice": (8, "terapipe", 2, "slice", BATCH, "gpt"),
    "weight gradients in waits": (4, "zero_bubble", 3, "micro_batch", BATCH, "gpt"),
    # gradients of weights are a good part of what there is, which at the peak are not there yet
    "one sequence": (2, "1f1b", 1, "slice", FEW, "gpt"),
    # known from one trial: what does not grow with slices has to be counted
    "recomputed, 16 bits": (6, "1f1b", 1, "slice", FEW, "16 bits"),
    "two tensors": (4, "terapipe", 3, "micro_batch", BATCH, "two tensors"),
    "uncut": (1, "terapipe", 2, "slice", BATCH, "gpt"), "1f1b, by slice": (4, "1f1b", 2, "slice", BATCH, "gpt"),
    "ZeRO-1": (2, "terapipe", 2, "slice", BATCH, "ZeRO-1"), "ZeRO-1, uncut": (1, "1f1b", 2, "slice", BATCH, "ZeRO-1"),
    "ZeRO-1, by micro-batch": (4, "1f1b", 2, "micro_batch", BATCH, "ZeRO-1"),
    "ZeRO-1, by micro-batch, terapipe": (4, "terapipe", 2, "micro_batch", BATCH, "ZeRO-1"),
}  # fmt: skip


class Counted:
    """The peak of this process's tensors on the CPU, by what PyTorch's allocator reports to the profiler."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._beside: list[float] = []

    def begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._beside = []
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()

    def mark(self, beside: float) -> None:
        with torch.profiler.record_function(MARK):
            self._beside.append(beside)

    def taken(self) -> float:
        self._profile.stop()
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() in ("[memory]", MARK)]
        there = most = beside = 0
        marks = iter(self._beside)
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == MARK:
                beside = next(marks)
                continue
            there += event.nbytes()
            most = max(most, there - beside)
        assert next(marks, None) is None and len(self._beside) > 2
        return float(most)


def measure(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """The model, calibrated by steps in more slices: of every setting what it says and what was counted, on this rank."""
    found: dict[str, tuple[float, float]] = {}

    def step(engine: Any, slices: int | list[int], schedule: str = "1f1b") -> Any:
        engine.set_slices(slices, schedule)
        memory, micro_batches, batch = engine._memory, engine.micro_batches, engine.micro_batch_size
        memory.begin(engine.module.parameters())
        memory.note_peak(engine.module.parameters())
        batches = iter([micro_batch(n, length=LENGTH, batch=batch, masked=False) for n in range(micro_batches)])
        engine.train_batch(batches if engine.is_first_stage() or engine.is_last_stage() else None)
        return memory.end()

    allow_fp16()
    for weights, micro_batches, batch, model_of in sorted({(w, m, b, of) for _, _, m, w, b, of in SETTINGS.values()}):
        settings = {"slices": MEASURED[0], "schedule": "1f1b", "weight_gradients": weights, "verify": False}
        sizes = {"micro_batches": micro_batches, "batch": batch, "stages": world}
        engine = build_engine(loss_fn=mean_loss, token_pipeline=settings, **MODELS[model_of], **sizes)
        memory, once, measured = engine._memory, weights == "micro_batch", []
        memory._peak = Counted() if engine.device.type == "cpu" else memory._peak
        step(engine, MEASURED[-1])
        for slices in MEASURED:
            taken = step(engine, slices)
            said = engine._consensus.gather((taken, memory.taken))
            measured.append(Peaks(slice_lengths(LENGTH, slices), tuple(peak for _, peak in said)))
        stages = {stage: one for of_rank, _ in said for stage, one in of_rank.items()}
        model = MemoryModel(tuple(stages[stage] for stage in sorted(stages)))
        for name, (slices, schedule, *others) in SETTINGS.items():
            if others == [micro_batches, weights, batch, model_of]:
                step(engine, slices, schedule)
                lengths = slice_lengths(LENGTH, slices)
                # as the engine knows it of a trial, from those of shorter slices; of what is cut finer from the first two
                shorter = [peaks for peaks in measured if max(peaks.lengths) < max(lengths)]
                trials = measured[:1] if ON_CPU and model_of == "16 bits" else max(shorter, measured[:2], key=len)
                known = calibrated(model, trials, "1f1b", micro_batches, once)
                found[name] = memory_use(known, schedule, lengths, micro_batches, once)[rank].total, memory.taken
        engine.destroy()
    return found


def compared(ranks: list[dict[str, tuple[float, float]]]) -> None:
    assert all(found.keys() == SETTINGS.keys() for found in ranks)
    off = {(rank, name): said / counted - 1 for rank, found in enumerate(ranks) for name, (said, counted) in found.items()}
    assert not {where: f"{each:+.1%}" for where, each in off.items() if abs(each) > 0.05}


ranks = launched(measure, 2, timeout=240)


def test_garbage_goes_before_a_watched_step():
    class Closed:
        def __init__(self):
            self.me = self

    gone = weakref.ref(Closed())
    StepMemory(Counted()).note_peak([])
    assert gone() is None


def test_the_model_says_what_settings_take(ranks):
    compared(ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stages", [1, 2])
def test_the_model_says_what_a_device_takes(stages: int) -> None:
    if torch.cuda.device_count() < stages:
        pytest.skip("NCCL needs a device for each rank")
    compared(run_ranks(measure, stages, timeout=400, env={"DS_ACCELERATOR": "cuda"}))

"""Facts of an engine for cutting its steps."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from ds_terapipe.json_files import check_writable
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.autotune.auto import AutoSlices
from ds_terapipe.pipeline.autotune.memory_limit import StepMeter
from ds_terapipe.pipeline.autotune.planner import Planner
from ds_terapipe.pipeline.autotune.run_info import RunInfo
from ds_terapipe.pipeline.autotune.slice_plan import FixedSlices, configured_slices, named_schedule
from ds_terapipe.pipeline.loss import runs_per_slice
from ds_terapipe.pipeline.recording.accounting import StepMemory
from ds_terapipe.pipeline.recording.layer_times import LayerTimes
from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.plan.placed import placement_field
from ds_terapipe.plan.stages import LayerSeconds
from ds_terapipe.refusals import cuts
from ds_terapipe.version import __version__


def new_slicer(engine: Any, consensus: Consensus, memory: StepMemory, layers: LayerTimes) -> FixedSlices | AutoSlices:
    """Return the engine's slicer by its settings; collective.

    Raises ConfigError on every rank: for a file that cannot be written or does not fit, or a layer whose gradient is no
    sum over slices.
    """
    config = _settings(engine)
    slices = configured_slices(config, engine.num_stages)
    if cuts(slices):
        consensus.agree(_by_frequency(engine))
    if not isinstance(slices, str):
        return FixedSlices(slices, named_schedule(config))
    path = config.measurements_path
    if path is not None:
        consensus.decide(lambda: check_writable("token_pipeline.measurements_path", path, "e.g. costs.json"))
    planner = Planner(
        config,
        _run_info(engine, consensus),
        consensus.decide,
        StepMeter(engine, consensus, memory),
        emit if engine.global_rank == 0 else lambda line: None,
        lambda: _layer_seconds(engine, consensus, layers),
    )
    return AutoSlices(planner)


def follow_micro_batch(engine: Any) -> None:
    """Drop an engine's measurements if its micro-batch size has changed; collective."""
    before, now = engine._sequences[-1], engine.train_micro_batch_size_per_gpu()
    if now == before:
        return
    if engine.global_rank == 0 and engine._slicer.state():
        emit(f"plan: a micro-batch has {now} sequences now, not {before}")
    engine._sequences.append(now)
    engine._begin_slicing()


def _settings(engine: Any) -> TokenPipelineConfig:
    """Return the settings; a plan and a file of measurements only hold for the placement and micro-batches of the start."""
    settings: TokenPipelineConfig = engine.token_pipeline
    if engine._controller.has_moved or len(engine._sequences) > 1:
        settings = settings.model_copy(update={"plan_path": None, "measurements_path": None})
    if not ModelChunks(engine.module).is_placed:  # a place alone has one stage
        settings = settings.model_copy(update={"stages_per_place": 1})
    return settings


def _by_frequency(engine: Any) -> ConfigError | None:
    """Return an error for an embedding with ``scale_grad_by_freq`` whose gradient would be made slice by slice.

    Such a gradient depends on all tokens of a micro-batch.
    """
    interception, once = engine._runtime.interception, engine.makes_weight_gradients_once()
    for name, module in engine.module.named_modules():
        weight = getattr(module, "weight", None)
        if not getattr(module, "scale_grad_by_freq", False) or not getattr(weight, "requires_grad", False):
            continue
        waits = interception is not None and id(weight) in interception.deferred
        if once and waits:
            continue
        use = '"weight_gradients": "micro_batch"' if waits and not engine.torch_autocast_enabled() else '"slices": 1'
        return ConfigError(
            f"token_pipeline: layer {name} ({type(module).__name__}) has scale_grad_by_freq=True, must be False where its "
            f"gradient is made slice by slice (a slice does not know how often a token is in the whole sequence), use {use}"
        )
    return None


def _run_info(engine: Any, consensus: Consensus) -> RunInfo:
    device = engine.device
    mine = {
        "stage": engine.stage_id,
        "layers": [type(layer).__name__ for layer in ModelChunks(engine.module).functions.values()],
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "not_deferred": engine.not_deferred,
        "trained": sum(p.numel() for p in engine.module.parameters() if p.requires_grad),
        "types": sorted({str(p.dtype) for p in engine.module.parameters()}),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
    }
    stages = {each["stage"]: each for each in consensus.gather(mine)}
    measured_on = {
        "stages": [stages[stage] for stage in sorted(stages)],
        "sequences": engine.train_micro_batch_size_per_gpu(),
        "ranks": {name: engine.grid._topo.get_dim(name) for name in engine.grid._topo.get_axis_names()},
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "ds_terapipe": __version__,
        },
        "weight_gradients": "micro_batch" if engine.makes_weight_gradients_once() else "slice",
        "checkpoint_interval": engine.module.activation_checkpoint_interval,
        "autocast": bool(engine.torch_autocast_enabled()),
        **placement_field(engine.placement),
    }
    if engine._runtime.multiple > 1:
        measured_on["sequence_parallel"] = engine._runtime.multiple
    return RunInfo(
        placement=engine.placement,
        sequences=engine.train_micro_batch_size_per_gpu(),
        micro_batches=engine.micro_batches,
        weights_once=engine.makes_weight_gradients_once(),
        loss_of_whole=not runs_per_slice(engine.module.loss_fn),
        multiple=engine._runtime.multiple,
        measured_on=measured_on,
    )


def _processor() -> str:
    """Return the processor's name from Linux, else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _layer_seconds(engine: Any, consensus: Consensus, times: LayerTimes) -> LayerSeconds | None:
    """Return the seconds of single layers on all places, from the slowest replica or tensor-parallel rank of each.

    None if some rank has not timed them, or a place has layers from several parts of the model: boundaries cannot
    describe it.
    """
    places = [stage.place for stage in engine.placement.stages]
    if places != sorted(places):
        return None
    stages: dict[int, tuple[float, ...]] = {}
    for stage, seconds in consensus.gather((engine.stage_id, times.seconds())):
        if seconds is None:
            return None
        stages[stage] = max(stages.get(stage, seconds), seconds, key=sum)  # of layers that are read, 0
    ends = engine.module.layers_around if hasattr(engine.module, "layers_per_stage") else (0, 0)  # a StagedPipeline
    return LayerSeconds(tuple(stages[stage] for stage in sorted(stages)), ends)

"""A training of the fine-tuning benchmark, as requests to the two processes that do it: begin, train, evaluate, finish.

All columns train the same layers with the same optimizer, learning rates and order of samples. Evaluation is the benchmark's own
and not timed: the weights of all stages are put together on every rank, and each rank classifies its share of the samples once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.benchmarks.elastic_finetune_models import mean_loss
from tests.benchmarks.elastic_finetune_tasks import Data, Settings, collate, layers_of, read
from tests.benchmarks.workers import Seat

PLACES = 2
PIPELINE, REPLICAS, FREEZE, RESHAPE, CACHE = COLUMNS = ("pipeline", "replicas", "freeze", "reshape", "cache")
OURS = (FREEZE, RESHAPE, CACHE)
_EVALUATED = 64  # samples at once
DECAY = 0.01


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        column: of `COLUMNS`.
        seed: of the order of samples, new weights and dropout.
        alpha: of the freezing; None: nothing is frozen.
        partition: ``partition_method`` of the ``PipelineModule`` at the launch.
        micro_batch: samples of a micro-batch at the launch.
    """

    column: str
    seed: int
    alpha: float | None
    partition: str
    micro_batch: int

    @property
    def stages(self) -> int:
        """At the launch."""
        return 1 if self.column == REPLICAS else PLACES

    @property
    def name(self) -> str:
        """In a line of text."""
        alpha = "" if self.alpha is None else f" alpha {self.alpha:.2f}"
        return f"{self.column}{alpha}, seed {self.seed} ({self.partition}, micro-batch {self.micro_batch})"


@dataclass(frozen=True)
class Change:
    """Before which step, counted from 0, there were other frozen layers or another shape, and which."""

    step: int
    frozen: int
    stages: int
    replicas: int


@dataclass(frozen=True)
class Part:
    """What a rank has trained in a request: some steps.

    Attributes:
        seconds: from the first step's begin to the last one's end on all ranks.
        steps: seconds of each.
        losses: of each.
        changes: see `Change`.
        frozen: entries of the layer list at the end.
        stages, replicas: at the end.
        counts: of the cache; samples of this rank.
    """

    seconds: float
    steps: list[float]
    losses: list[float]
    changes: list[Change]
    frozen: int
    stages: int
    replicas: int
    counts: dict[str, int] = field(default_factory=dict)


class Training:
    """A model, an engine, and where it stands. Calling it trains a step and returns the loss."""

    def __init__(self, settings: Settings, run: Run, data: Data) -> None:
        self.settings, self.run, self.data = settings, run, data
        self.engine = engine_of(settings, run, data)
        self._batches = None if run.column in OURS else _batches(settings, run, data, self.engine)
        # where there is a cache or a reshape each layer draws its dropout from the first rank's seed; else each rank from its own
        torch.manual_seed(1000 * run.seed + (0 if run.column in OURS else dist.get_rank()))
        self._whole: list[nn.Module] | None = None

    def __call__(self) -> float:
        return float(self.engine.train_batch(*([] if self._batches is None else [self._batches])))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frozen entries, stages, replicas."""
        engine = self.engine
        return getattr(engine, "frozen_layers", 0), engine.num_stages, engine.dp_world_size

    def whole(self) -> list[nn.Module]:
        """All layers with the present weights; collective."""
        mine = dict(self.engine.module.state_dict())
        states = [mine]
        if self.engine.num_stages > 1:
            states = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(states, mine)
        if self._whole is None:
            with torch.random.fork_rng(devices=[]):  # what building draws is not to be missed by the training
                self._whole = [spec.build() for spec in layers_of(self.settings, self.run.seed)]
        for index, layer in enumerate(self._whole):
            prefix = f"{index}."
            found = {n.removeprefix(prefix): t for state in states for n, t in state.items() if n.startswith(prefix)}
            layer.load_state_dict(found)
            layer.eval()
        return self._whole


def _batches(settings: Settings, run: Run, data: Data, engine: Any) -> Any:
    """The micro-batches of a replica for DeepSpeed's engine, in the order that ours has."""
    from ds_terapipe.elastic.sampler import ElasticBatchSampler

    sampler = ElasticBatchSampler(
        len(data.train), settings.batch, micro_batch=run.micro_batch, replicas=engine.dp_world_size,
        replica=engine.grid.get_data_parallel_rank(), shuffle=True, seed=run.seed,
    )  # fmt: skip
    return iter(DataLoader(data.train, batch_sampler=sampler, collate_fn=collate))


def adamw(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Weight decay on matrices only, as BERT is trained."""
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": DECAY},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True)


def steps_of_epoch(settings: Settings, data: Data) -> int:
    """All of them are whole."""
    return len(data.train) // settings.batch


def config_of(settings: Settings, run: Run, steps: int) -> dict[str, Any]:
    """``ds_config.json`` of a training of so many steps."""
    replicas = PLACES // run.stages
    warmup = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": settings.lr,
        "warmup_num_steps": max(2, round(settings.warmup * steps)),
        "warmup_type": "linear",
        "total_num_steps": steps,
    }
    config: dict[str, Any] = {
        "train_batch_size": settings.batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": settings.batch // (run.micro_batch * replicas),
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }
    if run.column in OURS:
        freeze = {"policy": "static"}
        if run.alpha is not None:
            freeze = {"policy": "alpha", "alpha": run.alpha, "interval": "epoch"}
        config["elastic_pipeline"] = {
            "freeze": freeze,
            "resize": {"policy": "off" if run.column == FREEZE else settings.resize},
            "cache": {"enabled": run.column == CACHE, **dict(settings.cache)} if run.column == CACHE else {},
            "data": {"shuffle": True, "seed": run.seed},
        }
    return config


def engine_of(settings: Settings, run: Run, data: Data) -> Any:
    """DeepSpeed's engine, or ours, which reads the data itself; collective."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ds_terapipe

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    module = PipelineModule(
        layers_of(settings, run.seed),
        num_stages=run.stages,
        loss_fn=mean_loss,
        partition_method=run.partition,
        seed_layers=False,
        activation_checkpoint_interval=0,
    )
    steps = settings.epochs * steps_of_epoch(settings, data)
    arguments: dict[str, Any] = {
        "model": module,
        "config": config_of(settings, run, steps),
        "model_parameters": list(module.parameters()),
        "optimizer": lambda parameters: adamw(list(parameters), settings.lr),
    }
    if run.column in OURS:
        arguments |= {"training_data": data.train, "collate_fn": collate}
    initialize = ds_terapipe.initialize if run.column in OURS else deepspeed.initialize
    engine, *_ = initialize(**arguments)
    return engine


# ---------------------------------------------------------------------------------------------------------- requests


def begin(seat: Seat, settings: Settings, run: Run) -> None:
    """Request: build the engine."""
    seat.step = Training(settings, run, read(settings))


def train(seat: Seat, count: int) -> Part:
    """Request: so many steps, begun and ended together with the other ranks."""
    training: Any = seat.step
    steps, losses, changes = [], [], []
    before = training.shape
    dist.barrier()
    start = last = time.perf_counter()
    for _ in range(count):
        losses.append(training())
        now = time.perf_counter()
        steps.append(now - last)
        last = now
        if training.shape != before:
            before = training.shape
            changes.append(Change(training.engine.global_steps - 1, *before))
    dist.barrier()
    seconds = time.perf_counter() - start
    counts = getattr(training.engine, "cache_counts", None)
    return Part(seconds, steps, losses, changes, *before, {} if counts is None else asdict(counts))


@torch.no_grad()
def evaluate(seat: Seat, part: str) -> tuple[int, int]:
    """Request: how many labels of ``dev`` or ``test`` are predicted, and how many there are; every sample once."""
    training: Any = seat.step
    samples, layers = getattr(training.data, part), training.whole()
    mine = torch.arange(seat.rank, len(samples), seat.world)
    right = count = 0
    for indices in mine.split(_EVALUATED):
        value, labels = samples.some(indices)
        for layer in layers:
            value = layer(value)
        right += int((value.argmax(-1) == labels).sum())
        count += labels.numel()
    total = torch.tensor([right, count])
    dist.all_reduce(total)
    return int(total[0]), int(total[1])


def finish(seat: Seat) -> int:
    """Request: end the engine, with all that it keeps; how many samples it has trained."""
    training: Any = seat.step
    seat.step = None
    trained = int(training.engine.global_samples)
    training.engine.destroy()
    del training
    gc.collect()
    return trained

"""A training of the fine-tuning benchmark, on two ranks.

All columns train the same layers with the same optimizer, learning rates and order of samples. Evaluation is not timed: the
weights of all stages are put together on every rank, and each rank classifies its share of the samples once.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.benchmarks import measure
from tests.benchmarks.elastic_finetune_tasks import Settings, collate, layers_of, mean_loss, read
from tests.benchmarks.models import decay_groups

PLACES, WARMUP = 2, 0.1
COLUMNS = ("pipeline", "replicas", "freeze", "reshape", "cache")
OURS = COLUMNS[2:]


class Run(NamedTuple):
    """One training.

    Attributes:
        column: of `COLUMNS`.
        seed: of the order of samples, new weights and dropout.
        alpha: of the freezing; None: nothing is frozen.
        partition, micro_batch: ``partition_method`` and samples of a micro-batch at the launch.
    """

    column: str
    seed: int
    alpha: float | None
    partition: str
    micro_batch: int


def config_of(settings: Settings, run: Run, steps: int) -> dict[str, Any]:
    """``ds_config.json`` of a training of so many steps."""
    warmup = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": settings.lr,
        "warmup_num_steps": max(2, round(WARMUP * steps)),
        "warmup_type": "linear",
        "total_num_steps": steps,
    }
    config: dict[str, Any] = {
        "train_batch_size": settings.batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }
    if run.column in OURS:
        alpha = {"policy": "alpha", "alpha": run.alpha, "interval": "epoch"}
        config["elastic_pipeline"] = {
            "freeze": {"policy": "static"} if run.alpha is None else alpha,
            "resize": {"policy": "off" if run.column == "freeze" else "halve" if settings.quick else "measured"},
            "cache": {"enabled": run.column == "cache"},
            "data": {"shuffle": True, "seed": run.seed},
        }
    return config


class Training:
    """A model, an engine and its data."""

    def __init__(self, settings: Settings, run: Run) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        import ds_terapipe

        self.settings, self.run, self.data, self.batches = settings, run, read(settings), []
        self.steps = len(self.data["train"]) // settings.batch
        module = PipelineModule(
            layers_of(settings, run.seed), num_stages=1 if run.column == "replicas" else PLACES, loss_fn=mean_loss,
            partition_method=run.partition, seed_layers=False, activation_checkpoint_interval=0,
        )  # fmt: skip
        arguments: dict[str, Any] = {
            "model": module,
            "config": config_of(settings, run, settings.epochs * self.steps),
            "model_parameters": list(module.parameters()),
            "optimizer": lambda some: torch.optim.AdamW(decay_groups(some), lr=settings.lr, fused=True),
        }
        if run.column in OURS:
            more = {"training_data": self.data["train"], "collate_fn": collate}
            self.engine = ds_terapipe.initialize(**arguments, **more)[0]
        else:
            self.engine = deepspeed.initialize(**arguments)[0]
            self.batches = [self.in_order()]
        # where there is a cache or a reshape each layer draws its dropout from the first rank's seed; else each rank from its own
        torch.manual_seed(1000 * run.seed + (0 if run.column in OURS else dist.get_rank()))

    def in_order(self) -> Any:
        """The micro-batches of a replica for DeepSpeed's engine, in the order that ours has."""
        from ds_terapipe.elastic.sampler import ElasticBatchSampler

        sampler = ElasticBatchSampler(
            len(self.data["train"]), self.settings.batch, micro_batch=self.run.micro_batch, shuffle=True, seed=self.run.seed,
            replicas=self.engine.dp_world_size, replica=self.engine.grid.get_data_parallel_rank(),
        )  # fmt: skip
        return iter(DataLoader(self.data["train"], batch_sampler=sampler, collate_fn=collate))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frozen entries of the layer list, stages, replicas."""
        return getattr(self.engine, "frozen_layers", 0), self.engine.num_stages, self.engine.dp_world_size

    def train(self, count: int) -> dict[str, Any]:
        """So many steps: seconds of all and of the fastest, mean loss, and (step, shape) where the shape has changed."""
        taken, losses, changes, before = [], [], [], self.shape
        dist.barrier()
        start = last = time.perf_counter()
        for _ in range(count):
            losses.append(float(self.engine.train_batch(*self.batches)))
            taken.append(time.perf_counter() - last)
            last += taken[-1]
            if self.shape != before:
                before = self.shape
                changes.append((self.engine.global_steps - 1, *before))
        dist.barrier()
        seconds = measure.slowest([time.perf_counter() - start])[0]
        found = {"seconds": seconds, "fastest": min(taken[count // 4 :]), "losses": fmean(losses)}
        return {**found, "frozen": before[0], "changes": changes, "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """Of the cache, samples of all ranks."""
        ranks: list[Any] = [None] * PLACES
        mine = getattr(self.engine, "cache_counts", None)
        dist.all_gather_object(ranks, {} if mine is None else asdict(mine))
        return {name: sum(each[name] for each in ranks) for name in ranks[0]}

    @torch.no_grad()
    def evaluate(self, part: str) -> float:
        """Share of the labels of ``dev`` or ``test`` that are predicted, in per cent; every sample once."""
        states: list[Any] = [None] * PLACES
        dist.all_gather_object(states, dict(self.engine.module.state_dict()))
        with torch.random.fork_rng(devices=[]):  # what building draws is not to be missed by the training
            layers = [spec.build() for spec in layers_of(self.settings, self.run.seed)]
        for index, layer in enumerate(layers):
            prefix = f"{index}."
            found = {n.removeprefix(prefix): t for state in states for n, t in state.items() if n.startswith(prefix)}
            layer.load_state_dict(found)
            layer.eval()
        samples, total = self.data[part], torch.zeros(2, dtype=torch.int64)
        for indices in torch.arange(dist.get_rank(), len(samples), PLACES).split(64):
            value, labels = samples[indices]
            for layer in layers:
                value = layer(value)
            total += torch.tensor([int((value.argmax(-1) == labels).sum()), labels.numel()])
        dist.all_reduce(total)
        return 100 * int(total[0]) / int(total[1])


def probed(settings: Settings, run: Run, steps: int, rounds: measure.Settings) -> float:
    """Seconds of the fastest step; the first quarter of them is to settle in."""
    training = Training(settings, run)
    rounds.quiet(rounds.probe)
    return training.train(steps)["fastest"]


def trained(settings: Settings, run: Run, rounds: measure.Settings) -> dict[str, Any]:
    """All epochs of a training: lists with an item for each, dev after each, test at the end, and the probes' slowdowns.

    Raises WrongResult where the training was not what its column is about.
    """
    training = Training(settings, run)
    slowdown, epochs = [rounds.quiet(rounds.probe).slowdown], []
    for epoch in range(settings.epochs):
        epochs.append(training.train(training.steps))
        slowdown.append(rounds.probe().slowdown)
        epochs[-1]["dev"] = training.evaluate("dev")
        measure.say(f"  epoch {epoch}: {epochs[-1]['seconds']:.1f} s, dev {epochs[-1]['dev']:.2f} %")
    found = {name: [epoch[name] for epoch in epochs] for name in epochs[0]}
    samples = settings.epochs * len(training.data["train"])
    wrong = what_is_wrong(run, found, training.steps, len(layers_of(settings, run.seed)))
    if training.engine.global_samples != samples:
        wrong.append(f"samples: got {training.engine.global_samples}, must be {samples}")
    if wrong:
        raise measure.WrongResult(f"{run}: {'; '.join(wrong)}")
    return {**found, "steps": training.steps, "slowdown": slowdown, "test": training.evaluate("test")}


def what_is_wrong(run: Run, found: dict[str, Any], steps: int, entries: int) -> list[str]:
    """Where a training was not what its column is about. Of the L entries before the head L (1 - (1 - alpha)^T), rounded up, are
    frozen after T epochs."""
    wrong, share = [], run.alpha or 0.0
    expected = [math.ceil((entries - 1) * (1 - (1 - share) ** at) - 1e-9) for at in range(len(found["seconds"]))]
    changes = [change for epoch in found["changes"] for change in epoch]
    at = [
        step for (step, now, *_), before in zip(changes, [0, *(c[1] for c in changes)], strict=False) if now != before
    ]
    begins = [steps * epoch for epoch, (a, b) in enumerate(pairwise(expected), 1) if a != b]
    if found["frozen"] != expected or at != begins:
        wrong.append(f"frozen layers: got {found['frozen']} at {at}, must be {expected} at {begins}")
    if any(tuple(shape) == (1, PLACES) for _, _, *shape in changes) != (run.column in ("reshape", "cache")):
        wrong.append(f"shapes: got {changes}")
    # with more layers frozen than before, entries are what the further layers start from; with as many they are read
    read, more = (sum(counts.get(name, 0) for counts in found["counts"]) for name in ("read", "continued"))
    kept_on = any(a and a == b for a, b in pairwise(expected))
    if (read + more > 0) != (run.column == "cache") or (run.column == "cache" and kept_on and not read):
        wrong.append(f"cache: got {found['counts']}")
    return wrong

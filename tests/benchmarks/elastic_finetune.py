"""Time and accuracy of a fine-tuning with freezing, beside DeepSpeed's pipeline and data parallelism.

``python -m tests.benchmarks.elastic_finetune --data FOLDER`` fine-tunes a BERT on SST-2 in two processes of one thread,
``--task vit`` a small vision Transformer on images, ``--task gpt`` a small GPT on Python's standard library. First come probes
of few steps: DeepSpeed's pipeline on every partition and micro-batch, its replicas and our engine on every micro-batch; the
fastest of each kind is trained. Then, seed by seed, all columns: ours with the cache for every alpha, without it for the first.
All columns train the same layers with the same optimizer, learning rates and order of samples.

Times are those of all training steps, changes of shape between them included, evaluations not: for these the weights of all
stages are put together on every rank, and each rank classifies its share of the samples once. Each finished run is a line in the
output folder; started again, the benchmark makes the missing ones.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.benchmarks import measure
from tests.benchmarks.elastic_finetune_tasks import TASKS, Settings, collate, layers_of, mean_loss, read
from tests.benchmarks.measure import Lines, spread
from tests.benchmarks.models import decay_groups

TITLES = {
    "pipeline": "DeepSpeed, pipeline of two stages",
    "replicas": "DeepSpeed, data parallel",
    "freeze": "ours, freezing alone",
    "reshape": "ours, with the reshape",
    "cache": "ours with cache",
}
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
        "warmup_min_lr": 0.0, "warmup_max_lr": settings.lr, "warmup_num_steps": max(2, round(WARMUP * steps)),
        "warmup_type": "linear", "total_num_steps": steps,
    }  # fmt: skip
    config: dict[str, Any] = {
        "train_batch_size": settings.batch, "train_micro_batch_size_per_gpu": run.micro_batch, "gradient_clipping": 0.0,
        "steps_per_print": 10**9, "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }  # fmt: skip
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

        self.settings, self.run, self.data = settings, run, read(settings)
        self.steps = len(self.data["train"]) // settings.batch
        module = PipelineModule(
            layers_of(settings, run.seed), num_stages=1 if run.column == "replicas" else PLACES, loss_fn=mean_loss,
            partition_method=run.partition, seed_layers=False, activation_checkpoint_interval=0,
        )  # fmt: skip
        arguments: dict[str, Any] = {
            "model": module, "config": config_of(settings, run, settings.epochs * self.steps),
            "model_parameters": list(module.parameters()),
            "optimizer": lambda some: torch.optim.AdamW(decay_groups(some), lr=settings.lr, fused=True),
        }  # fmt: skip
        if run.column in OURS:
            arguments |= {"training_data": self.data["train"], "collate_fn": collate}
        self.engine = (ds_terapipe if run.column in OURS else deepspeed).initialize(**arguments)[0]
        self.batches = [] if run.column in OURS else [self.in_order()]
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
    wrong = what_is_wrong(run, found, len(layers_of(settings, run.seed)))
    if training.engine.global_samples != samples:
        wrong.append(f"samples: got {training.engine.global_samples}, must be {samples}")
    if wrong:
        raise measure.WrongResult(f"{run}: {'; '.join(wrong)}")
    return {**found, "steps": training.steps, "slowdown": slowdown, "test": training.evaluate("test")}


def what_is_wrong(run: Run, found: dict[str, Any], entries: int) -> list[str]:
    """Where a training was not what its column is about. Of the L entries before the head L (1 - (1 - alpha)^T), rounded up, are
    frozen after T epochs."""
    share, column = run.alpha or 0.0, run.column
    expected = [math.ceil((entries - 1) * (1 - (1 - share) ** at) - 1e-9) for at in range(len(found["seconds"]))]
    moved = any(tuple(shape) == (1, PLACES) for epoch in found["changes"] for _, _, *shape in epoch)
    # with more layers frozen than before, entries are what the further layers start from; with as many they are read
    read, more = (sum(counts.get(name, 0) for counts in found["counts"]) for name in ("read", "continued"))
    kept_on = any(a and a == b for a, b in pairwise(expected))
    holds = {
        "frozen": found["frozen"] == expected,
        "changes": moved == (column in ("reshape", "cache")),
        "counts": (read + more > 0) == (column == "cache") and (column != "cache" or read > 0 or not kept_on),
    }
    return [f"{name}: got {found[name]}" for name, true in holds.items() if not true]


# ---------------------------------------------------------------------------------------------------------------- the plan


class Plan(NamedTuple):
    """Runs of the benchmark; ``rounds``: of all probes, so that no noisy minute decides."""

    seeds: Sequence[int]
    alphas: Sequence[float]
    columns: Sequence[str] = COLUMNS
    micro_batches: Sequence[int] = (4, 8, 16)
    rounds: int = 2
    batch: int = 32


class Finished(NamedTuple):
    """Results so far: (run, seconds of its fastest step) of each probe, and the result of `trained`, by run."""

    probes: list[tuple[Run, float]]
    results: dict[Run, dict[str, Any]]

    def of(self, column: str, alpha: float | None = None) -> list[dict[str, Any]]:
        return [found for run, found in self.results.items() if (run.column, run.alpha) == (column, alpha)]


def finished_in(lines: Lines) -> Finished:
    """The finished runs of a file."""
    found = [(Run(**line.pop("run")), line) for line in lines.read()]
    probes = [(run, line["step"]) for run, line in found if "step" in line]
    return Finished(probes, {run: line for run, line in found if "step" not in line})


def probes(plan: Plan) -> list[Run]:
    """All probes, in order."""
    served = {"pipeline": {"pipeline", "freeze"}, "replicas": {"replicas"}, "reshape": {"reshape", "cache"}}
    return [
        Run(column, plan.seeds[0], None, partition, size)
        for column in served
        if served[column] & set(plan.columns)
        for partition in (("uniform", "parameters") if column == "pipeline" else ("uniform",))
        for size in plan.micro_batches
        if plan.batch // (PLACES if column == "replicas" else 1) % size == 0
    ]


def kinds_of(plan: Plan) -> list[tuple[str, float | None]]:
    """(column, alpha) of the rows."""
    kinds = [("pipeline", None), ("replicas", None), ("freeze", plan.alphas[0]), ("reshape", plan.alphas[0])]
    return [kind for kind in [*kinds, *(("cache", alpha) for alpha in plan.alphas)] if kind[0] in plan.columns]


def needed(plan: Plan, finished: Finished) -> list[tuple[bool, Run]]:
    """(whether it is a probe, the run) of what is missing, as far as that is known; neighbours change from seed to seed."""
    made = Counter(run for run, _ in finished.probes)
    for number in range(plan.rounds):
        if missing := [(True, run) for run in probes(plan) if made[run] <= number]:
            return missing
    wanted = []
    for number, seed in enumerate(plan.seeds):
        for column, alpha in kinds_of(plan)[:: -1 if number % 2 else 1]:
            like = {"freeze": "pipeline", "cache": "reshape"}.get(column, column)
            fastest = min((step, run) for run, step in finished.probes if run.column == like)[1]
            wanted.append(Run(column, seed, alpha, fastest.partition, fastest.micro_batch))
    return [(False, run) for run in wanted if run not in finished.results]


def sweep(plan: Plan, settings: Settings, lines: Lines) -> None:
    """Make every run that is needed and not in the file, one after another, each in two processes of its own."""
    rounds = measure.Settings(patience=0, repeats=1) if settings.quick else measure.Settings(repeats=4)
    while missing := needed(plan, finished_in(lines)):
        is_probe, run = missing[0]
        measure.say(f"{run}: {'probe' if is_probe else 'training'}, {len(missing)} runs known to be missing")
        if is_probe:
            lines.add(
                run=run._asdict(), step=measure.on_ranks(probed, settings, run, 4 if settings.quick else 40, rounds)
            )
        else:
            lines.add(run=run._asdict(), **measure.on_ranks(trained, settings, run, rounds))


def table(plan: Plan, finished: Finished) -> list[str]:
    """Markdown: seconds and accuracies, mean and standard deviation over the seeds.

    At each epoch's fastest step: as if all steps of an epoch were as fast. Noise: the mean of the probes' slowdowns.
    """
    heads = "| | seeds | seconds | as fast as the pipeline | seconds at each epoch's fastest step | dev, % | test, % | noise |"
    lines = [heads, "|---" * 8 + "|"]
    pipeline = [sum(one["seconds"]) for one in finished.of("pipeline")]
    for column, alpha in kinds_of(plan):
        if some := finished.of(column, alpha):
            seconds = [sum(one["seconds"]) for one in some]
            title = TITLES[column] + (f", alpha {alpha:.3g}" if column in OURS else "")
            cells = [title, str(len(some)), f"{fmean(pipeline) / fmean(seconds):.2f}" if pipeline else ""]
            fastest = [one["steps"] * sum(one["fastest"]) for one in some]
            for place, digits, values in (
                (2, 1, seconds), (4, 0, fastest), (5, 2, [one["dev"][-1] for one in some]), (6, 2, [one["test"] for one in some]),
            ):  # fmt: skip
                cells.insert(place, f"{fmean(values):.{digits}f} ± {spread(values):.{digits}f}")
            lines.append(f"| {' | '.join(cells)} | {fmean(each for one in some for each in one['slowdown']):.2f} |")
    return lines


def fractions(text: str) -> tuple[float, ...]:
    """``1/4,1/2`` as numbers, for argparse."""
    parts = [part.partition("/") for part in text.split(",")]
    found = tuple(float(above) / float(below or 1) for above, _, below in parts)
    if not all(0 < alpha < 1 for alpha in found):
        raise argparse.ArgumentTypeError(f"got {text}, must be above 0 and below 1, e.g. 1/3")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 where data are missing."""
    options = measure.parser("elastic_finetune", __doc__)
    add = options.add_argument
    add("--task", choices=sorted(TASKS), default="bert", help="default bert")
    add("--data", help="folder of sentences (bert), zip file of images (vit)")
    add("--folder", type=Path, default=Path("runs/elastic_finetune"), help="of the finished runs")
    add("--seeds", type=int, help="runs of each column (default 3; 1 for vit, gpt and --quick)")
    add("--alphas", type=fractions, help="e.g. 1/4,1/2 (default 1/4,1/3,2/5,1/2; 1/3 for vit, gpt and --quick)")
    add("--columns", type=measure.names(COLUMNS), default=COLUMNS, help=f"of {','.join(COLUMNS)} (default all)")
    add("--limit", type=int, help="samples of each part at most (default 4096 for gpt, else all)")
    add("--micro-batches", type=measure.numbers, default=[4, 8, 16], help="that are probed (default 4,8,16)")
    add("--probe-rounds", type=int, default=2, help="of all probes (default 2)")
    options = options.parse_args(arguments)
    title, defaults = TASKS[options.task]
    defaults = {**defaults, **({"seeds": 1, "alphas": (1 / 3,), "limit": 64} if options.quick else {})}
    seeds, alphas, limit = (getattr(options, name) or defaults.get(name) for name in ("seeds", "alphas", "limit"))
    settings = Settings(options.task, options.data, options.quick, limit, defaults["lr"])
    plan = Plan(range(seeds), alphas, options.columns, options.micro_batches, options.probe_rounds)
    if options.quick:
        settings = Settings(options.task, None, True, limit, defaults["lr"], epochs=4, batch=8)
        plan = plan._replace(micro_batches=[4], rounds=1, batch=8)
    try:
        read(settings)
    except ValueError as error:
        print(error)
        return 1
    lines = Lines(options.folder / f"{options.task}.jsonl", asdict(settings))
    sweep(plan, settings, lines)
    print("\n".join([title, "", *table(plan, finished_in(lines))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

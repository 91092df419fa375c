"""Time and accuracy of a fine-tuning with freezing, beside DeepSpeed's pipeline and data parallelism.

``python -m tests.benchmarks.elastic_finetune``, as docs/benchmarks.md says. First come probes of few steps: DeepSpeed's
pipeline on every partition and micro-batch, its replicas and our engine on every micro-batch; the fastest of each kind is
trained. Then, seed by seed, all columns: ours with the cache for every alpha, without it for the first.

Times are those of all training steps, changes of shape between them included, evaluations not. Each finished run is a line in
the output folder; started again, the benchmark makes the missing ones.
"""

import math
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch.utils.data import DataLoader

import ds_terapipe
from ds_terapipe.elastic.sampler import ElasticBatchSampler
from tests.benchmarks import measure
from tests.benchmarks.elastic_finetune_tasks import TASKS, Settings, batch_of, collate, layers_of, mean_loss, read
from tests.benchmarks.measure import Lines, spread
from tests.benchmarks.models import decay_groups

TITLES = {
    "pipeline": "DeepSpeed, pipeline of two stages", "replicas": "DeepSpeed, data parallel",
    "freeze": "ours, freezing alone", "reshape": "ours, with the reshape", "cache": "ours with cache",
}  # fmt: skip
PLACES, WARMUP = 2, 0.1
COLUMNS = tuple(TITLES)
OURS = COLUMNS[2:]


class Run(NamedTuple):
    """One training."""

    column: str  # of `COLUMNS`
    seed: int  # of the order of samples, new weights and dropout
    alpha: float | None  # of the freezing; None: nothing is frozen
    partition: str  # ``partition_method``
    micro_batch: int  # samples of one at the launch
    probe: int = 0  # 1, 2, ... for a probe of few steps, 0 for a training to its end


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
    def __init__(self, settings: Settings, run: Run) -> None:
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
        self.batches = []
        if run.column not in OURS:  # the micro-batches of a replica, in the order that ours has
            sampler = ElasticBatchSampler(
                len(self.data["train"]), settings.batch, micro_batch=run.micro_batch, shuffle=True, seed=run.seed,
                replicas=self.engine.dp_world_size, replica=self.engine.grid.get_data_parallel_rank(),
            )  # fmt: skip
            self.batches = [iter(DataLoader(self.data["train"], batch_sampler=sampler, collate_fn=collate))]
        # where there is a cache or a reshape each layer draws its dropout from the first rank's seed; else each rank from its own
        torch.manual_seed(1000 * run.seed + (0 if run.column in OURS else dist.get_rank()))

    def train(self, count: int) -> dict[str, Any]:
        """Train ``count`` steps; seconds of all and of the fastest past a quarter, samples from the cache, frozen entries."""
        taken = []
        dist.barrier()
        start = last = time.perf_counter()
        for _ in range(count):
            self.engine.train_batch(*self.batches)
            taken.append(time.perf_counter() - last)
            last += taken[-1]
        dist.barrier()
        seconds, counts = time.perf_counter() - start, getattr(self.engine, "cache_counts", None)
        # with more layers frozen than before, entries are what the further layers start from; with as many they are read
        read = torch.tensor(0 if counts is None else counts.read + counts.continued)
        dist.all_reduce(read)
        return {
            "seconds": measure.slowest([seconds])[0], "fastest": min(taken[count // 4 :]), "read": int(read),
            "frozen": getattr(self.engine, "frozen_layers", 0), "stages": self.engine.num_stages,
            "samples": self.engine.global_samples,
        }  # fmt: skip

    @torch.no_grad()
    def evaluate(self, part: str) -> float:
        """Share of the labels of ``dev`` or ``test`` that are predicted, in per cent; every sample once."""
        states: list[Any] = [None] * PLACES
        dist.all_gather_object(states, dict(self.engine.module.state_dict()))
        with torch.random.fork_rng(devices=[]):  # what building draws is not to be missed by the training
            model = torch.nn.Sequential(*(spec.build() for spec in layers_of(self.settings, self.run.seed)))
        model.load_state_dict({name: tensor for state in states for name, tensor in state.items()})
        model.eval()
        samples, total = self.data[part], torch.zeros(2, dtype=torch.int64)
        for indices in torch.arange(dist.get_rank(), len(samples), PLACES).split(64):
            inputs, labels = batch_of(samples[indices])
            total += torch.tensor([int((model(inputs).argmax(-1) == labels).sum()), labels.numel()])
        dist.all_reduce(total)
        return 100 * int(total[0]) / int(total[1])


def trained(settings: Settings, rounds: measure.Settings, run: Run) -> dict[str, Any]:
    """Train all epochs; return lists with one item an epoch, or of a probe the fastest step. Raises WrongResult, see `check`."""
    training, slowdown, epochs = Training(settings, run), [measure.slowdown_of(measure.quiet(rounds))], []
    if run.probe:
        return {"step": training.train(4 if settings.quick else 40)["fastest"]}
    for epoch in range(settings.epochs):
        epochs.append(training.train(training.steps))
        slowdown.append(measure.slowdown_of(measure.probe(rounds)))
        epochs[-1]["dev"] = training.evaluate("dev")
        measure.say(f"  epoch {epoch}: {epochs[-1]['seconds']:.1f} s, dev {epochs[-1]['dev']:.2f} %")
    found = {name: [epoch[name] for epoch in epochs] for name in epochs[0]}
    check(run, found, len(layers_of(settings, run.seed)), len(training.data["train"]))
    return {**found, "steps": training.steps, "slowdown": slowdown, "test": training.evaluate("test")}


def check(run: Run, found: Mapping[str, Any], entries: int, samples: int) -> None:
    """Raise WrongResult where a training was not what its column is about. Of the L entries before the head
    L (1 - (1 - alpha)^T), rounded up, are frozen after T epochs."""
    share, column, epochs = run.alpha or 0.0, run.column, range(len(found["seconds"]))
    holds = {
        "frozen": found["frozen"] == [math.ceil((entries - 1) * (1 - (1 - share) ** at) - 1e-9) for at in epochs],
        "stages": (found["stages"][-1] == 1) == (column in ("replicas", "reshape", "cache")),
        "read": any(found["read"]) == (column == "cache"),
        "samples": found["samples"] == [samples * (at + 1) for at in epochs],
    }
    if wrong := [f"{name}: got {found[name]}" for name, true in holds.items() if not true]:
        raise measure.WrongResult(f"{run}: {'; '.join(wrong)}")


class Plan(NamedTuple):
    """Runs of the benchmark; ``rounds``: of all probes, so that no noisy minute decides."""

    seeds: Sequence[int]
    alphas: Sequence[float]
    columns: Sequence[str] = COLUMNS
    micro_batches: Sequence[int] = (4, 8, 16)
    rounds: int = 2
    batch: int = 32


Done = Mapping[Run, Mapping[str, Any]]
LIKE = {"freeze": "pipeline", "cache": "reshape"}  # whose probes serve another column, too


def kinds_of(plan: Plan) -> list[tuple[str, float | None]]:
    """(column, alpha) of the rows."""
    kinds = [("pipeline", None), ("replicas", None), ("freeze", plan.alphas[0]), ("reshape", plan.alphas[0])]
    return [kind for kind in [*kinds, *(("cache", alpha) for alpha in plan.alphas)] if kind[0] in plan.columns]


def needed(plan: Plan, done: Done) -> list[Run]:
    """Runs that are missing, as far as that is known: probes, then trainings, whose neighbours change from seed to seed."""
    probes = [
        Run(column, plan.seeds[0], None, partition, size, number + 1)
        for number in range(plan.rounds)
        for column in dict.fromkeys(LIKE.get(column, column) for column in plan.columns)
        for partition in (("uniform", "parameters") if column == "pipeline" else ("uniform",))
        for size in plan.micro_batches
        if plan.batch // (PLACES if column == "replicas" else 1) % size == 0
    ]
    if missing := [run for run in probes if run not in done]:
        return missing
    wanted = []
    for number, seed in enumerate(plan.seeds):
        for column, alpha in kinds_of(plan)[:: -1 if number % 2 else 1]:
            served = [run for run in probes if run.column == LIKE.get(column, column)]
            fastest = min(served, key=lambda run: done[run]["step"])
            wanted.append(Run(column, seed, alpha, fastest.partition, fastest.micro_batch))
    return [run for run in wanted if run not in done]


def table(plan: Plan, done: Done) -> list[str]:
    """Markdown: seconds and accuracies, mean and standard deviation over the seeds.

    At each epoch's fastest step: as if all steps of an epoch were as fast. Noise: the mean of the probes' slowdowns.
    """
    heads = "| | seeds | seconds | as fast as the pipeline | seconds at each epoch's fastest step | dev, % | test, % | noise |"
    lines = [heads, "|---" * 8 + "|"]
    pipeline = [sum(found["seconds"]) for run, found in done.items() if run.column == "pipeline" and not run.probe]
    for kind in kinds_of(plan):
        some = [found for run, found in done.items() if (run.column, run.alpha) == kind and not run.probe]
        seconds = [sum(one["seconds"]) for one in some]
        cells = [TITLES[kind[0]] + (f", alpha {kind[1]:.3g}" if kind[1] else ""), str(len(some)), mean_of(seconds, 1)]
        cells += [f"{fmean(pipeline) / fmean(seconds):.2f}" if pipeline else ""]
        cells += [mean_of([one["steps"] * sum(one["fastest"]) for one in some], 0)]
        cells += [mean_of([one["dev"][-1] for one in some], 2), mean_of([one["test"] for one in some], 2)]
        lines.append(f"| {' | '.join(cells)} | {fmean(each for one in some for each in one['slowdown']):.2f} |")
    return lines


def mean_of(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f} ± {spread(values):.{digits}f}"


def main() -> None:
    options = measure.parser("elastic_finetune", __doc__)
    add = options.add_argument
    add("--task", choices=sorted(TASKS), default="bert", help="default bert")
    add("--data", help="folder of sentences (bert), zip file of images (vit)")
    add("--seeds", type=int, help="runs of each column (default 3; 1 for vit, gpt and --quick)")
    fractions = measure.listed(lambda text: float(Fraction(text)))
    add("--alphas", type=fractions, help="e.g. 1/4,1/2 (default 1/4,1/3,2/5,1/2; 1/3 for vit, gpt and --quick)")
    add("--columns", type=measure.listed(str), default=COLUMNS, help=f"of {','.join(COLUMNS)} (default all)")
    add("--limit", type=int, help="samples of each part at most (default 4096 for gpt, else all)")
    add("--micro-batches", type=measure.listed(int), default=[4, 8, 16], help="that are probed (default 4,8,16)")
    add("--probe-rounds", type=int, default=2, help="of all probes (default 2)")
    options = options.parse_args()
    if options.quick and options.data is None:
        options.task = "gpt"  # which needs none
    title, defaults = TASKS[options.task]
    defaults = {**defaults, **({"seeds": 1, "alphas": (1 / 3,), "limit": 64} if options.quick else {})}
    seeds, alphas, limit = (getattr(options, name) or defaults.get(name) for name in ("seeds", "alphas", "limit"))
    settings = Settings(options.task, options.data, options.quick, limit, defaults["lr"])
    plan = Plan(range(seeds), alphas, options.columns, options.micro_batches, options.probe_rounds)
    rounds = measure.Settings(repeats=4)
    if options.quick:
        settings, rounds = settings._replace(epochs=4, batch=8), measure.Settings(patience=0, repeats=1)
        plan = plan._replace(micro_batches=[4], rounds=1, batch=8)
    read(settings)  # or say at once what is missing
    lines = Lines(Path("runs/elastic_finetune") / f"{options.task}.jsonl", Run, settings._asdict())
    done = measure.sweep(partial(needed, plan), partial(measure.on_ranks, trained, settings, rounds), lines)
    print("\n".join([title, "", *table(plan, done)]))


if __name__ == "__main__":
    main()

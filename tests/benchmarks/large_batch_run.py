"""One run of the large-batch benchmark: a model trained on a fixed number of samples, and what became of it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from tests.benchmarks.large_batch_corpus import Corpus, MaskedSamples
from tests.benchmarks.large_batch_model import make_model, masked_loss

MICRO_BATCH = 64  # samples per forward pass: the activations of so many stay in the cache
VALIDATION_SEED = 1_000_003
VALIDATION_SAMPLES = 4096
CURVE_POINTS = 40


@dataclass(frozen=True, order=True)
class Run:
    """``samples`` samples in steps of ``batch``; the LR climbs to ``learning_rate`` during the share ``warmup`` of the
    steps and falls to zero over the others, both linearly.
    """

    optimizer: str
    batch: int
    learning_rate: float
    seed: int
    samples: int
    warmup: float

    @property
    def steps(self) -> int:
        return self.samples // self.batch

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.optimizer}-b{self.batch}-lr{self.learning_rate:g}-n{self.samples}-w{self.warmup:g}-s{self.seed}"


@dataclass(frozen=True)
class Result:
    """``loss``: mean cross entropy in nats over the validation samples, None when the run left the finite numbers.

    ``curve``: (samples seen, mean training loss since the point before). ``corpus``: fingerprint of the text.
    """

    run: Run
    loss: float | None
    curve: list[tuple[int, float]]
    seconds: float
    corpus: str


def share_of_peak(step: int, steps: int, warmup: float) -> float:
    """The LR of step 0, 1, ... ``steps`` - 1 as a share of the highest. Linear up, linear down."""
    climb = max(1, round(warmup * steps))
    if step < climb:
        return (step + 1) / climb
    return (steps - step) / (steps - climb + 1)


def parameter_groups(model: nn.Module) -> list[dict]:
    """Weight decay on matrices only, as BERT is trained."""
    parameters = list(model.parameters())
    return [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.01},
        {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
    ]


def make_lamb(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The package's LAMB as it comes: every tensor adapted."""
    from ds_terapipe.optim.lamb import FusedLamb

    return FusedLamb(parameter_groups(model), lr=learning_rate, betas=(0.9, 0.999), eps=1e-6)


def make_adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """PyTorch's AdamW with the same betas, eps and decay."""
    return torch.optim.AdamW(parameter_groups(model), lr=learning_rate, betas=(0.9, 0.999), eps=1e-6, fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {"lamb": make_lamb, "adamw": make_adamw}


def train(run: Run, corpus: Corpus, report: Callable[[str], None] = lambda line: None) -> Result:
    """Train and validate; a loss that is not finite ends the run at once."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = make_model(run.seed)
    optimizer = OPTIMIZERS[run.optimizer](model, run.learning_rate)
    samples = MaskedSamples(corpus.training, run.steps * run.batch, run.seed)
    curve: list[tuple[int, float]] = []
    recent: list[float] = []
    point_every = max(1, run.steps // CURVE_POINTS)
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * share_of_peak(step, run.steps, run.warmup)
        recent.append(_step(model, optimizer, samples, step * run.batch, run.batch))
        if not math.isfinite(recent[-1]):
            return Result(run, None, curve, time.perf_counter() - start, corpus.fingerprint)
        if (step + 1) % point_every == 0:
            curve.append(((step + 1) * run.batch, sum(recent) / len(recent)))
            recent.clear()
            if len(curve) % 10 == 0:
                report(f"{run.name}: step {step + 1} of {run.steps}, loss {curve[-1][1]:.3f}")
    loss = validation_loss(model, corpus)
    return Result(run, loss if math.isfinite(loss) else None, curve, time.perf_counter() - start, corpus.fingerprint)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: MaskedSamples, start: int, batch: int) -> float:
    """One optimiser step over ``batch`` samples, a micro-batch at a time; the mean loss before it."""
    total = 0.0
    for first in range(0, batch, MICRO_BATCH):
        size = min(MICRO_BATCH, batch - first)
        loss = masked_loss(model, samples.batch(start + first, size)) * (size / batch)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus) -> float:
    """Mean cross entropy in nats over the same masked samples of the held-out files for every run."""
    count = min(VALIDATION_SAMPLES, len(corpus.validation)) // MICRO_BATCH * MICRO_BATCH
    samples = MaskedSamples(corpus.validation, count, VALIDATION_SEED)
    losses = [masked_loss(model, samples.batch(first, MICRO_BATCH)).item() for first in range(0, count, MICRO_BATCH)]
    return sum(losses) / len(losses)


class Store:
    """A folder with one file of one JSON line per finished run; runs on another text are not those of this one."""

    def __init__(self, folder: str | os.PathLike[str], corpus: str) -> None:
        self.folder, self.corpus = Path(folder), corpus
        self.folder.mkdir(parents=True, exist_ok=True)

    def _file(self, run: Run) -> Path:
        return self.folder / f"{run.name}-{self.corpus}.json"

    def write(self, result: Result) -> None:
        """In one go: a file that is there is complete."""
        file = self._file(result.run)
        unfinished = file.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(asdict(result)) + "\n")
        unfinished.replace(file)

    def read(self) -> list[Result]:
        """Every finished run on this text."""
        results = []
        for file in sorted(self.folder.glob("*.json")):
            data = json.loads(file.read_text())
            if data["corpus"] == self.corpus:
                run, curve = Run(**data.pop("run")), [(count, loss) for count, loss in data.pop("curve")]
                results.append(Result(run=run, curve=curve, **data))
        return results

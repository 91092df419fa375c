"""The time of a LAMB step against fused AdamW and eager PyTorch, over the tensors of BERT.

``python -m tests.benchmarks.lamb`` times BERT-base and BERT-large shapes with 1 and 2 threads. Bytes per parameter are counted
from the algorithms and held against a stream in the same rounds.

All optimizers share parameters, gradients and moments: each keeps the same two averages of the same gradients, so what one
leaves the next can go on with, and a model needs 16 bytes per parameter however many columns there are.
"""

import math
import timeit
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_terapipe.optim.lamb import FusedLamb
from tests.benchmarks import measure
from tests.benchmarks.measure import Result, Settings

STREAM_ELEMENTS = 64 * 2**20  # 256 MB each way, many times the last-level cache
STREAM_BYTES = 12  # read, write, and the read that a write to memory begins with
# Bytes moved per parameter when no tensor stays in a cache. AdamW: p, g, m, v read, p, m, v written. LAMB: in phase 1
# p, g, m, v read and m, v written, in phase 2 p, m, v read and p written; 4 more to look for nan and inf. Eager: the 13
# passes of EagerLamb, temporaries counted as the stream is, with the read before a first write.
BYTES = {"adamw": 28, "lamb": 44, "unchecked": 40, "search": 4, "read": 4, "eager": 128}
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def bert(layers: int, hidden: int, vocabulary: int = 30522, positions: int = 512) -> list[tuple[int, ...]]:
    """Shapes of BERT for pre-training (Devlin et al., arXiv 1810.04805): tied output embedding, both heads, separate q, k, v."""

    def matrix(rows: int, columns: int) -> list[tuple[int, ...]]:
        return [(rows, columns), (rows,)]

    norm, square = [(hidden,), (hidden,)], matrix(hidden, hidden)
    layer = 4 * square + norm + matrix(4 * hidden, hidden) + matrix(hidden, 4 * hidden) + norm
    embeddings: list[tuple[int, ...]] = [(vocabulary, hidden), (positions, hidden), (2, hidden)]
    return embeddings + norm + layers * layer + square + [(vocabulary,)] + square + norm + matrix(2, hidden)


MODELS = {"tiny": bert(2, 64, vocabulary=1000, positions=32), "bert-base": bert(12, 768), "bert-large": bert(24, 1024)}


class EagerLamb(torch.optim.Optimizer):
    """LAMB one tensor at a time in eager PyTorch, what a user has without a fused op; every line is one pass over a tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            state = self.state[parameter]
            state["step"] += 1
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(parameter.grad, 1 - beta1)
            square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
            denominator = (square.sqrt() / (1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
            update = (mean / (1 - beta1 ** state["step"])).div_(denominator)
            update.add_(parameter, alpha=group["weight_decay"])
            weight_norm, update_norm = parameter.norm(2.0), update.norm(2.0)
            ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
            parameter.add_(update.mul_(ratio), alpha=-group["lr"])


class Case:
    """The tensors of one model and what is timed on them. Called with a column's name, it takes one step."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.empty(shape).normal_(0, 0.02, generator=generator) for shape in MODELS[model]]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3, generator=generator)
        moments = {p: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)} for p in self.parameters}
        self.optimizers: dict[str, Any] = {
            "adamw": torch.optim.AdamW(self.parameters, **SETTINGS, fused=True),
            "lamb": FusedLamb(self.parameters, **SETTINGS),
            "unchecked": FusedLamb(self.parameters, **SETTINGS, check_gradients=False),
            "eager": EagerLamb(self.parameters, SETTINGS),
        }
        for name, optimizer in self.optimizers.items():  # each as after a first step
            for parameter in self.parameters:
                step = torch.tensor(1.0) if name == "adamw" else 1  # how each counts
                optimizer.state[parameter] = {**moments[parameter], "step": step}
            optimizer.step()
        self._stream = torch.ones(STREAM_ELEMENTS), torch.zeros(STREAM_ELEMENTS)

    def __call__(self, column: str) -> None:
        if column == "stream":
            source, target = self._stream
            torch.mul(source, 1.000001, out=target)  # not copy_, which may write past the cache
        elif column == "read":
            for parameter in self.parameters:
                parameter.grad.sum()
        elif column == "search":
            # what a step of FusedLamb begins with, alone: the squares of the gradients, in which a nan or inf shows
            ((_, (table,)),) = self.optimizers["lamb"]._tables.values()
            table.op.square_sum(table.tables, torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
        else:
            self.optimizers[column].step()


def rounds(model: str, settings: Settings, threads: int) -> Result:
    """The columns on the first rank; of several calls, behind one that does not count, the fastest one does. For both ranks."""
    case = Case(model) if dist.get_rank() == 0 else None

    def seconds(name: str) -> float:
        torch.set_num_threads(threads)
        repeats = 1 + (2 if name == "eager" else 5)
        taken = min(timeit.repeat(partial(case, name), number=1, repeat=repeats)[1:]) if case else 0.0
        torch.set_num_threads(1)
        return measure.slowest([taken])[0]

    return measure.run_rounds({name: partial(seconds, name) for name in ("stream", *BYTES)}, settings)


def stream_lines(result: Result, parameters: int) -> list[str]:
    """Bytes that each column moves per second, beside those of the stream."""
    stream = STREAM_BYTES * STREAM_ELEMENTS / result.seconds["stream"]
    lines = [f"{'':38}{'B/param':>13}{'GB/s':>12}{'of stream':>13}   {stream / 1e9:.1f} GB/s"]
    for name, count in BYTES.items():
        rate = count * parameters / result.seconds[name]
        lines.append(f"{name:38}{count:13}{rate / 1e9:12.1f}{rate / stream:13.0%}")
    return lines


def main() -> None:
    options = measure.parser("lamb", __doc__, rounds=5)
    add = options.add_argument
    add("--models", type=measure.listed(str), help="default bert-base,bert-large; tiny with --quick")
    add("--threads", type=measure.listed(int), default=[1, 2], help="default 1,2")
    options = options.parse_args()
    report = measure.Report(options)
    for model in options.models or (["tiny"] if options.quick else ["bert-base", "bert-large"]):
        parameters = sum(map(math.prod, MODELS[model]))
        for threads in options.threads:
            result = measure.on_ranks(rounds, model, measure.settings_of(options), threads)
            title = f"{model}, {parameters / 1e6:.1f} M parameters, threads: {threads}"
            report.add(title, result, [*result.table(title, "adamw"), *stream_lines(result, parameters)])


if __name__ == "__main__":
    main()

"""A training step of a GPT whose first layers are frozen: in the pipeline, out of it, and what leaving it costs.

``python -m tests.benchmarks.elastic`` trains in two processes with the embedding and half of the layers frozen, then with three
quarters. Columns: ours unfrozen on two stages, ours frozen on two stages (``kept``), on two replicas (``reshaped``), there with
the outputs of the frozen layers read (``cached``), and in the shape that it chooses itself (``measured``); DeepSpeed's engine
with the same layers frozen, on the partitions that it runs and as two replicas. Then the time that a change of shape takes.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch.distributed as dist

from tests.benchmarks import measure
from tests.benchmarks.measure import Column, Settings
from tests.benchmarks.models import QUICK, Shape, Workload
from tests.benchmarks.token_pipeline import Step, new_engine, ours, steps_of, token_slices

DECIDED = 6  # steps after which a shape has been measured, chosen and gone to
STAY, CHANGES = 5, 3  # steps in each shape, and how often it changes
Pairs = Sequence[tuple[int, int]]


def elastic_engine(workload: Workload, slices: int, freeze: Pairs, resize: Pairs | str, cached: bool = False) -> Any:
    """Ours, launched with two stages; ``freeze`` and ``resize`` as in the block ``elastic_pipeline``, and its cache or not."""
    block = {
        "freeze": {"policy": "schedule", "frozen_layers": [list(pair) for pair in freeze]},
        "resize": {"policy": resize if isinstance(resize, str) else [list(pair) for pair in resize]},
        "cache": {"enabled": cached},
    }
    return new_engine(2, workload, {**token_slices(slices), "elastic_pipeline": block})


def frozen_ours(workload: Workload, slices: int, frozen: int, resize: Pairs | str, cached: bool) -> Step:
    """Steps of our engine with ``frozen`` layer modules; with the cache, computing one of them is an error."""
    engine = elastic_engine(workload, slices, [(0, frozen)], resize, cached)
    step = steps_of(engine, workload)

    def reading() -> float | None:
        before = engine.cache_counts.computed
        loss = step()
        # the first two times that a micro-batch is seen it is computed, to be kept and to be compared
        if engine.cache_counts.computed > before and engine.global_steps > DECIDED:
            raise measure.WrongResult(f"the cache was not read: {engine.cache_counts}")
        return loss

    return reading if cached else step


def frozen_deepspeeds(workload: Workload, frozen: int, second: int | None) -> Step:
    """DeepSpeed's engine; ``second``: first layer module of the second stage, None: two replicas of the whole model."""
    if second is None:
        return steps_of(new_engine(1, workload, frozen=frozen), workload, dist.get_rank(), 2)
    return steps_of(new_engine(2, workload, None, frozen, [0, second, workload.shape.layers + 2]), workload)


def columns(workload: Workload, frozen: int, slices: Sequence[int]) -> list[Column]:
    """Ours with these slices, then DeepSpeed's partitions with trained parameters on each stage that put least on the first."""
    found, trains = [], f"all but {frozen}"
    for count in slices:
        found.append(Column(f"ours{count}", partial(ours, workload, count)))
        for name, resize in (("kept", "off"), ("reshaped", [(0, 1)]), ("cached", [(0, 1)]), ("measured", "measured")):
            prepare = partial(frozen_ours, workload, count, frozen, resize, name == "cached")
            settling = DECIDED if name in ("cached", "measured") else 0
            found.append(Column(f"{name}-{count}", prepare, settling, trains))
    for second in (*range(frozen + 1, workload.shape.layers + 2)[:2], None):
        name = f"deepspeed{second}" if second else "replicas"
        found.append(Column(name, partial(frozen_deepspeeds, workload, frozen, second), trains=trains))
    return found


def transitions_in(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """From the seconds of a run's steps, of which the first two in each shape are unsteady, for each change of shape: what
    these two take more than steady ones, in seconds and in steps of the faster of the two shapes."""
    shapes = [seconds[start : start + STAY] for start in range(0, len(seconds), STAY)]
    steady = [min(shape[2:]) for shape in shapes]
    extra = [sum(shape[:2]) - 2 * step for shape, step in zip(shapes, steady, strict=True)]
    return [(extra[at], extra[at] / min(steady[at - 1 : at + 1])) for at in range(1, len(shapes))]


def change_line(workload: Workload, slices: int, frozen: int, settings: Settings) -> str:
    """Runs that freeze and go to one stage, back, and to one stage again; medians over the rounds that count."""
    resize = [(number * STAY, 1 + (number + 1) % 2) for number in range(1, CHANGES + 1)]
    found: list[list[tuple[float, float]]] = []

    def run() -> float:
        engine = elastic_engine(workload, slices, [(STAY, frozen)], resize)
        seconds = measure.timed(steps_of(engine, workload), (CHANGES + 1) * STAY)
        engine.destroy()
        found.append(transitions_in(seconds))
        return sum(seconds)

    result = measure.run_rounds({"run": run}, settings)
    used = [pair for pairs, one in zip(found, result.rounds, strict=True) if one in result.counted for pair in pairs]
    extra, steps = (statistics.median(values) for values in zip(*used, strict=True))
    return f"{slices} slices: a change of shape takes {extra:.3f} s more, {steps:.2f} of a step; {result.state}"


def main() -> None:
    options = measure.parser("elastic", __doc__, rounds=5)
    add = options.add_argument
    add("--batches", type=measure.listed(int), help="sequences per step (default 2,4; 2 with --quick)")
    add("--parts", type=measure.listed(float), help="of the layers to freeze (default 0.5,0.75; 0.5 with --quick)")
    add("--slices", type=measure.listed(int), help="of our columns (default 1,4; 4 with --quick)")
    add("--layers", type=int, help="of the model (default 8; 4 with --quick)")
    add("--hidden", type=int, help="its width (default 512; 64 with --quick)")
    add("--columns", type=measure.listed(str), help="of the table's; then no change of shape is timed")
    options = options.parse_args()
    quick: bool = options.quick
    shape, settings, report = QUICK if quick else Shape(), measure.settings_of(options), measure.Report(options)
    shape = shape._replace(layers=options.layers or shape.layers, hidden=options.hidden or shape.hidden)
    slices, parts = options.slices or [1, 4][quick:], options.parts or [0.5, 0.75][: 2 - quick]
    for part, sequences in product(parts, options.batches or [2, 4][: 2 - quick]):
        workload, frozen = Workload(shape, sequences), 1 + int(part * shape.layers)
        title = f"B={sequences}, embedding + {frozen - 1} frozen"
        every = columns(workload, frozen, slices)
        chosen = [one for one in every if options.columns is None or one.name in options.columns]
        result = measure.on_ranks(measure.side_by_side, chosen, settings, 2)
        # the fastest of those that freeze nothing
        peers = [name for name in result.seconds if name.startswith("ours")] or [chosen[0].name]
        lines = result.table(title, min(peers, key=result.seconds.__getitem__))
        if options.columns is None and part == parts[0]:
            lines += [measure.on_ranks(change_line, workload, count, frozen, settings) for count in slices]
        report.add(title, result, lines)


if __name__ == "__main__":
    main()

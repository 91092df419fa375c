"""What the fine-tuning benchmark found: a table of columns, the curve over alpha, and whether the targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.benchmarks.elastic_finetune_plan import (
    Finished,
    Plan,
    Result,
    allowance,
    chosen_alpha,
    fastest,
    mean,
    spread,
)
from tests.benchmarks.elastic_finetune_run import CACHE, FREEZE, PIPELINE, REPLICAS, RESHAPE, Run

TITLES = {
    PIPELINE: "DeepSpeed, pipeline",
    REPLICAS: "DeepSpeed, data parallel",
    FREEZE: "ours, freeze",
    RESHAPE: "ours, freeze + reshape",
    CACHE: "ours, freeze + reshape + cache",
}
SPEEDUP = 2.0
SENSIBLE = 85.0  # per cent of sentences that a fine-tuned BERT of this size gets right


def title_of(result: Result) -> str:
    """Of its row."""
    alpha = result.run.alpha
    return TITLES[result.run.column] + ("" if alpha is None else f", alpha {alpha:.3g}")


def rows(plan: Plan, finished: Finished) -> list[list[Result]]:
    """The runs of each column and alpha, as far as they are finished; the chosen alpha comes last."""
    chosen = chosen_alpha(plan, finished)
    others = [alpha for alpha in plan.alphas if alpha != chosen]
    kinds = [(PIPELINE, None), (REPLICAS, None), *((CACHE, alpha) for alpha in others)]
    kinds += [(column, chosen) for column in (FREEZE, RESHAPE, CACHE)] if chosen is not None else []
    found = (finished.of(column, alpha) for column, alpha in kinds)
    return [some for some in found if some]


def table(plan: Plan, finished: Finished) -> list[str]:
    """Markdown: seconds and accuracies, mean and standard deviation over the seeds.

    At its fastest steps: with all steps of an epoch as fast as the fastest. Noise: the median of `Result.slowdown`.
    """
    pipeline, replicas = finished.of(PIPELINE), finished.of(REPLICAS)
    times = ["seconds", "times as fast as the pipeline", "as data parallel"]
    titles = ["", "seeds", *times, "dev, %", "test, %", "seconds at its fastest steps", "noise"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for some in rows(plan, finished):
        cells = [
            title_of(some[0]),
            str(len(some)),
            _both([one.total for one in some], 1),
            *(_times(other, some) for other in (pipeline, replicas)),
            _both([one.dev[-1] for one in some], 2),
            _both([one.test for one in some], 2),
            _both([one.undisturbed for one in some], 1),
            f"{statistics.median(each for one in some for each in one.slowdown):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _both(values: Sequence[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {spread(values):.{digits}f}"


def _times(slower: Sequence[Result], quicker: Sequence[Result]) -> str:
    return f"{_faster(slower, quicker):.2f}x" if slower else "-"


def _faster(slower: Sequence[Result], quicker: Sequence[Result]) -> float:
    return mean([one.total for one in slower]) / mean([one.total for one in quicker])


def epochs_table(plan: Plan, finished: Finished) -> list[str]:
    """Markdown: seconds of each epoch, means over the seeds, with the frozen layers and the shape at its end."""
    some_rows = rows(plan, finished)
    count = len(some_rows[0][0].seconds) if some_rows else 0
    lines = ["| | " + " | ".join(f"epoch {epoch}" for epoch in range(count)) + " |", "|---" * (count + 1) + "|"]
    for some in some_rows:
        cells = []
        for epoch in range(count):
            shapes = sorted({one.shapes[epoch] for one in some})
            shape = " or ".join(f"{stages} x {replicas}" for stages, replicas in shapes)
            seconds, at_best = mean([one.seconds[epoch] for one in some]), min(one.fastest[epoch] for one in some)
            cells.append(f"{seconds:.1f} s (step {at_best:.3f}), {some[0].frozen[epoch]} frozen, {shape}")
        lines.append(f"| {title_of(some[0])} | {' | '.join(cells)} |")
    return lines


def cache_lines(plan: Plan, finished: Finished) -> list[str]:
    """What the cache did: samples of an epoch whose frozen layers were not run, or only some of them."""
    lines = []
    for alpha in plan.alphas:
        for one in finished.of(CACHE, alpha):
            epochs = (
                f"{counts['read']} read, {counts['continued']} from fewer layers, {counts['computed']} computed"
                for counts, frozen in zip(one.counts, one.frozen, strict=True)
                if frozen
            )
            lines.append(f"- alpha {alpha:.3g}, seed {one.run.seed}: {'; '.join(epochs)}")
    return lines


def launch_lines(finished: Finished) -> list[str]:
    """What was probed, the fastest in bold."""
    lines = []
    for column, title in (
        (PIPELINE, TITLES[PIPELINE]),
        (REPLICAS, TITLES[REPLICAS]),
        (RESHAPE, "ours, nothing frozen"),
    ):
        seconds: dict[Run, float] = {}
        for one in (each for each in finished.probes if each.run.column == column):
            seconds[one.run] = min(one.fastest, seconds.get(one.run, one.fastest))
        best, parts = fastest(column, finished.probes), []
        for run, least in seconds.items():
            text = f"{run.partition} {run.micro_batch}: {least:.3f} s"
            parts.append(f"**{text}**" if run == best else text)
        if parts:
            lines.append(f"- {title}: {', '.join(parts)}")
    return lines


def target_lines(plan: Plan, finished: Finished, sensible: float | None = None) -> list[str]:
    """One line per target.

    Args:
        sensible: accuracy on dev, in per cent, below which DeepSpeed's pipeline has not learned what there is to learn.
    """
    alpha, pipeline, replicas = chosen_alpha(plan, finished), finished.of(PIPELINE), finished.of(REPLICAS)
    ours = [] if alpha is None else finished.of(CACHE, alpha)
    if not ours or min(map(len, (ours, pipeline, replicas))) < len(plan.seeds):
        return ["not all runs are finished"]
    lines = [f"alpha {alpha:.3g} was chosen on dev"]
    if sensible is not None:
        dev = mean([one.dev[-1] for one in pipeline])
        lines.append(
            f"the pipeline's accuracy on dev is {dev:.2f} %, at least {sensible:.0f}: {_verdict(dev >= sensible)}"
        )
    test, theirs = [one.test for one in ours], [one.test for one in pipeline]
    lost, allowed = mean(theirs) - mean(test), allowance(test, theirs)
    faster = _faster(pipeline, ours)
    lines += [
        f"{faster:.2f} times as fast as the pipeline, at least {SPEEDUP:.1f}: {_verdict(faster >= SPEEDUP)}; "
        f"{_undisturbed(pipeline, ours)}",
        f"accuracy on test {abs(lost):.2f} points {'above' if lost < 0 else 'below'} the pipeline's, "
        f"at most {allowed:.2f} below: {_verdict(lost <= allowed)}",
    ]
    faster = _faster(replicas, ours)
    lines.append(
        f"{faster:.2f} times as fast as data parallel, more than 1: {_verdict(faster > 1)}; {_undisturbed(replicas, ours)}"
    )
    return lines


def _undisturbed(slower: Sequence[Result], quicker: Sequence[Result]) -> str:
    ratio = mean([one.undisturbed for one in slower]) / mean([one.undisturbed for one in quicker])
    return f"{ratio:.2f} if all steps were as fast as the fastest of their epoch"


def _verdict(good: bool) -> str:
    return "pass" if good else "missed"

"""The time of a LAMB step against fused AdamW and eager PyTorch, over the tensors of BERT.

``python -m tests.benchmarks.lamb`` times BERT-base and BERT-large shapes with 1 and 2 threads. AdamW is timed twice
in a round: the two differ by the noise. Bytes per parameter are counted from the algorithms
(tests/benchmarks/lamb_cases.py) and held against a stream measured in the same rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from tests.benchmarks import measure
from tests.benchmarks.lamb_cases import BYTES, MODELS, STREAM_BYTES, STREAM_ELEMENTS, Case, parameters_of
from tests.benchmarks.measure import Result

COLUMNS = ("stream", "adamw", "lamb", "unchecked", "search", "read", "eager", "adamw2")


def stream_lines(result: Result, parameters: int) -> list[str]:
    """Bytes that each column moves per second, beside those of the stream."""
    stream = STREAM_BYTES * STREAM_ELEMENTS / result.seconds["stream"]
    lines = [f"{'':38}{'B/param':>13}{'GB/s':>12}{'of stream':>13}   {stream / 1e9:.1f} GB/s"]
    for name, count in BYTES.items():
        rate = count * parameters / result.seconds[name]
        lines.append(f"{name:38}{count:13}{rate / 1e9:12.1f}{rate / stream:13.0%}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = measure.parser("lamb", __doc__, rounds=5)
    add = options.add_argument
    add("--models", type=measure.names(list(MODELS)), help="default bert-base,bert-large; tiny with --quick")
    add("--threads", type=measure.numbers, default=[1, 2], help="default 1,2")
    options, results = options.parse_args(arguments), {}
    repeats, settings = {name: 2 if name == "eager" else 5 for name in COLUMNS}, measure.settings_of(options)
    for model in options.models or (["tiny"] if options.quick else ["bert-base", "bert-large"]):
        found = measure.on_ranks(measure.calls, partial(Case, model), repeats, settings, options.threads)
        for threads, result in zip(options.threads, found, strict=True):
            parameters = parameters_of(model)
            title = f"{model}, {parameters / 1e6:.1f} M parameters, threads: {threads}"
            results[title] = result
            print("\n".join([*result.table(title, "adamw"), *stream_lines(result, parameters), ""]), flush=True)
    measure.write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The LAMB benchmark's own reasoning: which tensors, what is concluded, and that all columns do the same job."""

from __future__ import annotations

import math

import pytest
import torch

from tests.benchmarks import lamb_cases, lamb_cuda, lamb_shapes
from tests.benchmarks.lamb import parse
from tests.benchmarks.lamb_cases import BYTES, STREAM_BYTES, STREAM_ELEMENTS, columns
from tests.benchmarks.lamb_cuda import Measured
from tests.benchmarks.lamb_eager import EagerLamb
from tests.benchmarks.lamb_shapes import CLASSES, MODELS, count, of_class
from tests.benchmarks.lamb_table import Case, class_table, limit, table, target_lines
from tests.benchmarks.rounds import Minima

STREAM = STREAM_BYTES * STREAM_ELEMENTS


def case(seconds: dict[str, float], clean: int = 5, model: str = "bert-base") -> Case:
    """A case whose stream moves 1 GB/s."""
    measured = {"stream": STREAM / 1e9, **seconds}
    return Case(model, MODELS[model](), 1, Minima(measured, clean, 7, 1.05, 1.02, []))


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [
        ("bert-base", 110_106_428, 206),
        ("bert-large", 336_226_108, 398),
        ("gpt-1.3b", 50304 * 2048 + 2048 * 2048 + 24 * (12 * 2048**2 + 13 * 2048) + 2 * 2048, 292),
    ],
)
def test_shapes(model, parameters, tensors):
    """BERT's are those of published checkpoints with both heads."""
    shapes = MODELS[model]()
    assert (count(shapes), len(shapes)) == (parameters, tensors)
    assert len({one.name for one in shapes}) == tensors
    places = [place for kind in CLASSES for place in of_class(shapes, kind)]
    assert sorted(places) == list(range(tensors))


def test_classes_are_of_the_sizes_they_are_named_for():
    shapes = lamb_shapes.bert(24, 1024)
    counted = {kind: count([shapes[place] for place in of_class(shapes, kind)]) for kind in CLASSES}
    assert counted["feed-forward"] == 24 * 8 * 1024**2
    assert counted["attention"] == (24 * 4 + 2) * 1024**2
    assert counted["embedding"] == (30522 + 512 + 2) * 1024


def test_table_gives_bytes_over_the_stream():
    parameters = count(MODELS["bert-base"]())
    lines = table(case({"adamw": 28e-9 * parameters, "adamw2": 30e-9 * parameters, "lamb": 55e-9 * parameters}))
    adamw, lamb = lines[2:]
    assert adamw.split()[-5:] == ["28.000", "28", "1.0", "100%", "1.00"]
    assert lamb.split()[-5:] == ["55.000", str(BYTES["lamb"]), "0.8", "80%", "1.96"]


def test_class_table_says_what_limits_a_class():
    shapes = MODELS["bert-base"]()
    sizes = {kind: count([shapes[place] for place in of_class(shapes, kind)]) for kind in CLASSES}
    per_parameter = {"embedding": 44e-9, "feed-forward": 47e-9, "attention": 30e-9, "biases and norms": 400e-9}
    seconds = {f"lamb:{kind}": value * sizes[kind] for kind, value in per_parameter.items()}
    seconds |= {f"adamw:{kind}": 28e-9 * sizes[kind] for kind in CLASSES}
    lines = class_table(case({**seconds, "lamb": sum(seconds[f"lamb:{kind}"] for kind in CLASSES)}))
    said = {line[:20].strip(): line.split("  ")[-1] for line in lines[1 : 1 + len(CLASSES)]}
    assert said == {
        "embedding": "memory",
        "feed-forward": "memory",
        "attention": "memory, less what stays in the cache",
        "biases and norms": "arithmetic or cost per tensor",
    }
    assert class_table(case({"lamb": 1.0})) == []


def test_limit_is_at_a_tenth_more_or_less_than_counted():
    assert limit(40 * 1.09, 40) == limit(40 / 1.09, 40) == "memory"
    assert limit(40 * 1.11, 40) == "arithmetic or cost per tensor"


@pytest.mark.parametrize(
    ("seconds", "clean", "outcome"),
    [
        (1.40, 5, "pass"),
        (1.51, 5, "inconclusive"),  # within the noise of 2 %
        (1.60, 5, "miss"),
        (1.20, 2, "inconclusive"),
    ],
)
def test_target_against_adamw(seconds, clean, outcome):
    (line,) = target_lines(case({"adamw": 1.02, "adamw2": 1.0, "unchecked": seconds, "lamb": 9.0}, clean))
    assert line.endswith(f": {seconds:.3f}x AdamW's time, at most 1.5: {outcome}")


@pytest.mark.parametrize(("seconds", "outcome"), [(0.8, "pass"), (1.0, "pass"), (1.12, "inconclusive"), (1.3, "miss")])
def test_target_of_the_search(seconds, outcome):
    (line,) = target_lines(case({"adamw": 1.02, "adamw2": 1.0, "search": seconds, "read": 1.0}))
    assert line.endswith(f"search: {1 / seconds:.2f}x torch.sum's bytes per second, at least 0.9: {outcome}")


def test_noise_without_a_second_adamw_concludes_no_miss():
    assert math.isinf(case({"adamw": 1.0}).noise)
    (line,) = target_lines(case({"adamw": 1.0, "unchecked": 2.0}))
    assert line.endswith("inconclusive")


def test_columns_of_a_round():
    assert columns(eager=False, classes=False) == ["stream", "adamw", "lamb", "unchecked", "search", "read", "adamw2"]
    assert "lamb:attention" in columns(eager=True, classes=True)


def test_every_column_works_on_the_same_tensors():
    """Each optimizer moves the parameters of its class, and the moments that all share, by one step."""
    tensors = lamb_cases.Case("tiny")
    for column in columns(eager=True, classes=True):
        before = [parameter.clone() for parameter in tensors.parameters]
        means = [tensors.moments[parameter][0].clone() for parameter in tensors.parameters]
        tensors(column.removesuffix("2"))
        kind = column.partition(":")[2]
        expected = [column not in lamb_cases.UNMOVING and kind in ("", shape.kind) for shape in tensors.shapes]
        assert [not torch.equal(old, new) for old, new in zip(before, tensors.parameters, strict=True)] == expected
        now = [tensors.moments[parameter][0] for parameter in tensors.parameters]
        assert [not torch.equal(old, new) for old, new in zip(means, now, strict=True)] == expected


def test_the_search_is_the_steps_own():
    tensors = lamb_cases.Case("tiny")
    tensors("search")
    squares = sum(parameter.grad.double().square().sum().item() for parameter in tensors.parameters)
    assert tensors.control[2].item() == pytest.approx(squares, rel=1e-6)


def test_command_line():
    options = parse(["--quick"])
    assert (options.models, options.rounds, options.attempts) == (["tiny"], 1, 1)
    assert parse([]).models == ["bert-base", "bert-large"]
    with pytest.raises(SystemExit):
        parse(["--models", "bert-huge"])


def test_cuda_lines():
    measured = [
        Measured("bert-large", "torch AdamW, fused", 336_226_108, 0.0030),
        Measured("bert-large", "FusedLamb", 336_226_108, 0.0033),
        Measured("bert-large", "apex FusedLAMB", 336_226_108, None, "apex is not installed"),
        Measured("bert-large", "DeepSpeed's FusedLamb, engine, fp16", 336_226_108, 0.012),
        Measured("bert-large", "FusedLamb, engine, fp16", 336_226_108, 0.005),
    ]
    lines = lamb_cuda.target_lines(measured)
    assert lines[0].endswith("1.100x AdamW's time, at most 1.15: pass")
    assert lines[1].endswith("not measured")
    assert lines[2].endswith("2.40x DeepSpeed's speed, at least 2.0: pass")
    assert any("apex is not installed" in line for line in lamb_cuda.table(measured))


def test_eager_lamb_is_the_papers():
    """One tensor, two steps, in float64 by hand; fp32 rounds each of some ten operations by 6e-8."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator, dtype=torch.float64)
    gradients = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    parameter = start.float()
    optimizer = EagerLamb([parameter], lr=0.1, weight_decay=0.01)
    expected, mean, square = start.clone(), 0, 0
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.float()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + 0.01 * expected
        expected -= 0.1 * expected.norm() / update.norm() * update
    torch.testing.assert_close(parameter.double(), expected, rtol=2e-6, atol=2e-6)

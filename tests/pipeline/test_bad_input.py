"""Data, models and settings that can't be run: one line of error on every rank, at once, and nobody is left waiting."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.mutants.claims import holds, refused_or_let_pass
from tests.pipeline.models import (
    HIDDEN,
    Block,
    Embedding,
    Head,
    MaskedTokenLoss,
    gpt,
    mean_loss,
    micro_batch,
)
from tests.pipeline.training import build_engine
from tests.spawn import Exit, run_ranks, run_to_exit

# Of waits, and longer than the processes get: an error that somebody has to wait for does not come at all.
TIMEOUT_S = 900
ENDS_WITHIN_S = 300
MICRO_BATCHES = 2


def good(length: int = 24, masked: bool = True) -> Iterator[Any]:
    return iter([micro_batch(m, length=length, masked=masked) for m in range(MICRO_BATCHES)])


def items(*given: Any) -> Iterator[Any]:
    return iter(given * MICRO_BATCHES)


def broken() -> Iterator[Any]:
    yield next(good())
    raise OSError("no such\nshard")


def short_labels() -> Iterator[Any]:
    inputs, (targets, mask) = micro_batch(0)
    return items((inputs, (targets[:, :-2], mask[:, :-2])))


def long_labels() -> Iterator[Any]:
    return items((micro_batch(0)[0], micro_batch(0, length=28)[1]))


def unequal_inputs() -> Iterator[Any]:
    (tokens, positions), labels = micro_batch(0)
    return items(((tokens, positions[:, :-1]), labels))


INPUTS, LABELS = micro_batch(0)
GARBAGE = "the data iterator: got "
# iterator, and what the one line says
DATA: dict[str, tuple[Callable[[], Iterator[Any]], str]] = {
    "more slices than tokens": (lambda: good(5), "token_pipeline.slices: got 6, must be at most the sequence length 5"),
    "None": (lambda: items(None), GARBAGE + "nothing, must yield (inputs, labels)"),
    "a number": (lambda: items(3), GARBAGE + "int, must yield (inputs, labels)"),
    "text": (lambda: items("tokens"), GARBAGE + "str, must yield (inputs, labels)"),
    "a dictionary": (lambda: items({"inputs": INPUTS, "labels": LABELS}), GARBAGE + "dict, must yield"),
    "no labels": (lambda: items((INPUTS,)), GARBAGE + "tuple of 1, must yield (inputs, labels)"),
    "a tensor": (lambda: items(INPUTS[0]), GARBAGE + "Tensor, must yield (inputs, labels)"),
    "inputs that are text": (lambda: items(("tokens", LABELS)), GARBAGE + "str as inputs"),
    "inputs in a list of lists": (lambda: items(([[1, 2]], LABELS)), GARBAGE + "list as inputs"),
    "no inputs": (lambda: items(((), LABELS)), GARBAGE + "tuple as inputs"),
    "a scalar": (lambda: items((torch.tensor(1), LABELS)), "token_pipeline.cut: got none, inputs[0] (int64 [])"),
    "unequal inputs": (unequal_inputs, "token_pipeline.cut: got none, inputs[1] (int64 [2, 23])"),
    "labels that are None": (lambda: items((INPUTS, None)), GARBAGE + "NoneType as labels"),
    "labels of another length": (short_labels, "token_pipeline.cut: got labels of [22] tokens for inputs of [24]"),
    "labels of more tokens": (long_labels, "token_pipeline.cut: got labels of [28] tokens for inputs of [24]"),
    "no data iterator": (lambda: None, GARBAGE + "nothing, must yield"),
}
# only the ranks of this name get the bad iterator
WHERE = {
    "all": lambda engine: True,
    "replica 1": lambda engine: engine.grid.data_parallel_id == engine.dp_world_size - 1,
}


def attempt(call: Callable[[], Any]) -> list[Any]:
    """Type and text of the error that a call ends with."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def tell(name: str, found: Any) -> None:
    print(f"FOUND {json.dumps([name, found])}", flush=True)


def found(end: Exit) -> dict[str, Any]:
    assert end.code == 0, end.output
    return dict(
        json.loads(line.removeprefix("FOUND ")) for line in end.output.splitlines() if line.startswith("FOUND ")
    )


def bad_data(rank: int, world_size: int) -> None:
    engine = build_engine(gpt(2), MaskedTokenLoss(), token_pipeline={"slices": 6, "timeout_s": TIMEOUT_S}, stages=2)
    for where, chosen in WHERE.items():
        for name, (iterator, _) in DATA.items():
            data = iterator() if chosen(engine) else good()
            engine.set_dataiterator(None)
            tell(f"{name}, {where}", attempt(lambda data=data: engine.train_batch(data)))
    for name, sick in (("first", engine.is_first_stage()), ("last", engine.is_last_stage())):
        tell(f"broken {name}", attempt(lambda sick=sick: engine.train_batch(broken() if sick else good())))
        tell(f"exhausted {name}", attempt(lambda sick=sick: engine.train_batch(iter([]) if sick else good())))
    tell("then", float(engine.train_batch(good())))  # nothing of all this has done the engine any harm
    tell("broken later", attempt(lambda: engine.train_batch(broken())))
    tell("evaluation", attempt(lambda: engine.eval_batch(items(None))))
    tell("at the end", float(engine.train_batch(good())))


@pytest.mark.parametrize("world_size", [2, 4])
def test_bad_data_is_one_line_on_every_rank(world_size):
    ends = [found(end) for end in run_to_exit(bad_data, world_size, timeout=ENDS_WITHIN_S)]
    for name, (_, text) in DATA.items():
        for where in WHERE:
            for rank, told in enumerate(ends):
                kind, message = told[f"{name}, {where}"]
                assert (kind, "\n" in message) == ("ConfigError", False), (name, where, rank, kind, message)
                assert text in message, (name, where, rank, message)
    last = set(range(world_size // 2, world_size))
    for name, sick in (("first", set(range(world_size)) - last), ("last", last), ("later", set(range(world_size)))):
        for rank, told in enumerate(ends):
            own = ["OSError", "no such\nshard"]
            others = ["RuntimeError", f"rank {min(sick)} failed: OSError: no such shard"]
            assert told[f"broken {name}"] == (own if rank in sick else others)
    for told in ends:
        assert {told[f"exhausted {name}"][0] for name in ("first", "last")} == {"StopIteration"}
        assert told["evaluation"][0] == "ConfigError"
        assert told["at the end"] < told["then"] and math.isfinite(told["then"])


class Pooled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(dim=1, keepdim=True)


class Counted(Embedding):
    """Positions made inside the model."""

    def forward(self, inputs: Any) -> Tensor:
        return super().forward((inputs[0], torch.arange(inputs[0].shape[1]).expand_as(inputs[0])))


class Raising(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        raise KeyError("first line\nsecond line")


class Wordless(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError


class Whole(nn.Module):
    """Wants the whole sequence."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.view(hidden.shape[0], 24, HIDDEN)


def between(*layers: type) -> list[LayerSpec]:
    specs = [LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(Block)]
    specs[-len(layers) :] = [LayerSpec(layer) for layer in layers]
    return [LayerSpec(Embedding), *specs, LayerSpec(Head)]


CANT = "token_pipeline.slices: got a model that can't be cut: "
MODELS = {
    "pooling": (lambda: between(Pooled), mean_loss, CANT + "the output of layer 4 (Pooled), module 4, differs by"),
    "positions": (lambda: [LayerSpec(Counted), *between()[1:]], mean_loss, CANT + "the input of layer 0 (Counted), module 0.pos"),
    "bug": (lambda: between(Raising), mean_loss, CANT + "run on a slice it fails, KeyError: 'first line\\nsecond line'"),
    "wordless bug": (lambda: between(Wordless), mean_loss, CANT + "run on a slice it fails, RuntimeError"),
    "bug in the first layer": (lambda: [LayerSpec(Raising), *between()[1:]], mean_loss, CANT + "run on a slice it fails"),
    "fixed shape": (lambda: between(Whole), mean_loss, CANT + "run on a slice it fails, RuntimeError: shape"),
    "no loss_fn": (lambda: between(), None, "got a PipelineModule without loss_fn"),
    "labels": (lambda: between(), lambda outputs, labels: mean_loss(outputs, labels[:, 1:]), "got labels that the loss_fn"),
}  # fmt: skip


def bad_models(rank: int, world_size: int) -> None:
    for name, (layers, loss_fn, _) in MODELS.items():
        engine = build_engine(layers(), loss_fn, token_pipeline={"slices": 4, "timeout_s": TIMEOUT_S}, stages=2)
        tell(name, attempt(lambda engine=engine: engine.train_batch(good(masked=False))))
        engine.destroy()


def attempt_with(micro_batches: int = MICRO_BATCHES, batches: tuple[int, ...] = (24,), **settings: Any) -> list[Any]:
    def train() -> None:
        engine = build_engine(
            gpt(2),
            mean_loss,
            token_pipeline={"timeout_s": TIMEOUT_S, **settings},
            stages=2,
            micro_batches=micro_batches,
        )
        for length in batches:
            engine.train_batch(good(length, masked=False))

    return attempt(train)


# what a rank is given, by (rank, number of ranks), and what the one line says
SETTINGS: dict[str, tuple[Callable[[int, int], dict[str, Any]], str]] = {
    "lengths": (
        lambda rank, ranks: {"slices": [10, 10]},
        "token_pipeline.slices: got [10, 10], which add up to 20 tokens, must add up to the sequence length 24, use",
    ),
    "changing length": (
        lambda rank, ranks: {"slices": [10, 14], "batches": (24, 30)},
        "got [10, 14], which add up to 24 tokens, must add up to the sequence length 30, use",
    ),
    "other slices": (
        lambda rank, ranks: {"slices": 2 + rank // (ranks // 2)},
        "token_pipeline: got other settings on rank ",
    ),
    # a setting that these steps do not need: without the comparison they would run
    "other time": (
        lambda rank, ranks: {"slices": 2, "timeout_s": TIMEOUT_S + rank},
        "token_pipeline: got other settings on rank ",
    ),
    "other micro-batches": (
        lambda rank, ranks: {"slices": 2, "micro_batches": 2 if rank == ranks - 1 else 1},
        "gradient_accumulation_steps: got 2 micro-batches on rank",
    ),
    "misspelt": (lambda rank, ranks: {"slises": 2}, 'token_pipeline: unknown key "slises"'),
    "misspelt on one rank": (
        lambda rank, ranks: {"slices": 2, **({"layuot": "bsh"} if rank == ranks - 1 else {})},
        'token_pipeline: unknown key "layuot"',
    ),
    "too short to look at": (
        lambda rank, ranks: {"slices": 2, "batches": (2,)},
        "token_pipeline.slices: got 2 for 2 tokens, must be 1 below 3",
    ),
}


def bad_settings(rank: int, world_size: int) -> None:
    for name, (settings, _) in SETTINGS.items():
        tell(name, attempt_with(**settings(rank, world_size)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("worker", ["bad_models", "bad_settings"])
def test_bad_models_and_settings_are_one_line_on_every_rank(worker, world_size):
    expected = {name: row[-1] for name, row in (MODELS if worker == "bad_models" else SETTINGS).items()}
    ranks = [found(end) for end in run_to_exit(globals()[worker], world_size, timeout=ENDS_WITHIN_S)]
    one_line(expected, ranks)


def one_line(expected: dict[str, str], ranks: list[dict[str, Any]]) -> None:
    """Every rank got a ConfigError with this text."""
    for rank, told in enumerate(ranks):
        for name, text in expected.items():
            kind, message = told[name]
            assert (kind, "\n" in message) == ("ConfigError", False), (name, rank, kind, message)
            assert text in message, (name, rank, message)


def two_told(rank: int, world_size: int, settings: tuple[str, ...], data: tuple[str, ...]) -> dict[str, Any]:
    told = {name: attempt_with(**SETTINGS[name][0](rank, world_size)) for name in settings}
    for name in data:
        engine = build_engine(gpt(2), MaskedTokenLoss(), token_pipeline={"slices": 6, "timeout_s": TIMEOUT_S}, stages=2)
        told[name] = attempt(lambda engine=engine, name=name: engine.train_batch(DATA[name][0]()))
        engine.destroy()
    return told


def two_are_told(mutant: str | None, settings: tuple[str, ...] = (), data: tuple[str, ...] = ()) -> bool:
    """Whether these settings and data are one line of error on two ranks under a mutant; for ``tests.mutants``."""
    expected = {name: SETTINGS[name][1] for name in settings} | {name: DATA[name][1] for name in data}
    told = refused_or_let_pass(run_ranks(two_told, 2, settings, data, mutant=mutant))
    return holds(one_line, expected, told)


def uncaught(rank: int, world_size: int, name: str) -> None:
    if name in MODELS:
        layers, loss_fn, _ = MODELS[name]
        build_engine(layers(), loss_fn, token_pipeline={"slices": 4}, stages=world_size).train_batch(good(masked=False))
    else:
        engine = build_engine(gpt(2), MaskedTokenLoss(), token_pipeline={"slices": 6}, stages=world_size)
        engine.train_batch(DATA[name][0]() if engine.is_last_stage() or name != "labels of another length" else good())


@pytest.mark.parametrize("name", ["labels of another length", "bug in the first layer"])
def test_a_script_that_lets_the_error_pass_ends_by_itself(name):
    for end in run_to_exit(uncaught, 2, name):
        assert end.code == 1, end.output
        last = end.output.rstrip().splitlines()[-1]
        text = MODELS[name][2] if name in MODELS else DATA[name][1]
        assert "ds_terapipe.errors.ConfigError: " in last and text in last, end.output

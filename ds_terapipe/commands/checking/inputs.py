"""A micro-batch for a model that is checked without data: the script's own if it gave a dataset, else of a known form.

Models of this package have one form each. For others the first form that the model's first layer takes is used, and
the first labels that its loss takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ds_terapipe.commands.checking.boundary import Boundary
from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.slicing import Span, as_tuple, plan_cuts


class Sample(NamedTuple):
    """A micro-batch as a data iterator yields it, (inputs, labels), and its tokens."""

    item: tuple[Any, Any]
    length: int


class StagePart(NamedTuple):
    """A stage of a module that is on this rank.

    Attributes:
        number: of the stage in the model.
        turn: how many stages of its place come before it.
        first: number of its first layer.
        functions: its layers.
        is_last: whether it is the model's last stage.
    """

    number: int
    turn: int
    first: int
    functions: list[Any]
    is_last: bool

    @classmethod
    def of(cls, module: Any, number: int) -> StagePart:
        """Return the stage of this number."""
        chunks = ModelChunks(module)
        index = chunks.places[:number].count(module.stage_id)
        entries, functions = chunks.ranges[index], chunks.functions
        here = [functions[entry] for entry in entries]
        return cls(number, index, entries.start, here, number == len(chunks.places) - 1)


class NoSample(Exception):
    """No micro-batch could be made; the text says what is missing."""


def sample_of(
    engine: Any, part: StagePart, length: int | None, before: Boundary | None, mode: Any, ranks: int = 1
) -> Sample:
    """Return a micro-batch for a stage of an engine.

    Args:
        engine: an engine on fake tensors.
        part: the stage.
        length: tokens of a sequence; None: the dataset's, or the rows of a table of learned positions.
        before: the boundary to the stage before; None for the first one.
        mode: the mode of the fake tensors.
        ranks: tensor-parallel ranks that share the tokens between layers.

    Raises:
        NoSample: no length is known, or no form fits.
    """
    module, first = engine.module, part.number == 0
    if before is None and not first:
        raise NoSample("the stage before could not be run")
    if getattr(engine, "training_dataloader", None) is not None:
        return _read(engine.training_dataloader, mode)
    length = length or _table_rows(module)
    if length is None:
        raise NoSample("the sequence length is not known, use --seq-length")
    batch, layers = engine.train_micro_batch_size_per_gpu(), part.functions
    with mode, torch.no_grad():
        inputs: Any = _tokens(batch, length)
        labels: Any = _tokens(batch, length)
        if first:

            def runs(inputs: Any) -> None:
                shape = tuple(as_tuple(layers[0](inputs))[0].shape)
                share = length // ranks
                if shape[:2] not in ((batch, share), (share, batch)):  # two tensors were taken from one
                    raise ValueError(f"outputs of shape {list(shape)} for [{batch}, {length}] tokens")

            inputs = _first_that(_inputs(module, batch, length), runs, "the first layer")
        if part.is_last and module.loss_fn is not None:
            value = inputs if before is None else before.tensors(Span(0, length, length))
            for layer in layers:
                value = layer(value)
            forms = _labels(batch, length, value)
            labels = _first_that(forms, lambda labels: module.loss_fn(value, labels), "the loss_fn")
    return Sample((inputs, labels), length)


def _read(loader: Iterable[Any], mode: Any) -> Sample:
    inputs, labels = next(iter(loader))[:2]
    try:
        length = plan_cuts(as_tuple(inputs), None, "inputs")[0]
    except ConfigError as problem:
        raise NoSample(f"the dataset's length is not known ({problem})") from problem
    return Sample(tree_map_only(Tensor, mode.from_tensor, (inputs, labels)), length)


def _table_rows(module: Any) -> int | None:
    """Rows of a table of learned positions in the first layer."""
    tables = (each for name, each in _first_modules(module) if isinstance(each, nn.Embedding) and "position" in name)
    return next((table.num_embeddings for table in tables), None)


def _first_that(forms: Iterator[Any], runs: Callable[[Any], Any], what: str) -> Any:
    """Return the first form with which a function runs; which error it raises for another is the model's matter."""
    said = ""
    for form in forms:
        try:
            runs(form)
        except Exception as problem:
            said = said or one_line(problem)
            continue
        return form
    raise NoSample(f"{what} takes no tokens [batch, sequence] and nothing else that is known ({said})")


def _tokens(batch: int, length: int) -> Tensor:
    """Return ids [b, s]."""
    return torch.zeros(batch, length, dtype=torch.int64)


def _inputs(module: Any, batch: int, length: int) -> Iterator[Any]:
    """Yield forms of the first stage's inputs, the likelier ones first."""
    of_megatron, features = {"GPTPipeline": 2, "BertPipeline": 3}.get(type(module).__name__), _features(module)
    if of_megatron is not None:
        yield tuple(_tokens(batch, length) for _ in range(of_megatron))
    if features is not None:
        yield torch.zeros(batch, length, features)
    yield _tokens(batch, length)
    for count in (2, 3):
        yield tuple(_tokens(batch, length) for _ in range(count))


def _labels(batch: int, length: int, outputs: Any) -> Iterator[Any]:
    """Yield forms of labels beside the outputs of the last stage."""
    mask, classes = torch.ones(batch, length), torch.zeros(batch, dtype=torch.int64)
    yield _tokens(batch, length)
    yield _tokens(batch, length), mask
    yield _tokens(batch, length), mask, classes
    yield classes
    yield torch.zeros_like(as_tuple(outputs)[0])


def _features(module: Any) -> int | None:
    """Features of the first layer's inputs where it begins with a linear layer."""
    kinds = (nn.Embedding, nn.Linear)
    first = next((each for _, each in _first_modules(module) if isinstance(each, kinds)), None)
    return first.in_features if isinstance(first, nn.Linear) else None


def _first_modules(module: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the first layer's modules, and their names in it."""
    return (each for layer in modules_of(ModelChunks(module).functions[0]) for each in layer.named_modules())

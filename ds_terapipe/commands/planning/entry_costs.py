"""Costs of the entries of the layer list, from the costs of ``plan``, for ``elastic/shapes/predict.py``.

The layer list of a model file is that of ``gpt_pipeline``: the embedding, the layers, the final norm, the head; or the layers
alone where there is no vocabulary. That of measurements is the one that was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from ds_terapipe.commands.planning.cost_sources import Analytic, Measured, Source
from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.elastic.shapes.predict import LayerCosts, Machine
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.analytic import OPTIMIZER_BYTES
from ds_terapipe.plan.costs.analytic_memory import GRADIENT, OPTIMIZER, WEIGHT, analytic_memory
from ds_terapipe.plan.stages import even
from ds_terapipe.schedule import Placement

_ENDS = (1, 2)  # entries before the layers and after them, of gpt_pipeline
_USE = "--model, or a file of token_pipeline.measurements_path whose uncut trials were timed layer by layer"


@dataclass(frozen=True)
class Entries:
    """The layer list of a launch.

    Attributes:
        text: description of the contents.
        parts: first entry of each stage of the launch and, last, the number of entries.
        places: place of each stage of it.
        processes: of the launch.
        tensor_parallel, replicas: of it.
        costs: of the entries in a shape.
        machine: costs of the rest of a step in a shape.
        overhead_s: seconds of a step beside all that.
        knows_bytes: whether the costs know weights and activations.
    """

    text: str
    parts: tuple[int, ...]
    places: tuple[int, ...]
    tensor_parallel: int
    replicas: int
    costs: Callable[[Shape], LayerCosts]
    machine: Callable[[Shape], Machine]
    overhead_s: float = 0.0
    knows_bytes: bool = True

    @property
    def count(self) -> int:
        """Entries of the list."""
        return self.parts[-1]

    @property
    def processes(self) -> int:
        """Number of processes of the launch."""
        return len(set(self.places)) * self.replicas * self.tensor_parallel


def entries_of(source: Source, lengths: tuple[int, ...], replicas: int | None, placement: Placement) -> Entries:
    """The layer list of these costs.

    Args:
        source: the costs.
        lengths: tokens of the slices of a micro-batch.
        replicas: replicas of the measured launch, if the file does not give them.
        placement: of the launch; several stages on a place have the layers evenly.

    Raises:
        ConfigError: they do not know single layers, or not those of such sequences.
    """
    places = tuple(stage.place for stage in placement.stages)
    if isinstance(source, Analytic):
        there = source if placement.is_usual else source.on(placement)
        assert there is not None  # the placement was read with these costs
        return _analytic(there, lengths, places)
    if isinstance(source, Measured):
        return _measured(source, sum(lengths), replicas, places)
    raise ConfigError(f"--frozen: got costs of no layers, must be costs of single layers, use {_USE}")


def _analytic(source: Analytic, lengths: tuple[int, ...], places: tuple[int, ...]) -> Entries:
    model, whole = source.model, bool(source.model.vocab_size)
    counts, last = list(source.layers), model.num_layers
    own = "" if model.untie_embeddings_and_output_weights else ", tied to 0"
    if whole:
        counts[0] += _ENDS[0]
        counts[-1] += _ENDS[1]
    return Entries(
        f"0 embedding, 1 to {last} layers, {last + 1} norm, {last + 2} head{own}" if whole else f"{last} layers",
        (0, *accumulate(counts)),
        places,
        source.tensor_parallel,
        source.data_parallel,
        partial(_analytic_costs, source, lengths),
        partial(_machine, source),
    )


def _machine(source: Analytic, shape: Shape) -> Machine:
    """Return the costs of `AnalyticCost.step_overhead`, per byte of 16-bit gradients."""
    cluster = source.cluster
    return Machine(
        source.cost(1).gradient_byte_s(source.is_within_node(shape.replicas)),
        cluster.rates.latency_s,
        OPTIMIZER_BYTES / GRADIENT / (cluster.memory_gb_per_s * 1e9),
    )


def _analytic_costs(source: Analytic, lengths: tuple[int, ...], shape: Shape) -> LayerCosts:
    """Return the entries' costs, each as a stage with one layer or none; the model's ends are in the outer stages."""
    model = source.model
    stages = (1,) * model.num_layers
    table = float(model.hidden_size * model.vocab_size)
    parameters = [float(model.layer_parameters)] * model.num_layers
    if table:
        stages = (0,) * _ENDS[0] + stages + (0,) * _ENDS[1]
        parameters = [table, *parameters, 0.0, table]
    parameters = [each / source.tensor_parallel for each in parameters]
    cost = source.with_layout(stages).cost(shape.micro_batch)
    length = np.array(lengths, dtype=float)
    context, total = np.cumsum(length) - length, float(sum(lengths))
    memory = analytic_memory(
        model, stages, source.tensor_parallel, shape.micro_batch, token_shares=source.multiple
    ).stages
    cut = len(lengths) > 1  # then keys and values have buffers of their own
    optimizer = OPTIMIZER / (shape.replicas if source.shares_optimizer else 1)
    entries = range(len(stages))
    tied = table and not model.untie_embeddings_and_output_weights
    return LayerCosts(
        shape.micro_batch,
        tuple(float(np.sum(cost.forward(e, length, context))) for e in entries),
        tuple(float(np.sum(cost.backward(e, length, context))) + float(cost.weights(e, total)) for e in entries),
        tuple(WEIGHT * each for each in parameters),
        tuple((GRADIENT + optimizer) * each for each in parameters),
        tuple(GRADIENT * each for each in parameters),
        # an entry's outputs are the next one's inputs, which are among its activations
        tuple(total * (each.activations - each.sent + cut * each.keys_values) for each in memory),
        (*entries[:-1], 0 if tied else entries[-1]),
    )


def _measured(source: Measured, seq_length: int, replicas: int | None, places: tuple[int, ...]) -> Entries:
    """Times of single layers are of a whole pass: a layer's forward pass is taken as the same share of it as its stage's."""
    measured, path = source.measured, source.path
    if measured.layers is None:
        raise ConfigError(f"{path}: layers: missing, must be the seconds of single layers, use {_USE}")
    if not measured.placement.is_usual:
        raise ConfigError(
            f"{path}: placement: got stages that only go forward, must be a measurement with nothing frozen, use a new one"
        )
    longest = measured.max_length
    if seq_length != longest:
        raise bad_value("--seq-length", seq_length, f"what the layers of {path} were timed with", str(longest))
    tokens, forward, backward = float(longest), [], []
    for stage, layers in enumerate(measured.layers.stages):
        ahead = measured.forward(stage, tokens, 0.0)
        back = measured.backward(stage, tokens, 0.0) + measured.weights(stage, tokens)
        share = ahead / (ahead + back)
        forward += [share * each for each in layers]
        backward += [(1 - share) * each for each in layers]
    counts, ends = list(map(len, measured.layers.stages)), measured.layers.ends
    zeros = (0.0,) * sum(counts)
    if len(places) > len(counts):
        counts = [*even(len(zeros) - sum(ends), len(places))]
        counts[0], counts[-1] = counts[0] + ends[0], counts[-1] + ends[1]
    costs = LayerCosts(
        measured.sequences, tuple(forward), tuple(backward), zeros, zeros, zeros, zeros, tuple(range(len(zeros)))
    )
    ranks = measured.measured_on.get("ranks")
    sizes = ranks if isinstance(ranks, dict) else {}
    return Entries(
        "as measured",
        (0, *accumulate(counts)),
        places,
        int(sizes.get("model", 1)),
        int(sizes.get("data", replicas or 1)),
        lambda shape: costs,
        lambda shape: Machine(0.0, 0.0, 0.0),
        measured.overhead_s,
        knows_bytes=False,
    )

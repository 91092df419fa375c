"""Inputs of ``plan`` and ``simulate``: arguments, configuration, model, cluster and measurements, read and checked.

An explicit argument wins over the DeepSpeed configuration, that over a default.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_terapipe.commands.output import check_positive
from ds_terapipe.commands.planning.batch_sizes import batch, data_parallel
from ds_terapipe.commands.planning.cost_sources import Analytic, Measured, Source, Units
from ds_terapipe.errors import ConfigError, bad_value, named
from ds_terapipe.json_files import Fields, read_json
from ds_terapipe.plan.choose import choose
from ds_terapipe.plan.costs.cost import Cost, MeasuredCost
from ds_terapipe.plan.costs.hardware import CLUSTERS, MODELS, load_cluster, load_model
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Plan, seconds_text
from ds_terapipe.plan.stages import even_layers, read_layers
from ds_terapipe.schedule import choices

if TYPE_CHECKING:
    from ds_terapipe.config import TokenPipelineConfig

CLUSTER = next(iter(CLUSTERS))
SEQ_LENGTH = 2048
_UNIT_STAGES = 4
AUTO = "auto"


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a command.

    Attributes:
        source: the costs.
        request: request for a plan.
        sequences: in a micro-batch.
        slices: of the configuration: a number, lengths, or ``auto``.
        notes: notes on defaults.
        cuts: False: there is a configuration, and no block ``token_pipeline`` in it.
        config: that block.
        parts: costs of several stages on each place; None: those of the source.
    """

    source: Source
    request: Request
    sequences: int
    slices: int | tuple[int, ...] | str
    notes: tuple[str, ...]
    cuts: bool = True
    config: TokenPipelineConfig | None = None
    parts: Cost | None = None

    @property
    def cost(self) -> Cost:
        """The costs of the stages."""
        return self.source.cost(self.sequences) if self.parts is None else self.parts

    @property
    def units(self) -> bool:
        """Whether no cost was given; seconds are those of `cost_sources.UnitCost`."""
        return isinstance(self.source, Units)

    @property
    def figures(self) -> dict[str, Any]:
        """The sizes and the costs for JSON."""
        request = self.request
        return {
            "seq_length": request.seq_length,
            "stages": request.stages,
            "micro_batches": request.micro_batches,
            "sequences": self.sequences,
            "unit_costs": self.units,
            "costs": self.source.text,
        }

    @property
    def lines(self) -> list[str]:
        """Lines about the origin of the figures."""
        request = self.request
        micro_batches = f"{request.micro_batches} micro-batch{'es' if request.micro_batches > 1 else ''}"
        return [
            f"costs: {self.source.text}",
            f"step: {micro_batches} of {self.sequences} x {request.seq_length} tokens",
            *self.notes,
        ]


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that both subcommands have."""
    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--ds-config", metavar="FILE", help="DeepSpeed configuration: batch sizes and the block token_pipeline"
    )
    costs.add_argument(
        "--model", metavar="FILE", help=f"model: a JSON file with Megatron's names, or one of {', '.join(MODELS)}"
    )
    costs.add_argument("--cluster", metavar="FILE", help=f"devices: a JSON file, or {CLUSTER} (the default)")
    costs.add_argument(
        "--measured",
        metavar="FILE",
        help="measurements in place of estimates: a file of token_pipeline.measurements_path",
    )
    shape = parser.add_argument_group("training")
    shape.add_argument("--stages", type=int, metavar="K", help="pipeline stages")
    shape.add_argument("--tensor-parallel", type=int, metavar="T", help="devices that share each layer (default: 1)")
    shape.add_argument("--data-parallel", type=int, metavar="D", help="replicas (default: 1)")
    shape.add_argument("--stage-layers", metavar="N,N", help="Transformer layers of each stage (default: even)")
    shape.add_argument("--sequences", type=int, metavar="B", help="sequences of one replica in a step")
    shape.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of one replica in a step")
    shape.add_argument("--seq-length", type=int, metavar="L", help=f"tokens of a sequence (default: {SEQ_LENGTH})")
    help_ = "schedule to use (default: auto, the fastest); interleaved has two stages on each place unless costs or keys say more"
    shape.add_argument("--schedule", choices=(AUTO, *choices()), help=help_)
    shape.add_argument(
        "--granularity", type=int, metavar="TOKENS", help="divisor of the lengths of unequal slices (default: 8)"
    )
    shape.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="limit for activations and buffers of a device, in 1e9 bytes, as token_pipeline.memory_gb. Default: the cluster's "
        "memory less weights and optimiser, or the free memory at the time of the measurements",
    )
    shape.add_argument(
        "--search",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time of the search for a better order (default: 10; 0: no search)",
    )
    shape.add_argument(
        "--weight-gradients",
        choices=("micro_batch", "slice"),
        help="make weight gradients once per micro-batch (default) or with each slice",
    )


def read_inputs(options: argparse.Namespace, unit_costs: bool = False, plan: Plan | None = None) -> Inputs:
    """Read everything that the arguments name.

    Args:
        options: parsed arguments of `add_inputs`.
        unit_costs: without model and measurements there are units; else that is an error.
        plan: plan with defaults for stages, micro-batches and sequences.

    Raises:
        ConfigError: one line with file or argument, field and expectation.
    """
    check_numbers(options)
    data, config = _configuration(options.ds_config)
    given = _Given(options, config, data, plan, [])
    source = given.source(unit_costs)
    if plan is not None and source.stages != _places(plan) and source.stages != plan.stages:
        raise bad_value(
            "--plan", _places(plan), f"for the {source.stages} stages that the costs are for", "another plan"
        )
    given.check_unused(source)
    sequences, micro_batches = batch(options, data, source, plan)
    memory_gb, memory = given.memory_gb, source.memory(sequences)
    if memory is None and memory_gb is not None:
        given.notes.append("memory: not known from these costs, so memory_gb is no limit")
    granularity = options.granularity or (config.granularity if config else 8)
    measured = source.measured if isinstance(source, Measured) else None
    length = given.seq_length(source)
    request = Request(
        seq_length=length,
        stages=source.stages,
        micro_batches=micro_batches,
        schedule=options.schedule or (config.schedule if config else AUTO),
        granularity=granularity,
        min_length=None if measured is None else max(measured.min_length, granularity),
        max_slice=None if measured is None else measured.max_slice,
        memory=memory,
        memory_gb=None if memory is None else source.device_gb if memory_gb is None else memory_gb,
        limit_name=f"{source.path}: measured_on.memory_limit_bytes, in GB"
        if isinstance(source, Measured) and memory_gb is None
        else "memory_gb",
        weights_once=source.weights_once if isinstance(source, Measured) else given.weights_once,
        placement=None if measured is None else measured.placement,
        overhead_s=source.overhead_s,
        about={**source.about, "seq_length": length},
    )
    slices = config.slices if config else AUTO
    return Inputs(
        source,
        request,
        sequences,
        tuple(slices) if isinstance(slices, list) else slices,
        notes=tuple(given.notes),
        cuts=data is None or config is not None,
        config=config,
    )


def choose_plan(inputs: Inputs, schedule: str | None = None, search_s: float = 0.0) -> Plan:
    """Return the best plan for the inputs, under ``schedule`` only if given; ``search_s`` as in a `Request`.

    Raises:
        ConfigError: as `plan.choose.choose`; a limit that is the cluster's is called so, for weights count in it.
    """
    request = replace(inputs.request, schedule=schedule or inputs.request.schedule, search_s=search_s)
    try:
        return choose(inputs.cost, request)
    except ConfigError as error:
        source = inputs.source
        if isinstance(source, Analytic) and source.fixed and str(error).startswith("memory_gb: "):
            raise ConfigError(
                f"{source.cluster.name}: {error} (with weights, gradients and optimiser; --memory-gb is what comes on top)"
            ) from error
        raise


def _places(plan: Plan) -> int:
    """Return the number of places of a plan."""
    return plan.stages if plan.placement is None else plan.placement.places


def check_numbers(options: argparse.Namespace) -> None:
    """Raises ConfigError for a number that none of the arguments of `add_inputs` can be."""
    whole = ("stages", "tensor_parallel", "data_parallel", "sequences", "micro_batches", "seq_length", "granularity")
    check_positive(options, whole)
    if not (options.search >= 0 and math.isfinite(options.search)):
        raise bad_value("--search", options.search, "a number of seconds, or 0", "10")
    value = options.memory_gb
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise bad_value("--memory-gb", value, "a positive number of 1e9 bytes", "e.g. 16")


def _configuration(path: str | None) -> tuple[Fields | None, TokenPipelineConfig | None]:
    """Return the DeepSpeed configuration and its block, None if missing; errors name the file."""
    if path is None:
        return None, None
    data = read_json(path, "a DeepSpeed configuration")
    # Takes DeepSpeed with it, which takes seconds.
    from ds_terapipe.config import TOKEN_PIPELINE, parse

    block = data.value(TOKEN_PIPELINE)
    with named(path):
        return data, None if block is None else parse({TOKEN_PIPELINE: block})


class _Given(NamedTuple):
    """Inputs of a command: arguments, the block ``token_pipeline`` of a configuration, the configuration, and a plan."""

    options: argparse.Namespace
    config: TokenPipelineConfig | None
    data: Fields | None
    plan: Plan | None
    notes: list[str]

    @property
    def memory_gb(self) -> float | None:
        """Memory for activations and buffers, None if nothing says it."""
        if self.options.memory_gb is not None or self.config is None:
            return self.options.memory_gb  # type: ignore[no-any-return]
        return self.config.memory_gb

    @property
    def weights_once(self) -> bool:
        """Whether weight gradients are made once per micro-batch."""
        if self.options.weight_gradients:
            return bool(self.options.weight_gradients == "micro_batch")
        if self.plan is not None:
            return self.plan.weights_once
        return self.config is None or self.config.weight_gradients != "slice"

    @property
    def stages(self) -> int | None:
        """Number of stages, None if nothing says it."""
        return self.options.stages or (_places(self.plan) if self.plan else None)

    def seq_length(self, source: Source) -> int:
        """Tokens of a sequence."""
        given, plan = self.options.seq_length, self.plan
        if given is not None and plan is not None and given != plan.seq_length:
            raise bad_value("--seq-length", given, "that of the plan", str(plan.seq_length))
        known = source.measured.max_length if isinstance(source, Measured) else SEQ_LENGTH
        return int(given or (plan.seq_length if plan else known))

    def source(self, unit_costs: bool) -> Source:
        """Return the measurements that are named, or the model, or the configuration's measurements, or units."""
        options = self.options
        path = options.measured
        if path is None and options.model is None and self.config is not None:
            path = self.config.measurements_path
        if options.cluster is not None and options.model is None:
            raise ConfigError("--cluster: got no model to run on it, must be there beside --model, use both")
        if options.cluster is not None and options.measured is not None:
            raise bad_value(
                "--cluster", options.cluster, "absent beside --measured, which are times of a device", "one of the two"
            )
        if path is not None:
            return self._measured(path)
        if options.model is not None:
            return self._analytic(self.stages, self.notes)
        if unit_costs:
            # a person who draws a schedule expects F and B, unless a plan or an argument says otherwise
            apart = self.weights_once and (self.plan is not None or options.weight_gradients is not None)
            length = options.seq_length or (self.plan.seq_length if self.plan else SEQ_LENGTH)
            return Units(self.stages or _UNIT_STAGES, length, apart)
        raise ConfigError(
            "--model: missing, must be there unless costs are measured, use a model file, one of "
            f"{', '.join(MODELS)}, or --measured"
        )

    def _measured(self, path: str) -> Measured:
        measured = MeasuredCost.load(path)
        ranks = measured.measured_on.get("ranks")
        for name, axis, found in (
            ("--stages", "pipe", measured.placement.places if measured.placement else measured.stages),
            ("--tensor-parallel", "model", ranks.get("model", 1) if isinstance(ranks, dict) else None),
            ("--data-parallel", "data", ranks.get("data", 1) if isinstance(ranks, dict) else None),
        ):
            given = getattr(self.options, name[2:].replace("-", "_"))
            if given is not None and found is not None and given != found:
                raise bad_value(name, given, f"what {path} was measured with, {found} ranks of {axis}", str(found))
        estimated = None
        if self.options.model is not None and measured.memory is None:
            estimated = self._analytic(measured.stages, [])
            self.notes.append(f"memory: estimated from {estimated.model.name}, it was not measured")
        return Measured(measured, path, estimated)

    def _analytic(self, stages: int | None, notes: list[str]) -> Analytic:
        options = self.options
        model, cluster = load_model(options.model), load_cluster(options.cluster or CLUSTER)
        if options.cluster is None:
            notes.append(f"--cluster is not given: {CLUSTER}")
        if options.stage_layers is not None:
            layers = read_layers(options.stage_layers, model.num_layers, stages)
        elif stages is not None:
            layers = even_layers(model.num_layers, stages)
        else:
            raise ConfigError("--stages: missing, must be the number of pipeline stages, use e.g. 8")
        tensor, heads = options.tensor_parallel or 1, model.num_attention_heads
        if heads % tensor:
            raise bad_value("--tensor-parallel", tensor, f"a divisor of the model's {heads} attention heads", "1")
        block = self.data.value("zero_optimization") if self.data is not None else None
        zero = block.get("stage", 0) if isinstance(block, dict) else 0
        return Analytic(
            model,
            cluster,
            layers,
            tensor,
            data_parallel(options, self.data),
            shares_optimizer=isinstance(zero, int) and zero > 0,
            weights_once=self.weights_once,
            fixed=self.memory_gb is None,
        )

    def check_unused(self, source: Source) -> None:
        """Arguments that these costs have no use for: an error where they would mislead, else a note."""
        options = self.options
        if options.stage_layers is not None and not isinstance(source, Analytic):
            rule = "absent: these costs are of the stages that were measured, or of no layers at all"
            raise bad_value("--stage-layers", options.stage_layers, rule, "--model alone, or train.py to measure them")
        if isinstance(source, Measured):
            found = "micro_batch" if source.weights_once else "slice"
            if options.weight_gradients not in (None, found):
                raise bad_value("--weight-gradients", options.weight_gradients, f"as {source.path} was measured", found)
            if options.model is not None and source.estimated is None:
                self.notes.append("--model is not used: times and memory were measured")
        if isinstance(source, Units) and (options.tensor_parallel or options.data_parallel):
            self.notes.append(
                "--tensor-parallel and --data-parallel are not used: without --model nothing is known about them"
            )


def shown_time(units: bool) -> Callable[[float], str]:
    """Return a formatter of times: seconds, or plain numbers if they have no unit."""
    return (lambda value: f"{value:.4g}") if units else seconds_text

"""Inputs of ``plan`` and ``simulate``: arguments, configuration, model, cluster and measurements, read and checked.

An explicit argument wins over the DeepSpeed configuration, that over a default.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ds_terapipe.commands.output import check_positive
from ds_terapipe.commands.planning.batch_sizes import batch, data_parallel
from ds_terapipe.commands.planning.cost_sources import Analytic, Measured, Source, Units
from ds_terapipe.config import TOKEN_PIPELINE, TokenPipelineConfig, parse
from ds_terapipe.errors import ConfigError, bad_value, named
from ds_terapipe.json_files import Fields, read_json
from ds_terapipe.plan.choose import choose
from ds_terapipe.plan.costs.cost import Cost, MeasuredCost
from ds_terapipe.plan.costs.hardware import CLUSTERS, MODELS, load_cluster, load_model
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Plan, seconds_text
from ds_terapipe.plan.stages import even_layers, read_layers
from ds_terapipe.schedule import choices

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
        """Whether no cost was given; seconds are those of `cost_sources.Units`."""
        return isinstance(self.source, Units)

    @property
    def figures(self) -> dict[str, Any]:
        """The sizes and the costs for JSON."""
        request = self.request
        return {
            "seq_length": request.seq_length,
            "stages": len(request.placement.stages),
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
    if plan is not None and options.seq_length not in (None, plan.seq_length):
        raise bad_value("--seq-length", options.seq_length, "that of the plan", str(plan.seq_length))
    data, config = _configuration(options.ds_config)
    given, notes = _filled(options, config, plan), list[str]()
    source = _source(options, given, data, unit_costs, notes)
    if plan is not None and source.stages not in (plan.placement.places, plan.stages):
        rule = f"for the {source.stages} stages that the costs are for"
        raise bad_value("--plan", plan.placement.places, rule, "another plan")
    _check_unused(options, source, notes)
    sequences, micro_batches = batch(options, data, source, plan)
    memory, limit_name = source.memory(sequences), "memory_gb"
    if memory is None and given.memory_gb is not None:
        notes.append("memory: not known from these costs, so memory_gb is no limit")
    if isinstance(source, Analytic) and source.fixed:  # --memory-gb is what comes on top
        limit_name = f"{source.cluster.name}, with weights, gradients and optimiser: memory_gb"
    known: dict[str, Any] = {"stages": source.stages, "weights_once": given.weight_gradients != "slice"}
    length = given.seq_length or SEQ_LENGTH
    if isinstance(source, Measured):
        length = given.seq_length or source.measured.max_length
        measured = source.measured.of_length(length)
        source = replace(source, measured=measured)
        known = {"stages": measured.placement, "weights_once": source.weights_once, "max_slice": measured.max_slice}
        known["min_length"] = max(measured.min_length, given.granularity)
        limit_name = limit_name if given.memory_gb else f"{source.path}: measured_on.memory_limit_bytes, in GB"
    request = Request(
        seq_length=length,
        micro_batches=micro_batches,
        schedule=given.schedule,
        granularity=given.granularity,
        memory=memory,
        memory_gb=None if memory is None else given.memory_gb or source.device_gb,
        limit_name=limit_name,
        overhead_s=source.overhead_s,
        about={**source.about, "seq_length": length},
        **known,
    )
    slices = config.slices if config else AUTO
    return Inputs(
        source,
        request,
        sequences,
        tuple(slices) if isinstance(slices, list) else slices,
        notes=tuple(notes),
        cuts=data is None or config is not None,
        config=config,
    )


def choose_plan(inputs: Inputs, schedule: str | None = None, search_s: float = 0.0) -> Plan:
    """Return the best plan for the inputs, under ``schedule`` only if given; ``search_s`` as in a `Request`.

    Raises:
        ConfigError: as `plan.choose.choose`.
    """
    request = replace(inputs.request, schedule=schedule or inputs.request.schedule, search_s=search_s)
    return choose(inputs.cost, request)


def plan_if_fits(inputs: Inputs, schedule: str | None = None, search_s: float = 0.0) -> Plan | None:
    """Return the plan of `choose_plan`; None where none fits."""
    with contextlib.suppress(ConfigError):
        return choose_plan(inputs, schedule, search_s)
    return None


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
    block = data.value(TOKEN_PIPELINE)
    with named(path):
        return data, None if block is None else parse({TOKEN_PIPELINE: block})


def _filled(options: argparse.Namespace, config: TokenPipelineConfig | None, plan: Plan | None) -> argparse.Namespace:
    """Return the arguments; what is missing is as in the plan, in the configuration, or by default."""
    found = argparse.Namespace(**vars(options))
    defaults: dict[str, Any] = {"granularity": 8, "schedule": AUTO}
    if config is not None:
        names = ("granularity", "schedule", "memory_gb", "weight_gradients")
        defaults = {name: getattr(config, name) for name in names}
        defaults["measured"] = config.measurements_path if options.model is None else None
    if plan is not None:
        apart = "micro_batch" if plan.weights_once else "slice"
        defaults |= {"stages": plan.placement.places, "seq_length": plan.seq_length, "weight_gradients": apart}
    for name, value in defaults.items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    return found


def _source(
    options: argparse.Namespace, given: argparse.Namespace, data: Fields | None, unit_costs: bool, notes: list[str]
) -> Source:
    """Return the measurements that are named, or the model, or units."""
    if given.cluster is not None and given.model is None:
        raise ConfigError("--cluster: got no model to run on it, must be there beside --model, use both")
    if given.cluster is not None and given.measured is not None:
        rule = "absent beside --measured, which are times of a device"
        raise bad_value("--cluster", given.cluster, rule, "one of the two")
    if given.measured is not None:
        return _measured(options, given.measured)
    if given.model is not None:
        return _analytic(given, data, notes)
    if unit_costs:
        # a person who draws a schedule expects F and B, unless a plan, an argument or a key says otherwise
        apart = given.weight_gradients == "micro_batch"
        return Units(given.stages or _UNIT_STAGES, given.seq_length or SEQ_LENGTH, apart)
    raise ConfigError(
        "--model: missing, must be there unless costs are measured, use a model file, one of "
        f"{', '.join(MODELS)}, or --measured"
    )


def _measured(options: argparse.Namespace, path: str) -> Measured:
    measured = MeasuredCost.load(path)
    ranks = measured.measured_on.get("ranks")
    for name, axis, found in (
        ("stages", "pipe", measured.placement.places),
        ("tensor_parallel", "model", ranks.get("model", 1) if isinstance(ranks, dict) else None),
        ("data_parallel", "data", ranks.get("data", 1) if isinstance(ranks, dict) else None),
    ):
        asked = getattr(options, name)
        if asked is not None and found is not None and asked != found:
            rule = f"what {path} was measured with, {found} ranks of {axis}"
            raise bad_value(f"--{name.replace('_', '-')}", asked, rule, str(found))
    return Measured(measured, path)


def _analytic(given: argparse.Namespace, data: Fields | None, notes: list[str]) -> Analytic:
    model, cluster = load_model(given.model), load_cluster(given.cluster or CLUSTER)
    if given.cluster is None:
        notes.append(f"--cluster is not given: {CLUSTER}")
    if given.stage_layers is not None:
        layers = read_layers(given.stage_layers, model.num_layers, given.stages)
    elif given.stages is not None:
        layers = even_layers(model.num_layers, given.stages)
    else:
        raise ConfigError("--stages: missing, must be the number of pipeline stages, use e.g. 8")
    tensor = given.tensor_parallel or 1
    if not model.divides_by(tensor):
        heads = f"{model.num_attention_heads} attention heads and {model.groups} key and value heads"
        raise bad_value(
            "--tensor-parallel", tensor, f"a divisor of the model's {heads}, or a multiple of the latter", "1"
        )
    block = data.value("zero_optimization") if data is not None else None
    zero = block.get("stage", 0) if isinstance(block, dict) else 0
    return Analytic(
        model,
        cluster,
        layers,
        tensor,
        data_parallel(given, data),
        shares_optimizer=isinstance(zero, int) and zero > 0,
        weights_once=given.weight_gradients != "slice",
        fixed=given.memory_gb is None,
    )


def _check_unused(options: argparse.Namespace, source: Source, notes: list[str]) -> None:
    """Arguments that these costs have no use for: an error where they would mislead, else a note."""
    if options.stage_layers is not None and not isinstance(source, Analytic):
        rule = "absent: these costs are of the stages that were measured, or of no layers at all"
        raise bad_value("--stage-layers", options.stage_layers, rule, "--model alone, or train.py to measure them")
    if isinstance(source, Measured):
        found = "micro_batch" if source.weights_once else "slice"
        if options.weight_gradients not in (None, found):
            raise bad_value("--weight-gradients", options.weight_gradients, f"as {source.path} was measured", found)
        if options.model is not None:
            notes.append("--model is not used: times and memory were measured")
    if isinstance(source, Units) and (options.tensor_parallel or options.data_parallel):
        notes.append("--tensor-parallel and --data-parallel are not used: without --model nothing is known about them")


def shown_time(units: bool) -> Callable[[float], str]:
    """Return a formatter of times: seconds, or plain numbers if they have no unit."""
    return (lambda value: f"{value:.4g}") if units else seconds_text

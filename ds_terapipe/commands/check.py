"""Print the memory of each stage of a launch, or its error, without a GPU.

Build each distinct rank of a launch on tensors without memory. Print layers, parameters, weights, gradients, optimiser,
activations and peak of each stage, and the plan.

example:
  ds_terapipe check --world 64 -- train.py --num-layers 40 --deepspeed_config ds_config.json
  ds_terapipe check --ds-config ds_config.json --world 16 --seq-length 2048 -- my_train.py
  ds_terapipe check --ds-config ds_config.json --world 64 --model gpt3-13b --stages 8 --tensor-parallel 8

The script runs unchanged up to its engine, once for each distinct rank. It needs no device, cluster, hostfile or data.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ds_terapipe.commands.output import check_positive, show
from ds_terapipe.commands.planning.inputs import CLUSTER, SEQ_LENGTH
from ds_terapipe.commands.progress import progress
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.hardware import load_cluster, load_model
from ds_terapipe.plan.costs.memory import gigabytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_argument = parser.add_argument
    add_argument("--ds-config", metavar="FILE", help="DeepSpeed configuration of a script that names none")
    add_argument("--world", type=int, metavar="N", required=True, help="processes of the launch")
    add_argument(
        "--seq-length",
        type=int,
        metavar="L",
        help="tokens of a sequence (default: the script's --seq-length or --max-seq-length)",
    )
    add_argument("--cluster", metavar="FILE", help=f"devices that must hold the launch: a JSON file, or {CLUSTER}")
    add_argument(
        "--model", metavar="FILE", help="a model in place of a script: a JSON file or a name, as in `ds_terapipe plan`"
    )
    add_argument("--stages", type=int, metavar="K", default=1, help="pipeline stages of --model (default: 1)")
    add_argument(
        "--tensor-parallel", type=int, metavar="T", default=1, help="devices that share its layers (default: 1)"
    )
    add_argument("script", nargs="*", metavar="-- SCRIPT ARGS", help="training script and its arguments")


def run(options: argparse.Namespace) -> None:
    """Print the table and the plan."""
    check_positive(options, ("world", "seq_length", "stages", "tensor_parallel"))
    if bool(options.script) == bool(options.model):
        got = None if options.model is None else [options.model, *options.script[:1]]
        raise bad_value("check", got, "either a script or --model", "-- train.py and its arguments, or --model")
    if options.model and not options.ds_config:
        raise ConfigError("--ds-config: missing, must be there beside --model, use a DeepSpeed configuration")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed comes with them, which takes seconds
    from ds_terapipe.commands.checking.planned import outcome_of
    from ds_terapipe.commands.checking.rank import Task
    from ds_terapipe.commands.checking.ranks import check_launch, text_of
    from ds_terapipe.commands.checking.table import as_json, table

    cluster = load_cluster(options.cluster or CLUSTER)
    script = tuple(options.script) if options.script else _of_sizes(options)
    own = _own_arguments(script)
    takes_config = options.ds_config and not own.deepspeed_config and "add_config_arguments" in text_of(script[0])
    task = Task(
        0,
        options.world,
        min(options.world, cluster.devices_per_node),
        (*script, "--deepspeed_config", options.ds_config) if takes_config else script,
        options.ds_config,
        options.seq_length or own.seq_length or None,
    )
    with progress("checking"):
        reports = check_launch(task)
        outcome = outcome_of(reports, cluster)
    show(options, "\n".join(table(reports, outcome)), as_json(reports, outcome))
    if options.cluster is None or not outcome.uses:
        return
    fullest = max(range(len(outcome.uses)), key=lambda place: outcome.uses[place].total)
    needed = gigabytes(outcome.uses[fullest].total)
    if needed > cluster.memory_gb:
        raise ConfigError(
            f"{outcome.row} {fullest} takes {needed:.3g} GB, a device of {cluster.name} has {cluster.memory_gb:g}"
        )


def _of_sizes(options: argparse.Namespace) -> tuple[str, ...]:
    """The script that builds the model of ``--model``, and its arguments."""
    model = load_model(options.model)
    path = options.model if model.name == options.model else str(Path(options.model).absolute())
    options.seq_length = options.seq_length or SEQ_LENGTH
    sizes = (options.stages, options.tensor_parallel, options.seq_length)
    return (str(Path(__file__).parent / "checking" / "decoder.py"), path, *map(str, sizes))


def _own_arguments(script: tuple[str, ...]) -> argparse.Namespace:
    """Return those of the script's arguments that a check knows."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--deepspeed_config", nargs="?")
    names = ("--seq-length", "--seq_length", "--max-seq-length", "--max_seq_length")
    parser.add_argument(*names, nargs="?", type=lambda text: int(text) if text.isdigit() else None)
    return parser.parse_known_args(script[1:])[0]

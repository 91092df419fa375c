"""A training step of a GPT in two processes: token slices against DeepSpeed's pipeline.

``python -m tests.benchmarks.token_pipeline`` prints, for 1, 2, 4 and 8 sequences in micro-batches of one, the seconds
per step of every column and the ratio to DeepSpeed's PipelineEngine, which is run twice: the two differ by the noise.
With ``TESTS_DEVICE=cuda`` the processes train on GPUs, see docs/gpu.md.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import p2p
from torch import nn

import ds_terapipe
from ds_terapipe.pipeline.autotune.planner import RIVALS
from ds_terapipe.pipeline.autotune.trials import ROUNDS, TRIALS, TURNS
from tests.benchmarks import measure
from tests.benchmarks.measure import Column
from tests.benchmarks.models import QUICK, Shape, TokenLoss, Workload, layers, llama_pipeline, plain

LEARNING_RATE = 0.1
OPTIONAL = ("filled4", "twice4")  # columns of the table that are asked for
Step = Callable[[], "float | None"]


def new_engine(
    stages: int, workload: Workload, keys: dict[str, Any] | None = None, frozen: int = 0,
    boundaries: Sequence[int] | None = None, **kinds: type,
) -> Any:  # fmt: skip
    """Our engine by the configuration's ``keys``, or DeepSpeed's, of the workload's model, with so many ``frozen`` layer modules.

    ``boundaries``: the first layer module of each stage and the number of all; by default equally many. ``kinds``: of modules.
    """

    class Placed(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            super()._partition_layers(method)
            if boundaries is not None:
                self.parts = list(boundaries)
                self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    if workload.shape.family == "llama":
        model = llama_pipeline(workload.shape, stages)
    else:
        specs = layers(workload.shape, **kinds)
        model = Placed(specs, num_stages=stages, loss_fn=TokenLoss(), partition_method="uniform")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.partition(".")[0]) >= frozen)
    config = {
        "train_batch_size": workload.sequences, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
        "steps_per_print": 10**9, "bf16": {"enabled": workload.shape.bf16}, "zero_allow_untested_optimizer": True, **(keys or {}),
    }  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    return (ds_terapipe if keys else deepspeed).initialize(model=model, optimizer=optimizer, config=config)[0]


def steps_of(engine: Any, workload: Workload, replica: int = 0, replicas: int = 1) -> Step:
    """Steps of an engine over a replica's share of the workload's micro-batches, again and again."""
    iterator = itertools.cycle(workload.micro_batches()[replica::replicas])

    def step() -> float:
        p2p._grid = engine.grid  # DeepSpeed keeps one for the process, that of the engine which was made last
        return float(engine.train_batch(iterator))

    return step


def token_slices(slices: int | str, **keys: Any) -> dict[str, Any]:
    return {"token_pipeline": {"slices": slices, "verify": False, **keys}}


def deepspeeds(workload: Workload) -> Step:
    return steps_of(new_engine(dist.get_world_size(), workload), workload)


def ours(workload: Workload, slices: int | str, **keys: Any) -> Step:
    return steps_of(new_engine(dist.get_world_size(), workload, token_slices(slices, **keys)), workload)


def one_process(workload: Workload) -> Step:
    """Plain PyTorch on the first rank."""
    if dist.get_rank():
        return lambda: None
    return plain_steps(plain(layers(workload.shape)), workload.micro_batches())


def plain_steps(model: nn.Module, micro_batches: Sequence[Any], loss_of: Callable[..., torch.Tensor] | None = None) -> Step:
    """Steps of plain PyTorch. ``DistributedDataParallel`` reduces the gradients of the last micro-batch's backward."""
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), loss_of or TokenLoss()
    alone = getattr(model, "no_sync", nullcontext)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for index, (inputs, labels) in enumerate(micro_batches):
            with nullcontext() if index + 1 == len(micro_batches) else alone():
                loss = loss_of(model(inputs), labels) / len(micro_batches)
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def named(ways: Mapping[str, Callable[[Workload], Step]], workload: Workload) -> dict[str, Column]:
    """Columns by name, behind them ``auto``, which settles while the planner measures, plans, and compares with trials."""
    found = {name: Column(name, partial(prepare, workload)) for name, prepare in ways.items()}
    settling = 1 + ROUNDS * len(TRIALS) + 1 + TURNS * (1 + RIVALS)
    return {**found, "auto": Column("auto", partial(ours, workload, "auto"), settling)}


def columns(workload: Workload) -> dict[str, Column]:
    """DeepSpeed is there twice, one process for the GPT alone."""
    ways: dict[str, Callable[[Workload], Step]] = {"deepspeed": deepspeeds, "deepspeed2": deepspeeds}
    if workload.shape.family == "gpt":
        ways["one"] = one_process
    ways |= {f"ours{count}": partial(ours, slices=count) for count in (1, 2, 4, 8, 16)}
    filled: dict[str, Any] = {"slices": 4, "schedule": "zero_bubble"}
    return named({**ways, "filled4": partial(ours, **filled), "twice4": partial(ours, stages_per_place=2, **filled)}, workload)


def main() -> None:
    options = measure.parser("token_pipeline", __doc__, rounds=5)
    add = options.add_argument
    add("--batches", type=measure.listed(int), default=[1, 2, 4, 8], help="sequences per step (default 1,2,4,8)")
    add("--columns", type=measure.listed(str), help="of the table's (default: without filled4 and twice4)")
    add("--steps", type=int, help="of a column in a round, the fastest counts (default 2; 1 from B=4)")
    add("--model", choices=("gpt", "llama"), default="gpt", help="llama: Hugging Face's (default gpt)")
    for option in ("--sequence", "--layers", "--hidden", "--heads"):
        usual, quick = (getattr(shape, option[2:]) for shape in (Shape(), QUICK))
        add(option, type=int, help=f"of the model (default {usual}; {quick} with --quick)")
    add("--bf16", action="store_true", help="DeepSpeed's bf16 (default fp32)")
    add("--stages", type=int, default=2, help="processes (default 2)")
    options = options.parse_args()
    given = {name: value for name in ("sequence", "layers", "hidden", "heads", "bf16") if (value := getattr(options, name))}
    shape = (QUICK if options.quick else Shape())._replace(family=options.model, **given)
    report = measure.Report(options)
    for sequences in options.batches:
        every, steps = columns(Workload(shape, sequences)), options.steps or (2 if sequences <= 2 else 1)
        chosen = [every[name] for name in options.columns or every if options.columns or name not in OPTIONAL]
        limit = measure.BF16_TOLERANCE if options.bf16 else measure.LOSS_TOLERANCE
        arguments = chosen, measure.settings_of(options), steps, limit
        result = measure.on_ranks(measure.side_by_side, *arguments, ranks=options.stages)
        report.add(f"B={sequences}", result, result.table(f"B={sequences}", "deepspeed"))


if __name__ == "__main__":
    main()

"""The columns of the token pipeline benchmark: each prepares, in its own processes, one training step of the same
model.

``prepare(rank, world, workload)`` returns ``step() -> float | None``: one optimiser step over the workload's
micro-batches (of one sequence each) with plain SGD, returning the mean loss on at least one rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_terapipe.pipeline.autotune.comparison import comparison_steps
from ds_terapipe.pipeline.autotune.phases import ROUNDS, TRIALS
from ds_terapipe.pipeline.autotune.planner import RIVALS
from tests.benchmarks import gpt, llama
from tests.benchmarks.workers import Seat

LEARNING_RATE = 0.1
Step = Callable[[], "float | None"]


@dataclass(frozen=True)
class Workload:
    """A model and a batch: ``sequences`` micro-batches of one sequence."""

    shape: gpt.Shape
    sequences: int

    def micro_batches(self) -> list[tuple[Any, Tensor]]:
        """((tokens, positions), labels), each tensor [1, sequence], once for every sequence; of a Llama (tokens, labels)."""
        if self.shape.family == "llama":
            tokens, labels = llama.batch(self.shape, self.sequences)
            return list(zip(tokens.split(1), labels.split(1), strict=True))
        whole = gpt.batch(self.shape, self.sequences)
        parts = zip(*(tensor.split(1) for tensor in whole), strict=True)
        return [((tokens, positions), labels) for tokens, positions, labels in parts]

    def endlessly(self) -> Iterator[tuple[Any, Tensor]]:
        """The micro-batches over and over, as a training loop's iterator."""
        return itertools.cycle(self.micro_batches())

    def of_replica(self, replica: int, replicas: int) -> Iterator[tuple[Any, Tensor]]:
        """As ``endlessly``, a replica's share of them."""
        return itertools.cycle(self.micro_batches()[replica::replicas])


@dataclass(frozen=True)
class Column:
    """A way to train the model. ``modules`` are imported before the column's memory is first looked at; ``settling`` is
    the number of steps that it takes, with nothing else running, before it is as fast as it will be; ``checkout`` is a
    folder that ds_terapipe is taken from where it is not this one; ``trains`` says what it trains: columns with the same
    have the same losses.
    """

    name: str
    title: str
    world: int
    prepare: Callable[[int, int, Workload], Step] = field(repr=False)
    modules: tuple[str, ...] = ()
    settling: int = 0
    checkout: str | None = None
    trains: str = "everything"


def _accumulating_step(model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], workload: Workload) -> Step:
    micro_batches = workload.micro_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for inputs, labels in micro_batches:
            loss = loss_fn(model(inputs), labels) / len(micro_batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def prepare_one_process(rank: int, world: int, workload: Workload) -> Step:
    """Plain PyTorch, gradients accumulated over the micro-batches; transformers' own model where it is a Llama."""
    if workload.shape.family == "llama":
        return _accumulating_step(llama.Whole(workload.shape), llama.loss(), workload)
    return _accumulating_step(gpt.stage(workload.shape, 0, 1), gpt.TokenLoss(), workload)


def deepspeed_engine(
    initialize: Callable[..., Any],
    stages: int,
    workload: Workload,
    keys: dict[str, Any],
    frozen: int = 0,
    boundaries: Sequence[int] | None = None,
) -> Any:
    """The engine that ``initialize`` makes of the workload's model and the configuration's ``keys``.

    ``frozen``: so many layer modules have ``requires_grad`` turned off; ``boundaries``: the first layer module of each
    stage and the number of all, by default equally many.
    """
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    class Placed(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            super()._partition_layers(method)
            if boundaries is not None:
                self.parts = list(boundaries)
                self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    shape = workload.shape
    if shape.family == "llama":
        model = llama.pipeline(shape, stages)
    else:
        layers = [LayerSpec(gpt.layer_class(shape, index), shape, index) for index in range(shape.modules)]
        model = Placed(layers, num_stages=stages, loss_fn=gpt.TokenLoss(), partition_method="uniform")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.partition(".")[0]) >= frozen)
    config = {
        "train_batch_size": workload.sequences,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **keys,
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    return engine


def training_step(engine: Any, workload: Workload) -> Step:
    """Steps of the engine over the workload's micro-batches."""
    iterator = workload.endlessly()
    return lambda: float(engine.train_batch(iterator))


def prepare_deepspeed(rank: int, world: int, workload: Workload) -> Step:
    """DeepSpeed's own PipelineEngine."""
    import deepspeed

    return training_step(deepspeed_engine(deepspeed.initialize, world, workload, {}), workload)


def token_slice_engine(world: int, workload: Workload, slices: int | str) -> Any:
    """ds_terapipe's engine over the workload's model; ``slices`` as in the configuration."""
    import ds_terapipe

    keys = {"token_pipeline": {"slices": slices, "verify": False}}
    return deepspeed_engine(ds_terapipe.initialize, world, workload, keys)


@dataclass(frozen=True)
class PrepareOurs:
    """ds_terapipe's engine with ``slices`` equal slices, or ``"auto"``; with one process it runs all of them in sequence.

    A class and not a closure because it travels to the workers.
    """

    slices: int | str

    def __call__(self, rank: int, world: int, workload: Workload) -> Step:
        return training_step(token_slice_engine(world, workload, self.slices), workload)


def prepare_torch_pipelining(rank: int, world: int, workload: Workload) -> Step:
    """torch.distributed.pipelining: GPipe with fewer micro-batches than stages, where its 1F1B refuses, 1F1B above."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    class Taking(nn.Module):
        """Arguments come separately here, and as a tuple in the layers."""

        def __init__(self, layers: nn.Module):
            super().__init__()
            self.layers = layers

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.layers(inputs if len(inputs) > 1 else inputs[0])

    module = Taking(gpt.stage(workload.shape, rank, world))
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    kind = ScheduleGPipe if workload.sequences < world else Schedule1F1B
    schedule = kind(stage, n_microbatches=workload.sequences, loss_fn=gpt.TokenLoss())
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    tokens, positions, labels = gpt.batch(workload.shape, workload.sequences)

    def step() -> float | None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens, positions)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    return step


class _Alone(nn.Module):
    """A megatron-core linear layer without the second value (a bias it did not add) that it returns."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)[0]


def _split_linear(linear: nn.Linear, dimension: int, config: Any) -> nn.Module:
    """megatron-core's linear layer with this rank's part of ``linear``: rows (dimension 0) or columns (dimension 1)."""
    from megatron.core.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    keywords = {
        "config": config,
        "init_method": nn.init.zeros_,
        "bias": linear.bias is not None,
        "skip_bias_add": False,
    }
    inner: nn.Module
    if dimension == 0:
        inner = ColumnParallelLinear(linear.in_features, linear.out_features, gather_output=False, **keywords)
    else:
        inner = RowParallelLinear(linear.in_features, linear.out_features, input_is_parallel=True, **keywords)
    with torch.no_grad():
        inner.weight.copy_(linear.weight.chunk(world, dimension)[rank])
        if linear.bias is not None:
            inner.bias.copy_(linear.bias.chunk(world)[rank] if dimension == 0 else linear.bias)
    return _Alone(inner)


def prepare_megatron_tp(rank: int, world: int, workload: Workload) -> Step:
    """The model with megatron-core's tensor-parallel linear layers, embedding of tokens and loss in it."""
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    config = ModelParallelConfig(tensor_model_parallel_size=world, use_cpu_initialization=True)
    model = gpt.stage(workload.shape, 0, 1)
    embedding, *blocks, head = model
    whole = embedding.tokens
    embedding.tokens = VocabParallelEmbedding(
        whole.num_embeddings, whole.embedding_dim, init_method=nn.init.zeros_, config=config
    )
    with torch.no_grad():
        embedding.tokens.weight.copy_(whole.weight.chunk(world)[rank])
    for block in blocks:
        block.qkv, block.fc1 = _split_linear(block.qkv, 0, config), _split_linear(block.fc1, 0, config)
        block.proj, block.fc2 = _split_linear(block.proj, 1, config), _split_linear(block.fc2, 1, config)
    head.linear = _split_linear(head.linear, 0, config)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels).mean()

    return _accumulating_step(model, loss_fn, workload)


def prepare(seat: Seat, column: Column, workload: Workload) -> list[float | None]:
    """Request: build the column's step in this worker and run it twice; the two losses.

    The second loss is of the weights that the first step's gradients made, so it shows that those were right too.
    """
    seat.step = column.prepare(seat.rank, seat.world, workload)
    return [seat.step() for _ in range(2)]


def timed_step(seat: Seat) -> tuple[float, float | None]:
    """Request: (seconds, loss) of one step, begun together with the other ranks."""
    if seat.world > 1:
        dist.barrier()
    start = time.perf_counter()
    loss = seat.step()
    return time.perf_counter() - start, loss


def untimed_step(seat: Seat) -> None:
    """Request: one step that is not timed."""
    seat.step()


SLICES = (1, 2, 4, 8, 16)
ONLY_GPT = ("torch", "megatron")
# The planner measures in the first steps, plans, and compares the plan with the best trials in the next ones.
SETTLING = 1 + ROUNDS * len(TRIALS) + comparison_steps(1 + RIVALS)
_DEEPSPEED = ("deepspeed",)
_OURS = ("deepspeed", "ds_terapipe")
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("one", "one process", 1, prepare_one_process),
        Column("deepspeed", "DeepSpeed", 2, prepare_deepspeed, _DEEPSPEED),
        Column("deepspeed2", "DeepSpeed'", 2, prepare_deepspeed, _DEEPSPEED),
        Column("torch", "torch PP", 2, prepare_torch_pipelining, ("torch.distributed.pipelining",)),
        Column("megatron", "mcore TP=2", 2, prepare_megatron_tp, ("megatron.core.tensor_parallel",)),
        *(Column(f"ours{count}", f"ours {count}", 2, PrepareOurs(count), _OURS) for count in SLICES),
        Column("auto", "ours, auto", 2, PrepareOurs("auto"), _OURS, SETTLING),
    )
}


def of_checkout(column: Column, path: str) -> Column:
    """The same column of the package in another checkout: ``ours4`` becomes ``before4``, ``auto`` ``auto-before``."""
    name, title = (text.replace("ours", "before") for text in (column.name, column.title))
    name = f"{name}-before" if "before" not in name else name
    return replace(column, name=name, title=title, checkout=path)


def in_one_process(slices: int) -> Column:
    """Our engine with one stage: what cutting costs when nothing is gained from it."""
    return Column(f"whole{slices}", f"ours {slices}, one stage", 1, PrepareOurs(slices), _OURS)

"""Small GPTs, their batches, and their weights put together again from all processes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.nn import functional as F

VOCAB, SEQ, MICRO_BATCH, MICRO_BATCHES = 64, 16, 2, 2


@dataclass(frozen=True)
class Model:
    position: str = "learned"
    tied: bool = True
    modern: bool = False  # grouped queries with norms, RMS norm, SwiGLU, no biases
    dtype: torch.dtype = torch.float32
    checkpoint_interval: int = 0
    sequence_parallel: bool = False


def build(model: Model, *, tensor: int = 1, stages: int = 1, **arguments: Any) -> Any:
    """The pipeline of a GPT with 4 layers of 32."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ds_terapipe.megatron import gpt_pipeline

    modern = {
        "num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
        "add_bias_linear": False, "qk_layernorm": True,
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor, sequence_parallel=model.sequence_parallel and tensor > 1,
        params_dtype=torch.float64 if model.dtype == torch.float64 else torch.float32, **(modern if model.modern else {}),
    )  # fmt: skip
    return gpt_pipeline(
        config, vocab_size=VOCAB, seq_length=SEQ, num_stages=stages, position_embedding=model.position,
        tied=model.tied, activation_checkpoint_interval=model.checkpoint_interval, **arguments,
    )  # fmt: skip


def batches(replica: int = 0, replicas: int = 1, seed: int = 0) -> Iterator[Any]:
    """Endless micro-batches, the same sequences for every layout, with holes in the loss mask."""
    generator = torch.Generator().manual_seed(seed)
    for number in itertools.count():
        text = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ + 1), generator=generator)
        # as many tokens in each micro-batch, so that replicas weigh the same
        mask = torch.ones(MICRO_BATCH, SEQ)
        mask.view(-1)[torch.randperm(mask.numel(), generator=generator)[:7]] = 0.0
        if number % replicas == replica:
            positions = torch.arange(SEQ).expand(MICRO_BATCH, SEQ).contiguous()
            yield (text[:, :-1].contiguous(), positions), (text[:, 1:].contiguous(), mask)


def of_all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def whole_tensors(
    pipeline: Any, of: Callable[[Any], torch.Tensor | None] = lambda p: p, unlike: set[str] | None = None
) -> dict[str, np.ndarray]:
    """Every parameter of the model by name, or what ``of`` takes of it if that is not None, put together from stages and tensor
    parallel parts, on every process.

    Asserts on the way that what is held more than once is the same everywhere. With ``unlike``, names of tensors of which some
    bits differ go there instead, and the first copy counts.
    """
    # 0 where the topology has no such axis
    tensor = max(1, pipeline.topology().get_dim("model")) if hasattr(pipeline, "topology") else 1
    mine = [
        (name, getattr(p, "partition_dim", -1), getattr(p, "partition_stride", 1), value.detach().cpu().clone())
        for name, p in pipeline.named_parameters()
        if (value := of(p)) is not None
    ]
    shards: dict[str, dict[int, torch.Tensor]] = {}
    cuts: dict[str, tuple[int, int]] = {}
    for rank, parameters in enumerate(of_all_ranks(mine)):
        for name, dimension, stride, value in parameters:
            first = shards.setdefault(name, {}).setdefault(rank % tensor if dimension >= 0 else 0, value)
            cuts[name] = (dimension, stride)
            if unlike is None:
                torch.testing.assert_close(value, first, rtol=1e-6, atol=1e-8, msg=f"copies of {name} differ")
            elif not torch.equal(value, first):
                unlike.add(name)
    return {name: _join([held[place] for place in sorted(held)], *cuts[name]).double().numpy() for name, held in shards.items()}


def _join(parts: list[torch.Tensor], dimension: int, stride: int) -> torch.Tensor:
    if dimension < 0:
        return parts[0]
    chunks = [part.chunk(stride, dim=dimension) for part in parts]
    return torch.cat([chunk[piece] for piece in range(stride) for chunk in chunks], dim=dimension)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b||."""
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def exact_loss(engine: Any, mean: float) -> float:
    """DeepSpeed rounds a loss to fp32 on its way to the other stages."""
    mine = float(engine.total_loss) / engine.micro_batches if engine.is_last_stage() else None
    losses = [loss for loss in of_all_ranks(mine) if loss is not None]
    exact = sum(losses) / len(losses)
    assert abs(exact - mean) <= 1e-6 * abs(exact)
    return exact

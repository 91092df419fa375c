"""Weights that are frozen anywhere in a layer: no gradient is made of them, and nothing is kept for one.

Against plain PyTorch over the whole sequence: the gradients, the bytes that autograd saves, and how often a product as large as
each weight is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import Interception, defers
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import spans
from ds_terapipe.schedule import Unit

TOKENS, BATCH, ROWS, WIDTH = 24, 3, 19, 6
SLICES = (5, 1, 10, 8)


class Lora(nn.Module):
    """A frozen layer beside a trained product of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def stack(*frozen: str) -> nn.Module:
    """Layers of sizes of their own, so that a product tells whose it is."""
    net = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 11))
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


class Tied(nn.Module):
    """A frozen table that is the head as well, around a trained layer; or the table is trained and the layer is not."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH).requires_grad_(trains)
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(not trains)

    def forward(self, tokens: Tensor) -> Tensor:
        return head(self.table, torch.tanh(self.layer(self.table(tokens))))


@defers
def head(table: nn.Embedding, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, table.weight)


class Recomputed(nn.Module):
    """A frozen layer between trained ones, and all of them in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = stack("2.weight", "2.bias"), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


class Megatron(nn.Module):
    """Megatron-core's layers: an embedding, a column-parallel and a row-parallel one, in one of whose names is ``frozen``."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        from megatron.core import tensor_parallel as mcore
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True)
        own: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_}
        both: dict[str, Any] = {**own, "bias": True, "skip_bias_add": False}
        self.table = mcore.VocabParallelEmbedding(ROWS, WIDTH, **own)
        self.column = mcore.ColumnParallelLinear(WIDTH, 10, **both, gather_output=False)
        self.row = mcore.RowParallelLinear(10, 14, **both, input_is_parallel=True)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(frozen not in name)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.row(F.gelu(self.column(self.table(tokens))[0]))[0]


NETS: dict[str, Callable[[], nn.Module]] = {
    "LoRA": lambda: nn.Sequential(Lora(WIDTH, 10, 2), nn.GELU(), Lora(10, 14, 3)),
    "biases only": lambda: stack("0.weight", "2.weight", "4.weight"),
    "weights only": lambda: stack("0.bias", "2.bias", "4.bias"),
    "in the middle": lambda: stack("2.weight", "2.bias"),
    "the first": lambda: stack("0.weight", "0.bias"),
    "tied, frozen": lambda: Tied(False),
    "tied, trained": lambda: Tied(True),
    "reentrant": lambda: Recomputed(True),
    "not reentrant": lambda: Recomputed(False),
    **{f"Megatron's {name}": lambda name=name: Megatron(name) for name in ("table", "column", "row", "weight")},
}


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """One process with megatron-core's groups, where that is installed."""
    try:
        from ds_terapipe.megatron import destroy_parallel, initialize_parallel
    except ImportError:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    initialize_parallel()
    yield
    destroy_parallel()
    dist.destroy_process_group()


# what a micro-batch took: bytes that autograd saved, bytes that were kept for weight gradients, products by shape
Cost = tuple[int, int, Counter[tuple[int, ...]]]


class Products(TorchDispatchMode):
    """Counts results of products and of an embedding's backward by their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "matmul", "linear", "embedding_dense_backward"):
            self.shapes[tuple(result.shape)] += 1
        return result


@contextmanager
def saving(net: nn.Module, saved: list[int]) -> Iterator[None]:
    """Bytes of what autograd saves, every storage once, weights aside."""
    known, found = {p.untyped_storage().data_ptr() for p in net.parameters()}, dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    saved.append(sum(found.values()))


def taken(net: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    if inputs[0].requires_grad:
        found["input"] = torch.cat([each.grad for each in inputs if each.grad is not None], dim=1)
    net.zero_grad()
    return found


def whole(net: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Cost]:
    inputs, saved = [x.detach().clone().requires_grad_(x.requires_grad)], list[int]()
    with Products() as products:
        with saving(net, saved):
            outputs = net(inputs[0])
        outputs.square().sum().backward()
    return taken(net, inputs), (saved[0], 0, products.shapes)


def sliced(net: nn.Module, x: Tensor, deferred: bool) -> tuple[dict[str, Tensor], Cost]:
    context, keeper, cuts, outputs, saved = SliceContext(), WeightGradients(), spans(SLICES), [], list[int]()
    context.weight_gradients = keeper if deferred else None
    # memory of their own, as messages have it
    inputs = [part.detach().clone().requires_grad_(x.requires_grad) for part in x.split(SLICES, dim=1)]
    interception = Interception([net])
    with Products() as products:
        for index, span in enumerate(cuts):
            with context.forward(Unit(0, index), span), saving(net, saved):
                context.enter_layer(0)
                outputs.append(net(inputs[index]))
        for index in reversed(range(len(cuts))):
            with context.backward(Unit(0, index), cuts[index]):
                outputs[index].square().sum().backward()
        kept = keeper.kept_bytes
        keeper.make(0)
    interception.close()
    assert keeper.kept_bytes == 0
    return taken(net, inputs), (sum(saved), kept, products.shapes)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_nothing_is_made_saved_or_kept_for_a_frozen_weight(name: str, deferred: bool) -> None:
    if name.startswith("Megatron"):
        pytest.importorskip("megatron.core")
    torch.manual_seed(0)
    net, x = NETS[name]().double(), torch.randint(ROWS, (BATCH, TOKENS))
    if not hasattr(net, "table"):
        x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted, (plain_saved, _, plain_products) = whole(net, x)
    got, (saved, kept, products) = sliced(net, x, deferred)
    assert got.keys() == wanted.keys()
    for each, gradient in got.items():
        assert torch.linalg.vector_norm(gradient - wanted[each]) <= 1e-10 * torch.linalg.vector_norm(wanted[each])
    assert saved <= plain_saved
    for each, weight in net.named_parameters():
        shape = tuple(weight.shape)
        if weight.dim() == 2 and not weight.requires_grad:  # Megatron's own frozen layer makes no such product either
            assert products[shape] == products[shape[::-1]] == 0 == plain_products[shape], each
    assert kept == (expected(net) if deferred else 0)


def expected(net: nn.Module) -> int:
    """Bytes of the inputs and output gradients of the trained linear layers and tables of this file's models."""
    numbers = 0  # of eight bytes, indices among them
    for name, weight in net.named_parameters():
        if weight.dim() == 2 and weight.requires_grad:
            numbers += 1 + weight.shape[1] if name.startswith("table") else sum(weight.shape)
    if isinstance(net, Tied) and net.table.weight.requires_grad:
        numbers += ROWS + WIDTH  # its head
    return BATCH * TOKENS * 8 * numbers

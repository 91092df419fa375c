"""An engine changes its own modules alone, their copies compute with their own weights, and nothing is left.

For weights that are frozen anywhere in a layer no gradient is made and nothing is kept.
"""

import copy
import functools
import gc
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import Interception, _users, defers, has_hooks, not_deferred_line
from ds_terapipe.pipeline.operators.sdpa import Overrides
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from tests.pipeline.attention_layers import DotProductAttention
from tests.pipeline.test_weight_gradients import assert_same, gradients_of_the_whole, net_of, run_intercepted, run_sliced, take

pytestmark = pytest.mark.usefixtures("operators")

WIDTH, ROWS = 6, 12
TOKENS = torch.randint(0, ROWS, (2, 8), generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    """One of each kind that is changed: tokens [b, s] to [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core_attention = DotProductAttention(1)

    def forward(self, tokens: Any) -> Any:
        rows = self.linear(self.table(tokens)).transpose(0, 1).unsqueeze(2)
        return self.core_attention(rows, rows, rows, None).transpose(0, 1)


def sliced(model: nn.Module) -> tuple[set[str], dict[str, torch.Tensor]]:
    """Names of the weights that have no gradient before they are made, and the gradients then."""
    keeper = WeightGradients()
    run_intercepted(model, TOKENS, (3, 1, 4), keeper)
    late = {name for name, p in model.named_parameters() if p.grad is None}
    keeper.make(0)
    return late, take(model)


def state_of(model: nn.Module) -> Any:
    return [dict(module.__dict__) for module in model.modules()], Overrides._users, len(_users)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_closed_it_leaves_modules_as_they_were_once_no_other_holds_them(how: str) -> None:
    model = Model()
    before, old, interception = state_of(model), Interception([model]), Interception([model.linear] * 2)
    old.close()
    assert "forward" in model.linear.__dict__ and "forward" not in model.table.__dict__
    copy.deepcopy(model)
    for _ in range(2):
        if how == "closed":
            interception.close()
        interception = interception if how == "closed" else None
        gc.collect()
        assert state_of(model) == before


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_computes_with_its_own_weights(kind: str) -> None:
    torch.manual_seed(0)
    model = Model().double()
    interception = Interception([model])
    made = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    interception.close()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(-0.5)
    fresh = Model().double()
    fresh.load_state_dict(made.state_dict())
    want = gradients_of_the_whole(fresh, TOKENS)
    assert_same(gradients_of_the_whole(made, TOKENS), want)  # the other one is closed
    mine = Interception([made])
    assert mine.adapted == [made.core_attention]
    late, got = sliced(made)
    assert late == want.keys()
    assert_same(got, want)
    mine.close()
    assert [each.keys() for each in state_of(made)[0]] == [each.keys() for each in state_of(Model())[0]]


@defers
def good_head(module: nn.Module, x: Any) -> Any:
    return deferred_linear(x, module.weight)


bare_head = lambda module, x: F.linear(x, module.weight)  # noqa: E731
OwnLinear = type("OwnLinear", (nn.Linear,), {"forward": lambda self, x: x @ self.weight.t() + self.bias})


def test_what_is_not_deferred_is_named() -> None:
    table = nn.Embedding(ROWS, WIDTH)
    deferred = {"model": Model(), "table": table, "norm": nn.LayerNorm(2), "frozen": OwnLinear(2, 2).requires_grad_(False)}
    others = {"own": OwnLinear(2, 2), "heads": nn.MultiheadAttention(4, 2)}
    others |= {"sparse": nn.Embedding(2, 2, sparse=True), "convolution": nn.Conv1d(1, 1, 1)}
    everything = nn.ModuleDict({**deferred, **others})
    named = ["own.weight", "heads.in_proj_weight", "heads.out_proj.weight", "sparse.weight", "convolution.weight"]
    for heads in ([good_head], [good_head, bare_head]):
        interception = Interception([everything, *(functools.partial(head, table) for head in heads), F.gelu])
        expected = ["table.weight", *named] if bare_head in heads else named
        assert interception.not_deferred(everything.named_parameters()) == expected
        interception.close()
    said = "weight gradients made slice by slice, not once per micro-batch (as exact, but slower): a, b, c, d and 2 more"
    assert not_deferred_line([]) == "" and not_deferred_line(list("abcdef")) == said
    everything["norm"].weight.register_post_accumulate_grad_hook(DeepSpeedEngine.zero_grad)
    everything["norm"].bias.register_hook(abs)
    assert [name for name, p in everything.named_parameters() if has_hooks(p)] == ["norm.bias"]


LENGTH, BATCH, SLICES = 24, 3, (5, 1, 10, 8)


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
        return good_head(self.table, torch.tanh(self.layer(self.table(tokens))))


# a net, and numbers of a token that are kept: inputs and output gradients of its trained layers and tables, indices among them
NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LoRA": (lambda: nn.Sequential(Lora(WIDTH, 10, 2), nn.GELU(), Lora(10, 14, 3)), 8 + 12 + 13 + 17),
    "biases only": (lambda: stack("0.weight", "2.weight", "4.weight"), 0),
    "weights only": (lambda: stack("0.bias", "2.bias", "4.bias"), 16 + 24 + 25),
    "in the middle": (lambda: stack("2.weight", "2.bias"), 16 + 25),
    "the first": (lambda: stack("0.weight", "0.bias"), 24 + 25),
    "tied, frozen": (lambda: Tied(False), 12),
    "tied, trained": (lambda: Tied(True), 1 + WIDTH + ROWS + WIDTH),
    "recomputed": (lambda: net_of(lambda net, x: net.stack(x), True, stack=stack("2.weight", "2.bias")), 16 + 25),
}


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


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_nothing_is_made_or_kept_for_a_frozen_weight(name: str, deferred: bool) -> None:
    net, x = NETS[name][0]().double(), torch.randint(ROWS, (BATCH, LENGTH))
    if not hasattr(net, "table"):
        x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    net.register_forward_pre_hook(lambda _, inputs: inputs[0].clone())  # memory of their own, as messages have it
    wanted, of_input = gradients_of_the_whole(net, x), x.grad
    x.grad, keeper = None, WeightGradients() if deferred else None
    with Products() as products:
        run_sliced(net, x, SLICES, keeper)
        kept = keeper.kept_bytes if keeper else 0
        if keeper:
            keeper.make(0)
    assert_same(take(net), wanted)
    if of_input is not None:
        torch.testing.assert_close(x.grad, of_input, rtol=1e-10, atol=1e-12)
    for each, weight in net.named_parameters():
        shape = tuple(weight.shape)
        if weight.dim() == 2 and not weight.requires_grad:
            assert products.shapes[shape] == products.shapes[shape[::-1]] == 0, each
    assert kept == (BATCH * LENGTH * 8 * NETS[name][1] if deferred else 0)

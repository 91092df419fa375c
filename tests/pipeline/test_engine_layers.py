"""Layers of all kinds train as in one process, whatever they hand to one another; a step holds what it must in memory."""

import gc
import time
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint

from ds_terapipe import ConfigError
from ds_terapipe.schedule import Op, order, simulate
from tests.pipeline.attention_layers import split
from tests.pipeline.models import HEADS, HIDDEN, Block, Embedding, Head, masked_loss, micro_batch, steps_of, tied_gpt
from tests.pipeline.training import Trace, build_engine, train, train_plain, worst
from tests.spawn import launched

LOSS_NUMBERS = 2  # what DeepSpeed keeps of a step is its loss, here and averaged over replicas
UNEVEN = [11, 4, 9]
Pair = namedtuple("Pair", "a b")  # a stage's own layers may hand on one


class Beside(Block):
    """A block that passes a second tensor by, behind a linear layer for each sample."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(torch.vmap(self.out)(inputs[0])), inputs[1]


class And(Embedding):
    """Hands on a second tensor, which ``make`` makes of the tokens and positions."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs), self.make(*inputs)


class Early(Embedding):
    """Two tensors; the second one has a gradient up to token 15, and where a slice begins there it requires none."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        at, early = self.positions(inputs[1]), inputs[1].unsqueeze(-1) < sum(UNEVEN[:2])
        return super().forward(inputs), torch.where(early, at, at.detach()) if early.any() else at.detach()


class AddAgain(Embedding):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0] + self.tokens(inputs[1])


def cross(inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over an encoder's states: as many as a slice has tokens, and masked as many as the probe's first one."""
    q, k = (split(each, HEADS) for each in inputs)
    masked = attend(q, k[..., :2, :], k[..., :2, :], torch.ones(1, 2, dtype=torch.bool))
    return inputs[0] + (attend(q, k, k) + masked).transpose(1, 2).flatten(2)


def over_heads(hidden: Tensor) -> Tensor:
    """Attention of each token's heads over each other: as many as a slice has tokens."""
    return attend(*[hidden.unflatten(-1, (UNEVEN[1], -1))] * 3).flatten(-2)


def rotary(tokens: Tensor, positions: Tensor) -> Tensor:
    """A table e^(i t), conjugated lazily: complex, and not in memory as it reads."""
    angles = positions.float().unsqueeze(-1) / torch.arange(1, HIDDEN // 2 + 1)
    return torch.polar(torch.ones_like(angles), angles).conj()


def to_complex(hidden: Tensor) -> Tensor:
    return torch.view_as_complex(hidden.unflatten(-1, (-1, 2))) * 1j


def to_real(pairs: Tensor) -> Tensor:
    return torch.view_as_real(pairs).flatten(-2)


WithNorm = type("WithNorm", (Head,), {"forward": lambda self, x: (Head.forward(self, x), self.norm.weight.square())})


def writing_loss(outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
    """Changes its arguments, also what is of no token; its backward recomputes attention of all tokens."""
    labels[0].add_(1).remainder_(outputs[0].shape[-1])
    mixed = checkpoint(lambda x: attend(x, x, x, is_causal=True), outputs[0].div_(2).unsqueeze(1), use_reentrant=False)
    return masked_loss(mixed.squeeze(1), labels) + outputs[1].mul_(3).sum()


def layers(*kinds: Any) -> list[Any]:
    return [LayerSpec(kind) if isinstance(kind, type) else kind for kind in kinds]


def beside(first: Any, join: Any) -> list[Any]:
    """Six layers: two tensors cross the boundary between the stages."""
    first = first if isinstance(first, type) else LayerSpec(And, first)
    return layers(first, Beside, Beside, Beside, join, Head)


MODELS: dict[str, list[Any]] = {
    "bool mask": beside(lambda tokens, _: tokens % 5 != 0, lambda inputs: inputs[0] * inputs[1].unsqueeze(-1)),
    "integers": beside(lambda tokens, _: tokens, AddAgain),
    "two with gradients": layers(Early, Beside, lambda inputs: inputs[::-1], lambda inputs: inputs[0] - inputs[1], Block, Head),
    "unused output": beside(Early, lambda inputs: inputs[0]),
    "an encoder's states": beside(lambda tokens, _: torch.randn(len(tokens), 4, HIDDEN, generator=torch.Generator()), cross),
    "functions": layers(Embedding, Block, over_heads, lambda x: Pair(x, x), lambda pair: pair.a + pair.b, Head),
    "complex": beside(rotary, lambda inputs: to_real(-1j * to_complex(inputs[0]) * inputs[1])),
    "complex with gradient": layers(Embedding, Block, to_complex, to_real, Block, Head),
    "loss that writes": layers(Embedding, Block, Block, WithNorm),
}


def differences(specs: list[Any], keys: Any, loss: Any = masked_loss, then: Sequence[Any] = ()) -> float:
    """Largest relative difference to one process, in two steps and one for each of ``then``, arguments of ``set_slices``."""
    steps, got = steps_of(2 + len(then), 2), Trace()
    engine = build_engine(specs, loss, token_pipeline=keys)
    for slices, some in ((None, steps[:2]), *zip(then, ([step] for step in steps[2:]), strict=True)):
        if slices is not None:
            engine.set_slices(*slices)
        trace = train(engine, some)
        got = Trace(got.losses + trace.losses, got.gradients + trace.gradients, weights=trace.weights)
    engine.destroy()
    plain = train_plain(specs, loss, steps)
    found = [worst(got.weights, plain.weights)]
    found += [abs(a - b) / b for a, b in zip(got.losses, plain.losses, strict=True)]
    for a, b in zip(got.gradients, plain.gradients, strict=True):
        # an embedding that nothing uses has a zero gradient here and none in one process
        assert all(not a[name].any() for name in a.keys() - b.keys())
        assert not (b.keys() & got.weights.keys()) - a.keys()
        found.append(worst({name: gradient for name, gradient in a.items() if name in b}, b))
    return max(found)


def refused() -> None:
    scaled = Embedding()
    scaled.tokens.scale_grad_by_freq = True  # a token's gradient is scaled by how often it comes in the sequence
    with pytest.raises(ConfigError, match=r"^token_pipeline: layer 0\.tokens .* has scale_grad_by_freq=True, must be False"):
        build_engine(layers(scaled, Block, Head), masked_loss, token_pipeline={"slices": 4, "weight_gradients": "slice"})


def tensors() -> dict[int, weakref.ref[Tensor]]:
    """All tensors that Python knows of, by id; one tensor has one such reference."""
    gc.collect()
    return {id(thing): weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), Tensor)}


def kept(made: Sequence[weakref.ref[Tensor]], within_s: float = 60.0) -> list[torch.Size]:
    """Shapes of those larger than a loss that are there after ``within_s`` seconds: gloo's threads let go of theirs late."""

    def shapes() -> list[torch.Size]:  # no frame that goes on may keep a tensor
        # layouts of weights, which one step leaves to the next to be overwritten, have a layout of their own
        found = [tensor for ref in made if (tensor := ref()) is not None and tensor.numel() > LOSS_NUMBERS]
        return [tensor.shape for tensor in found if tensor.layout == torch.strided]

    deadline = time.monotonic() + within_s
    while shapes() and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    return shapes()


def live_units(schedule: str) -> dict[str, Any]:
    """The most units, and tokens, that were live at once on the stage, and the tensors that each step leaves."""

    def data() -> Iterator[Any]:
        return (micro_batch(m) for m in range(6))  # which their maker does not keep

    engine = build_engine(tied_gpt(), masked_loss, token_pipeline={"slices": 4, "schedule": schedule}, micro_batches=6)
    for _ in range(2):
        engine.train_batch(data())  # makes what lives as long as the engine does
    kept_after, made = [], 0
    for step in (engine.train_batch, engine.eval_batch, engine.train_batch):
        before = tensors()
        step(data())
        new = [ref for key, ref in tensors().items() if before.get(key) is not ref]
        kept_after.append(kept(new))
        made += len(new)
    result = {"peak": (engine.peak_live_units, engine.peak_live_tokens), "kept": kept_after, "made": made}
    engine.destroy()
    return result


def worker(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        loss = writing_loss if name == "loss that writes" else masked_loss
        found[name] = differences(model, {"slices": UNEVEN}, loss, then=[(UNEVEN, "terapipe"), (1, "1f1b")])
        if name in ("integers", "two with gradients", "complex with gradient"):
            keys = {"slices": UNEVEN, "schedule": "terapipe", "weight_gradients": "slice"}
            found[name] = max(found[name], differences(model, keys))
    refused()
    return found | {schedule: live_units(schedule) for schedule in ("1f1b", "terapipe")}


ranks = launched(worker, 2, timeout=240)


@pytest.mark.parametrize("name", MODELS)
def test_layers_train_as_in_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    assert [results[name] <= 1e-5 for results in ranks] == [True, True], [results[name] for results in ranks]


@pytest.mark.parametrize("schedule", ["1f1b", "terapipe"])
def test_a_step_holds_what_the_simulator_says_and_leaves_nothing(ranks: list[dict[str, Any]], schedule: str) -> None:
    seconds: Any = {Op.FORWARD: 1.0}
    simulated = simulate(order(schedule, 2, [4] * 6), compute=lambda a: seconds.get(a.op, 2.0), tokens=lambda _: 6)
    assert [r[schedule]["peak"] for r in ranks] == [(s.peak_units, s.peak_tokens) for s in simulated.places]
    assert ranks[0][schedule]["peak"][0] == (2 + 4 - 1 if schedule == "1f1b" else 6 * 4)
    for results in ranks:
        assert results[schedule]["kept"] == [[]] * 3
        assert results[schedule]["made"] >= 3, "losses: the count does see what steps make"

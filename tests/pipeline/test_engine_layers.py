"""What layers may be and hand to one another, frozen ones, checkpointed ones, and what a step holds in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.pipeline.leftovers import kept, made_since, tensors
from tests.pipeline.models import (
    HIDDEN,
    Block,
    Embedding,
    FrozenBlock,
    FrozenEmbedding,
    Head,
    gpt,
    masked_loss,
    micro_batch,
    steps_of,
    tied_gpt,
)
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

LOSS_NUMBERS = 2  # numbers: what DeepSpeed keeps of a step is its loss, here and averaged over replicas

sgd = partial(torch.optim.SGD, lr=0.2)


class Beside(nn.Module):
    """A block that passes a second tensor by."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, other = inputs
        return self.block(hidden), other


class KeepMask(Embedding):
    """Hidden states and a bool mask made from the tokens."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs), inputs[0] % 5 != 0


class Scale(Embedding):
    """Hidden states and a float tensor [b, s, 1] that needs no gradient."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs), (inputs[1].float() / 24).cos().unsqueeze(-1)


class Ids(Embedding):
    """Hidden states and the tokens, int64."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs), inputs[0]


class Two(Embedding):
    """Two tensors with gradients: embedded tokens and embedded positions."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.tokens(inputs[0]), self.positions(inputs[1])


class In16Bits(Block):
    """Computes in bf16 in a model of fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(hidden).float()


class HalfFrozenBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv.requires_grad_(False)
        self.down.bias.requires_grad_(False)


def masked(inputs: tuple[Tensor, Tensor]) -> Tensor:
    hidden, keep = inputs
    return hidden * keep.unsqueeze(-1)


def scaled(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0] * inputs[1]


def summed(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0] + inputs[1]


def first(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0]


class AddAgain(nn.Module):
    """Embeds the tokens that came along once more."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Embedding(53, HIDDEN)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0] + self.again(inputs[1])


class WritingEmbedding(Embedding):
    """Changes the data that it is given."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        inputs[0].add_(1).remainder_(53)
        return super().forward(inputs)


class Rotating(Embedding):
    """Hidden states and a rotary table e^(i t), conjugated lazily: complex, and not in memory as it reads."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        angles = inputs[1].float().unsqueeze(-1) / torch.arange(1, HIDDEN // 2 + 1)
        return super().forward(inputs), torch.polar(torch.ones_like(angles), angles).conj()


def rotated(inputs: tuple[Tensor, Tensor]) -> Tensor:
    pairs = torch.view_as_complex(inputs[0].unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * inputs[1]).flatten(-2)


def to_complex(hidden: Tensor) -> Tensor:
    return torch.view_as_complex(hidden.unflatten(-1, (-1, 2))) * 1j


def to_real(pairs: Tensor) -> Tensor:
    return torch.view_as_real(pairs).flatten(-2)


def doubled_in_place(hidden: Tensor) -> Tensor:
    return hidden.mul_(2)


def writing_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Changes both of its arguments."""
    labels[0].add_(1).remainder_(53)
    return masked_loss(logits.div_(2), labels)


def beside(start: type[nn.Module], join: Any) -> list[Any]:
    """Six layers: two tensors cross the boundary between the stages."""
    blocks = [LayerSpec(Beside), LayerSpec(Beside), LayerSpec(Beside)]
    return [LayerSpec(start), *blocks, join, LayerSpec(Head)]


def frozen(*kinds: type[nn.Module]) -> list[Any]:
    return [LayerSpec(kind) for kind in kinds]


MODELS: dict[str, Callable[[], Sequence[Any]]] = {
    "bool mask": lambda: beside(KeepMask, masked),
    "float without gradient": lambda: beside(Scale, scaled),
    "integers": lambda: beside(Ids, LayerSpec(AddAgain)),
    "two with gradients": lambda: beside(Two, summed),
    "unused output": lambda: beside(Two, first),
    "functions": lambda: [*gpt(2)[:2], torch.tanh, lambda x: 2 * x, *gpt(2)[2:]],
    "complex": lambda: beside(Rotating, rotated),
    "complex with gradient": lambda: [*gpt(2)[:2], to_complex, to_real, *gpt(2)[2:]],
    "inputs written to": lambda: [LayerSpec(WritingEmbedding), *gpt(4)[1:]],
    "boundary written to": lambda: [*gpt(3)[:3], doubled_in_place, *gpt(3)[3:]],
    "loss that writes": gpt,
    "frozen layers": lambda: frozen(FrozenEmbedding, Block, FrozenBlock, HalfFrozenBlock, FrozenBlock, Head),
    "frozen first stage": lambda: frozen(FrozenEmbedding, FrozenBlock, FrozenBlock, Block, HalfFrozenBlock, Head),
    "frozen last stage": lambda: frozen(Embedding, Block, Block, FrozenBlock, FrozenBlock, HalfFrozenBlock),
}


def some_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD; a stage without trainable parameters gets one of its own, which torch's optimisers ask for."""
    return sgd(list(parameters) or [nn.Parameter(torch.zeros(1))])


def train_model(specs: Sequence[Any], loss: Any, keys: dict[str, Any], **options: Any) -> float:
    """Largest relative difference of losses, gradients and weights between the engine and one process."""
    steps = steps_of(2, 2)
    engine = build_engine(specs, loss, token_pipeline=keys, optimizer=some_optimizer, **options)
    got, plain = train(engine, steps), train_plain(specs, loss, steps, sgd)
    engine.destroy()
    for a, b in zip(got.gradients, plain.gradients, strict=True):
        # an embedding that nothing uses has a zero gradient here and none in one process
        assert all(not a[name].any() for name in a.keys() - b.keys())
        assert not (b.keys() & got.weights.keys()) - a.keys()
    return max(
        *(abs(a - b) / b for a, b in zip(got.losses, plain.losses, strict=True)),
        *(
            worst({n: t for n, t in a.items() if n in b}, b)
            for a, b in zip(got.gradients, plain.gradients, strict=True)
        ),
        worst(got.weights, plain.weights),
    )


def hidden_loss(hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, mask = labels
    return ((hidden.mean(-1) - targets / 53).square() * mask).sum() / mask.sum()


LOSSES = {"frozen last stage": hidden_loss, "loss that writes": writing_loss}
UNCUT = dict.fromkeys(("complex", "inputs written to", "boundary written to", "loss that writes"), ({"slices": 1},))


def reused(step: Sequence[Any]) -> Iterator[Any]:
    """The micro-batches of a step, each in the memory of the one before."""
    (tokens, positions), (targets, mask) = buffers = micro_batch(0)
    for inputs, labels in step:
        for buffer, tensor in zip((tokens, positions, targets, mask), (*inputs, *labels), strict=True):
            buffer.copy_(tensor)
        yield buffers


def loss_of(specs: Sequence[Any], data: Callable[[Sequence[Any]], Iterator[Any]] = iter) -> float:
    """Relative difference of losses from those of one process; ``data`` brings the micro-batches of a step."""
    steps = steps_of(2, 3)
    engine = build_engine(specs, masked_loss, token_pipeline={"slices": 4}, micro_batches=3)
    losses = [float(engine.train_batch(data(step))) for step in steps]
    engine.destroy()
    plain = train_plain(specs, masked_loss, steps, sgd).losses
    return max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))


def checkpointed(weight_gradients: str, interval: int) -> float:
    return train_model(
        tied_gpt(), masked_loss, {"slices": 5, "weight_gradients": weight_gradients},
        config={"pipeline": {"activation_checkpoint_interval": interval, "use_reentrant": False}},
    )  # fmt: skip


class Counting(dict):
    """Remembers the largest number of its entries."""

    most = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


def data() -> Iterator[Any]:
    """The micro-batches of a step; whoever made them does not keep them."""
    return (micro_batch(m) for m in range(6))


def live_units(schedule: str) -> dict[str, Any]:
    """The most units that a stage holds outputs (or inputs, on the last stage) of, and the tensors that steps leave.

    "kept": by step, those larger than a loss that are there when it is over. "for ever": those of any size that are there
    when a later training step is over, too.
    """
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline={"slices": 4, "schedule": schedule}, micro_batches=6)
    (stage,) = engine._assembly.stages.values()
    stage._outputs, stage._inputs = Counting(), Counting()
    for _ in range(2):
        engine.train_batch(data())  # makes what lives as long as the engine does
    kept_after, made = [], []
    for step in (engine.train_batch, engine.train_batch, engine.eval_batch):
        before = tensors()
        step(data())
        new = made_since(before)
        kept_after.append(kept(new, larger_than=LOSS_NUMBERS))
        made += new
    engine.train_batch(data())
    for_ever = kept(made)
    held = stage._inputs.most if engine.is_last_stage() else stage._outputs.most
    result = {"held": held, "kept": kept_after, "made": len(made), "for ever": for_ever, "left": len(stage._outputs)}
    engine.destroy()
    return result


def worker(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: max(
            train_model(make(), LOSSES.get(name, masked_loss), {"slices": 5, **keys})
            for keys in ({}, {"schedule": "terapipe", "weight_gradients": "slice"}, *UNCUT.get(name, ()))
        )
        for name, make in MODELS.items()
    }
    for weight_gradients in ("auto", "micro_batch"):
        for interval in (1, 2):
            results[f"checkpointed {weight_gradients} {interval}"] = checkpointed(weight_gradients, interval)
    results["one buffer"] = loss_of(gpt(), reused)
    # bf16 rounds to 8 bits; 200 is what that may be off, in units of the test's bound
    results["16 bits inside"] = loss_of(frozen(Embedding, In16Bits, Block, In16Bits, Head)) / 200
    return results | {schedule: live_units(schedule) for schedule in ("1f1b", "terapipe")}


ranks = launched(worker, 2, timeout=180)


@pytest.mark.parametrize("name", [*MODELS, "one buffer", "16 bits inside"])
def test_layers_train_as_in_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, results in enumerate(ranks):
        assert results[name] <= 1e-5, f"rank {rank}: {results[name]:.1e}"


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("weight_gradients", ["auto", "micro_batch"])
def test_activation_checkpointing(ranks: list[dict[str, Any]], weight_gradients: str, interval: int) -> None:
    for results in ranks:
        assert results[f"checkpointed {weight_gradients} {interval}"] <= 1e-5


def test_live_units_are_bounded_by_stages_and_slices(ranks: list[dict[str, Any]]) -> None:
    assert [results["1f1b"]["held"] for results in ranks] == [2 + 4 - 1, 4]
    assert ranks[0]["terapipe"]["held"] == 6 * 4


@pytest.mark.parametrize("schedule", ["1f1b", "terapipe"])
def test_no_tensor_outlives_its_step(ranks: list[dict[str, Any]], schedule: str) -> None:
    for results in ranks:
        assert results[schedule]["kept"] == [[]] * 3
        assert results[schedule]["for ever"] == []
        assert results[schedule]["made"] >= 3  # losses: the count does see what steps make
        assert results[schedule]["left"] == 0

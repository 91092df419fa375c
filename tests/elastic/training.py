"""Trainings whose layers freeze and whose pipeline changes its shape, and the same in one process: what proofs compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import Tensor, nn

from ds_terapipe import FusedLamb
from tests.pipeline import models
from tests.pipeline.models import Block, Embedding, FrozenBlock, FrozenEmbedding, Head, gpt, masked_loss, mean_loss, tied_gpt
from tests.pipeline.training import Trace, allow_fp16, build_engine, train_module

Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    model: str  # of `MODELS`
    optimizer: str  # of `OPTIMIZERS`; "instance" is given to DeepSpeed as an object
    stages: int  # at the start; the other processes are replicas
    freeze: Steps  # from which step on how many entries are frozen
    resize: Steps  # and how many stages there are
    slices: int | str | None = 2  # of ``token_pipeline``; None: there is no such block
    scheduler: str | None = None  # "lambda", a function of torch's; "warmup", DeepSpeed's from the JSON
    steps: int = 30
    batch: int = 8  # samples of a step at the start
    size: int = 2  # and of a micro-batch
    clip: float = 0.5  # ``gradient_clipping``
    precision: str = "fp32"  # of `PRECISIONS`

    @property
    def transitions(self) -> list[int]:
        """The steps before which something changes."""
        return sorted({step for step, _ in (*self.freeze, *self.resize)})

    def frozen(self, step: int) -> int:
        return max((entries for begin, entries in self.freeze if begin <= step), default=0)

    def stages_at(self, step: int) -> int:
        return next((number for begin, number in reversed(self.resize) if begin <= step), self.stages)

    def elastic(self, **more: Any) -> dict[str, Any]:
        freeze = {"policy": "schedule", "frozen_layers": [list(pair) for pair in self.freeze]} if self.freeze else {}
        return {"freeze": freeze, "resize": {"policy": [list(pair) for pair in self.resize] or "off"}, **more}


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.drop(hidden))


def layers(*kinds: type[nn.Module]) -> Callable[[], list[Any]]:
    return lambda: [LayerSpec(kind) for kind in kinds]


def _masked(seed: int, size: int, masked: bool = True) -> Any:
    return models.micro_batch(seed, batch=size, masked=masked)


_texts = partial(_masked, masked=False)
MODELS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Tensor], Callable[[int, int], Any]]] = {
    "gpt": (gpt, masked_loss, _masked), "tied": (tied_gpt, masked_loss, _masked),
    "dropping texts": (layers(Embedding, *[Dropping] * 4, Head), mean_loss, _texts),
    "partly frozen": (layers(FrozenEmbedding, FrozenBlock, FrozenBlock, Block, Block, Head), mean_loss, _texts),
    # the layer behind the frozen ones writes into what these put out
    "writing": (layers(FrozenEmbedding, FrozenBlock, models.WritingBlock, Block, Block, Head), mean_loss, _texts),
    "mostly frozen": (layers(FrozenEmbedding, *[FrozenBlock] * 3, Block, Head), mean_loss, _texts),
    "texts": (gpt, mean_loss, _texts), "tied texts": (tied_gpt, mean_loss, _texts),
}  # fmt: skip


def data_of(case: Case) -> list[list[Any]]:
    """The micro-batches of every step, of all replicas."""
    make = MODELS[case.model][2]
    return [[make(1000 * s + m, case.size) for m in range(case.batch // case.size)] for s in range(case.steps)]


def grouped(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of other decay and rate: tables, which only some stages have; matrices; the rest."""
    kinds: dict[str, list[nn.Parameter]] = {"tables": [], "matrices": [], "rest": []}
    for parameter in parameters:
        table = parameter.dim() == 2 and parameter.shape[0] in (models.VOCABULARY, models.POSITIONS)
        kinds["tables" if table else "matrices" if parameter.dim() > 1 else "rest"].append(parameter)
    settings = {"tables": (4e-3, 0.2), "matrices": (2e-3, 0.1), "rest": (1e-3, 0.0)}
    each = ((kinds[kind], lr, decay) for kind, (lr, decay) in settings.items() if kinds[kind])
    return [{"params": members, "lr": lr, "weight_decay": decay} for members, lr, decay in each]


def grouped_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with `grouped` groups, and an epsilon that noise doesn't reach: with 1e-8 it becomes full steps."""
    return torch.optim.AdamW(grouped(parameters), betas=(0.9, 0.99), eps=1e-4)


class FusedAdamOnCPU(FusedAdam):
    """DeepSpeed's FusedAdam, whose own ``step`` counts and calls, with a kernel that needs no compiler."""

    def __init__(self, parameters: Any) -> None:
        same = grouped_adamw(list(parameters))
        defaults = {key: same.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        torch.optim.Optimizer.__init__(self, same.param_groups, {**defaults, "bias_correction": True})
        self.adam_w_mode, self.set_grad_none, self._dummy_overflow_buf = 1, True, torch.zeros(1, dtype=torch.int)
        self.multi_tensor_adam = _adam_of_lists


def _adam_of_lists(
    chunk: int, skipped: Tensor, lists: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float, eps: float,
    step: int, decoupled: int, corrected: int, decay: float,
) -> None:  # fmt: skip
    """Adam like csrc/adam/multi_tensor_adam.cu of DeepSpeed 0.19.8: one step count for all tensors."""
    assert decoupled and corrected
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt().add_(eps)
        parameter.mul_(1 - lr * decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))


SGD, LAMB = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, {"lr": 1e-2, "weight_decay": 0.05, "eps": 1e-3}
OPTIMIZERS: dict[str, tuple[Any, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    # what DeepSpeed is given, what one process has
    "adamw": (lambda parameters: grouped_adamw(list(parameters)), grouped_adamw),
    "instance": (grouped_adamw, grouped_adamw), "fused adam": (FusedAdamOnCPU, grouped_adamw),
    "muon": (lambda parameters: MuonWithAuxAdam(  # without matrices
        [{**each, "use_muon": False} for each in grouped_adamw(list(parameters)).param_groups],
        lambda groups: FusedAdamOnCPU(p for group in groups for p in group["params"])), grouped_adamw),
    "sgd": ({"type": "SGD", "params": SGD}, partial(torch.optim.SGD, **SGD)),
    "lamb": ({"type": "FusedLamb", "params": LAMB}, partial(FusedLamb, **LAMB)),
}  # fmt: skip
WARMUP = {"warmup_min_lr": 1e-3, "warmup_max_lr": 5e-2, "warmup_num_steps": 20, "warmup_type": "linear"}


# a scale that overflows first, is halved, and grows after three steps without
FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 2}
_BF16, _ZERO_1 = {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {}, "ZeRO-1": _ZERO_1, "bf16": _BF16,
    "bf16 ZeRO-1": {**_BF16, **_ZERO_1, "data_types": {"grad_accum_dtype": "fp32"}}, "fp16": {"fp16": FP16},
    "fp16 ZeRO-1": {"fp16": FP16, **_ZERO_1},
}  # fmt: skip


def prefixes(specs: Sequence[Any], frozen: int) -> tuple[str, ...]:
    """Prefixes of the parameter names of the first ``frozen`` entries."""
    return tuple(
        f"tied_modules.{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{entry}."
        for entry, spec in enumerate(specs[:frozen])
    )


@cache
def reference(case: Case) -> Trace:
    """The batches of `data_of` in one process, with the same parameters frozen."""
    return reference_on(case, data_of(case))


def reference_on(
    case: Case, steps: Sequence[Sequence[Any]], after_step: Callable[[int, nn.Module], None] = lambda number, model: None
) -> Trace:
    """Train `reference` on other batches; ``after_step`` gets the step's number and the model."""
    specs, loss_fn = MODELS[case.model][0](), MODELS[case.model][1]
    model = models.Plain(specs)
    optimizer = OPTIMIZERS[case.optimizer][1](list(model.parameters()))

    def freeze(number: int) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes(specs, case.frozen(number))):
                parameter.requires_grad_(False)

    def part_of_loss(inputs: Any, labels: Any, step: Sequence[Any]) -> Tensor:
        return loss_fn(model(inputs), labels) / len(step)

    return train_module(model, optimizer, steps, part_of_loss, case.clip, freeze, lambda number: after_step(number, model))


def engine_of(case: Case, **more: Any) -> Any:
    """An engine for it. ``more`` are arguments of `build_engine`; ``config`` adds to what the case says."""
    make, loss_fn, _ = MODELS[case.model]
    config = {"elastic_pipeline": case.elastic(), **PRECISIONS[case.precision], **more.pop("config", {})}
    if case.scheduler == "warmup":
        config["scheduler"] = {"type": "WarmupLR", "params": WARMUP}
    if case.scheduler == "lambda":
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    if "fp16" in config:
        allow_fp16()
    replicas = torch.distributed.get_world_size() // case.stages
    options = {
        "token_pipeline": None if case.slices is None else {"slices": case.slices},
        "micro_batches": case.batch // (case.size * replicas), "batch": case.size, "stages": case.stages,
        "clip": case.clip, "optimizer": OPTIMIZERS[case.optimizer][0], "instance": case.optimizer == "instance",
    }  # fmt: skip
    return build_engine(more.pop("specs", None) or make(), loss_fn, config=config, **{**options, **more})


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def objects_of(engine: Any) -> list[Any]:
    """Objects that a user holds, which must still be the trained ones after any number of reshapes."""
    optimizer = engine.basic_optimizer
    return [engine.module, optimizer, engine.lr_scheduler, engine.training_dataloader, *optimizer.param_groups]


def are_the_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))

"""Trainings whose layers freeze and whose pipeline changes its shape, and the same in one process: what proofs compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed import PipelineEngine
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import Tensor, nn

from ds_terapipe import FusedLamb
from ds_terapipe.elastic.engine import ElasticPipelineEngine
from ds_terapipe.pipeline.inspection import first_batch
from tests.pipeline.models import (
    HEADS,
    HIDDEN,
    POSITIONS,
    SEED,
    VOCABULARY,
    Block,
    Embedding,
    FrozenBlock,
    FrozenEmbedding,
    Head,
    Plain,
    gpt,
    masked_loss,
    mean_loss,
    micro_batch,
    tied_gpt,
)
from tests.pipeline.training import allow_fp16, build_engine, difference

Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        model, optimizer: of `MODELS` and `OPTIMIZERS`; "instance" is given to DeepSpeed as an object.
        stages: at the start; the other processes are replicas.
        freeze: from which step on how many entries are frozen.
        resize: from which step on how many stages there are.
        slices: of ``token_pipeline``; None: there is no such block.
        scheduler: "lambda", a function of torch's; "warmup", DeepSpeed's from the JSON; None.
        steps: so many.
        batch, size: samples of a step and of a micro-batch at the start.
        clip: ``gradient_clipping``.
        precision: of `PRECISIONS`.
    """

    model: str
    optimizer: str
    stages: int
    freeze: Steps
    resize: Steps
    slices: int | None = 4
    scheduler: str | None = None
    steps: int = 30
    batch: int = 8
    size: int = 2
    clip: float = 0.5
    precision: str = "fp32"

    @property
    def transitions(self) -> list[int]:
        """The steps before which something changes."""
        return sorted({step for step, _ in (*self.freeze, *self.resize)})

    def frozen(self, step: int) -> int:
        """Entries that this step trains without."""
        return max((entries for begin, entries in self.freeze if begin <= step), default=0)

    def stages_at(self, step: int) -> int:
        """Stages that this step runs on."""
        return next((number for begin, number in reversed(self.resize) if begin <= step), self.stages)

    def elastic(self, **more: Any) -> dict[str, Any]:
        """The block of ``ds_config.json``."""
        freeze = {"policy": "schedule", "frozen_layers": [list(pair) for pair in self.freeze]} if self.freeze else {}
        resize = {"policy": [list(pair) for pair in self.resize] or "off"}
        return {"freeze": freeze, "resize": resize, **more}


# ------------------------------------------------------------------------------------------------------------ models


class Patches(nn.Module):
    """Images [b, patches, 12] to hidden states, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, HIDDEN)
        self.positions = nn.Parameter(torch.empty(9, HIDDEN).normal_(std=0.1))

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images) + self.positions


class Bidirectional(nn.Module):
    """A pre-norm Transformer layer in which every position sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("scale", torch.tensor(0.9), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, _ = hidden.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.before(hidden)).chunk(3, dim=-1))
        hidden = hidden + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, HIDDEN))
        return hidden + self.scale * F.gelu(self.mlp(self.after(hidden)))


def pooled(hidden: Tensor) -> Tensor:
    """The mean over all positions: a plain function among the layers."""
    return hidden.mean(dim=1)


def classifier() -> list[Any]:
    """A small vision Transformer."""
    return [
        LayerSpec(Patches),
        *(LayerSpec(Bidirectional) for _ in range(3)),
        LayerSpec(nn.LayerNorm, HIDDEN),
        pooled,
        LayerSpec(nn.Linear, HIDDEN, 7),
    ]


def images(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of the classifier's."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, 9, 12, generator=random), torch.randint(0, 7, (size,), generator=random)


class Dropping(Block):
    """A block with dropout of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.drop(hidden))


def dropping() -> list[Any]:
    """GPT with dropout."""
    return [LayerSpec(Embedding), *(LayerSpec(Dropping) for _ in range(4)), LayerSpec(Head)]


def partly_frozen() -> list[Any]:
    """GPT of whose layers the user has frozen the first half."""
    return [LayerSpec(kind) for kind in (FrozenEmbedding, FrozenBlock, FrozenBlock, Block, Block, Head)]


class WritingBlock(Block):
    """Writes into its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(1.5))


def writing() -> list[Any]:
    """GPT of whose layers the user has frozen the first two; the next one writes into what these put out."""
    return [LayerSpec(kind) for kind in (FrozenEmbedding, FrozenBlock, WritingBlock, Block, Block, Head)]


MODELS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Tensor], Callable[[int, int], Any]]] = {
    "gpt": (gpt, masked_loss, lambda seed, size: micro_batch(seed, batch=size)),
    "tied": (tied_gpt, masked_loss, lambda seed, size: micro_batch(seed, batch=size)),
    "dropping": (dropping, masked_loss, lambda seed, size: micro_batch(seed, batch=size)),
    "dropping texts": (dropping, mean_loss, lambda seed, size: micro_batch(seed, batch=size, masked=False)),
    "partly frozen": (partly_frozen, mean_loss, lambda seed, size: micro_batch(seed, batch=size, masked=False)),
    "writing": (writing, mean_loss, lambda seed, size: micro_batch(seed, batch=size, masked=False)),
    "texts": (gpt, mean_loss, lambda seed, size: micro_batch(seed, batch=size, masked=False)),
    "tied texts": (tied_gpt, mean_loss, lambda seed, size: micro_batch(seed, batch=size, masked=False)),
    "classifier": (classifier, F.cross_entropy, images),
}


def data_of(case: Case) -> list[list[Any]]:
    """The micro-batches of every step, of all replicas."""
    make = MODELS[case.model][2]
    return [[make(1000 * s + m, case.size) for m in range(case.batch // case.size)] for s in range(case.steps)]


# -------------------------------------------------------------------------------------------------------- optimisers


def grouped(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of other decay and rate: tables, which only some stages have; matrices; the rest."""
    kinds: dict[str, list[nn.Parameter]] = {"tables": [], "matrices": [], "rest": []}
    for parameter in parameters:
        table = parameter.dim() == 2 and parameter.shape[0] in (VOCABULARY, POSITIONS)
        kinds["tables" if table else "matrices" if parameter.dim() > 1 else "rest"].append(parameter)
    settings = {"tables": (4e-3, 0.2), "matrices": (2e-3, 0.1), "rest": (1e-3, 0.0)}
    return [
        {"params": kinds[kind], "lr": lr, "weight_decay": decay}
        for kind, (lr, decay) in settings.items()
        if kinds[kind]
    ]


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
    """As csrc/adam/multi_tensor_adam.cu of DeepSpeed 0.19.8: one step count for all tensors."""
    assert decoupled and corrected
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt().add_(eps)
        parameter.mul_(1 - lr * decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))


OPTIMIZERS: dict[str, tuple[Any, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    # what DeepSpeed is given, what one process has
    "adamw": (lambda parameters: grouped_adamw(list(parameters)), grouped_adamw),
    "instance": (grouped_adamw, grouped_adamw),
    "fused adam": (FusedAdamOnCPU, grouped_adamw),
    "backwards": (lambda parameters: grouped_adamw(list(parameters)[::-1]), lambda p: grouped_adamw(p[::-1])),
    "sgd": (
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "lamb": (
        {"type": "FusedLamb", "params": {"lr": 1e-2, "weight_decay": 0.05, "eps": 1e-3}},
        partial(FusedLamb, lr=1e-2, weight_decay=0.05, eps=1e-3),
    ),
}
WARMUP = {"warmup_min_lr": 1e-3, "warmup_max_lr": 5e-2, "warmup_num_steps": 20, "warmup_type": "linear"}


def decaying(step: int) -> float:
    """Factor of every rate: no two steps have the same."""
    return 0.98**step


def lambda_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A scheduler as a function, which DeepSpeed calls."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, decaying)


# a scale that overflows first, is halved, and grows after six steps without
FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 6, "hysteresis": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "ZeRO-1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 ZeRO-1": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp16": {"fp16": FP16},
    "fp16 ZeRO-1": {"fp16": FP16, "zero_optimization": {"stage": 1}},
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda_lr,
    "warmup": lambda optimizer: WarmupLR(optimizer, **WARMUP),
}


# ------------------------------------------------------------------------------------------------------- one process


@dataclass
class Reference:
    """A training in one process: loss of each step, weights and settings (rate, decay) by name at the end."""

    losses: list[float]
    weights: dict[str, Tensor]
    settings: dict[str, tuple[float, float]]


def prefixes(specs: Sequence[Any], frozen: int) -> tuple[str, ...]:
    """What the names of the first ``frozen`` entries' parameters begin with."""
    return tuple(
        f"tied_modules.{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{entry}."
        for entry, spec in enumerate(specs[:frozen])
    )


@cache
def reference(case: Case) -> Reference:
    """The batches of `data_of` in one process, with the same parameters frozen."""
    return reference_on(case, data_of(case))


def reference_on(
    case: Case, steps: Sequence[Sequence[Any]], after_step: Callable[[int, nn.Module], None] | None = None
) -> Reference:
    """As `reference`, on other batches; ``after_step`` gets the step's number and the model."""
    specs, loss_fn = MODELS[case.model][0](), MODELS[case.model][1]
    model, losses = Plain(specs), []
    optimizer = OPTIMIZERS[case.optimizer][1](list(model.parameters()))
    scheduler = None if case.scheduler is None else SCHEDULERS[case.scheduler](optimizer)
    for number, step in enumerate(steps):
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes(specs, case.frozen(number))):
                parameter.requires_grad_(False)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for inputs, labels in step:
            loss = loss_fn(model(inputs), labels) / len(step)
            loss.backward()
            total += loss.item()
        losses.append(total)
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        nn.utils.clip_grad_norm_(trained, case.clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if after_step is not None:
            after_step(number, model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Reference(losses, weights, settings_by_name(model, optimizer))


def settings_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Rate and decay of every parameter that the optimiser trains."""
    of = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters() if id(p) in of and p.requires_grad}


# ---------------------------------------------------------------------------------------------------- many processes


def engine_of(case: Case, **more: Any) -> Any:
    """An engine for it. ``more`` are arguments of `build_engine`; ``config`` adds to what the case says."""
    make, loss_fn, _ = MODELS[case.model]
    config = {"elastic_pipeline": case.elastic(), **PRECISIONS[case.precision], **more.pop("config", {})}
    if case.scheduler == "warmup":
        config["scheduler"] = {"type": "WarmupLR", "params": WARMUP}
    if case.scheduler == "lambda":
        more["lr_scheduler"] = lambda_lr
    if "fp16" in config:
        allow_fp16()
    replicas = torch.distributed.get_world_size() // case.stages
    options = {
        "token_pipeline": None if case.slices is None else {"slices": case.slices},
        "micro_batches": case.batch // (case.size * replicas),
        "batch": case.size,
        "stages": case.stages,
        "clip": case.clip,
        "optimizer": OPTIMIZERS[case.optimizer][0],
        "instance": case.optimizer == "instance",
    }
    return build_engine(more.pop("specs", None) or make(), loss_fn, config=config, **{**options, **more})


class Objects:
    """What a user has in hand, and must still be what trains after any number of reshapes."""

    _NAMES = ("module", "basic_optimizer", "lr_scheduler", "training_dataloader")

    def __init__(self, engine: Any) -> None:
        self._engine, self._had = engine, self._now(engine)

    def _now(self, engine: Any) -> dict[str, Any]:
        groups = engine.basic_optimizer.param_groups
        return {**{name: getattr(engine, name) for name in self._NAMES}, "groups": groups, "list": list(groups)}

    def same(self) -> bool:
        """Whether they are; the groups of the optimiser too, none more or less."""
        now = self._now(self._engine)
        pairs = zip(self._had.pop("list"), now.pop("list"), strict=True)
        return all(a is b for a, b in pairs) and all(now[name] is value for name, value in self._had.items())


@contextmanager
def moved(engine: Any) -> Iterator[list[tuple[int, int, int]]]:
    """Of each reshape: the step, the bytes that this rank sent, and those of weights and moments that it did not have before."""
    reshape, found = engine._reshape, []

    def noted(*args: Any) -> int:
        before = _bytes_by_name(engine)
        sent = reshape(*args)
        lacked = sum(size for name, size in _bytes_by_name(engine).items() if name not in before)
        found.append((engine.global_steps, sent, lacked))
        return int(sent)

    engine._reshape = noted
    yield found
    del engine._reshape


@contextmanager
def verified() -> Iterator[list[int]]:
    """The entries that this rank ran whole and sliced, to compare them."""
    verify_stage, entries = first_batch.verify_stage, []

    def noted(root: Any, layers: Any, *args: Any) -> Any:
        entries.extend(range(layers.first, layers.first + len(layers.functions)))
        return verify_stage(root, layers, *args)

    with mock.patch.object(first_batch, "verify_stage", noted):
        yield entries


def _bytes_by_name(engine: Any) -> dict[str, int]:
    state = engine.basic_optimizer.state
    return {
        name: sum(
            tensor.numel() * tensor.element_size()
            for tensor in (parameter, *state.get(parameter, {}).values())
            if isinstance(tensor, Tensor) and (tensor is parameter or tensor.numel() > 1)
        )
        for name, parameter in engine.module.named_parameters()
    } | {name: buffer.numel() * buffer.element_size() for name, buffer in engine.module.named_buffers()}


def what_is_wrong(engine: Any, specs: Sequence[Any], frozen: int) -> list[str]:
    """What of this rank's parameters and layers is not as ``frozen`` entries ask for, after a step."""
    problems, optimizer = [], engine.basic_optimizer
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    names = dict(engine.module.named_parameters())
    for name, parameter in names.items():
        is_frozen = name.startswith(prefixes(specs, frozen)) if frozen else False
        if parameter.requires_grad is is_frozen:
            problems.append(f"{name}: requires_grad {parameter.requires_grad}")
        if grouped.count(id(parameter)) != (0 if is_frozen else 1):
            problems.append(f"{name}: is in {grouped.count(id(parameter))} groups")
        if bool(optimizer.state.get(parameter)) is is_frozen:
            problems.append(f"{name}: optimizer state {sorted(optimizer.state.get(parameter, {}))}")
        if is_frozen and parameter.grad is not None:
            problems.append(f"{name}: has a gradient")
    alive = {id(parameter) for parameter in names.values()}
    problems += [
        f"a parameter that is not here, {list(p.shape)}, has state" for p in optimizer.state if id(p) not in alive
    ]
    for prefix, module in _layers(engine, specs):
        if module.training is bool(frozen and prefix.startswith(prefixes(specs, frozen))):
            problems.append(f"layer {prefix}: training {module.training}")
    return problems


def _layers(engine: Any, specs: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    """This rank's layers that are modules, by what their names begin with."""
    first, stop = engine.module._local_start, engine.module._local_stop
    found = []
    for entry in range(first, stop):
        (prefix,) = prefixes([*specs[: entry + 1]], entry + 1)[-1:]
        layer: Any = engine.module
        for part in prefix[:-1].split("."):
            layer = layer._modules.get(part) if layer is not None else None
        if layer is not None:
            found.append((prefix, layer))
    return found


def elastic_run(case: Case) -> dict[str, Any]:
    """Train it, on every rank; what the rank saw."""
    engine, specs = engine_of(case), MODELS[case.model][0]()
    objects, found = Objects(engine), {"losses": [], "seen": [], "wrong": [], "rates": []}
    start = engine.dp_world_size, engine.grid.data_parallel_id
    share = case.batch // case.size // start[0]
    torch.manual_seed(SEED)  # of dropout
    with moved(engine) as moves, verified() as found["verified"]:
        for number, step in enumerate(data_of(case)):
            found["losses"].append(float(engine.train_batch(iter(step[start[1] * share :][:share]))))
            forward_only = engine.placement.forward_only
            found["seen"].append((engine.frozen_layers, tuple(engine.shape), forward_only > 0, engine.units_run))
            found["wrong"] += [f"step {number}: {text}" for text in what_is_wrong(engine, specs, case.frozen(number))]
    found |= {
        "moves": moves,
        "same": objects.same(),
        "is_elastic": isinstance(engine, ElasticPipelineEngine) and isinstance(engine, PipelineEngine),
        "weights": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "settings": settings_by_name(engine.module, engine.basic_optimizer),
        "rate": engine.get_lr(),
        "grid": (
            engine.grid.pipe_parallel_size,
            engine.grid.data_parallel_size,
            engine.num_stages,
            engine.dp_world_size,
        ),
        "micro_batches": (engine.micro_batches, engine.gradient_accumulation_steps(), engine.train_batch_size()),
    }
    engine.destroy()
    return found


def elastic_runs(rank: int, world_size: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """For a pool of processes: one training after the other."""
    return [elastic_run(case) for case in cases]


def off(case: Case, ranks: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Largest relative difference of any step's loss, and of any tensor by norm, from one process."""
    wanted = reference(case)
    losses = max(
        abs(got - exact) / abs(exact)
        for found in ranks
        for got, exact in zip(found["losses"], wanted.losses, strict=True)
    )
    weights = max(
        difference(tensor, wanted.weights[name]) for found in ranks for name, tensor in found["weights"].items()
    )
    return losses, weights

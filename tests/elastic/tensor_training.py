"""Trainings of tensor-parallel GPTs whose layers freeze and whose pipeline changes its shape, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ds_terapipe
from ds_terapipe.optim.lamb import FusedLamb
from tests.elastic.test_elastic_wrapped import kept
from tests.elastic.training import PRECISIONS, Objects, Steps, moved
from tests.megatron.common import MICRO_BATCH, Model, batches, build, whole_tensors

MICRO_BATCHES, HEADS, CLIP = 2, 4, 0.5
# So large an epsilon because Adam makes full steps of any gradient that is well above its own: with 1e-8 twelve steps in fp32
# end up to 7e-5 away from the same in fp64, with this 1.3e-6.
LR, DECAY, EPSILON = 4e-3, 0.1, 1e-4


@dataclass(frozen=True)
class TensorCase:
    """A training that begins on two stages of two tensor-parallel ranks each.

    Attributes:
        optimizer: "adamw", or "lamb" for models without key biases: their gradient, which is rounding, is in its norms.
        precision: of `PRECISIONS`.
        modern: grouped queries, RMS norm, SwiGLU, no biases.
        tied: whether the head has the embedding's table.
        schedule: ``freeze.frozen_layers``.
        resize: ``resize.policy``.
        frozen, stages: from which step on there are how many.
        restarts: whether layers train again when the LR restarts, before step 8.
        steps: so many.
        saved: after so many there is a checkpoint, in a shape that is not that of the start; None: there is none.
        seed: of the batches.
    """

    optimizer: str = "adamw"
    precision: str = "fp32"
    modern: bool = False
    tied: bool = False
    schedule: Steps = ((2, 1), (4, 3), (8, 4))
    resize: Any = ((4, 1), (8, 2), (10, 1))
    frozen: Steps = ((2, 1), (4, 3), (8, 4))
    stages: Steps = ((4, 1), (8, 2), (10, 1))
    restarts: bool = False
    steps: int = 12
    saved: int | None = 6
    seed: int = 3

    @property
    def model(self) -> Model:
        """As the tests of megatron's layers build it."""
        return Model(tied=self.tied, modern=self.modern)

    def frozen_at(self, step: int) -> int:
        """Entries that this step trains without."""
        return next((entries for begin, entries in reversed(self.frozen) if begin <= step), 0)

    def stages_at(self, step: int) -> int:
        """Stages that this step runs on."""
        return next((number for begin, number in reversed(self.stages) if begin <= step), 2)

    @property
    def transitions(self) -> list[int]:
        """The steps before which something changes."""
        return sorted({step for step, _ in (*self.frozen, *self.stages)})

    def prefixes(self, step: int) -> tuple[str, ...]:
        """What the names of the parameters that this step does not train begin with."""
        entries = range(self.frozen_at(step))
        names = ["tied_modules.embedding." if self.tied and entry == 0 else f"{entry}." for entry in entries]
        return tuple(names) or ("nothing",)


def factor(step: int) -> float:
    """Of the rate: it falls, and from step 8 on is what it was."""
    return (1.0, 0.98, 0.95, 0.9, 0.8, 0.6, 0.45, 0.35, 1.0, 0.95, 0.9, 0.8)[min(step, 11)]


def data_of(case: TensorCase) -> list[list[Any]]:
    """The micro-batches of every step."""
    endless = batches(seed=case.seed)
    return [[next(endless) for _ in range(MICRO_BATCHES)] for _ in range(case.steps)]


def optimizer_of(case: TensorCase, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, with decay for matrices and none for vectors, or FusedLamb."""
    parameters = list(parameters)
    if case.optimizer == "lamb":
        return FusedLamb(parameters, lr=LR, weight_decay=DECAY)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=EPSILON)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    """Its rate is `factor` times that of the start."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def key_bias(name: str, modern: bool) -> np.ndarray | None:
    """Of a bias of queries, keys and values, where it is the keys'; None: it is no such bias.

    A key bias adds the same to all scores of a query: its true gradient is zero, what AdamW makes of that is rounding.
    """
    if modern or not name.endswith("linear_qkv.bias"):
        return None
    kinds = np.repeat([False, True, False], 32 // HEADS)  # of each head the query, the key, the value
    return np.tile(kinds, HEADS)


# ------------------------------------------------------------------------------------------------------- one process


@dataclass
class Single:
    """Loss of each step, weights (or masters) at the end."""

    losses: list[float]
    weights: dict[str, np.ndarray]


def single(case: TensorCase, dtype: torch.dtype) -> Single:
    """A plain loop over the same batches in numbers of a type; beside bf16 there are fp32 masters and sums of gradients."""
    model = build(case.model).to(dtype)
    narrow = dtype == torch.bfloat16
    masters = {
        name: nn.Parameter(p.detach().float() if narrow else p.detach().clone()) for name, p in model.named_parameters()
    }
    optimizer = optimizer_of(case, list(masters.values()))
    scheduler, losses = scheduler_of(optimizer), []
    for number, step in enumerate(data_of(case)):
        frozen = case.prefixes(number)
        for name, master in masters.items():
            master.grad = None
            if name.startswith(frozen):
                optimizer.state.pop(master, None)  # whoever trains again begins anew
        total = 0.0
        for inputs, labels in step:
            loss = model.loss_fn(model(inputs), labels) / len(step)
            loss.backward()
            total += loss.item()
            for name, parameter in model.named_parameters():
                if not name.startswith(frozen) and parameter.grad is not None:
                    gradient = parameter.grad.to(masters[name].dtype)
                    masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
                parameter.grad = None
        losses.append(total)
        nn.utils.clip_grad_norm_([p for p in masters.values() if p.grad is not None], CLIP)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return Single(losses, {name: master.detach().double().numpy() for name, master in masters.items()})


def singles(rank: int, world_size: int, cases: dict[str, TensorCase]) -> dict[str, dict[str, Single]]:
    """For a process: in the case's own numbers and in wider ones."""
    found: dict[Any, dict[str, Single]] = {}
    for case in cases.values():
        key = key_of(case)
        if key in found:
            continue
        found[key] = {"own": single(case, torch.bfloat16 if "bf16" in case.precision else torch.float32)}
        if "bf16" in case.precision:  # FusedLamb takes no fp64
            found[key]["exact"] = single(case, torch.float32 if case.optimizer == "lamb" else torch.float64)
    return {name: found[key_of(case)] for name, case in cases.items()}


def key_of(case: TensorCase) -> Any:
    """What a training in one process depends on."""
    return case.optimizer, "bf16" in case.precision, case.modern, case.tied, case.frozen, case.steps, case.seed


# ---------------------------------------------------------------------------------------------------- four processes


def engine_of(case: TensorCase, stages: int = 2, tensor: int = 2, **config: Any) -> Any:
    """An engine for it, in any shape."""
    unfreeze = {"unfreeze": ["lr_restart"]} if case.restarts else {}
    schedule = [list(pair) for pair in case.schedule]
    policy = case.resize if isinstance(case.resize, str) else [list(pair) for pair in case.resize]
    settings = {
        "train_batch_size": MICRO_BATCHES * MICRO_BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "token_pipeline": {"slices": 2},
        "elastic_pipeline": {
            "freeze": {"policy": "schedule", "frozen_layers": schedule, **unfreeze},
            "resize": {"policy": policy},
        },
        **PRECISIONS[case.precision],
        **config,
    }
    module = build(case.model, tensor=tensor, stages=stages)
    more: dict[str, Any] = {"optimizer": lambda parameters: optimizer_of(case, list(parameters))}
    if case.optimizer == "lamb":  # named, so that it is told which weights are tied
        more = {}
        settings["optimizer"] = {"type": "FusedLamb", "params": {"lr": LR, "weight_decay": DECAY}}
    engine, *_ = ds_terapipe.initialize(
        model=module, config=settings, model_parameters=list(module.parameters()), lr_scheduler=scheduler_of, **more
    )
    return engine


def held(engine: Any, case: TensorCase) -> dict[str, tuple[Tensor, ...]]:
    """Of every parameter that this rank trains: what it is stepped as, and its moments; collective."""
    if case.precision != "fp32":
        return kept(engine, case.optimizer)
    state = engine.basic_optimizer.state
    return {
        name: (p.detach().clone(), *(state[p][key].clone() for key in ("exp_avg", "exp_avg_sq")))
        for name, p in engine.module.named_parameters()
        if state.get(p)
    }


def trained(engine: Any, case: TensorCase, steps: Sequence[int]) -> list[float]:
    """Losses of these steps."""
    data, replicas, replica = data_of(case), engine.start_shape.replicas, engine.grid.data_parallel_id
    share = MICRO_BATCHES // replicas
    if replicas == 1:
        replica = 0
    return [float(engine.train_batch(iter(data[step][replica * share :][:share]))) for step in steps]


def whole_masters(engine: Any, case: TensorCase) -> dict[str, np.ndarray]:
    """What is stepped, put together from all ranks; of what is frozen the weight."""
    masters = {name: each[0] for name, each in held(engine, case).items()}
    by_parameter = {id(p): masters.get(name, p) for name, p in engine.module.named_parameters()}
    return whole_tensors(engine.module, lambda p: by_parameter[id(p)])


def run(case: TensorCase, folder: str) -> dict[str, Any]:
    """Train it, on every rank; what the rank saw."""
    engine = engine_of(case)
    objects, change, found = Objects(engine), engine._change, {"seen": [], "changes": [], "losses": []}

    def noted(*args: Any, **options: Any) -> None:
        before = held(engine, case)
        change(*args, **options)
        found["changes"].append((engine.global_steps, before, held(engine, case)))

    engine._change = noted
    state = None
    with moved(engine) as moves:
        for step in range(case.steps):
            if step == case.saved:
                engine.save_checkpoint(folder)
                state = held(engine, case)
            found["losses"] += trained(engine, case, [step])
            tensor = engine.grid.model_parallel_size
            found["seen"].append((engine.frozen_layers, engine.num_stages, engine.dp_world_size, tensor))
    del engine._change
    found |= {"moves": moves, "same": objects.same(), "tensor": engine.grid.get_slice_parallel_rank()}
    whole, last = whole_masters(engine, case), {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    found["weights"] = whole if engine.global_rank == 0 else {}
    engine.destroy()
    stays = engine_of(replace(case, resize="off"))
    found["stayed"] = trained(stays, case, range(case.steps)), whole_masters(stays, case)
    stays.destroy()
    if case.saved is not None:
        again = engine_of(case)
        again.load_checkpoint(folder)
        found["restored"] = all_equal(state, held(again, case))
        losses = trained(again, case, range(case.saved, case.steps))
        weights = {name: p.detach() for name, p in again.module.named_parameters()}
        found["went on"] = (
            losses == found["losses"][case.saved :],
            all_equal({n: (p,) for n, p in last.items()}, {n: (p,) for n, p in weights.items()}),
        )
        again.destroy()
    return found


def all_equal(some: Any, others: Any) -> bool:
    """The same names, and the same bits."""
    return set(some) == set(others) and all(
        len(some[name]) == len(others[name]) and all(map(torch.equal, some[name], others[name])) for name in some
    )


def runs(rank: int, world_size: int, cases: dict[str, TensorCase], folder: str) -> dict[str, Any]:
    """For four processes: one training after the other."""
    return {name: run(case, f"{folder}/{number}") for number, (name, case) in enumerate(cases.items())}

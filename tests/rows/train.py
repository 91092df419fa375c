"""A row's training on its ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, partialmethod
from inspect import signature
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from ds_terapipe.elastic.cache import outputs as outputs_of_cache
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.pipeline import replicas
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.recording.layer_times import LayerTimes
from tests.elastic import training
from tests.megatron import common
from tests.pipeline.models import MaskedTokenLoss, Scaled, focused_loss, gpt, masked_loss, micro_batch, tied_gpt, writing_gpt
from tests.pipeline.training import _gradient, allow_fp16, build_engine, module_of
from tests.ran import lengths_of, watched
from tests.rows.row import FREEZES, OURS, PERIOD, RESIZES, Layout, Row

SEQUENCES = 2  # of a micro-batch
LOSSES: dict[str, Any] = {"masked": masked_loss, "per token": MaskedTokenLoss(), "focused": focused_loss}
SPECS: dict[str, Callable[..., list[Any]]] = {"gpt": gpt, "tied": partial(tied_gpt, tokens=Scaled), "writing": writing_gpt}
SCALE = 128.0  # of an fp16 loss, doubled behind every step from the second on
LAYER_COSTS = LayerTimes.costs
END = 0  # token that ends a document, where a sequence has several
PRECISIONS: dict[str, dict[str, Any]] = {
    **training.PRECISIONS, "fp64": {}, "bf16 at once": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 1}},
}  # fmt: skip
SHARED = "shared by two ranks"
UNEVEN = {24: (7, 2, 9, 1, 5), common.SEQ: (5, 1, 4, 2, 4), SHARED: (4, 2, 6, 2, 2)}


class Trained(NamedTuple):
    """A training: loss of each step, gradients of the first before clipping, weights at the end, whole, by name."""

    losses: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]


class Found(NamedTuple):
    trained: Trained  # of rank 0
    again: Trained | None  # losses and weights of a run that went on from the checkpoint
    wrong: list[str]  # facts of this rank that are not those of the row
    read: int  # samples whose frozen outputs this rank took from the cache


def megatron_model(row: Row, dtype: torch.dtype = torch.float32) -> common.Model:
    modern = row.model == "modern"
    position = "rope" if modern else "learned"
    return common.Model(position, tied=not modern, modern=modern, dtype=dtype, checkpoint_interval=row.recompute,
                        sequence_parallel=row.sequence_parallel)  # fmt: skip


def data_of(row: Row) -> list[list[Any]]:
    """The micro-batches of every step, over all replicas; those of the first `PERIOD` steps come again and again."""
    if row.model in OURS:
        first = [[micro_batch(1000 * s + m, batch=SEQUENCES) for m in range(row.micro_batches)] for s in range(PERIOD)]
    else:
        endless = common.batches(seed=3)
        first = [[next(endless) for _ in range(row.micro_batches)] for _ in range(PERIOD)]
    if row.packed:
        first = [[((tokens.where(tokens % 8 > 0, END), at), labels) for (tokens, at), labels in step] for step in first]
    return [first[step % PERIOD] for step in range(row.steps)]


def documents_of(inputs: tuple[torch.Tensor, torch.Tensor]) -> Documents | None:
    return Documents.of(document_numbers(inputs[0]))


def document_numbers(tokens: torch.Tensor) -> torch.Tensor:
    """Number the document of each token, [b, s] from 1 on."""
    return torch.nn.functional.pad((tokens[:, :-1] == END).cumsum(1), (1, 0)) + 1


def specs_of(row: Row) -> list[Any]:
    return SPECS[row.model](4 if row.placement == "plain" else 6)


def slices_of(row: Row) -> Any:
    length = SHARED if row.sequence_parallel else 24 if row.model in OURS else common.SEQ
    return list(UNEVEN[length]) if row.slices == "uneven" else row.slices


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay for matrices only; an epsilon above the rounding of gradients, out of which a smaller one makes whole steps."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.99), eps=1e-4)


SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
LAMB = {"lr": 4e-3, "weight_decay": 0.1, "eps": 1e-4}
PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, **SGD), "adamw": adamw, "instance": adamw,
    "lamb": lambda parameters: FusedLamb(parameters, **LAMB),
}  # fmt: skip
GIVEN: dict[str, Any] = {
    "sgd": {"type": "SGD", "params": SGD}, "adamw": lambda parameters: adamw(list(parameters)), "instance": adamw,
    "lamb": {"type": "FusedLamb", "params": LAMB},
}  # fmt: skip


def falling(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler by which no two steps have the same rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)


@mock.patch.object(replicas, "_ALONE", 100)  # of which matrices have more
def train(rank: int, world_size: int, row: Row, folder: str) -> Found:
    """Train as the row says, and go on from its checkpoint."""
    outputs_of_cache.OutputCache._compare = lambda self: None  # whether it pays to read is another test's
    if "allow_override" in signature(torch.library.Library.impl).parameters:  # PyTorch 2.11 has no such choice
        torch.library.Library.impl = partialmethod(torch.library.Library.impl, allow_override=False)
    if row.precision == "fp16":
        allow_fp16()
    # stages that are cut by times would change the bits
    LayerTimes.costs = (lambda self: None) if row.resume == "here" else LAYER_COSTS
    run, begin = _Run(row, row.layout), row.saved_after
    if begin is None:
        return Found(run.steps(range(row.steps)), None, run.wrong, run.close())
    before = run.steps(range(begin))
    run.engine.save_checkpoint(folder)
    after = run.steps(range(begin, row.steps))
    read = run.close()
    again = _Run(row, row.layout.other if row.resume == "elsewhere" else row.layout)
    again.engine.load_checkpoint(folder)
    went_on = again.steps(range(begin, row.steps))
    read += again.close()
    whole = Trained(before.losses + after.losses, before.gradients, after.weights)
    return Found(whole, went_on, run.wrong + again.wrong, read)


def races() -> list[str]:
    """Return the accesses that no order holds apart, on the stand-in of a device."""
    from tests.device_stand_in import runtime

    return [] if runtime.LIBRARY is None else sorted(runtime.races())


class _Run:
    """An engine that starts in a layout, and the data that its ranks get: those of the replica at the start."""

    def __init__(self, row: Row, start: Layout) -> None:
        self.row, self.start, self.wrong, self.taken = row, start, list[str](), 0
        self.engine = _engine_of(row, start)
        replica, share = self.engine.grid.data_parallel_id, row.micro_batches // start.replicas
        self.mine = slice(replica * share, (replica + 1) * share if not row.is_elastic or self.engine.reads_data else 0)
        self.lengths = [lengths_of(24 if row.model in OURS else common.SEQ, slices_of(row))] * share

    def steps(self, numbers: Sequence[int]) -> Trained:
        engine, data, losses = self.engine, data_of(self.row), list[float]()
        gradients: dict[str, Any] = {}
        take = engine._take_model_step

        def observed(*args: Any, **kwargs: Any) -> None:
            if not gradients:
                gradients.update(_gradients(self.row, engine))
            take(*args, **kwargs)

        engine._take_model_step = observed
        plain = not self.row.is_elastic and self.row.freeze == "none"
        with watched(engine) if plain else nullcontext() as ran:
            for number in numbers:
                mean = engine.train_batch(iter(data[number][self.mine]))
                losses.append(common.exact_loss(engine, float(mean)) if self.row.precision == "fp64" else float(mean))
                if ran is not None:
                    ran.check(self.lengths)
                self._look(number)
        engine._take_model_step = take
        return Trained(losses, gradients, common.whole_tensors(engine.module))

    def _look(self, number: int) -> None:
        """Note facts of the step that are not as they must be."""
        row, engine = self.row, self.engine
        here = row.layout_at(number, self.start)
        facts: list[tuple[str, Any, Any]] = [
            ("stages", engine.num_stages, here.stages),
            ("replicas", engine.dp_world_size, here.replicas),
            ("tensor", max(1, engine.grid.model_parallel_size), here.tensor),
        ]
        if row.is_elastic and row.freeze == "schedule":
            facts.append(("frozen", engine.frozen_layers, row.frozen(number)))
        if not row.is_elastic:
            early = here.replicas > 1 and self.taken > 0
            stages = {s for s in engine._runtime.stages if engine.placement.goes_backward(s)} if early else set()
            facts.append(("stages reduced before the others' ends", engine._replicas._ended, stages))
        self.taken += 1
        back = range(here.stages) if row.placement == "interleaved" else reversed(range(here.stages))
        several = row.placement != "plain" and min(self.start.stages, here.stages) > 1
        places = (*range(here.stages), *(back if several else ()))
        facts.append(("places", ModelChunks(engine.module).places, places))
        if engine.slices_run:
            cuts = [cut for of_boundary in engine._runtime.boundary_cuts.values() for cut in of_boundary]
            facts.append(("shares", any(cut.shares for cut in cuts), row.sequence_parallel and row.slices != 1))
            facts.append(("slices", set(engine.slices_run), {self.lengths[0]}))
        self.wrong += [f"step {number}: {what} {got}, not {wanted}" for what, got, wanted in facts if got != wanted]
        session = getattr(engine._controller, "caching", None)
        if session is not None and session.cache is not None:
            for job in session.cache._writing:  # a step as short as these would be over before its outputs are written
                job.result()

    def close(self) -> int:
        """Destroy the engine; samples that it read from the cache."""
        read = self.engine.cache_counts.read if self.row.cache else 0
        self.engine.destroy()
        self.wrong += races()
        return int(read)


def _engine_of(row: Row, start: Layout) -> Any:
    token_pipeline = {"slices": slices_of(row), "schedule": row.schedule, "weight_gradients": row.weight_gradients}
    if row.placement != "plain" and start.stages == 1:
        token_pipeline["schedule"] = "1f1b"
    elif row.placement != "plain":
        token_pipeline |= {"stages_per_place": 2, "placement": row.placement}
    zero = "ZeRO-1" if row.precision == "fp16" and row.optimizer == "instance" else "fp32"  # whose wrapper also has a scale
    config = {"pipeline": {"use_reentrant": False}, **PRECISIONS[row.precision], **PRECISIONS[zero]}
    if row.is_elastic:
        config["elastic_pipeline"] = _elastic_block(row, start)
    dtype = torch.float64 if row.precision == "fp64" else torch.float32
    module = _module_of(row, start, dtype)
    if row.freeze == "by hand":
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(("0.", "1.")))
    return build_engine(
        (), None, made=module, token_pipeline=token_pipeline, micro_batches=row.micro_batches // start.replicas,
        batch=SEQUENCES, clip=row.clip, optimizer=GIVEN[row.optimizer], instance=row.optimizer == "instance", dtype=dtype,
        config=config, lr_scheduler=falling,
    )  # fmt: skip


def _elastic_block(row: Row, start: Layout) -> dict[str, Any]:
    freeze: dict[str, Any] = {}
    if row.freeze == "schedule":
        freeze = {"policy": "schedule", "frozen_layers": [list(pair) for pair in FREEZES]}
    steps = () if row.resize == "off" else RESIZES[:1] if row.resize == "once" else RESIZES
    policy = [[step, row.layout_at(step, start).stages] for step in steps]
    return {"freeze": freeze, "resize": {"policy": policy or "off"}, **({"cache": {"enabled": True}} if row.cache else {})}


def _module_of(row: Row, start: Layout, dtype: torch.dtype) -> Any:
    if row.model not in OURS:
        from ds_terapipe.megatron import destroy_parallel

        destroy_parallel()  # of another layout, before
        end = END if row.packed else None
        return common.build(megatron_model(row, dtype), tensor=start.tensor, stages=start.stages, document_end=end)
    module = module_of(specs_of(row), LOSSES[row.loss], start.stages, activation_checkpoint_interval=row.recompute)
    if row.packed:
        module.documents_of = documents_of
    return module


def _gradients(row: Row, engine: Any) -> dict[str, Any]:
    """Gradients that the optimizer is about to use, before clipping; zero where a parameter has none."""
    scale = SCALE if row.precision == "fp16" else 1.0

    def of(parameter: nn.Parameter) -> torch.Tensor:
        gradient = _gradient(engine, parameter)
        return torch.zeros_like(parameter) if gradient is None else gradient.view(parameter.shape).double() / scale

    return common.whole_tensors(engine.module, of)

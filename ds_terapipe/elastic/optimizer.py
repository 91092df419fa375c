"""The user's optimizer, which stays while DeepSpeed's engine and wrapper are built again around it."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.constants import BFLOAT16, FP16
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

from ds_terapipe.elastic.moves.groups import has_one_count, in_order
from ds_terapipe.elastic.moves.masters import fill, is_wrapped
from ds_terapipe.elastic.moves.rebuild import quietly
from ds_terapipe.elastic.moves.shares import Bucket
from ds_terapipe.elastic.settings import ElasticPipelineConfig, FreezeSettings
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.job import Job
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.pipeline.parameter_groups import check_inside, make_alike

# DeepSpeed's own methods and their arguments after the optimiser, by what its check says
_WRAPPED: dict[str, tuple[str, tuple[Any, ...]]] = {
    BFLOAT16: ("_configure_bf16_optimizer", ()),
    FP16: ("_configure_fp16_optimizer", (torch.float16,)),
    ZERO_OPTIMIZATION: ("_configure_zero_optimizer", ()),
}


def check_steps(freeze: FreezeSettings, optimizer: Any) -> None:
    """Refuse an optimizer that has one step count for layers that return and others. Raises ConfigError."""
    if freeze.unfreeze and has_one_count(optimizer):
        must = "absent beside DeepSpeed's FusedAdam (which has one step count for a group, where returning layers begin at 0)"
        use = '[], or "torch_adam": true in optimizer.params'
        raise bad_value(f"{freeze.PATH}.unfreeze", freeze.unfreeze, must, use)


def keeps_matrices(engine: Any, optimizer: Any) -> bool:
    """Whether DeepSpeed keeps an optimizer's momentum in whole matrices, which other flat parts do not have: Muon beside ZeRO."""
    return bool(engine.zero_optimization()) and "muon" in type(optimizer).__name__.lower()  # as DeepSpeed asks


def check_kept(settings: ElasticPipelineConfig, engine: Any) -> ElasticPipelineConfig:
    """Refuse an optimizer that ZeRO does not use as layers move: it makes an Adagrad of its own, and steps Muon itself.

    Returns:
        The settings, without moves if nothing asked for them.

    Raises:
        ConfigError: layers are to freeze or move.
    """
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    name, why = type(optimizer).__name__, ""
    if is_wrapped(wrapper) and wrapper.optimizer is not optimizer:
        why = "DeepSpeed steps another one, of one group, beside zero_optimization"
    elif keeps_matrices(engine, optimizer):
        why = "DeepSpeed keeps its momentum as whole matrices beside zero_optimization"
    if not why:
        return settings
    if settings.has_to_move or settings.freeze.policy != "static":
        must = f"one that layers can leave ({why})"
        raise bad_value("optimizer.type", name, must, 'e.g. "AdamW", or zero_optimization.stage 0')
    return settings.staying(f"optimizer.type is {name} ({why})") if settings.moves else settings


def same_groups(engine: Any, optimizer: Any, settings: ElasticPipelineConfig) -> ElasticPipelineConfig:
    """Give all ranks the same parameter groups if layers may move; collective.

    Returns:
        The settings, without moves if the optimizer does not allow them and they are not required.

    Raises:
        ConfigError: on every rank.
    """
    gather = Job.current().gather
    # also if nothing moves: a checkpoint may be loaded by name
    in_order(optimizer, engine.module, engine.param_names)
    try:
        if settings.moves:
            check_inside(optimizer, engine.module, engine.param_names, gather, "where layers may go to other ranks")
        make_alike(optimizer, engine.client_lr_scheduler, gather)
    except ConfigError as error:  # on every rank
        if settings.has_to_move:
            raise
        if settings.moves:
            return settings.staying(str(error))
    return settings


def wrapped(engine: Any, basic_optimizer: Any, before: Any, bucket: Bucket | None = None) -> Any:
    """Return the optimiser in DeepSpeed's wrapper; ``before``, ``bucket``: as for `fill`."""
    kind = engine._do_optimizer_sanity_check(basic_optimizer)
    if kind not in _WRAPPED:
        return basic_optimizer
    method, arguments = _WRAPPED[kind]
    with quietly():
        wrapper = getattr(engine, method)(basic_optimizer, *arguments)
    fill(wrapper, before, bucket)
    if isinstance(basic_optimizer, FusedLamb) and hasattr(wrapper, "check_grad_overflow"):
        wrapper.check_grad_overflow = True
    return wrapper


def layer_dtype(engine: Any) -> torch.dtype | None:
    """Type to which DeepSpeed casts the layers; None: it leaves them."""
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else None

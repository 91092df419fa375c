"""The user's optimizer and scheduler, which stay while DeepSpeed's engine is rebuilt around them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.constants import BFLOAT16, FP16
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

from ds_terapipe.elastic.moves.groups import in_order
from ds_terapipe.elastic.moves.masters import fill, taking_no_step
from ds_terapipe.elastic.moves.rebuild import Kept, quietly
from ds_terapipe.elastic.moves.shares import Bucket
from ds_terapipe.elastic.phases import ElasticPhases
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.pipeline.parameter_groups import check_inside, make_alike
from ds_terapipe.process_groups import gathered

# DeepSpeed's own methods and their arguments after the optimiser, by what its check says
_WRAPPED: dict[str, tuple[str, tuple[Any, ...]]] = {
    BFLOAT16: ("_configure_bf16_optimizer", ()),
    FP16: ("_configure_fp16_optimizer", (torch.float16,)),
    ZERO_OPTIMIZATION: ("_configure_zero_optimizer", ()),
}


class ElasticOptimizer(ElasticPhases):
    """Part of the engine: configures the optimiser for DeepSpeed's constructor, the first time and in a rebuild."""

    _kept: Kept | None = None  # while DeepSpeed's engine is rebuilt

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if self._kept is not None:
            self.basic_optimizer = self._kept.basic_optimizer
            self.optimizer = self._wrapped(self.basic_optimizer, self._kept.optimizer)
            return
        super()._configure_optimizer(client_optimizer, model_parameters)
        freeze = self.elastic_pipeline.freeze
        if freeze.unfreeze and isinstance(self.basic_optimizer, FusedAdam):
            must = "absent beside DeepSpeed's FusedAdam (which has one step count for a group, where returning layers begin at 0)"
            use = '[], or "torch_adam": true in optimizer.params'
            raise bad_value(f"{freeze.PATH}.unfreeze", freeze.unfreeze, must, use)

    def _arrange_groups(self, optimizer: Any, kind: str | None) -> None:
        """Arrange the parameter groups at the start; if layers may move, all ranks get the same groups."""
        if hasattr(self, "_consensus"):
            return
        gather = partial(gathered, group=self.module.world_group)
        # also if nothing moves: a checkpoint may be loaded by name
        in_order(optimizer, self.module, self.param_names)
        try:
            if self.elastic_pipeline.moves:
                check_inside(optimizer, self.module, self.param_names, gather, "where layers may go to other ranks")
            make_alike(optimizer, self.client_lr_scheduler, gather)
        except ConfigError as error:  # on every rank
            if self.elastic_pipeline.has_to_move:
                raise
            if self.elastic_pipeline.moves:
                self.elastic_pipeline = self.elastic_pipeline.staying(str(error))
        super()._arrange_groups(optimizer, kind)

    def _wrapped(self, basic_optimizer: Any, before: Any, bucket: Bucket | None = None) -> Any:
        """Return the optimiser in DeepSpeed's wrapper; ``before``, ``bucket``: as for `fill`."""
        kind = self._do_optimizer_sanity_check(basic_optimizer)
        if kind not in _WRAPPED:
            return basic_optimizer
        method, arguments = _WRAPPED[kind]
        with quietly(), _nothing_to_collect(), taking_no_step(basic_optimizer):
            wrapper = getattr(self, method)(basic_optimizer, *arguments)
        fill(wrapper, before, bucket)
        if isinstance(basic_optimizer, FusedLamb) and hasattr(wrapper, "check_grad_overflow"):
            wrapper.check_grad_overflow = True
        return wrapper

    @property
    def _layer_dtype(self) -> torch.dtype | None:
        """Type to which DeepSpeed casts the layers; None: it leaves them."""
        if self.fp16_enabled():
            return torch.float16
        return torch.bfloat16 if self.bfloat16_enabled() else None

    def _configure_lr_scheduler(self) -> None:
        if self._kept is None:
            super()._configure_lr_scheduler()
        else:
            self.lr_scheduler = self._kept.lr_scheduler

    def _broadcast_model(self) -> None:
        if self._kept is None:
            super()._broadcast_model()


# From 3.12 on the interpreter itself reports some hundred frozen objects; where a user calls gc.freeze there are more than
# 100,000 beside torch.
OWN_FROZEN = 10_000


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """Freeze the garbage collector's objects for BF16_Optimizer, which collects several times for its memory reports.

    Each collection would take about a second.
    """
    freezes = gc.get_freeze_count() < OWN_FROZEN  # else the user has called gc.freeze
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()

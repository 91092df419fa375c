"""Keys ``optimizer`` and ``scheduler`` of ds_config.json, as arguments of ``deepspeed.initialize``.

DeepSpeed knows neither "FusedLamb" nor the large-batch schedules by name, but takes callables that make an optimizer and a
scheduler. The configuration that it sees is a copy with what it needs to accept them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_terapipe.errors import ConfigError, bad_value, shown, unknown_key
from ds_terapipe.job import Job
from ds_terapipe.optim import engine_hooks, modes
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.schedules import lr_schedules
from ds_terapipe.refusals import LAMB_RULES
from ds_terapipe.rules import at, check

OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
CLIPPING = "gradient_clipping"
# Groups are the engine's to set; the norm of all gradients is known to it alone.
NOT_FROM_JSON = ("self", "params", "max_grad_norm", "tensor_parallel_group")


@dataclass(frozen=True)
class JsonKeys:
    """Arguments for ``deepspeed.initialize``, and the changes to the engine that it returns.

    Attributes:
        config: the configuration for DeepSpeed, a copy.
        optimizer: makes a ``FusedLamb`` of parameters or groups of them; None where the optimizer is not ours.
        lr_scheduler: makes the scheduler of the optimizer; None where it is not ours.
    """

    config: dict[str, Any]
    optimizer: Callable[[Any], FusedLamb] | None
    lr_scheduler: Callable[[Any], Any] | None

    def put_into(self, arguments: dict[str, Any]) -> None:
        """Replace arguments of ``deepspeed.initialize``, in place."""
        for argument, value in (("optimizer", self.optimizer), ("lr_scheduler", self.lr_scheduler)):
            if value is not None:
                arguments[argument] = value

    def finish(self, engine: Any) -> None:
        """Attach the optimizer and the scheduler to an engine that was built with these arguments."""
        if self.optimizer is not None:
            engine_hooks.attach_optimizer(engine)
        if self.lr_scheduler is not None:
            engine.lr_scheduler.attach(engine)


def read(config: Mapping[str, Any], arguments: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> JsonKeys:
    """Check the two blocks and turn them into arguments.

    Args:
        config: the whole configuration, as DeepSpeed reads it.
        arguments: of the call of ``deepspeed.initialize``.
        optimizer: whether ``optimizer.type`` is ours.
        scheduler: whether ``scheduler.type`` is ours.

    Raises:
        ConfigError: naming the key; the same on every rank.
    """
    made = dict(config)
    make_optimizer = make_scheduler = None
    for block, argument, is_ours in ((OPTIMIZER, "optimizer", optimizer), (SCHEDULER, "lr_scheduler", scheduler)):
        if is_ours and arguments.get(argument) is not None:
            got = f"{shown(config[block]['type'])} beside initialize({argument}=...)"
            raise ConfigError(f"{block}.type: got {got}, must be one of the two, use the key alone")
    if optimizer:
        check(LAMB_RULES, config)
        params = _optimizer_params(made, scheduled=scheduler, groups=arguments.get("model_parameters"))
        make_optimizer = _optimizer_maker(params, arguments.get("model"), arguments.get("mpu"), made)
    if scheduler:
        if not at(config, f"{OPTIMIZER}.type") and arguments.get("optimizer") is None:
            kind = shown(config[SCHEDULER]["type"])
            raise ConfigError(f"{SCHEDULER}.type: got {kind} without an optimizer, must have one, use optimizer.type")
        made, make_scheduler = lr_schedules.read(made, _replicas(config, arguments))
    return JsonKeys(made, make_optimizer, make_scheduler)


def _optimizer_params(made: dict[str, Any], *, scheduled: bool, groups: Any) -> dict[str, Any]:
    """Return keyword arguments for ``FusedLamb``; ``made`` receives the settings for DeepSpeed; ``groups``: the user's."""
    params = at(made, f"{OPTIMIZER}.params") or {}
    if not isinstance(params, Mapping):
        raise bad_value(f"{OPTIMIZER}.params", params, "a block of keys", 'e.g. {"lr": 1e-3}')
    params = dict(params)
    clip = params.pop("max_grad_norm", None)
    if clip is not None:
        made[CLIPPING], given = modes.checked("max_grad_norm", clip), made.get(CLIPPING)
        if given not in (None, clip):
            rule = f"equal to {CLIPPING}, which is {shown(given)}"
            raise bad_value(modes.key("max_grad_norm"), clip, rule, f"{CLIPPING} alone")
    known = [name for name in inspect.signature(FusedLamb).parameters if name not in NOT_FROM_JSON]
    for name in params:
        if name not in known:
            raise unknown_key(f"{OPTIMIZER}.params", name, [*known, "max_grad_norm"])
    if "lr" not in params:
        if not scheduled:
            raise ConfigError(f"{OPTIMIZER}.params.lr: missing, must be a finite number, 0 or more, use e.g. 1e-3")
        groups = groups if isinstance(groups, (list, tuple)) else ()  # an iterator is left to the optimizer
        if own := [group["lr"] for group in groups if isinstance(group, Mapping) and "lr" in group]:
            raise ConfigError(
                f"{OPTIMIZER}.params.lr: missing, must be there beside groups with rates of their own ({shown(own[0])}), "
                "which a scheduler sees in proportion to it, use the rate of the other groups"
            )
        params["lr"] = 0.0  # the schedule sets it before the first step
    made[OPTIMIZER] = {**made[OPTIMIZER], "params": dict(params)}
    made["zero_allow_untested_optimizer"] = True  # its layers' norms are summed over partitions
    return params


def _optimizer_maker(
    params: dict[str, Any], model: Any, mpu: Any, config: Mapping[str, Any]
) -> Callable[[Any], FusedLamb]:
    FusedLamb([torch.nn.Parameter(torch.zeros(1))], **params)  # wrong values are found before anything is built

    def make(parameters: Any) -> FusedLamb:
        optimizer = FusedLamb(parameters, **params)
        # Before DeepSpeed's wrapper is made: FP16_UnfusedOptimizer takes a step in its constructor.
        engine_hooks.set_groups(optimizer, model, mpu, config)
        return optimizer

    return make


def _replicas(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> int | None:
    """Data-parallel replicas, as DeepSpeed counts them for the batch size; None where it has not set up its groups."""
    grid = arguments["model"].mpu() if hasattr(arguments.get("model"), "mpu") else arguments.get("mpu")
    if grid is not None:
        return int(grid.get_data_parallel_world_size()) if hasattr(grid, "get_data_parallel_world_size") else None
    divided = arguments.get("mesh_param") or config.get("sequence_parallel_size") or config.get("tensor_parallel")
    return len(Job.current().ranks) if torch.distributed.is_initialized() and not divided else None

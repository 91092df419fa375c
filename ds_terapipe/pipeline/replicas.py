"""Gradients of replicas: each is reduced where it is, from the last action of its stage on.

DeepSpeed 0.19.8 reduces a flat copy of all gradients after the schedule and after tied gradients
(``DeepSpeedEngine.allreduce_bucket`` in runtime/engine.py, or ``DeepSpeedZeroOptimizer.reduce_gradients``). Tied gradients are
complete on the first stage last of all, so the other stages would idle until then, and reduce afterwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.deepspeed_state import leave_reduced
from ds_terapipe.overrides import override, replaced
from ds_terapipe.pipeline.gradients import gradient_name
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.token_shares import applied_to_parts
from ds_terapipe.schedule import Action, Op

_ALONE = 2**18  # elements from which on a separate message is faster than two copies (and needs no memory)


class _Begun(NamedTuple):
    """An all-reduce that has begun: of ``message``, which is ``gradient`` itself or its copy of another type."""

    gradient: Tensor
    message: Tensor
    work: Any


class _Average(NamedTuple):
    """How DeepSpeed 0.19.8 averages gradients.

    Attributes:
        scale: called with a message and ``number`` before the sum.
        after: factor of the sum.
        own_type: whether a gradient is scaled in its own type, before its message has another.
    """

    scale: Callable[[Tensor, float], Any] = Tensor.mul_
    number: float = 1.0
    after: float = 1.0
    own_type: bool = False


class ReplicaGradients(Observer):
    """All-reduces of large gradients over replicas, begun while other stages still run.

    Gradients that other ranks or stages add to afterwards (of tied weights, or of tokens shared by ranks) begin after the
    schedule, and so do those that ZeRO offloads. ZeRO-1 finds the others reduced, and takes its part of them.

    Args:
        engine: a ``DeepSpeedEngine``; its method ``allreduce_no_retain`` is overridden by `follow_replicas`.
        stages: this rank's stages, by number.
    """

    def __init__(self, engine: Any, stages: Mapping[int, Stage]) -> None:
        # weak, since the engine holds this
        self._engine: Any = weakref.proxy(engine)
        self._stages = stages
        self._complete: dict[int, list[Parameter]] | None = None  # parameters whose gradients a stage completes
        self._last: dict[Action, int] = {}  # stages, by their last actions in this step
        self._order: list[int] = []  # stages whose all-reduces have not begun
        self._ended: set[int] = set()
        self._begun: dict[int, _Begun] = {}  # by the gradient's address
        self._connected = False  # whether this rank has reduced over the replicas' group

    def expect(self, row: Sequence[Action]) -> None:
        """Set the actions of the step that begins."""
        backward = {action.stage for action in row if action.op is Op.BACKWARD}
        # messages too: on one hardware queue a reduction would hold up those behind it
        last = {action.stage: action for action in row if action.stage in backward}
        self._begun.clear()
        self._ended.clear()
        # rows of replicas can differ where their sequences do, and all-reduces must not
        self._order = sorted(last, reverse=True) if last and self._can_begin() else []
        self._last = {last[stage]: stage for stage in self._order}

    @property
    def watches(self) -> bool:
        """Whether a stage's gradients can begin in this step."""
        return bool(self._last)

    def action_ends(self, action: Action) -> None:
        """Begin with the gradients of a stage that has run its last action, if later stages have."""
        if action not in self._last:
            return
        self._ended.add(self._last[action])
        while self._order and self._order[0] in self._ended:
            stage = self._order.pop(0)
            with self._engine._recorder.collective(f"reduce stage {stage}: begin"):
                for gradient, dtype in self._of_stage(stage):
                    self._begin(gradient, dtype)

    def all_reduce(
        self, reduce: Callable[..., None], bucket: Sequence[Tensor], dp_group: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Reduce gradients, as ``DeepSpeedEngine.allreduce_no_retain`` (``reduce``) does; collective."""
        engine, begun = self._engine, list[_Begun]()
        dtype = engine.communication_data_type
        average = _average(engine, kwargs.get("dp_world_size") or dist.get_world_size(dp_group))
        large: list[Tensor] = []
        small: list[Tensor] = []
        for gradient in bucket:
            done, rest = self._take(gradient)
            begun += done
            for each in rest:
                alone = each.numel() >= _ALONE and each.dtype == dtype
                (large if alone and each.is_contiguous() else small).append(each)
        begun += [_begin(each, average, dp_group, dtype) for each in large]
        _wait(begun)
        if small:
            reduce(small, dp_group, *args, **kwargs)
        _finish(begun, average)

    def reduce(self, reduce: Callable[[], None]) -> None:
        """Reduce all gradients by ``reduce``, which is DeepSpeed's; ZeRO takes those that have begun for reduced; collective."""
        of_zero = self._handed_over() if _is_partitioned(self._engine.optimizer) else []
        reduce()
        for parameter in of_zero:
            del parameter.ds_grad_is_ready
        self._connected = True

    def _handed_over(self) -> list[Any]:
        """Hand averages that have begun over to ZeRO, and return their parameters; no reference to a gradient stays."""
        engine, begun = self._engine, [*self._begun.values()]
        self._begun.clear()
        _wait(begun)
        _finish(begun, _average(engine, engine.dp_world_size))
        return leave_reduced(engine.optimizer, {each.gradient.data_ptr(): each.message for each in begun})

    def _can_begin(self) -> bool:
        engine = self._engine
        # the first collective of a group connects its ranks, which can wait for messages of the pipeline
        if not (self._connected and engine.is_data_parallel):
            return False
        offloads = any(getattr(engine.optimizer, name, False) for name in ("cpu_offload", "zenflow"))
        return engine.pipeline_enable_backward_allreduce and not offloads and not engine.has_moe_layers

    def _of_stage(self, stage: int) -> list[tuple[Tensor, torch.dtype]]:
        """Return the large gradients that a stage has completed, and the types of their messages; the same on all replicas."""
        engine, optimizer = self._engine, self._engine.optimizer
        if self._complete is None:
            self._complete = self._complete_ones()
        name, of_zero = gradient_name(engine), _is_partitioned(optimizer)
        found = []
        for parameter in self._complete[stage]:
            if not parameter.requires_grad:
                continue
            if getattr(parameter, name) is None:  # another replica may have it
                dtype = optimizer.gradient_accumulation_dtype if name == "grad_accum" else parameter.dtype
                setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))
            dtype = optimizer.get_param_comm_dtype(parameter) if of_zero else engine.communication_data_type
            found.append((getattr(parameter, name), dtype))
        return found

    def _complete_ones(self) -> dict[int, list[Parameter]]:
        module = self._engine.module
        shared = {id(weight) for weight, _ in module.get_tied_weights_and_groups()}
        shared |= {id(parameter) for parameter in applied_to_parts(module)}
        of_stage = {number: _parameters(stage) for number, stage in self._stages.items()}
        used = Counter(id(parameter) for parameters in of_stage.values() for parameter in parameters)
        return {
            number: [p for p in parameters if p.numel() >= _ALONE and used[id(p)] == 1 and id(p) not in shared]
            for number, parameters in of_stage.items()
        }

    def _begin(self, gradient: Tensor, dtype: torch.dtype) -> None:
        if gradient.is_sparse or not gradient.is_contiguous():
            return
        group = self._engine.mpu.get_data_parallel_group()
        average = _average(self._engine, dist.get_world_size(group))
        self._begun[gradient.data_ptr()] = _begin(gradient.detach(), average, group, dtype)

    def _take(self, gradient: Tensor) -> tuple[list[_Begun], list[Tensor]]:
        """Return the all-reduces that have begun of a gradient, or of parts of a flat one, and the parts that have not."""
        begin, size = gradient.data_ptr(), gradient.element_size()
        inside = [at for at in self._begun if begin <= at < begin + gradient.numel() * size]
        if not inside:
            return [], [gradient]
        taken = [self._begun.pop(at) for at in sorted(inside)]
        flat, rest, done = gradient.detach().view(-1), [], 0
        for each in taken:
            start = (each.gradient.data_ptr() - begin) // size
            rest.append(flat[done:start])
            done = start + each.gradient.numel()
        rest.append(flat[done:])
        return taken, [each for each in rest if each.numel()]


def follow_replicas(engine: Any) -> None:
    """Have an engine reduce gradients over replicas by its `ReplicaGradients`."""
    override(
        engine, "allreduce_no_retain", lambda engine, *args, **kwargs: engine._replicas.all_reduce(*args, **kwargs)
    )


def broadcasting_scalars(engine: Any) -> AbstractContextManager[None]:
    """Context manager of a constructor that broadcasts parameters without dimensions too.

    DeepSpeed 0.19.8 views the memory of each parameter as bytes, which PyTorch refuses for these.
    """

    def broadcast() -> None:
        scalars = [parameter for parameter in engine.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        PipelineEngine._broadcast_model(engine)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    return replaced(engine, _broadcast_model=broadcast)


def reduce_replicas(engine: Any, reduce: Callable[[], None]) -> None:
    """Reduce gradients over replicas; ``reduce``, which is DeepSpeed's, would flatten and copy those of a single one."""
    if engine.is_data_parallel or isinstance(engine.optimizer, ZeROOptimizer):
        engine._replicas.reduce(reduce)
        return
    for parameter in engine.module.parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.numel() > 0:
            parameter.grad = torch.zeros_like(parameter)  # optimisers decay a weight whose gradient is zero


def _is_partitioned(optimizer: Any) -> bool:
    """Whether ``optimizer`` reduces gradients itself and keeps a part of them: ``DeepSpeedZeroOptimizer``."""
    return isinstance(optimizer, ZeROOptimizer) and not isinstance(optimizer, BF16_Optimizer)


def _average(engine: Any, world_size: float) -> _Average:
    """Return how the engine's ``allreduce_bucket`` averages, or ZeRO's ``average_tensor`` and what that calls."""
    if not engine.gradient_average:
        return _Average()
    optimizer, factor = engine.optimizer, engine.gradient_predivide_factor()
    partitioned = _is_partitioned(optimizer)
    if partitioned and (optimizer.reduce_scatter or not optimizer.contiguous_gradients):
        return _Average(Tensor.div_, world_size, own_type=optimizer.contiguous_gradients)
    if engine.postscale_gradients():
        return _Average(Tensor.mul_, 1.0 / factor, factor / world_size)
    return _Average(Tensor.div_, world_size) if partitioned else _Average(Tensor.mul_, 1.0 / world_size)


def _begin(gradient: Tensor, average: _Average, group: Any, dtype: torch.dtype) -> _Begun:
    """Begin the all-reduce of a gradient in a message of a type."""
    message = gradient if gradient.dtype == dtype or average.own_type else gradient.to(dtype)
    if average.number != 1.0:
        average.scale(message, average.number)
    message = message.to(dtype)
    return _Begun(gradient, message, dist.all_reduce(message, group=group, async_op=True))


def _wait(begun: Sequence[_Begun]) -> None:
    # a collective that is waited for at once runs on the current stream, which must follow those on NCCL's own
    for one in begun:
        one.work.wait()


def _finish(begun: Sequence[_Begun], average: _Average) -> None:
    """Finish the averages of gradients whose sums are there."""
    if begun and average.after != 1.0:
        torch._foreach_mul_([one.message for one in begun], average.after)
    for gradient, message, _ in begun:
        if message is not gradient:
            gradient.copy_(message)


def _parameters(stage: Stage) -> list[Parameter]:
    """Return the parameters of a stage's layers, each once."""
    return list(dict.fromkeys(p for module in stage.layers.modules for p in module.parameters()))

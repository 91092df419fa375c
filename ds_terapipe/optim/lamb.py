"""LAMB as one fused step over all tensors, with the trust ratios of whole layers however these are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.optim import modes, state_dicts, telemetry
from ds_terapipe.optim.device_tensors import DeviceTensors, Record, by_device, fingerprint, require_whole
from ds_terapipe.optim.op import backends, segments
from ds_terapipe.optim.op.device_table import DeviceTable
from ds_terapipe.optim.op.step_tensors import TYPES
from ds_terapipe.optim.sharding import Group, Groups, all_reduce


class FusedLamb(torch.optim.Optimizer):
    r"""LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962 v5).

    For each layer with parameters p and gradients g, at its step t (counted from 1)::

        m = beta1 m + (1 - beta1) g              v = beta2 v + (1 - beta2) g^2
        u = M / (sqrt(V) + eps) + weight_decay p
        p = p - lr r u                           r = |p| / |u|, the trust ratio; 1 if either norm is 0

    The modes differ in the bias correction and in what is adapted:

    - ``paper``: M = m / (1 - beta1^t), V = v / (1 - beta2^t), every tensor is adapted (algorithm 2 of the paper, v5).
    - ``deepspeed``: M = m, V = v, r held in [0.01, 10], and p moves by lr sqrt(1 - beta2^t) / (1 - beta1^t) r u, every
      tensor is adapted (DeepSpeed 0.19.8, fused_lamb_cuda_kernel.cu).
    - ``nvlamb``: as ``paper``; made to be used with ``max_grad_norm=1.0`` (apex's FusedLAMB with ``use_nvlamb``, timm's Lamb
      with ``always_adapt``).
    - ``apex``: as ``nvlamb``, but with r = 1 for tensors of groups without weight decay (apex's FusedLAMB, timm's Lamb).

    No mode clips; ``max_grad_norm`` alone does. Learning rates do not carry over between ``deepspeed`` and the others: its
    factor sqrt(1 - beta2^t) / (1 - beta1^t) is a hidden warm-up, with the default betas 0.32 at t = 1, 0.15 at t = 12, 0.31
    at t = 100, 0.80 at t = 1000, and its u, with the moments as they are, weighs decay against gradient differently.

    A step that meets a nan or inf in any gradient, here or on a rank that shares in its norms, is skipped: parameters,
    moments and step counts stay as they are, :attr:`skipped_steps` grows by one and a warning is logged. Before the first
    real step, a step whose gradients are all exactly zero changes and counts nothing. Parameters whose gradient is None are
    left alone, without decay. Parameters may be fp32, fp16 or bf16, the moments are fp32. ``torch.amp.GradScaler`` leaves
    the unscaling to this optimizer.

    Args:
        params: parameters, or dicts of them with settings of their own (all but ``max_grad_norm``,
            ``tensor_parallel_group``, ``monitor_interval``, ``check_gradients``, ``backend``).
        lr: The learning rate, the relative change of a layer per step, since \|r u\| = \|p\|. In code it may be a tensor of one
            element. JSON needs it, unless a scheduler of ours sets the rate.
        betas: The decay of the two moments per step, from 0 to below 1.
        eps: A number added to sqrt(V), in units of the gradient.
        weight_decay: The decay, in units of u per parameter.
        mode: The variant of LAMB. ``"paper"`` is the published algorithm (v5). ``"nvlamb"`` is the same for use with clipping.
            ``"apex"`` does not adapt tensors without decay. ``"deepspeed"`` corrects the step and holds the ratio in [0.01, 10].
        exclude: ``"bias_norm"`` leaves parameters of at most one dimension without decay and trust ratio, as the TensorFlow
            reference does. The dimensions are the model's, also where ZeRO flattens. Null adapts all.
        max_grad_norm: The 2-norm that the gradients of all groups together are scaled down to. In JSON it is the same as
            ``gradient_clipping``, and DeepSpeed 0.19.8 clips at 1.0 where neither is given; 0 turns clipping off.
        min_coeff: The lower end of the trust ratio. Null takes the mode's.
        max_coeff: The upper end of the trust ratio. Null takes the mode's.
        weight_norm_clip: A limit of the weight norm in r, or a pair (lower, upper): phi of the paper.
        bias_correction: ``false`` leaves out the bias corrections of the mode.
        eps_inside_sqrt: ``true`` takes sqrt(V + eps) in place of sqrt(V) + eps.
        grad_averaging: ``false`` takes g in place of (1 - beta1) g into m, as apex does.
        split_qkv: Whether the query, key and value of a fused matrix are layers of their own. The parameter needs an attribute
            ``lamb_rows``, e.g. (rows of a head's query, of its key, of its value), which repeats over dimension 0.
        tensor_parallel_group: see :meth:`set_groups`.
        monitor_interval: Steps between two events to the monitor: trust ratios, share of clamped layers, gradient norm. 0 sends
            none.
        check_gradients: ``false`` saves the read that finds nan and inf, for a caller that has looked for them.
        backend: ``"auto"`` takes the compiled op of a tensor's device; without one it takes PyTorch and warns. ``"plain"`` takes
            PyTorch. ``"cpu"`` and ``"cuda"`` ask for their op.

    Raises:
        ConfigError: for a bad setting, naming ``optimizer.params.<name>``, or parameters that are not fp32, fp16 or bf16.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        mode: str = "paper",
        exclude: str | None = None,
        max_grad_norm: float | None = None,
        *,
        min_coeff: float | None = None,
        max_coeff: float | None = None,
        weight_norm_clip: float | tuple[float, float] | None = None,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        grad_averaging: bool = True,
        split_qkv: bool = False,
        tensor_parallel_group: Group | None = None,
        monitor_interval: int = 0,
        check_gradients: bool = True,
        backend: str = "auto",
    ) -> None:
        self.max_grad_norm: float = modes.checked("max_grad_norm", max_grad_norm) or 0.0
        self.monitor_interval: int = modes.checked("monitor_interval", monitor_interval)
        self.check_gradients: bool = modes.checked("check_gradients", check_gradients)
        self.backend: str = modes.checked("backend", backend)
        self._records: list[Record] = []
        self._groups = Groups(tensor_parallel=tensor_parallel_group)
        self._reset()
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "mode": mode, "exclude": exclude,
            "min_coeff": min_coeff, "max_coeff": max_coeff, "weight_norm_clip": weight_norm_clip,
            "bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "grad_averaging": grad_averaging,
            "split_qkv": split_qkv,
        }  # fmt: skip
        modes.resolve(dict(defaults))
        super().__init__(params, defaults)

    def _reset(self) -> None:
        """Reset everything that is not saved: tables, counters, the monitor."""
        self._tables: dict[tuple[int, ...], tuple[Any, list[DeviceTable]]] = {}
        self._changed = False
        self._skips = telemetry.SkippedSteps()
        self._reports = telemetry.Reports()

    # ------------------------------------------------------------------------------------------------- what is optimized

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Override ``Optimizer.add_param_group``: the group may have settings of its own.

        Raises:
            ConfigError: for a bad setting, or a parameter that is not fp32, fp16 or bf16, or a shard of PyTorch's.
        """
        # ZeroRedundancyOptimizer repeats the argument in its groups
        if (param_group.get("max_grad_norm", self.max_grad_norm) or 0.0) != self.max_grad_norm:
            rule = f"one value for all parameter groups ({self.max_grad_norm})"
            raise bad_value(modes.key("max_grad_norm"), param_group["max_grad_norm"], rule, "the argument")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            modes.resolve(group)
            for parameter in group["params"]:
                segments.rows_pattern(parameter, group["split_qkv"])
                require_whole(parameter)
                if parameter.layout != torch.strided or parameter.dtype not in TYPES:
                    got = f"{parameter.layout} parameter of {parameter.dtype}"
                    raise bad_value("optimizer.type", got, "dense float32, float16 or bfloat16", "model.float()")
        except ConfigError:
            self.param_groups.pop()
            raise
        number = len(self.param_groups) - 1
        names = group.get("param_names") or [f"group{number}.{i}" for i in range(len(group["params"]))]
        self._records.append(Record(group, list(group["params"]), list(names)))
        self._tables.clear()

    def set_groups(
        self,
        tensor_parallel_group: Group | None = None,
        norm_group: Group | None = None,
        tied: Mapping[Tensor, Group] | None = None,
    ) -> None:
        """Set the process groups that hold parts of the same model. Call it alike on all ranks, before the first step.

        The groups over which ZeRO-1/2 and BF16_Optimizer cut a layer are found by themselves, and where this is not called
        and Megatron-core is initialized, so is the tensor-parallel group.

        Args:
            tensor_parallel_group: the ranks that hold the other parts of parameters marked ``tensor_model_parallel``. The
                norms of parameters without the mark are taken from its first rank.
            norm_group: the ranks that together hold every element of the model, and of its gradients, once, but for
                replicated parameters and tied copies: pipeline stages and tensor-parallel ranks of one model replica, and
                with ZeRO or BF16_Optimizer all replicas. Clipping uses the norm over it, and a step is skipped on all of it.
            tied: for an original parameter that several pipeline stages hold, the ranks that hold it and have this rank's
                place in their stage. Copies are marked ``ds_pipe_replicated``; the one without the mark gives the norms.

        Raises:
            ConfigError: if ``tied`` is given without ``norm_group``.
        """
        if tied and norm_group is None:
            raise ConfigError("optimizer.type: got tied weights, must know all ranks of the model, use norm_group=...")
        self._groups = Groups(
            tensor_parallel_group if tensor_parallel_group is not None else self._groups.tensor_parallel,
            norm_group,
            {id(parameter): group for parameter, group in (tied or {}).items()},
        )
        self._tables.clear()

    def parameters_changed(self) -> None:
        """To be called when parameters were put into the groups, or taken from them, without `add_param_group`."""
        known = {
            id(p): name for record in self._records for p, name in zip(record.originals, record.names, strict=True)
        }
        self._records = []
        for number, group in enumerate(self.param_groups):
            names = [known.get(id(p), f"group{number}.{i}") for i, p in enumerate(group["params"])]
            self._records.append(Record(group, list(group["params"]), names))
        self._tables.clear()
        self._changed = True  # those with ``lamb_rows`` may have left

    def set_names(self, names: Mapping[Tensor, str]) -> None:
        """Names of original parameters, for :meth:`statistics`."""
        for record in self._records:
            record.names = [names.get(p, name) for p, name in zip(record.originals, record.names, strict=True)]
        self._tables.clear()

    def set_monitor(self, monitor: telemetry.Monitor | None) -> None:
        """Give ``monitor`` a list of (tag, value, step) every ``monitor_interval`` steps: least, mean and greatest trust
        ratio of this rank's layers, the share of clamped ones, and the gradients' norm before clipping. DeepSpeed's
        ``MonitorMaster.write_events`` fits. On CUDA the values are copied beside the training, and come a step or more later.
        """
        self._reports.monitor = monitor

    # ------------------------------------------------------------------------------------------------------------- step

    @torch.no_grad()
    @_disable_dynamo  # it makes constants of facts of a step, such as which parameters have a gradient
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float | Tensor = 1.0,
        found_inf: float | bool | Tensor | None = None,
        copies: Sequence[Tensor | None] | None = None,
    ) -> Any:
        """One step on the groups in ``param_groups``. Collective where layers are sharded.

        Args:
            closure: computes the loss again.
            grad_scale: the loss scale that the gradients carry: they are divided by it, as ``torch.amp`` does.
            found_inf: nonzero if the caller has found a nan or inf, whereupon the step is skipped; if given, the gradients are
                not searched here.
            copies: per parameter, in the order of ``param_groups``, a tensor of its shape that receives the new values
                rounded to its own type, or None.

        Returns:
            The closure's result, else None.

        Raises:
            ConfigError: if the layers within the groups' tensors are not known, or a group's settings have become bad ones.
            RuntimeError: for sparse gradients. Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = self._amp(grad_scale, found_inf)
        records = [self._record(group) for group in self.param_groups]
        if self.max_grad_norm and len(records) != len(self._records):
            raise ConfigError(
                f"optimizer.params.max_grad_norm: got {self.max_grad_norm} with a wrapper that steps one parameter group at a "
                "time (ZeRO), must be null there, use the key gradient_clipping"
            )
        tables = self._refreshed(records, copies)
        for table in tables:
            table.begin(scale, self.max_grad_norm, found_inf, self.check_gradients and found_inf is None)
        if tables:
            self._share_control(tables)
            self._skips.note(tables[0])
        for table in tables:
            table.run()
        self._reports.note(records, tables, len(self._records), self.monitor_interval)
        return loss

    def _amp(self, scale: float | Tensor, found_inf: Any) -> tuple[float | Tensor, Any]:
        """Merge the attributes that ``torch.amp.GradScaler`` has set into the arguments."""
        held = getattr(self, "grad_scale", None)
        if held is not None:
            scale = held * scale
        if found_inf is None:
            found_inf = getattr(self, "found_inf", None)
        if not isinstance(scale, Tensor) and not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"FusedLamb.step: got grad_scale {scale}, must be a finite number above 0")
        return scale, found_inf

    def _share_control(self, tables: list[DeviceTable]) -> None:
        """Agree on overflow and on the existence of an earlier step, over all devices and ranks."""
        groups = tables[0].reduction.control_groups(bool(self.max_grad_norm))
        if len(tables) == 1 and not groups:
            return
        shared = torch.zeros(3, dtype=torch.float64, device=tables[0].device)
        for table in tables:
            shared += table.found().to(shared.device)
        for group in groups:
            all_reduce(shared, group)
        for table in tables:
            table.agree(shared)

    def _record(self, group: dict[str, Any]) -> Record:
        """The record of a group in ``param_groups``, which a wrapper may have put there alone."""
        for record in self._records:
            if record.group is group:
                record.check()
                return record
        raise ConfigError(
            "optimizer.type: got FusedLamb with a parameter group that it was not made with, must be one of its own, use "
            "add_param_group"
        )

    def _refreshed(self, records: list[Record], copies: Sequence[Tensor | None] | None) -> list[DeviceTable]:
        """The tables for these groups, with the addresses of now."""
        key = tuple(id(record) for record in records)
        now = fingerprint(records)
        known, tables = self._tables.get(key, (None, []))
        if known != now:
            tables = self._built(records)
            self._tables[key] = now, tables
        total = sum(len(record.group["params"]) for record in records)
        if copies is not None and len(copies) != total:
            raise ValueError(
                f"FusedLamb.step: got {len(copies)} copies, must be one, or None, for each of {total} tensors"
            )
        for table in tables:
            table.refresh(self.state, copies)
        return tables

    def _built(self, records: list[Record]) -> list[DeviceTable]:
        split = [p for record in self._records if record.group["split_qkv"] for p in record.originals]
        if split and not self._changed and not any(hasattr(parameter, "lamb_rows") for parameter in split):
            rule = "false where no parameter has lamb_rows"
            raise bad_value(modes.key("split_qkv"), True, rule, "parameter.lamb_rows = (rows, ...)")
        held = by_device(records)
        if not held and self._groups.norm is not None:
            # a rank without any tensor joins other ranks' collectives; their device, and its op, may be another one
            held = {torch.device("cpu"): DeviceTensors()}
        ops = {
            device: backends.pick(device, self.backend if mine.tensors else "plain") for device, mine in held.items()
        }
        return [DeviceTable(device, mine, records, self._groups, ops[device]) for device, mine in held.items()]

    # ------------------------------------------------------------------------------------------------------ what happened

    @property
    def skipped_steps(self) -> int:
        """Calls of :meth:`step` that changed nothing because a gradient was nan or inf. Waits for a CUDA device."""
        return self._skips.total()

    def statistics(self) -> list[telemetry.LayerStatistics]:
        """Norms, trust ratio and clamping of every layer in the last step that was not skipped. Waits for a CUDA device."""
        return [layer for _, tables in self._tables.values() for table in tables for layer in table.statistics()]

    # -------------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Override ``Optimizer.state_dict``: ``step`` is an int in every parameter's state and in every group.

        So DeepSpeed's FusedLamb, apex's FusedLAMB and timm's Lamb load it. Waits for a CUDA device.
        """
        return state_dicts.exported(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class, of DeepSpeed's FusedLamb, apex's FusedLAMB or timm's Lamb.

        Of the others' settings lr, betas, eps, weight_decay and bias_correction are taken; the rest stays as it is here.

        Raises:
            ConfigError: if it is of other groups, numbers or shapes of parameters. Nothing has been changed then.
        """
        moments: dict[Tensor, dict[str, Tensor]] = {}

        def convert(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            imported = state_dicts.imported(given, self.param_groups)
            moments.update(state_dicts.moments_of(imported, self.param_groups))
            return imported

        def restore(_: Any) -> None:
            for parameter, values in moments.items():
                self.state[parameter].update(values)

        # Between the user's hooks: theirs before see the state as it was saved, theirs behind see fp32 moments.
        handles = (
            self.register_load_state_dict_pre_hook(convert),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for handle in handles:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without process groups, monitor and count of skipped steps."""
        kept = ("max_grad_norm", "monitor_interval", "check_gradients", "backend")
        records = [(record.originals, record.names) for record in self._records]
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}, "_saved_records": records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        records = state.pop("_saved_records", None) if "_saved_records" in state else None
        super().__setstate__(state)
        if records is None:  # load_state_dict: new dicts for the groups that there are
            records = [(record.originals, record.names) for record in self._records]
            self._tables.clear()
        else:
            self._groups = Groups()
            self._reset()
        self._records = [
            Record(group, originals, names)
            for group, (originals, names) in zip(self.param_groups, records, strict=True)
        ]

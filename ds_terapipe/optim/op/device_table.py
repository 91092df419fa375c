"""The tables of one device, kept from step to step: built once, then only addresses, steps and settings are renewed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.optim import modes, telemetry
from ds_terapipe.optim.device_tensors import DeviceTensors, Record
from ds_terapipe.optim.op.plain import FOUND_INF, SQUARES, trust_ratio
from ds_terapipe.optim.op.segments import SegmentArrays, Tables
from ds_terapipe.optim.op.step_tensors import StepTensors
from ds_terapipe.optim.sharding import Groups, Reduction
from ds_terapipe.optim.step_rules import StepRules


class DeviceTable:
    """The tables, norms and control values for the tensors of one device that one call of ``step`` updates.

    Args:
        device: where the tensors are.
        held: what they are.
        records: the parameter groups of the call.
        groups: process groups that layers are shared over.
        op: the back end.

    Raises:
        ConfigError: if a layer's other parts are in unknown places.
    """

    def __init__(
        self, device: torch.device, held: DeviceTensors, records: Sequence[Record], groups: Groups, op: Any
    ) -> None:
        self.device, self.op, self._tensors, self._layers = device, op, held.tensors, held.layers
        # Only the op on a GPU counts steps and decides by itself; for all others the host does.
        self._is_host_led = op.name != "cuda"
        group_of = np.array(held.groups, dtype=np.int64)
        self._rules = StepRules(records, group_of, device, None if self._is_host_led else op)
        self.reduction = Reduction(held.layers, groups, device)
        self._arrays = SegmentArrays(held.parts, self.reduction.counted)
        self._of_step = StepTensors(device, held.tensors, held.positions, held.in_rows)
        self._known_start: tuple[tuple[float, float], Tensor] | None = None
        count = len(held.layers)
        self.tables = Tables(torch.from_numpy(self._arrays.segments), self._rules.values, count)
        self.norms, self._sums = (torch.zeros(count, 2, dtype=torch.float64, device=device) for _ in range(2))
        self.ratios = torch.ones(count, dtype=torch.float64, device=device)
        self.control = torch.zeros(4, dtype=torch.float64, device=device)

    def refresh(self, state: Mapping[Tensor, dict[str, Any]], copies: Sequence[Tensor | None] | None) -> None:
        """Renew addresses, steps and settings from the tensors, their gradients and their state.

        Args:
            state: the optimizer's; moments are made for tensors that have a gradient for the first time.
            copies: for all tensors of the call, what receives the new values, or None.

        Raises:
            RuntimeError: for sparse gradients, or gradients or copies of another type or shape. Nothing is changed then.
        """
        step, states = self._of_step, [state[tensor] for tensor in self._tensors]
        step.refresh(states, copies)
        self._rules.renew(states, step.active)
        self.tables.rules = self._rules.values
        self._arrays.renew(step, self._rules.rows)
        if self.op.takes_views:
            self.tables.views = self._arrays.views(step)

    # ------------------------------------------------------------------------------------------------------- the step

    def begin(self, scale: float | Tensor, max_norm: float, found_inf: Any, search: bool) -> None:
        """Look at the gradients.

        Args:
            scale: the loss scale that they carry.
            max_norm: limit of their norm, 0 for no clipping.
            found_inf: the caller's finding, or None.
            search: whether to look for nan and inf.
        """
        control = self.control
        if isinstance(scale, Tensor):
            control.copy_(self._start(1.0, max_norm))
            control[0] = 1.0 / scale
        else:
            control.copy_(self._start(1.0 / scale, max_norm))
        if found_inf is not None:
            if isinstance(found_inf, Tensor):
                found_inf = found_inf.to(self.device, torch.float64).reshape(())
            control[FOUND_INF] = (found_inf != 0) * 1.0
        # Before the first step the squares tell a priming step.
        self._squares_taken = bool(search or max_norm or not self._rules.has_started)
        self._started: Tensor | None = None
        if self._squares_taken:
            self.op.square_sum(self.tables, control)

    def _start(self, factor: float, max_norm: float) -> Tensor:
        """Control values before anything is found; on the device, where a copy needs no kernel."""
        if self._known_start is None or self._known_start[0] != (factor, max_norm):
            values = torch.tensor([factor, max_norm, 0.0, 0.0], dtype=torch.float64, device="cpu")
            self._known_start = (factor, max_norm), values.to(self.device)
        return self._known_start[1]

    def found(self) -> Tensor:
        """Float64 [3]: sum of the squares of the gradients, whether nan or inf is in them, steps made before."""
        return torch.cat([self.control[SQUARES:], self._rules.steps_made().reshape(1).to(self.device)])

    def agree(self, found: Tensor) -> None:
        """Replace this table's sum by that of :meth:`found` over all devices and ranks."""
        self.control[SQUARES:] = found[:2].to(self.device)
        self._started = found[2].to(self.device)

    def run(self) -> None:
        """Update all tensors, unless a gradient is nan or inf, or this is a priming step. Collective if layers are sharded."""
        done = True
        if self._is_host_led:
            _, _, squares, found_inf = self.control.tolist()
            done = found_inf == 0 and (squares != 0 or self._has_started())
        elif not self._rules.has_started:
            started = self._rules.steps_made() if self._started is None else self._started
            is_priming = (started == 0) & (self.control[SQUARES] == 0)
            self.control[FOUND_INF] = torch.maximum(self.control[FOUND_INF], is_priming.double())
        if done:
            self._update()
        elif not self.reduction.is_local:
            # a rank whose device decides is in every step's sum, and back ends may differ: an op that could not be compiled there
            self.reduction.sum_norms(torch.zeros_like(self.norms))
        self._of_step.release()
        self.tables.views = []
        if done:
            self._rules.count()

    def _has_started(self) -> bool:
        return self._rules.has_started if self._started is None else bool(self._started > 0)

    def _update(self) -> None:
        advances = {} if self._is_host_led else {"advance": True}
        if self.reduction.is_local:
            self.op.step(self.tables, self.norms, self.control, self.ratios, **advances)
        else:
            self.op.moments(self.tables, self.norms, self.control)
            self._sum_norms()
            self.op.apply(self.tables, self.norms, self.control, self.ratios, **advances)

    def _sum_norms(self) -> None:
        """Sum the norms of whole layers; in a step that the device skips, the last sums stay."""
        if self._is_host_led:
            self.reduction.sum_norms(self.norms)
            return
        self._sums.copy_(self.norms)
        self.reduction.sum_norms(self._sums)
        self.norms.copy_(torch.where(self.control[FOUND_INF] != 0, self.norms, self._sums))

    def learn(self, control: Tensor) -> None:
        """Take notice of the control values of an earlier step, which have come from the device since."""
        if control[FOUND_INF] == 0 and control[SQUARES] != 0:
            self._rules.has_started = True

    # ----------------------------------------------------------------------------------------------------- statistics

    def report(self) -> Tensor:
        """Norms, ratios, sum of squares, scale and number of the last step, float64 [3 L + 3], on the device."""
        squares = self.control[SQUARES] if self._squares_taken else torch.full_like(self.control[SQUARES], -1.0)
        # In host memory the rules have the number of the step that was made, on the device already that of the next.
        step = self.tables.rules[:, modes.STEP].max() - (0 if self._is_host_led else 1)
        rest = torch.stack([squares, self.control[0], step.to(self.device)])
        return torch.cat([self.norms.reshape(-1), self.ratios, rest])

    def read(self, values: Tensor) -> telemetry.Report:
        """Convert the values of :meth:`report`, in host memory, into a report."""
        layers = self.tables.layers
        rules = [modes.rule(layer.settings, layer.excluded) for layer in self._layers]
        norms, ratios = values[: 2 * layers].reshape(-1, 2), values[2 * layers : 3 * layers]
        # The op writes no ratio for layers of which this rank has nothing; statistics have it all the same.
        for layer in set(range(layers)) - set(self._arrays.layer.tolist()):
            ratios[layer] = trust_ratio(rules[layer], *norms[layer].tolist())
        statistics = telemetry.layer_statistics([layer.name for layer in self._layers], norms, ratios, rules)
        squares, scale, step = values[3 * layers :].tolist()
        return telemetry.Report(statistics, squares, scale, int(step))

    def statistics(self) -> list[telemetry.LayerStatistics]:
        """Return the statistics of the last step; waits for the device."""
        return self.read(self.report().cpu()).layers

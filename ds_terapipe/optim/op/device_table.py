"""The tables of one device, kept from step to step: built once, then only addresses, steps and settings are renewed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.optim import modes, telemetry
from ds_terapipe.optim.device_tensors import DeviceTensors, Record
from ds_terapipe.optim.op import segments
from ds_terapipe.optim.op.plain import FOUND_INF, SQUARES, Rule, trust_ratio
from ds_terapipe.optim.op.segments import Part, SegmentArrays, Tables, View, Views
from ds_terapipe.optim.op.step_tensors import NOTHING, StepTensors, addresses_of
from ds_terapipe.optim.sharding import Fragment, Groups, Reduction
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
        ConfigError: if a layer's other parts are in unknown places, or ``lamb_rows`` does not fit.
    """

    def __init__(
        self, device: torch.device, held: DeviceTensors, records: Sequence[Record], groups: Groups, op: Any
    ) -> None:
        self.device, self.op, self.records = device, op, records
        self.tensors = held.tensors
        self.names: list[str] = []
        self.layer_groups: list[tuple[int, bool]] = []
        rows: list[Fragment] = []
        # Only the op on a GPU counts steps and decides by itself; for all others the host does.
        self._is_host_led = op.name != "cuda"
        group_of = np.array(held.groups, dtype=np.int64)
        self._rules = StepRules(records, group_of, device, None if self._is_host_led else op)
        in_rows = self._lay_out(held, rows)
        self.reduction = Reduction(rows, groups, device)
        self._arrays = SegmentArrays(list(self._parts(held)))
        # The op writes no ratio for layers of which this rank has nothing; statistics have it all the same.
        self._elsewhere = sorted(set(range(len(rows))) - set(self._arrays.layer.tolist()))
        strides = [segments.memory_strides(t, in_rows=i in in_rows) for i, t in enumerate(self.tensors)]
        self._of_step = StepTensors(device, self.tensors, held.positions, strides)
        self._known_start: tuple[tuple[float, float], Tensor] | None = None
        this = weakref.proxy(self)  # no cycle: tensors that leave the optimiser are freed at once
        self._made_views = Views(lambda: this._views())
        self.tables = Tables(torch.from_numpy(self._arrays.segments), self._rules.values, len(rows), self._made_views)
        self.norms, self._sums = (torch.zeros(len(rows), 2, dtype=torch.float64, device=device) for _ in range(2))
        self.ratios = torch.ones(len(rows), dtype=torch.float64, device=device)
        self.control = torch.zeros(4, dtype=torch.float64, device=device)

    # ------------------------------------------------------------------------------------------------------ built once

    def _lay_out(self, held: DeviceTensors, rows: list[Fragment]) -> set[int]:
        """Number the layers. Returns the tensors that are cut by rows."""
        in_rows = set()
        for place, group, name in zip(held.places, held.place_groups, held.names, strict=True):
            settings = self.records[group].group
            pattern = segments.rows_pattern(place.parameter, settings["split_qkv"])
            excluded = modes.is_excluded(settings, place.parameter.dim())
            for sub_layer in range(len(pattern or (0,))):
                rows.append(place)
                self.names.append(name if pattern is None else f"{name}[{sub_layer}]")
                self.layer_groups.append((group, excluded))
            if pattern and place.tensor is not None:
                in_rows.add(place.tensor)
        return in_rows

    def _parts(self, held: DeviceTensors) -> Iterator[Part]:
        layer = 0
        for place, group in zip(held.places, held.place_groups, strict=True):
            settings = self.records[group].group
            pattern = segments.rows_pattern(place.parameter, settings["split_qkv"])
            excluded = modes.is_excluded(settings, place.parameter.dim())
            counted = self.reduction.is_counted(place.parameter)
            if place.tensor is not None:
                for sub_layer, offset, length in segments.runs(
                    place.parameter.shape, pattern, place.start, place.length
                ):
                    yield Part(place.tensor, place.offset + offset, length, layer + sub_layer, excluded, counted)
            layer += len(pattern or (0,))

    # -------------------------------------------------------------------------------------------------- at every step

    def refresh(self, state: Mapping[Tensor, dict[str, Any]], copies: Sequence[Tensor | None] | None) -> None:
        """Renew addresses, steps and settings from the tensors, their gradients and their state.

        Args:
            state: the optimizer's; moments are made for tensors that have a gradient for the first time.
            copies: for all tensors of the call, what receives the new values, or None.

        Raises:
            RuntimeError: for sparse gradients, or gradients or copies of another type or shape. Nothing is changed then.
        """
        step, states = self._of_step, [state[tensor] for tensor in self.tensors]
        self._current = step.refresh(states, copies)
        addresses = {column: addresses_of(tensors) for column, tensors in enumerate(self._current)}
        changed = self._arrays.point(addresses, step.sizes, step.active)
        self._rules.renew(states, step.active)
        self.tables.rules = self._rules.values
        changed |= self._arrays.kinds(self._rules.rows, step.types)
        if changed:
            self.tables.version += 1
            self._made_views.forget()

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
            values = torch.tensor([factor, max_norm, 0.0, 0.0], dtype=torch.float64)
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
        self._finish(done)

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

    def _finish(self, done: bool) -> None:
        """Write temporaries back and, on the host, count the step."""
        self._of_step.write_back()
        if done:
            self._rules.count()

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
        rules = [modes.rule(self.records[group].group, excluded, 0.0) for group, excluded in self.layer_groups]
        norms, ratios = values[: 2 * layers].reshape(-1, 2), values[2 * layers : 3 * layers]
        for layer in self._elsewhere:
            ratios[layer] = trust_ratio(Rule(*rules[layer]), *norms[layer].tolist())
        statistics = telemetry.layer_statistics(self.names, norms, ratios, rules)
        squares, scale, step = values[3 * layers :].tolist()
        return telemetry.Report(statistics, squares, scale, int(step))

    def statistics(self) -> list[telemetry.LayerStatistics]:
        """Return the statistics of the last step; waits for the device."""
        return self.read(self.report().cpu()).layers

    # ---------------------------------------------------------------------------------------------------------- views

    def _views(self) -> list[View]:
        parameters, gradients, exp_avgs, exp_avg_sqs, copies = self._current
        views = []
        for tensor, offset, length in zip(
            self._arrays.tensor.tolist(),
            self._arrays.offset.tolist(),
            self._arrays.segments[:, segments.LENGTH].tolist(),
            strict=True,
        ):
            offset = offset if length else 0
            views.append(
                View(
                    segments.flat(parameters[tensor], offset, length),
                    segments.flat(gradients[tensor], offset, length),
                    segments.flat(exp_avgs[tensor], offset, length),
                    segments.flat(exp_avg_sqs[tensor], offset, length),
                    None if copies[tensor] is NOTHING else segments.flat(copies[tensor], offset, length),
                )
            )
        return views

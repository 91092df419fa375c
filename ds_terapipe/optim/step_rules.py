"""Step numbers of tensors, and their rules: one pair of rows for all tensors of a group at the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.optim import modes
from ds_terapipe.optim.device_tensors import Record
from ds_terapipe.optim.op import segments

_COUNT_BITS = 40
# The row of a step without any gradient, which the op accepts.
_UNUSED = modes.Rule(**{name: float(name == "step") for name in modes.Rule._fields})


class DeviceSteps:
    """Number of steps of a tensor on a GPU, read on demand: ``int(steps)`` waits.

    Args:
        following: a scalar on the device, the number of the step to come.
    """

    def __init__(self, following: Tensor) -> None:
        self.following = following

    def __int__(self) -> int:
        return int(self.following.item()) - 1


class StepRules:
    """The rules of one device's tensors.

    Tensors of one group that have made the same number of steps are a cohort, with two rows: one for parameters that are
    adapted and one for those that are excluded.

    Args:
        records: the parameter groups.
        group_of: for each tensor, its record; int64 [T].
        device: where the rules are.
        op: the back end, if the steps are counted on the device; None if they are counted in host memory.
    """

    def __init__(self, records: Sequence[Record], group_of: np.ndarray, device: torch.device, op: Any | None) -> None:
        self._records, self._group_of, self._device, self._op = records, group_of, device, op
        self._cohorts: list[int] = []  # the first tensor of each
        self._known: tuple[list[Any], bytes] | None = None
        self._sent: list[modes.Rule] | None = None
        self.values = torch.zeros(1, len(modes.Rule._fields), dtype=torch.float64, device=device if op else "cpu")
        self.rows = np.zeros((len(group_of), 2), dtype=np.int64)
        self.has_started = False
        """Whether an active tensor is known to have made a step before."""

    def renew(self, states: Sequence[dict[str, Any]], active: np.ndarray) -> None:
        """Set ``values``, float64 [R, 12], and ``rows``, int64 [T, 2], from the tensors' states and their groups' settings."""
        self._states, self._active = states, np.flatnonzero(active)
        for i in self._active.tolist():
            states[i].setdefault("step", 0)
        steps = [state.get("step", 0) for state in states]
        if self._op is None:
            self._renew_on_host(steps)
        else:
            self._renew_on_device(steps)

    def _renew_on_host(self, steps: list[Any]) -> None:
        self._counts = np.array(list(map(int, steps)), dtype=np.int64)
        self._number(self._counts)
        self.values = _on_host(self._settings(self._counts[self._cohorts] + 1))
        self.has_started = bool((self._counts[self._active] > 0).any())

    def _renew_on_device(self, steps: list[Any]) -> None:
        """Renew the rules, but leave the step numbers on the device, where the op counts them."""
        active = self._active.tobytes()
        if self._known is None or self._known[1] != active or not all(map(is_, steps, self._known[0])):
            self._begin_cohorts(steps)
            self._known = steps, active
        rules = self._settings([0] * len(self._cohorts))
        if rules != self._sent:
            assert self._op is not None
            self._op.write_rules(self.values, _on_host(rules))
            self._sent = rules
        for cohort, member in enumerate(self._cohorts):
            lr = self._group(member)["lr"]
            if self._is_there(lr):
                self.values[2 * cohort : 2 * cohort + 2, modes.LR] = lr.reshape(())

    def _begin_cohorts(self, steps: list[Any]) -> None:
        """New rows, at the steps that the tensors have come to; rows that others still look at stay as they are."""
        numbers: dict[Any, int] = {}
        keys = [numbers.setdefault(id(s) if isinstance(s, DeviceSteps) else int(s), len(numbers)) for s in steps]
        self._number(np.array(keys, dtype=np.int64))
        rows = max(1, 2 * len(self._cohorts))
        self.values = torch.zeros(rows, len(modes.Rule._fields), dtype=torch.float64, device=self._device)
        self._sent = None
        for cohort, member in enumerate(self._cohorts):
            step = steps[member]
            following = step.following if isinstance(step, DeviceSteps) else int(step) + 1
            self.has_started |= not isinstance(step, DeviceSteps) and int(step) > 0
            self.values[2 * cohort : 2 * cohort + 2, modes.STEP] = following
        made = [DeviceSteps(self.values[2 * cohort, modes.STEP]) for cohort in range(len(self._cohorts))]
        for i in self._active.tolist():
            self._states[i]["step"] = steps[i] = made[self.rows[i, 0] // 2]

    def _number(self, keys: np.ndarray) -> None:
        """Put active tensors of the same group and key into one cohort."""
        members = self._active
        both = self._group_of[members] << _COUNT_BITS | keys[members]
        _, first, cohort = np.unique(both, return_index=True, return_inverse=True)
        self._cohorts = members[first].tolist()
        assert 2 * len(self._cohorts) <= segments.MAX_RULES
        self.rows = np.zeros((len(keys), 2), dtype=np.int64)
        self.rows[members] = 2 * cohort[:, None] + np.arange(2)

    def _settings(self, steps: Iterable[float]) -> list[modes.Rule]:
        """Return the rows of the cohorts, at these steps."""
        rules = []
        for member, step in zip(self._cohorts, steps, strict=True):
            group = self._group(member)
            # A learning rate on the device is copied there; reading it here would make the host wait.
            lr = 0.0 if self._is_there(group["lr"]) else float(group["lr"])
            rules += [modes.rule(group, excluded, lr, float(step)) for excluded in (False, True)]
        return rules or [_UNUSED]

    def _group(self, member: int) -> dict[str, Any]:
        record: Record = self._records[self._group_of[member]]
        return record.group

    def _is_there(self, lr: Any) -> bool:
        return self._op is not None and isinstance(lr, Tensor) and lr.device == self._device

    def count(self) -> None:
        """Count a step of the active tensors, if the numbers are in host memory."""
        if self._op is None:
            for i in self._active.tolist():
                self._states[i]["step"] = int(self._counts[i]) + 1

    def steps_made(self) -> Tensor:
        """The most steps that an active tensor has made before, a float64 scalar. Waits for nothing."""
        if self._op is None:
            return _on_host(float(self._counts[self._active].max(initial=0)))
        return (self.values[:, modes.STEP].max() - 1).clamp(min=0)


def _on_host(values: Any) -> Tensor:
    """Return float64 in host memory, also where PyTorch's default device is another one."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")

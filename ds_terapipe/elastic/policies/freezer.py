"""Calls the policy at every step, and unfreezes layers on events. Pure: no process groups, no tensors."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_terapipe.elastic.policies.freeze import BY_POLICY, ModelLayers, policy_class
from ds_terapipe.errors import ConfigError, shown

if TYPE_CHECKING:
    from ds_terapipe.elastic.settings import FreezeSettings

LR_RESTART, LOSS_RISE = "lr_restart", "loss_rise"
REASONS = (LR_RESTART, LOSS_RISE, BY_POLICY)
_FALLS, _RISES = 0.5, 2.0  # a restart: the LR falls to half of the highest, then rises to twice the lowest
_WORSE = 0.05  # share of the lowest mean loss of an interval, which may be below zero


class Signals(NamedTuple):
    """State of the training that triggers unfreezing; the same on all ranks.

    Attributes:
        lr: highest LR of all parameter groups in the step that begins.
        loss: returns the mean loss since its last call; None without steps.
    """

    lr: float
    loss: Callable[[], float | None]


class _Rate:
    """Detector of LR restarts: the LR rises to twice the lowest value after a fall to half of the highest."""

    def __init__(self) -> None:
        self.highest = self.lowest = 0.0

    def begin(self, lr: float) -> None:
        """Reset to the LR at which the first layers are frozen."""
        self.highest = self.lowest = lr

    def restarts(self, lr: float) -> bool:
        """Whether a step with this LR is a restart."""
        # no restart in a warm-up, which may begin at 0: the LR has not fallen
        if self.lowest <= _FALLS * self.highest < self.highest and lr > self.lowest and lr >= _RISES * self.lowest:
            return True
        if lr > self.highest:
            self.highest = self.lowest = lr
        self.lowest = min(self.lowest, lr)
        return False


class Freezer:
    """Calls a policy at every step. Its answers never reach the head; unfreezing must be allowed by the settings.

    Args:
        settings: the block ``elastic_pipeline.freeze``.
        model: the entries of the layer list.
        completed: returns the intervals completed before the step with a 0-based ``global_steps``.

    Attributes:
        frozen: number of frozen entries by the last decision.
        reason: reason in `REASONS` for which the last decision unfroze layers; None: it did not.
    """

    def __init__(self, settings: FreezeSettings, model: ModelLayers, completed: Callable[[int], int]) -> None:
        self.frozen = 0
        self.reason: str | None = None
        self._settings = settings
        self._policy = policy_class(settings.policy)(settings, model)
        self._most = model.head
        self._completed = completed
        self._step: int | None = None
        self._first = 0  # intervals completed before the first decision
        self._since = 0  # intervals completed when layers were unfrozen
        self._rate = _Rate()
        self._best: float | None = None  # lowest mean loss of an interval since layers were unfrozen

    @property
    def needs_gradients(self) -> bool:
        """Whether the policy needs gradient norms."""
        return self._policy.needs_gradients

    @property
    def is_users(self) -> bool:
        """Whether the policy is none of the package's: it may fail, or answer, on one rank alone."""
        return not type(self._policy).__module__.startswith("ds_terapipe.")

    def begin(self, step: int) -> None:
        """Count intervals from this step: the training has come so far without a policy."""
        if self._counts:
            self._first = self._since = self._completed(step)

    @property
    def _counts(self) -> bool:
        """Whether intervals matter."""
        return self._policy.decides_at_intervals or LOSS_RISE in self._settings.unfreeze

    def decide(self, step: int, norms: Callable[[], Sequence[float] | None], signals: Signals | None = None) -> int:
        """Return the number of frozen entries for the step with this 0-based ``global_steps``.

        A second call for the same step returns the same. If intervals have ended since the last step, the policy is
        called once, for the last of them.

        Args:
            step: number of completed steps.
            norms: for `FreezePolicy.at_interval`; called at the end of an interval and for a policy that needs it only, so it may
                be collective.
            signals: None if only the policy decides.

        Raises:
            ConfigError: naming the policy, where it doesn't answer with a number of entries, or with fewer than are frozen and
                may not.
        """
        if step == self._step:
            return self.frozen
        before = now = 0
        if self._counts:
            before, now = self._first if self._step is None else self._completed(self._step), self._completed(step)
        self.reason = None if signals is None else self._restarts(signals, now > before)
        if self.reason is not None:
            self.frozen, self._since, self._best = 0, now, None
            self._policy.rejoined(step)
        had = self.frozen
        if self._policy.decides_at_intervals and now > before:
            of_interval = norms() if self.needs_gradients else None
            if self.reason is None:
                self._freeze("at_interval", self._policy.at_interval(now - self._since, self.frozen, of_interval))
        self._freeze("at_step", self._policy.at_step(step, self.frozen))
        if self.frozen and not had and signals is not None:
            self._rate.begin(signals.lr)
        self._step = step
        return self.frozen

    def _restarts(self, signals: Signals, interval_ended: bool) -> str | None:
        found = None
        if LOSS_RISE in self._settings.unfreeze and interval_ended:
            loss = signals.loss()
            if loss is not None:
                if self.frozen and self._best is not None and loss > self._best + _WORSE * abs(self._best):
                    found = LOSS_RISE
                self._best = loss if self._best is None else min(loss, self._best)
        if LR_RESTART in self._settings.unfreeze and self.frozen and self._rate.restarts(signals.lr):
            found = LR_RESTART
        return found

    def _freeze(self, asked: str, entries: object) -> None:
        if not isinstance(entries, numbers.Integral) or isinstance(entries, bool):
            got = f"{shown(entries)} from {type(self._policy).__name__}.{asked}"
            raise ConfigError(f"elastic_pipeline.freeze.policy: got {got}, must be a number of entries, use an integer")
        wanted = max(0, min(int(entries), self._most))
        if wanted < self.frozen:
            if BY_POLICY not in self._settings.unfreeze:
                got = f"{wanted} from {type(self._policy).__name__}.{asked}, with {self.frozen} entries frozen"
                use = f'max(frozen, ...), or "unfreeze": [{shown(BY_POLICY)}] to have layers train again'
                raise ConfigError(f"elastic_pipeline.freeze.policy: got {got}, must be as many or more, use {use}")
            self.reason = BY_POLICY
        self.frozen = wanted

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        return {
            "policy": self._settings.policy,
            "frozen": self.frozen,
            "step": self._step,
            "first": self._first,
            "since": self._since,
            "rate": [self._rate.highest, self._rate.lowest],
            "best": self._best,
            "own": self._policy.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; another policy counts from there, with the same frozen entries."""
        self.frozen = min(state["frozen"], self._most)
        self._step, self._since, self._best = state["step"], state.get("since", 0), state.get("best")
        self._first = state.get("first", 0)
        self._rate.highest, self._rate.lowest = state.get("rate", (0.0, 0.0))
        if state["policy"] == self._settings.policy:
            self._policy.load(state["own"])
        elif self._step is not None and self._counts:
            self._since = self._completed(self._step)

"""Which entries of a PipelineModule's layer list are frozen at which step. Pure: no process groups, no tensors.

What is frozen is a prefix of the list, and it never shrinks. A policy says how long it is; :class:`Freezer` asks it at every
step. The rules ``alpha`` and ``grad_norm`` are those of PipeTransformer (He et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ds_terapipe.config import one_of
from ds_terapipe.errors import ConfigError, shown

# Rounding must not freeze a layer more: 10 (1 - (1 - 0.3)) is 3.0000000000000004.
_ROUNDING = 1e-9


class PolicySettings(Protocol):
    """What of the block ``elastic_pipeline.freeze`` concerns policies."""

    @property
    def policy(self) -> str:
        """Which one."""

    @property
    def alpha(self) -> float:
        """Share of the layers that still train."""

    @property
    def frozen_layers(self) -> tuple[tuple[int, int], ...] | None:
        """From which step on how many entries are frozen."""


@dataclass(frozen=True)
class ModelLayers:
    """What freezing has to know of a model.

    Args:
        trainable: for each entry of the PipelineModule's layer list, whether it has parameters that the user trains at the
            start.

    Raises:
        ConfigError: no entry has.
    """

    trainable: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not any(self.trainable):
            raise ConfigError(
                "model: got no parameter with requires_grad, must have one in a layer, use requires_grad_() on what trains"
            )

    @property
    def head(self) -> int:
        """Index of the last trainable entry, and so the entries of the longest prefix that may be frozen: those before it."""
        return max(index for index, trains in enumerate(self.trainable) if trains)

    @property
    def before_head(self) -> tuple[int, ...]:
        """Indices of the trainable entries before the head; there are L of them, as the rules call it."""
        return tuple(index for index in range(self.head) if self.trainable[index])

    def prefix(self, count: int) -> int:
        """Entries of the shortest prefix that holds the first ``count`` trainable entries before the head.

        Entries without parameters that follow directly are not in it.

        Raises:
            ValueError: there are not so many.
        """
        before = self.before_head
        if not 0 <= count <= len(before):
            raise ValueError(
                f"count: got {count}, must be from 0 to the {len(before)} trainable entries before the head"
            )
        return before[count - 1] + 1 if count else 0

    def frozen_of(self, frozen: int) -> int:
        """How many of the trainable entries before the head are among the first ``frozen`` entries."""
        return sum(self.trainable[: min(frozen, self.head)])


class FreezePolicy:
    """Says how many entries are frozen. A policy of one's own overrides `at_step` or `at_interval`, and is registered.

    Every rank has an instance and asks it the same, so what it returns may depend on its arguments and its own state only.
    Smaller numbers than before and numbers above ``model.head`` are allowed: the first change nothing, the second freeze all
    that may be frozen.

    Attributes:
        reads: which of the settings ``alpha`` and ``frozen_layers`` it reads; a configuration that gives another is refused.
        needs_gradients: whether `at_interval` wants the norms of gradients, for which the engine sums up squares.
        decides_at_intervals: whether `at_interval` does anything; by default, whether a subclass overrides it.

    Args:
        settings: the block ``elastic_pipeline.freeze``.
        model: the entries of the layer list.
    """

    reads: tuple[str, ...] = ()
    needs_gradients: bool = False
    decides_at_intervals: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "decides_at_intervals" not in vars(cls):
            cls.decides_at_intervals = cls.at_interval is not FreezePolicy.at_interval

    def __init__(self, settings: PolicySettings, model: ModelLayers) -> None:
        self.settings = settings
        self.model = model

    def at_step(self, step: int, frozen: int) -> int:
        """Entries that the step with this 0-based ``global_steps`` trains without, where ``frozen`` are already."""
        return frozen

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """Entries that are frozen after an interval.

        Args:
            completed: intervals since the beginning of the training.
            frozen: entries that are frozen now.
            norms: for each entry, the root of the mean square of its trained parameters' gradients, over all ranks, before
                clipping, averaged over the interval's steps; nan for entries that have none. None where the policy does not need
                it or nothing was measured.
        """
        return frozen

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep, as JSON can hold it: all that the next answers depend on beside their arguments."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned."""


class StaticPolicy(FreezePolicy):
    """Freezes nothing: the ``requires_grad`` of the user's parameters is all."""


class SchedulePolicy(FreezePolicy):
    """Freezes given numbers of entries from given steps on."""

    reads = ("frozen_layers",)

    def at_step(self, step: int, frozen: int) -> int:
        """The entries of the last pair whose step is this one or an earlier one."""
        return max((entries for begin, entries in self.settings.frozen_layers or () if begin <= step), default=frozen)


class AlphaPolicy(FreezePolicy):
    """Each interval freezes the share alpha of the layers that still train: L (1 - (1 - alpha)^T) after T of them, rounded up."""

    reads = ("alpha",)

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """The closed form, whatever was before."""
        layers = len(self.model.before_head)
        return self.model.prefix(_rounded_up(layers * (1 - (1 - self.settings.alpha) ** completed)))


class GradNormPolicy(FreezePolicy):
    """Freezes up to the layer with the smallest gradient, and at most the share alpha of the layers that still train.

    Counted among the trainable entries: f <- min(ceil(f + alpha (L - f)), argmin of the norms from f to the head). The smallest
    norm itself goes on training; nothing happens where the first unfrozen layer has it. Of equal norms the first one counts.
    """

    reads = ("alpha",)
    needs_gradients = True

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """An entry whose norm is nan is passed over: it had no gradient. An interval without any norm decides nothing."""
        before = self.model.before_head
        count = self.model.frozen_of(frozen)
        candidates = enumerate([*before, self.model.head])
        found = [] if norms is None else [(norms[index], place) for place, index in candidates if place >= count]
        found = [(norm, place) for norm, place in found if not math.isnan(norm)]
        if not found:
            return frozen
        bound = _rounded_up(count + self.settings.alpha * (len(before) - count))
        return self.model.prefix(min(bound, min(found)[1]))


class Freezer:
    """Asks a policy at every step; its answers never shrink, and never reach the head.

    Args:
        settings: the block ``elastic_pipeline.freeze``.
        model: the entries of the layer list.
        completed: how many intervals were over before the step with this 0-based ``global_steps``, see `completed_intervals`.

    Attributes:
        frozen: entries that are frozen since the last decision.
    """

    def __init__(self, settings: PolicySettings, model: ModelLayers, completed: Callable[[int], int]) -> None:
        self.frozen = 0
        self._name = settings.policy
        self._policy = policy_class(settings.policy)(settings, model)
        self._most = model.head
        self._completed = completed
        self._step: int | None = None

    @property
    def needs_gradients(self) -> bool:
        """Whether the policy wants norms of gradients."""
        return self._policy.needs_gradients

    def decide(self, step: int, norms: Callable[[], Sequence[float] | None]) -> int:
        """Entries that the step with this 0-based ``global_steps`` trains without.

        Asked twice for a step, it answers twice the same. Where intervals have ended since the step before, the policy is asked
        once, about the last of them.

        Args:
            step: as many steps have been taken.
            norms: for `FreezePolicy.at_interval`; called at the end of an interval and for a policy that needs it only, so it may
                be collective.
        """
        if step == self._step:
            return self.frozen
        if self._policy.decides_at_intervals:
            before = 0 if self._step is None else self._completed(self._step)
            now = self._completed(step)
            if now > before:
                self._freeze(self._policy.at_interval(now, self.frozen, norms() if self.needs_gradients else None))
        self._freeze(self._policy.at_step(step, self.frozen))
        self._step = step
        return self.frozen

    def _freeze(self, entries: int) -> None:
        self.frozen = max(self.frozen, min(int(entries), self._most))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON can hold it."""
        return {"policy": self._name, "frozen": self.frozen, "step": self._step, "own": self._policy.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned; under another policy, with as many frozen entries as there were."""
        self.frozen = min(state["frozen"], self._most)
        self._step = state["step"]
        if state["policy"] == self._name:
            self._policy.load(state["own"])


def completed_intervals(interval: int | str, step: int, batch: int, samples: int | None) -> int:
    """How many intervals were over before the step with this 0-based ``global_steps``.

    Args:
        interval: ``freeze.interval``, steps or ``"epoch"``.
        batch: samples of a step, over all replicas.
        samples: of ``training_data``; None without it, where intervals have to be steps.

    Raises:
        ValueError: an epoch of no ``training_data``.
    """
    if not isinstance(interval, str):
        return step // interval
    if not samples:
        raise ValueError("freeze.interval: got an epoch, must be a number of steps where there is no training_data")
    return step * batch // samples


# ------------------------------------------------------------------------------------------------------------ the registry

_POLICIES: dict[str, type[FreezePolicy]] = {}


def register_policy(name: str, cls: type[FreezePolicy]) -> None:
    """Make a policy known as ``elastic_pipeline.freeze.policy``: on every rank, before ``initialize``.

    Raises:
        ValueError: it is no subclass of `FreezePolicy`, or another one has the name.
    """
    if not (isinstance(cls, type) and issubclass(cls, FreezePolicy)):
        raise ValueError(
            f"policy {name}: got {cls!r}, must be a class, use a subclass of ds_terapipe.elastic.freeze.FreezePolicy"
        )
    if _POLICIES.get(name, cls) is not cls:
        raise ValueError(f"policy: got {shown(name)} a second time, must be a name of its own, use another one")
    _POLICIES[name] = cls


def policy_names() -> tuple[str, ...]:
    """What ``elastic_pipeline.freeze.policy`` may be."""
    return tuple(_POLICIES)


def policy_class(name: str) -> type[FreezePolicy]:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    one_of("elastic_pipeline.freeze.policy", name, policy_names(), "static")
    return _POLICIES[name]


for _name, _class in (
    ("static", StaticPolicy),
    ("schedule", SchedulePolicy),
    ("alpha", AlphaPolicy),
    ("grad_norm", GradNormPolicy),
):
    register_policy(_name, _class)


def _rounded_up(value: float) -> int:
    return math.ceil(value - _ROUNDING)

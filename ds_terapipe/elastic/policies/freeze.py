"""Freeze policies: which entries of a layer list are frozen at a step. Pure: no process groups, no tensors.

The frozen entries are a prefix of the list. A policy decides its length; `freezer.Freezer` asks it at every step. The
rules ``alpha`` and ``grad_norm`` are those of PipeTransformer (He et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_terapipe.blocks import one_of
from ds_terapipe.errors import ConfigError, shown

if TYPE_CHECKING:
    from ds_terapipe.elastic.settings import FreezeSettings

READABLE = ("alpha", "frozen_layers", "tolerance", "patience")
BY_POLICY = "policy"  # of ``freeze.unfreeze``: the policy may answer with fewer entries than before

# Rounding must not freeze a layer more: 10 (1 - (1 - 0.3)) is 3.0000000000000004.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ModelLayers:
    """The trainable entries of a model's layer list.

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
        """Index of the last trainable entry, and so the length of the longest prefix that may be frozen."""
        return max(index for index, trains in enumerate(self.trainable) if trains)

    @property
    def before_head(self) -> tuple[int, ...]:
        """Indices of the trainable entries before the head; the rules call their number L."""
        return tuple(index for index in range(self.head) if self.trainable[index])

    def prefix(self, count: int) -> int:
        """Return the length of the shortest prefix with the first ``count`` trainable entries before the head.

        Directly following entries without parameters are not part of it.

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
        """Return how many of the trainable entries before the head are among the first ``frozen`` entries."""
        return sum(self.trainable[: min(frozen, self.head)])


class FreezePolicy:
    """Decides how many entries are frozen. Your own policy overrides `at_step` or `at_interval`, and is registered.

    Every rank has an instance and calls it with the same arguments, so results may only depend on arguments and own
    state. A number above ``model.head`` freezes all that may be frozen. A smaller number than before unfreezes layers,
    and is an error unless ``freeze.unfreeze`` has "policy".

    Attributes:
        reads: settings of `READABLE` that the policy reads; a configuration with others is refused.
        needs_gradients: whether `at_interval` needs gradient norms, for which the engine sums squares.
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

    def __init__(self, settings: FreezeSettings, model: ModelLayers) -> None:
        self.settings = settings
        self.model = model

    def at_step(self, step: int, frozen: int) -> int:
        """Return the number of frozen entries for the step with this 0-based ``global_steps``.

        ``frozen``: entries that are frozen already.
        """
        return frozen

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """Return the number of frozen entries after an interval.

        Args:
            completed: intervals since the beginning of the training, or since layers were unfrozen.
            frozen: entries that are frozen now.
            norms: for each entry, the root of the mean square of its trained parameters' gradients, over all ranks, before
                clipping, averaged over the interval's steps; nan for entries that have none. None where the policy does not need
                it or nothing was measured.
        """
        return frozen

    def rejoined(self, step: int) -> None:
        """Reset the policy: from the step with this 0-based ``global_steps`` on all layers train again."""

    def state(self) -> dict[str, Any]:
        """Return all state on which later answers depend beside their arguments, as JSON types, for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""


class StaticPolicy(FreezePolicy):
    """Freezes nothing beyond the user's own ``requires_grad``."""


class SchedulePolicy(FreezePolicy):
    """Freezes given numbers of entries from given steps on; fewer than before needs "policy" in ``freeze.unfreeze``."""

    reads = ("frozen_layers",)
    _since = -1  # pairs up to this step are ignored

    def at_step(self, step: int, frozen: int) -> int:
        """Return the entries of the last pair whose step has come."""
        pairs = self.settings.frozen_layers or ()
        found = [entries for begin, entries in pairs if self._since < begin <= step]
        if found and BY_POLICY in self.settings.unfreeze:
            return found[-1]
        return max([frozen, *found])

    def rejoined(self, step: int) -> None:
        """Ignore pairs up to this step."""
        self._since = step

    def state(self) -> dict[str, Any]:
        """Return the step up to which pairs are ignored."""
        return {"since": self._since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state."""
        self._since = state.get("since", -1)


class AlphaPolicy(FreezePolicy):
    """Freezes the share alpha of the remaining layers per interval: L (1 - (1 - alpha)^T) after T, rounded up."""

    reads = ("alpha",)

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """Return the closed form, at least ``frozen``."""
        layers = len(self.model.before_head)
        return max(frozen, self.model.prefix(_rounded_up(layers * (1 - (1 - self.settings.alpha) ** completed))))


class GradNormPolicy(FreezePolicy):
    """Freezes up to the layer with the smallest gradient, and at most the share alpha of the layers that still train.

    Counted among the trainable entries: f <- min(ceil(f + alpha (L - f)), argmin of the norms from f to the head). The
    layer with the smallest norm goes on training; if it is the first unfrozen one, nothing happens. Of equal norms the
    first one counts.
    """

    reads = ("alpha",)
    needs_gradients = True

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """Apply the rule. Entries with a norm of nan had no gradient and are skipped; without norms nothing changes."""
        before = self.model.before_head
        count = self.model.frozen_of(frozen)
        candidates = enumerate([*before, self.model.head])
        found = [] if norms is None else [(norms[index], place) for place, index in candidates if place >= count]
        found = [(norm, place) for norm, place in found if not math.isnan(norm)]
        if not found:
            return frozen
        bound = _rounded_up(count + self.settings.alpha * (len(before) - count))
        return max(frozen, self.model.prefix(min(bound, min(found)[1])))


class PlateauPolicy(FreezePolicy):
    """Freezes entries, from the first on, whose gradient norm has stayed the same for some intervals.

    An interval counts for an entry if the norm changes by less than ``tolerance``, relative to the interval before. A
    change of twice that or more resets the count; between the two the count stays, so that noise at the border decides
    nothing. An entry with ``patience`` such intervals is frozen once all before it are. One interval freezes at most
    the share ``alpha`` of the layers that still train.
    """

    reads = ("alpha", "tolerance", "patience")
    needs_gradients = True

    def __init__(self, settings: FreezeSettings, model: ModelLayers) -> None:
        super().__init__(settings, model)
        self.rejoined(0)

    def rejoined(self, step: int) -> None:
        """Forget all norms."""
        self._last: list[float | None] = [None for _ in self.model.trainable]
        self._quiet = [0 for _ in self.model.trainable]

    def at_interval(self, completed: int, frozen: int, norms: Sequence[float] | None) -> int:
        """Count the quiet intervals. A norm of nan is skipped, and so is a change from a norm of zero."""
        if norms is None:
            return frozen
        for entry, norm in enumerate(norms):
            if math.isnan(norm):
                continue
            last, self._last[entry] = self._last[entry], norm
            if not last:
                continue
            change = abs(norm - last) / last
            if change < self.settings.tolerance:
                self._quiet[entry] += 1
            elif change >= 2 * self.settings.tolerance:
                self._quiet[entry] = 0
        before = self.model.before_head
        count = self.model.frozen_of(frozen)
        bound = min(_rounded_up(count + self.settings.alpha * (len(before) - count)), len(before))
        while count < bound and self._quiet[before[count]] >= self.settings.patience:
            count += 1
        return max(frozen, self.model.prefix(count))

    def state(self) -> dict[str, Any]:
        """Return the last norms, and the counts of quiet intervals."""
        return {"last": self._last, "quiet": self._quiet}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state."""
        self._last, self._quiet = list(state["last"]), list(state["quiet"])


# ------------------------------------------------------------------------------------------------------------ the registry

_POLICIES: dict[str, type[FreezePolicy]] = {}


def register_policy(name: str, cls: type[FreezePolicy]) -> None:
    """Register a policy for ``elastic_pipeline.freeze.policy``: on every rank, before ``initialize``.

    Raises:
        ValueError: it is no subclass of `FreezePolicy`, or another one has the name.
    """
    if not (isinstance(cls, type) and issubclass(cls, FreezePolicy)):
        raise ValueError(
            f"policy {name}: got {cls!r}, must be a class, use a subclass of ds_terapipe.elastic.policies.freeze.FreezePolicy"
        )
    if _POLICIES.get(name, cls) is not cls:
        raise ValueError(f"policy: got {shown(name)} a second time, must be a name of its own, use another one")
    _POLICIES[name] = cls


def policy_names() -> tuple[str, ...]:
    """Return the values that ``elastic_pipeline.freeze.policy`` may have."""
    return tuple(_POLICIES)


def policy_class(name: str) -> type[FreezePolicy]:
    """Return the policy class of a name.

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
    ("plateau", PlateauPolicy),
):
    register_policy(_name, _class)


def _rounded_up(value: float) -> int:
    return math.ceil(value - _ROUNDING)

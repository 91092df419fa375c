"""Observers of a step: called before and after each action that a runtime executes."""

from __future__ import annotations

from typing import Any

from ds_terapipe.schedule import Action


class Observer:
    """Base class of an observer of training steps and evaluations; every method does nothing by default.

    The runtime asks :attr:`watches` at the begin of a step and calls the observers that watch it. Of several observers, the
    last one is called closest to the action: last before it, and first after it.
    """

    @property
    def watches(self) -> bool:
        """Whether to call this observer in the step that begins."""
        return True

    def step_begins(self) -> None:
        """Called before the first action."""

    def action_begins(self, index: int, action: Action) -> None:
        """Called before an action; ``index``: its position in this rank's row of the grid."""

    def action_ends(self, action: Action) -> None:
        """Called after an action; on a GPU its kernels may still run."""

    def message(self, stage: int, name: str, value: Any) -> None:
        """Called with the tensors that a stage has ``"received"`` from the previous stage or will have ``"sent"`` to the next."""

    def step_ends(self) -> None:
        """Called after the last action, before gradients are reduced; not after an error."""

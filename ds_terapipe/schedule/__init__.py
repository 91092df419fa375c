"""What runs when: schedules as data. Pure functions on the standard library alone.

An order (`order`, `forward_only`) lists the computations of each stage, `with_messages` puts in sends and receives,
`validate` proves that the whole can run, `simulate` times it, and `grid_text` and `timeline_svg` show it. An engine only has
to execute the actions.
"""

from __future__ import annotations

from .actions import Action, Grid, Op, Unit
from .lower import with_messages, with_weight_gradients
from .orders import NAMES, forward_only, order, peak_live_units
from .render import grid_text, timeline_svg, timelines_svg
from .replay import Dependencies, Replay, Span, dependencies, replay
from .simulate import Simulation, StageResult, simulate
from .streams import EVAL_SENT_KEPT, POSTED_AHEAD, SENT_KEPT, Channel, stream_deadlock
from .timeline import Panel
from .validate import ScheduleError, dry_run, validate

__all__ = [
    "EVAL_SENT_KEPT",
    "NAMES",
    "POSTED_AHEAD",
    "SENT_KEPT",
    "Action",
    "Channel",
    "Dependencies",
    "Grid",
    "Op",
    "Panel",
    "Replay",
    "ScheduleError",
    "Simulation",
    "Span",
    "StageResult",
    "Unit",
    "dependencies",
    "dry_run",
    "forward_only",
    "grid_text",
    "order",
    "peak_live_units",
    "replay",
    "simulate",
    "stream_deadlock",
    "timeline_svg",
    "timelines_svg",
    "validate",
    "with_messages",
    "with_weight_gradients",
]

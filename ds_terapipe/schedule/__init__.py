"""Schedules and placements as data. Pure functions on the standard library alone.

A `Placement` assigns stages to places. An order (`order`, `forward_only`) lists the computations of each place.
`with_messages` inserts sends and receives, `with_weight_gradients` separate weight gradients; `validate` proves that
the whole can run, `simulate` times it, and `grid_text` and `timeline_svg` show it. An engine only has to execute the
actions.
"""

from __future__ import annotations

from .actions import ALL, Action, Grid, Group, Op, Unit
from .channels import EVAL_SENT_KEPT, POSTED_AHEAD, SENT_KEPT, Channel
from .given import SEARCHED, check_text, given, grid_from, text_of
from .lower import complete, covered_slices, with_messages, with_weight_gradients
from .orders import NAMES, Schedule, choices, forward_only, names_on, order, peak_live_units, register, schedule_named
from .orders.registry import held_by
from .placement import Placement, as_placement
from .render import grid_text
from .replay import Interval, dependencies, replay
from .simulate import Simulation, simulate
from .timeline import Panel, timeline_svg, timelines_svg
from .validate import ScheduleError, validate

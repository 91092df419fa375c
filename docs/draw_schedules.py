"""Draws docs/schedules.svg: 1F1B and slice-level 1F1B on one time scale, from the schedules that the engine executes.

    python docs/draw_schedules.py

Arithmetic, not a measurement: slices of equal cost, backward twice as long as forward, messages free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_terapipe.schedule import Action, Op, Panel, order, timelines_svg


def cost(slices: int) -> Callable[[Action], float]:
    return lambda action: (1 if action.op is Op.FORWARD else 2) / slices


def main() -> None:
    panels = [
        Panel("1F1B: 4 stages, 2 sequences", order("1f1b", 4, [1] * 2), cost(1)),
        Panel("slice-level 1F1B: the same, each sequence in 4 slices", order("1f1b", 4, [4] * 2), cost(4)),
    ]
    Path(__file__).with_name("schedules.svg").write_text(timelines_svg(panels))


if __name__ == "__main__":
    main()

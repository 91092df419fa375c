"""Planning of slices: their cost, their memory, and the fastest plan. Pure functions on numpy.

`choose` compares schedules, numbers of slices and lengths by simulation, under a limit on memory. It takes a `Cost`:
`MeasuredCost` is fitted to measurements, `AnalyticCost` of ``plan.analytic`` comes from operations, bytes and links.
`partition` divides layers over stages.
"""

from __future__ import annotations

from ds_terapipe.plan.choose import Request, can_choose, choose, plan_of
from ds_terapipe.plan.costs.cost import Cost, MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.layers import LayerSeconds
from ds_terapipe.plan.costs.memory import MemoryModel, MemoryUse, StageMemory, memory_use
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.result import Option, Plan
from ds_terapipe.plan.slices import Cut, Cuts, best_cut, even_cuts, slice_times
from ds_terapipe.plan.stages import Partition, gain, partition

__all__ = [
    "Cost",
    "Cut",
    "Cuts",
    "LayerSeconds",
    "MeasuredCost",
    "MemoryModel",
    "MemoryUse",
    "Option",
    "Partition",
    "Plan",
    "Request",
    "Sample",
    "StageCost",
    "StageMemory",
    "StepTimes",
    "best_cut",
    "can_choose",
    "choose",
    "even_cuts",
    "gain",
    "memory_use",
    "partition",
    "plan_of",
    "slice_times",
]

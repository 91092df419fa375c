"""Planning of slices: their cost, their memory, and the fastest plan. Pure functions on numpy.

`choose.choose` compares schedules, numbers of slices and lengths by simulation, under a limit on memory. It takes a `Cost`:
`MeasuredCost` of ``costs.cost`` is fitted to measurements, `AnalyticCost` of ``costs.analytic`` comes from operations, bytes
and links. `stages.partition` divides layers over stages.
"""

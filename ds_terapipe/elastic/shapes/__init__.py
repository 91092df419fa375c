"""Shapes of the pipeline: their costs, the choice of the fastest, and the history of a training."""

"""Inspection before the first sliced step: sequence dimensions, and whether the model can be cut."""

"""Policies for the frozen layers and the shape of the pipeline at each step. Pure."""

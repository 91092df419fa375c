"""Shapes of the pipeline: what they take, which is the fastest, and what a training has had."""

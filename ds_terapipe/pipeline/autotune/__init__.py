"""Cutting of a step: given, planned, or measured and compared."""

"""Operators that know slices: attention over the keys so far, deferred weight gradients, random numbers."""

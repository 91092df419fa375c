"""Cost of a slice in time and memory: measured, or from a datasheet."""

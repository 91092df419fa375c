"""What a slice costs in time and memory: measured, or from a datasheet."""

"""Learning rates and phases of large-batch training."""

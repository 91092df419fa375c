"""What a model's own operators do for a slice: attention over the keys so far, weight gradients that wait, random numbers."""

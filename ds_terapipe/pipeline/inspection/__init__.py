"""Before the first sliced step: where the sequence is, and whether the model can be cut."""

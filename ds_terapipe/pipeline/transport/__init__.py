"""Between ranks: messages of slices, what all agree on, and who waits for whom."""

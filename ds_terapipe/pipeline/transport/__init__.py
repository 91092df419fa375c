"""Communication between ranks: messages of slices, agreement, and timed waits."""

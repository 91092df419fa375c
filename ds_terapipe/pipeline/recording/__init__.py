"""What a step took: time, memory, a line of the log, a trace."""

"""Records of a step: time, memory, log line, trace."""

"""Which layers are frozen at which step, and which shape the pipeline has then. Pure."""

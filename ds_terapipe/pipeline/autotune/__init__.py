"""How a step is cut: given, planned, or measured and compared."""

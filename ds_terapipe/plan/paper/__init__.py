"""TeraPipe's published results, and the simulator's for the same settings."""

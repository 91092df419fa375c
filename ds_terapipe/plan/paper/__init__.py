"""TeraPipe's published results, and what the simulator makes of them."""

"""Changes of shape: layers, weights, optimiser and DeepSpeed's engine around them."""

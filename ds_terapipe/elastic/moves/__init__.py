"""From one shape to another: layers, weights, optimiser and DeepSpeed's engine around them."""

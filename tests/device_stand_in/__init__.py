"""The engine over PyTorch's CUDA build: on GPUs, on one GPU that ranks share, or on no GPU at all."""

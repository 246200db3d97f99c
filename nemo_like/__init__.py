"""Fit a model's training into GPU memory with PyTorch FSDP2, at the least cost in speed."""

"""Tensor parallelism: the cut of weights, and the forward of their modules."""

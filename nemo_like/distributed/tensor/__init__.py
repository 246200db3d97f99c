"""Tensor parallelism: which weights are cut, and what their modules do then."""

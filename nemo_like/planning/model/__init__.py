"""A model traced on fake tensors, in the shape that one rank runs."""

"""Choices of the tensors that layers save: the best of one layer, of all layers, and within a budget."""

"""Choices of what layers save: the best of one layer, of all layers, and within a budget."""

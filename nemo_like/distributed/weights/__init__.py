"""Weights of a model over ranks: where they come from, how they are named, saved and read."""

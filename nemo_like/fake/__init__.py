"""Run a model without weights or memory: for predictions, the cut into stages and the check of a split."""

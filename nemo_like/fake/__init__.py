"""Run a model without weights or memory: what predictions, the cut into stages and the check of a split use."""

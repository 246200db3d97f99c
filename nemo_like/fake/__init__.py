"""Run a model without weights or memory: what predictions, the cut into stages and the trial of a split use."""

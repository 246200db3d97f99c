"""Explain the memory of a GPU by a snapshot that PyTorch recorded there. Nothing here imports torch."""

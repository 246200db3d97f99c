"""Surveys of every model type of the installed transformers; `python -m tests.surveys` writes `docs/reference/models.md`."""

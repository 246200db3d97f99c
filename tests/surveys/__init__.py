"""Surveys of every model type of the installed transformers; `python -m tests.surveys` writes `docs/model-coverage.md`."""

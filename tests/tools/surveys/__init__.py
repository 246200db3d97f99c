"""Surveys of transformers' model types; `python -m tests.tools.surveys` writes `docs/reference/models.md`."""

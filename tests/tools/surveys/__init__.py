"""Surveys of transformers' model types; `python -m tests.tools.surveys` writes `docs/evidence/surveys/models.md`."""

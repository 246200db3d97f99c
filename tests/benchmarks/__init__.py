"""Benchmarks of ourselves: `python -m tests.benchmarks SUITE` prints what pages of `docs/evidence/` show."""

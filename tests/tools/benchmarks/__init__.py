"""Benchmarks of ourselves: `python -m tests.tools.benchmarks SUITE` prints what pages of `docs/evidence/` show."""

"""Predictions of a `PlanQuery`: a rank's step, its bytes, reserved and deciding bytes, and seconds; the fastest
choices."""

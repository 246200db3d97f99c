"""Predictions of a `PlanQuery`: a rank's step, its bytes, reserved bytes and seconds, what decides, the fastest choices."""

"""Measurements for whoever changes the code; run by `python -m benchmarks` in a clone."""

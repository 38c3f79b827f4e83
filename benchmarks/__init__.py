"""Measurements for whoever changes the code; run by tools/benchmark.py in a clone."""

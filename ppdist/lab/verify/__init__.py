"""Checks that users run on their own configuration, data and cluster."""

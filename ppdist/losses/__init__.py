"""Losses, target assignment, boxes and their suppression."""

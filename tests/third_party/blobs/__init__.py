"""What another package brings: a detector, a backbone, a format and a tracker.

In keys.py nothing imports Paddle, so that configurations are read without it.
"""

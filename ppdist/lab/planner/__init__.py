"""Planner: predicts training speed on N cards with a model (`model`, fitted by `fit`).

Nothing here needs Paddle.  Accuracy is not predicted.  See docs/planning.md.
"""

"""Planner: how fast a training is on N cards, by a model (`model`, fitted by `fit`).

Nothing here needs Paddle.  Accuracy is not predicted.  See docs/planning.md.
"""

"""Planner: how fast a training is on N cards, by a model.

    fit       the numbers of a step from measured rows, typed in or read from JSON
    predict   the model: network, step, hours; what limits it

Nothing here needs Paddle.  Accuracy is not predicted.  See docs/planning.md.
"""

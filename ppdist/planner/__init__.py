"""Planner: how long a training takes on N cards, by a model.

    what_if         the model: network, step, training; what limits it; what would help
    fit             the numbers of a step from measured rows, typed in or read from JSON
    options         a question from the command line: measured, given or assumed
    tables          predictions and fits for people, and as a plot

Nothing here needs Paddle.  Accuracy is not predicted.  See docs/planning.md.
"""

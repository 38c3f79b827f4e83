"""Planner: how long a training takes on N cards, by a model.

    network   seconds of an all-reduce: ring, tree, in two levels
    step      seconds of one optimizer step on N cards
    run       epochs, evaluations, hours; what limits them; what would help
    fit       the numbers of a step from measured rows
    measured  rows and rates from the JSON of tools/benchmark.py and tools/doctor.py
    backtest  the model against published tables (published)
    picture   the prediction drawn

Nothing here needs Paddle.  Accuracy is not predicted.  See docs/planning.md.
"""

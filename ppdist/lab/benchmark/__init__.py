"""Benchmarks on the user's own configuration, data and machines.

    step         training steps, by part
    loader       the training loader
    latency      one prediction, eager and in every exported form
    scaling      training on several numbers of processes

Every function returns plain data that can be written as JSON; ppdist benchmark prints it.
"""

"""Measured speed on the user's own configuration, data and machines.

    step         training steps and evaluations, by part; variants interleaved in one process
    loader       the training loader, beside the same without cache
    latency      one prediction, eager and in every exported form
    scaling      training and evaluation on several numbers of processes
    interleaved  groups of processes in time slices, so that all meet the same machine

Every function returns plain data for JSON; ppdist benchmark prints it.
"""

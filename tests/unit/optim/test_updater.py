"""Shares of the optimizer's state."""

from ppdist.optim.sharded_updater import assign_parameters


def test_assign_parameters_balances_parameter_sizes():
    assert assign_parameters([1, 5, 2, 2, 4], 2) == [1, 0, 1, 0, 1]
    assert assign_parameters([3], 3) == [0]

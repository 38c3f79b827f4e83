"""Shares of the optimizer's state."""

from ppdist.optim.sharded_updater import share_out


def test_share_out_balances_parameter_sizes():
    assert share_out([1, 5, 2, 2, 4], 2) == [1, 0, 1, 0, 1]
    assert share_out([3], 3) == [0]

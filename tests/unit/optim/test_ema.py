"""The average that starts again where the last stage of a run begins."""

import numpy as np
import paddle
from paddle import nn

from ppdist.optim.ema import EMA, Decay, Restart

RESTART = Restart(3, Decay(0.5))


def average(restart: Restart | None) -> tuple[nn.Linear, EMA]:
    paddle.seed(0)
    model = nn.Linear(2, 2)
    return model, EMA(model, Decay(0.9), restart=restart)


def step(model: nn.Linear, ema: EMA, number: int) -> np.ndarray:
    """One step that gives the weights a value of its own; returns their average."""
    if ema.is_due_to_restart(number):
        ema.restart({})
    model.weight.set_value(paddle.full([2, 2], float(number + 1)))
    ema.update({})
    return ema.average["weight"].numpy().copy()


def test_after_a_restart_the_average_is_of_later_weights_alone() -> None:
    model, ema = average(RESTART)
    found = [step(model, ema, number) for number in range(6)]
    expected = np.full([2, 2], 3.0)  # the weights before step 3
    for updates, number in enumerate(range(3, 6), 1):
        keep = min(0.5, (1 + updates) / (10 + updates))
        expected = keep * expected + (1 - keep) * (number + 1)
        np.testing.assert_allclose(found[number], expected, rtol=1e-6)
    assert (ema.updates, ema.restarted) == (3, 3)
    plain, without = average(None)
    for number in range(3):
        np.testing.assert_array_equal(step(plain, without, number), found[number])


def test_a_step_that_is_left_out_does_not_lose_the_restart() -> None:
    model, ema = average(RESTART)
    for number in (0, 1, 2, 4):
        step(model, ema, number)
    assert (ema.updates, ema.restarted) == (1, 3)


def test_a_longer_run_restarts_at_its_own_last_stage() -> None:
    model, ema = average(RESTART)
    for number in range(4):
        step(model, ema, number)
    _, longer = average(Restart(9, Decay(0.5)))
    longer.load(ema.state(), ema.updates, ema.restarted)
    assert longer.decay == Decay(0.9) and not longer.is_due_to_restart(8)
    assert longer.is_due_to_restart(9)
    _, same = average(RESTART)
    same.load(ema.state(), ema.updates, ema.restarted)
    assert same.decay == Decay(0.5) and not same.is_due_to_restart(4)


def test_masters_of_a_lower_precision_are_what_it_starts_from() -> None:
    _, ema = average(RESTART)
    ema.restart({"weight": paddle.full([2, 2], 7.0)})
    assert (ema.average["weight"].numpy() == 7.0).all()

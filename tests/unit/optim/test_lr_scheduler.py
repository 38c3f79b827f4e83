"""Learning rates by the step: warm-up and decay shapes; the average of weights beside them."""

import math

import pytest

from ppdist.config.optimizer import ScheduleConfig
from ppdist.optim.ema import Decay
from ppdist.optim.lr_scheduler import LRScheduler


def schedule(**values):
    config = ScheduleConfig(**values)
    return LRScheduler(
        config,
        0.1,
        momentum=0.9,
        bias_start_lr=0.2,
        warmup_steps=10,
        total_steps=110,
        steps_per_epoch=10,
    )


def test_every_schedule_warms_up_from_zero_to_the_peak():
    for name in ("cosine", "flat_cosine", "linear", "step"):
        rates = [schedule(name=name)(step) for step in range(10)]
        assert rates == pytest.approx([0.01 * (step + 1) for step in range(10)])


def test_cosine_and_linear_end_at_the_final_factor():
    for name in ("cosine", "linear", "flat_cosine"):
        rate = schedule(name=name, final_factor=0.05)
        assert rate(110) == pytest.approx(0.005)
        assert rate(10) == pytest.approx(0.1)
    assert schedule(name="cosine", final_factor=0.0)(60) == pytest.approx(0.05)
    assert schedule(name="linear", final_factor=0.0)(60) == pytest.approx(0.05)
    assert schedule(name="flat_cosine")(60) == pytest.approx(0.1)


def test_step_schedule_drops_at_its_epochs():
    rate = schedule(name="step", step_epochs=(5, 8), step_factor=0.1)
    assert [rate(49), rate(50), rate(79), rate(80)] == pytest.approx([0.1, 0.01, 0.01, 0.001])


def test_ema_spans_the_same_images_at_any_batch():
    assert Decay(0.9998, kappa=4).limit == pytest.approx(0.9992, abs=1e-6)
    for ramp_steps in (None, 2000.0):
        assert Decay(0.9998, 4, ramp_steps)(10**6) == pytest.approx(0.9998**4)
    # One update on four times the images forgets as much as four updates do.
    small, large = Decay(0.9999, 1, 2000), Decay(0.9999, 4, 2000)
    assert large(500) == pytest.approx(small(2000) ** 4)


def test_ema_ramp_without_length_spans_same_images():
    small, large = Decay(0.99999), Decay(0.99999, kappa=4)
    for update in (50, 500):  # to first order in 9 / update
        forgotten = 1 - large(update)
        assert forgotten == pytest.approx(1 - small(4 * update) ** 4, rel=0.2)


def test_the_ramps_are_those_of_the_two_families():
    assert Decay(0.9998)(1) == pytest.approx(2 / 11)
    assert Decay(0.9999, 1, 2000)(2000) == pytest.approx(0.9999 * (1 - math.exp(-1)))
    assert Decay(0.9999, 1, 2000)(1) == pytest.approx(5e-4, rel=1e-3)


def test_biases_and_momentum_have_own_warmup_start():
    warm = schedule(warmup_bias_lr=0.2, warmup_momentum=0.5)
    first, middle, last, after = (warm.rates(step) for step in (0, 4, 9, 10))
    assert first == pytest.approx((0.01, 0.19, 0.54))
    assert middle == pytest.approx((0.05, 0.15, 0.7))
    assert last == pytest.approx((0.1, 0.1, 0.9))
    assert after == pytest.approx((warm(10), warm(10), 0.9))
    assert schedule().rates(3) == pytest.approx((0.04, 0.04, 0.9))

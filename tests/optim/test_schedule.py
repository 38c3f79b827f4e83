"""Learning rates: scaling, warm-up compensation, decay shapes."""

import math

import pytest

from ppdist.engine.derived import derive
from ppdist.optim.ema import Decay, EMAConfig
from ppdist.optim.optimizer import OptimizerConfig
from ppdist.optim.schedule import Schedule, ScheduleConfig, scaled_lr, warmup_images


def schedule(**values):
    return Schedule(ScheduleConfig(**values), 0.1, momentum=0.9, bias_start_lr=0.2, warmup_steps=10,
                    total_steps=110, steps_per_epoch=10)  # fmt: skip


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.04), ("sqrt", 0.02), ("none", 0.01)])
def test_learning_rate_follows_the_total_batch(rule, expected):
    assert scaled_lr(0.01, 256, 64, rule) == pytest.approx(expected)


def test_warm_up_grows_with_the_batch_and_is_capped_at_four_epochs():
    coco = 118_287
    assert warmup_images(1, coco, 64, 64, "auto") == coco
    assert warmup_images(1, coco, 256, 64, "auto") == pytest.approx(2 * coco)
    assert warmup_images(1, coco, 64 * 64, 64, "auto") == 4 * coco
    assert warmup_images(5, coco, 256, 64, "auto") == 5 * coco  # already longer than the cap
    assert warmup_images(1, coco, 256, 64, "none") == coco
    assert warmup_images(0.03, coco, 256, 8, "auto") == pytest.approx(
        max(0.03 * coco, 500 * 8) * math.sqrt(32)
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
    assert schedule(name="flat_cosine", flat_fraction=0.5)(60) == pytest.approx(0.1)


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


def test_the_ramps_are_those_of_the_two_families():
    assert Decay(0.9998)(1) == pytest.approx(2 / 11)
    assert Decay(0.9999, 1, 2000)(2000) == pytest.approx(0.9999 * (1 - math.exp(-1)))
    assert Decay(0.9999, 1, 2000)(1) == pytest.approx(5e-4, rel=1e-3)


def test_biases_and_momentum_warm_up_from_values_of_their_own():
    warm = schedule(warmup_bias_lr=0.2, warmup_momentum=0.5)
    first, middle, last, after = (warm.rates(step) for step in (0, 4, 9, 10))
    assert first == pytest.approx((0.01, 0.19, 0.54))
    assert middle == pytest.approx((0.05, 0.15, 0.7))
    assert last == pytest.approx((0.1, 0.1, 0.9))
    assert after == pytest.approx((warm(10), warm(10), 0.9))
    assert schedule().rates(3) == pytest.approx((0.04, 0.04, 0.9))


def test_a_warm_up_is_not_shorter_than_asked_for():
    def warmup_steps(least):
        return derive(
            world=1, dataset_size=205, batch_size_per_card=16, accumulate_steps=1, epochs=60,
            max_steps=None, optimizer=OptimizerConfig(), ema=EMAConfig(),
            schedule=ScheduleConfig(warmup_epochs=3, warmup_least_steps=least),
        ).schedule.warmup_steps  # fmt: skip

    assert (warmup_steps(0), warmup_steps(100), warmup_steps(10_000)) == (39, 100, 390)


def test_four_cards_derive_a_scaled_run_from_the_same_config():
    def run(world):
        return derive(
            world=world, dataset_size=1000, batch_size_per_card=8, accumulate_steps=2, epochs=10,
            max_steps=None, schedule=ScheduleConfig(warmup_epochs=1, warmup_compensation="none"),
            optimizer=OptimizerConfig(lr=0.01, reference_batch_size=16), ema=EMAConfig(decay=0.99),
        )  # fmt: skip

    one, four = run(1), run(4)
    assert (one.total_batch, four.total_batch) == (16, 64)
    assert (one.steps_per_epoch, four.steps_per_epoch) == (63, 16)
    assert four.schedule.peak_lr == pytest.approx(0.04)
    assert (one.schedule.warmup_steps, four.schedule.warmup_steps) == (63, 16)
    assert four.ema_decay.limit == pytest.approx(0.99**4)
    assert ("total batch", "64", "4 ranks x 8 images x 2 micro-steps") in four.rows()

"""What follows from a total batch other than the reference, with numbers worked out by hand."""

import math

import pytest

from ppdist.optim.lr_scheduler import (
    effective_batch_ratio,
    epochs_factor,
    rate_factor,
    warmup_images,
)

COCO = 118_287


def test_a_noise_scale_holds_a_large_batch_back():
    # eps(B) = eps_max / (1 + B_noise / B): 1 / 17 at 64 and 1 / 2 at 1024 of 1024, so 8.5 times.
    assert effective_batch_ratio(1024, 64, 1024) == pytest.approx(8.5)
    assert rate_factor(effective_batch_ratio(1024, 64, 1024), "sqrt") == pytest.approx(
        math.sqrt(8.5)
    )
    assert effective_batch_ratio(64, 64, 1024) == 1.0
    assert effective_batch_ratio(10**9, 64, 1024) == pytest.approx(17.0, rel=1e-5)  # 1 + 1024 / 64
    assert effective_batch_ratio(128, 64, 1e9) == pytest.approx(2.0, rel=1e-6)
    # A smaller batch gives up less than its share: 1 / 33 against 1 / 17.
    assert effective_batch_ratio(32, 64, 1024) == pytest.approx(17 / 33)


def test_warmup_grows_with_batch_by_a_fifth_of_the_run_at_most():
    assert warmup_images(1, 80, COCO, 64, 64, "auto") == COCO
    assert warmup_images(1, 80, COCO, 256, 64, "auto") == pytest.approx(2 * COCO)
    assert warmup_images(5, 80, COCO, 256, 64, "auto") == pytest.approx(10 * COCO)
    assert warmup_images(5, 20, COCO, 256, 64, "auto") == pytest.approx(9 * COCO)  # 5 + 20 / 5
    assert warmup_images(1, 80, COCO, 64 * 1024, 64, "auto") == pytest.approx(17 * COCO)
    assert warmup_images(1, 80, COCO, 256, 64, "none") == COCO
    assert warmup_images(0, 80, COCO, 256, 64, "auto") == 0
    assert warmup_images(0.03, 17, COCO, 256, 8, "auto") == pytest.approx(4000 * math.sqrt(32))


def test_warmup_steps_never_exceed_reference_or_jump():
    # 200 images at batch 8 are 25 steps, however far that is below 500.
    assert warmup_images(0.01, 80, 20_000, 16, 8, "auto") == pytest.approx(400)
    assert warmup_images(0.01, 80, 20_000, 9, 8, "auto") == pytest.approx(225)


def test_adam_warmup_keeps_second_moment_steps():
    # 20 000 images at batch 8: 2500 steps.  At 32: by sqrt(4) 1250 steps, of the 2000 it needs.
    assert warmup_images(1, 15, 20_000, 32, 8, "auto") == pytest.approx(40_000)
    assert warmup_images(1, 15, 20_000, 32, 8, "auto", beta2=0.999) == pytest.approx(64_000)
    assert warmup_images(1, 15, 20_000, 32, 8, "auto", beta2=0.996) == pytest.approx(40_000)
    # No more steps than at the reference, and no more than a fifth of 15 epochs beyond the one.
    assert warmup_images(0.2, 15, 20_000, 32, 8, "auto", beta2=0.999) == pytest.approx(16_000)
    assert warmup_images(1, 15, 20_000, 128, 8, "auto", beta2=0.999) == pytest.approx(80_000)
    assert warmup_images(1, 15, 20_000, 8, 8, "auto", beta2=0.999) == 20_000


def test_epochs_grow_with_batch_past_noise_scale():
    assert epochs_factor(1024, 64, 1024) == pytest.approx(2 / 1.0625)
    assert epochs_factor(64, 64, 1024) == 1.0
    assert epochs_factor(8, 64, 1024) == 1.0  # a smaller batch does not cut them
    # MLPerf's RetinaNet: 4.0 epochs at batch 256, 8.6 at 2560.
    assert 4.0 * epochs_factor(2560, 256, 1830) == pytest.approx(8.6, rel=0.03)
    # and Mask R-CNN: 14.0 at 128, 17.1 at 256.
    assert 14.0 * epochs_factor(256, 128, 450) == pytest.approx(17.1, rel=0.01)

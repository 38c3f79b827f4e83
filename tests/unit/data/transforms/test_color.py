"""Colours, HSV, blur and grey against what they claim."""

import colorsys

import cv2
import numpy as np
import pytest

from ppdist.config.augment import AugmentConfig
from ppdist.data.transforms.color import (
    blur,
    grey,
    hsv,
    random_colours,
    recolour_hsv,
)
from ppdist.data.types import Sample, keyed_generator


def changed(step, image_HW3, key=0, **augment) -> np.ndarray:
    """Pixels after a step of PIXEL_STEPS."""
    sample = Sample(image_HW3, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), 0)
    return step(sample, AugmentConfig(**augment), keyed_generator(0, key)).image_HW3


def test_neutral_colours_are_identity():
    plain = np.full((4, 4, 3), 100, np.uint8)
    recoloured = 0
    for sample in range(50):
        assert random_colours(0.0, keyed_generator(0, sample)) is None
        matrix = random_colours(1.0, keyed_generator(0, sample))
        after = cv2.transform(plain, matrix)
        assert np.ptp(after.astype(int), axis=2).max() <= 2, "hue and saturation leave grey alone"
        assert 100 * 0.5 - 33 <= after.mean() <= 100 * 1.5 + 33
        recoloured += abs(after.mean() - 100) > 5
    assert recoloured > 30


def test_hsv_turns_scales_and_leaves_grey_grey():
    colours = np.array([[[200, 80, 40], [100, 180, 120], [128, 128, 128]]], np.uint8)
    hues, saturations, values = [], [], []
    for key in range(200):
        after = changed(hsv, colours, key, hsv=(0.05, 0.5, 0.3))
        assert np.ptp(after[0, 2].astype(int)) <= 1
        before, now = (cv2.cvtColor(x, cv2.COLOR_RGB2HSV)[0].astype(int) for x in (colours, after))
        hues.append((now[0, 0] - before[0, 0] + 90) % 180 - 90)
        saturations.append(now[1, 1] / before[1, 1])
        values.append(now[2, 2] / 128)
    assert -12 <= min(hues) < -5 and 5 < max(hues) <= 12  # 0.05 of 180 is 9, and rounding
    assert 0.45 < min(saturations) < 0.6 and 1.3 < max(saturations) <= 1.55
    assert 0.69 < min(values) < 0.75 and 1.25 < max(values) < 1.31
    assert changed(hsv, colours) is colours


@pytest.mark.parametrize(
    "change", [(0.4, 0, 0), (-0.4, 0, 0), (-0.02, 0.7, -0.4), (0.01, -0.7, 0.4)]
)
def test_hsv_is_that_of_the_standard_library(change):
    colours = np.random.RandomState(0).randint(0, 256, (65, 40, 3)).astype(np.uint8)
    found = recolour_hsv(colours, change)
    turn, saturation, value = change
    for before, after in zip(colours.reshape(-1, 3), found.reshape(-1, 3)):
        h, s, v = colorsys.rgb_to_hsv(*(before / 255))
        s, v = min(1, s * (1 + saturation)), min(1, v * (1 + value))
        expected = 255 * np.array(colorsys.hsv_to_rgb((h + turn) % 1, s, v))
        assert np.abs(after - expected).max() <= 10  # hues are whole steps of two degrees


def test_blur_and_grey_do_what_they_say():
    noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)
    spreads = [changed(blur, noise, key, blur=1.0).std() for key in range(20)]
    assert max(spreads) < noise.std() * 0.8 and min(spreads) < noise.std() * 0.3
    found = changed(grey, noise, grey=1.0)
    assert np.ptp(found, axis=2).max() == 0
    np.testing.assert_allclose(found[..., 0], noise @ [0.299, 0.587, 0.114], atol=0.6)

"""Expand, crop, mirror and resize: boxes follow pixels."""

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.config.augment import AugmentConfig
from ppdist.data.transforms import geometry
from ppdist.data.transforms.geometry import (
    FILL,
    GeometryParams,
    ResizeParams,
    crop,
    expand,
    map_boxes,
    place_window,
    random_geometry,
    render,
    resize_for_evaluation,
    stretch_image,
)
from ppdist.data.types import keyed_generator
from tests.unit.data.pictures import picture

NOTHING = AugmentConfig(distort=0, expand=0, crop=0, flip=0, random_interpolation=False)


def test_plain_image_of_input_size_is_unchanged():
    image, boxes = picture(), np.array([[3, 4, 30, 40]], np.float32)
    whole_image = GeometryParams.of_image(boxes, 64, 48, (48, 64))
    placement = random_geometry(whole_image, NOTHING, keyed_generator(0, 1)).placement("stretch")
    np.testing.assert_array_equal(render(image, placement, cv2.INTER_LINEAR), image)
    mapped, keep = map_boxes(boxes, placement)
    np.testing.assert_array_equal(mapped, boxes)
    assert keep.all()


def mirrored(*axes: str) -> ResizeParams:
    """Nothing but this."""
    values = zip(ResizeParams.__annotations__, stretch_image(64, 48, (48, 64)))
    return ResizeParams(**dict(values) | dict.fromkeys(axes, True))


def test_mirroring_twice_is_nothing():
    image, boxes = picture(), np.array([[3, 4, 30, 40]], np.float32)
    for axis in ("mirror_x", "mirror_y"):
        placement = mirrored(axis)
        once = render(image, placement, cv2.INTER_LINEAR)
        np.testing.assert_array_equal(once, image[:, ::-1] if axis == "mirror_x" else image[::-1])
        twice, _ = map_boxes(map_boxes(boxes, placement)[0], placement)
        np.testing.assert_allclose(twice, boxes)
    both = mirrored("mirror_x", "mirror_y")
    np.testing.assert_array_equal(render(image, both, cv2.INTER_LINEAR), image[::-1, ::-1])


def test_what_an_expanded_image_does_not_cover_is_fill():
    image = np.zeros((48, 64, 3), np.uint8)
    placement = place_window(np.array([-64.0, -48.0, 128.0, 96.0]), 64, 48, (144, 192))
    assert placement == ResizeParams((0, 0, 64, 48), (64, 48, 128, 96), 144, 192)
    drawn = render(image, placement, cv2.INTER_LINEAR)
    assert (drawn[:48] == FILL).all() and (drawn[48:96, 64:128] == 0).all()
    assert (drawn == FILL).all(2).sum() == 144 * 192 - 48 * 64


def test_expanding_keeps_the_image_inside_and_the_aspect():
    for sample in range(50):
        params = GeometryParams.of_image(np.zeros((0, 4)), 64, 48, (48, 64))
        x1, y1, x2, y2 = expand(params, AugmentConfig(expand=1), keyed_generator(0, sample)).window
        assert x1 <= 0 and y1 <= 0 and x2 >= 64 and y2 >= 48
        assert 1 <= (x2 - x1) / 64 <= 4
        assert np.isclose((x2 - x1) / (y2 - y1), 64 / 48)


def test_crop_holds_box_centre_and_stays_in_window():
    boxes = np.array([[10, 10, 40, 40], [100, 80, 140, 110]], np.float32)
    window, crops = np.array([0.0, 0, 160, 120]), 0
    for sample in range(100):
        params = GeometryParams.of_image(boxes, 160, 120, (120, 160))
        part = crop(params, AugmentConfig(crop=1), keyed_generator(1, sample)).window
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        assert ((centres > part[:2]) & (centres < part[2:])).all(1).any()
        assert (part[:2] >= 0).all() and (part[2:] <= window[2:] + 1e-9).all()
        crops += not np.array_equal(part, window)
        assert 0.3 - 1e-6 <= np.sqrt((part[2:] - part[:2]).prod() / (160 * 120)) <= 1
    assert crops > 50


def test_a_crop_is_good_when_one_box_overlaps_it_enough(monkeypatch):
    monkeypatch.setattr(geometry, "_CROP_OVERLAPS", (0.5,))
    window = np.array([0.0, 0.0, 160.0, 120.0])
    boxes = np.array([[10.0, 10.0, 130.0, 110.0], [150.0, 2.0, 156.0, 8.0]])  # one large, one far
    params, config = GeometryParams.of_image(boxes, 160, 120, (120, 160)), AugmentConfig(crop=1)
    parts = [crop(params, config, keyed_generator(2, sample)).window for sample in range(10)]
    assert not any(np.array_equal(part, window) for part in parts)
    for x1, y1, x2, y2 in parts:
        inter = (min(x2, 130) - max(x1, 10)) * (min(y2, 110) - max(y1, 10))
        assert inter / ((x2 - x1) * (y2 - y1) + 120 * 100 - inter) >= 0.5


def test_objects_off_centre_or_too_small_are_dropped():
    boxes = np.array([[0, 0, 10, 10], [50, 50, 50.4, 70], [90, 90, 130, 130]], np.float32)
    placement = ResizeParams((6, 0, 100, 100), (0, 0, 94, 100), 100, 94)
    mapped, keep = map_boxes(boxes, placement)
    assert keep.tolist() == [False, False, False]
    mapped, keep = map_boxes(boxes, stretch_image(200, 200, (200, 200)))
    assert keep.tolist() == [True, False, True]
    mapped, keep = map_boxes(np.zeros((0, 4), np.float32), placement)
    assert mapped.shape == (0, 4) and keep.shape == (0,)


def test_evaluation_resizes_cubic_without_ratio():
    image = picture()
    expected = cv2.resize(image, (40, 96), interpolation=cv2.INTER_CUBIC)
    np.testing.assert_array_equal(resize_for_evaluation(image, (96, 40)), expected)


def test_antialiased_pixels_are_means_under_a_triangle():
    image_1W3 = np.repeat(np.array([[0, 90, 0, 60]], np.uint8)[..., None], 3, 2)
    found = resize_for_evaluation(image_1W3, (1, 2), "stretch_antialiased")
    expected = (0.75 * 90 / 1.75, (0.25 * 90 + 0.75 * 60) / 1.75)
    assert found[0, :, 0].tolist() == [round(value) for value in expected]


@pytest.mark.parametrize(
    ("shape", "size", "most"),
    [
        ((340, 255), (204, 108), 0),
        ((71, 205), (262, 239), 0),
        ((50, 600), (50, 64), 0),
        ((200, 64), (640, 64), 0),
        ((332, 120), (251, 281), 1),  # the width grows: Pillow may begin with the height
    ],
)
def test_antialiased_pixels_are_those_of_pillow(shape, size, most):
    """Source: what torchvision calls for an image of Pillow, in torch's RT-DETRv2 and D-FINE."""
    image_HW3 = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    found = resize_for_evaluation(image_HW3, size, "stretch_antialiased")
    expected = np.asarray(Image.fromarray(image_HW3).resize(size[::-1], Image.Resampling.BILINEAR))
    assert np.abs(found.astype(int) - expected).max() <= most

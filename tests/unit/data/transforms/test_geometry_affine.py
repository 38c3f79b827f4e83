"""Turning, zooming, slanting and shifting: boxes follow pixels, and nothing else moves."""

import cv2
import numpy as np
import pytest

from ppdist.config.augment import AffineConfig, AugmentConfig
from ppdist.data.transforms.geometry import (
    GeometryParams,
    affine,
    bounding_pixels,
    box_matrix,
    map_by_matrix,
    paste,
    scale_shift_matrix,
)
from ppdist.data.types import keyed_generator

NOTHING = AffineConfig()
EVERYTHING = AffineConfig(rotate=45, scale=0.5, shear=15, translate=0.2)
UPRIGHT = AffineConfig(scale=0.5, translate=0.2)


def view(config, key=0, canvas=(120, 160), size=(120, 160), mirrored=(False, False)):
    mosaic = GeometryParams(*canvas[::-1], size, mirror_x=mirrored[0], mirror_y=mirrored[1])
    return affine(mosaic, AugmentConfig(affine=config), keyed_generator(7, key)).view_33


def extent_of(image_HW3) -> np.ndarray:
    """(x1, y1, x2, y2) around the pixels that are more white than black."""
    ys, xs = np.nonzero(image_HW3[..., 0] > 127)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def test_rotated_box_at_border_ends_at_visible_part():
    half = np.sqrt(0.5)
    turn = np.array([[half, -half, 0], [half, half, 0], [0, 0, 1]])  # by 45 degrees about (0, 0)
    boxes = np.array([[-10, -10, 10, 10], [0, 0, 40, 40]], np.float32)
    mapped, keep = map_by_matrix(boxes, scale_shift_matrix(to=(0, 50)) @ turn, (100, 100))
    tip = 20 * half
    np.testing.assert_allclose(mapped, [[0, 50 - tip, tip, 50 + tip], [0, 50, 2 * tip, 100]])
    assert keep.all()
    # A slanting bar passes by the input's corner; a fifth of the area around it is in sight.
    bar = np.array([[0, -1, 64, 1]], np.float32)
    assert not map_by_matrix(bar, scale_shift_matrix(to=(80, -25)) @ turn, (100, 100))[1][0]


def test_tenth_of_rotated_box_uses_its_own_area():
    half = np.sqrt(0.5)
    turn = np.array([[half, -half, 0], [half, half, 0], [0, 0, 1]])
    box = np.array([[-50, -50, 50, 50]], np.float32)
    for depth, kept in ((30, False), (34, True)):  # of a tip that is `depth` ** 2 of 100 ** 2
        matrix = scale_shift_matrix(to=(depth - 100 * half, 100)) @ turn
        assert map_by_matrix(box, matrix, (200, 200))[1].tolist() == [kept]


def test_upright_boxes_end_at_pixels_without_bias():
    offsets = []
    for key in range(100):
        image = np.zeros((120, 160, 3), np.uint8)
        image[40:80, 60:100] = 255
        matrix = view(UPRIGHT, key)
        drawn = np.zeros((120, 160, 3), np.uint8)
        paste(drawn, image, (0, 0, 160, 120), matrix)
        mapped, _ = map_by_matrix(np.array([[60, 40, 100, 80]], np.float32), matrix, (120, 160))
        offsets.append(extent_of(drawn) - mapped[0])
    # Half a pixel off, as OpenCV's own convention would have it, would show in the mean.
    assert np.abs(np.mean(offsets, 0)).max() < 0.15


def test_identity_affine_keeps_canvas_centre_as_is():
    image = np.random.RandomState(0).randint(0, 256, (120, 160, 3)).astype(np.uint8)
    matrix = view(NOTHING)
    np.testing.assert_allclose(matrix, np.eye(3), atol=1e-12)
    drawn = np.zeros_like(image)
    paste(drawn, image, (0, 0, 160, 120), matrix)
    np.testing.assert_array_equal(drawn, image)
    middle = view(NOTHING, canvas=(240, 320))
    np.testing.assert_allclose(middle @ [160, 120, 1], [80, 60, 1])


def test_what_the_numbers_mean():
    angles, gains, shifts = [], [], []
    for key in range(200):
        turned = view(AffineConfig(rotate=30), key)
        angles.append(np.rad2deg(np.arctan2(turned[0, 1], turned[0, 0])))
        gains.append(view(AffineConfig(scale=0.5), key)[0, 0])
        shifts.append(view(AffineConfig(translate=0.1), key)[:2, 2] / [160, 120])
    assert -30 <= min(angles) < -25 and 25 < max(angles) <= 30
    assert 0.5 <= min(gains) < 0.55 and 1.45 < max(gains) <= 1.5
    assert -0.1 <= np.min(shifts) < -0.09 and 0.09 < np.max(shifts) <= 0.1
    slanted = [view(AffineConfig(shear=10), key) for key in range(50)]
    assert all(abs(matrix[0, 1]) <= np.tan(np.deg2rad(10)) for matrix in slanted)
    assert len({matrix[0, 1] for matrix in slanted}) == 50


def test_objects_hardly_seen_too_small_or_too_thin_go():
    boxes = np.array(
        [
            [-90, 10, 11, 50],  # more than a tenth of it is seen
            [-90, 10, 9, 50],  # less
            [10, 10, 13, 13],
            [10, 10, 12, 40],  # two pixels wide
            [0, 10, 150, 12.5],
            [0, 10, 290, 12.2],  # 130 times as wide as high
            [-500, -500, -400, -400],
        ],
        np.float32,
    )
    mapped, keep = map_by_matrix(boxes, np.eye(3), (300, 300))
    assert keep.tolist() == [True, False, True, False, True, False, False]
    np.testing.assert_array_equal(mapped[0], [0, 10, 11, 50])
    assert (mapped >= 0).all() and (mapped <= 300).all()
    mapped, keep = map_by_matrix(np.zeros((0, 4), np.float32), np.eye(3), (300, 300))
    assert mapped.shape == (0, 4) and keep.shape == (0,)


@pytest.mark.parametrize("config", [UPRIGHT, EVERYTHING])
def test_touching_images_leave_no_gap_nor_spill(config):
    white = np.full((50, 60, 3), 255, np.uint8)
    for key in range(20):
        matrix = view(config, key)
        apart, whole = (np.full((120, 160, 3), 114, np.uint8) for _ in range(2))
        for box in ((20, 10, 80, 60), (80, 10, 140, 60), (20, 60, 80, 110), (80, 60, 140, 110)):
            paste(apart, white, (0, 0, 60, 50), matrix @ box_matrix((0, 0, 60, 50), box))
        paste(whole, white, (0, 0, 60, 50), matrix @ box_matrix((0, 0, 60, 50), (20, 10, 140, 110)))
        if config is UPRIGHT:
            np.testing.assert_array_equal(apart, whole)
        around = np.ones((3, 3), np.uint8)  # slanted outlines may differ by a pixel
        eroded = cv2.erode(whole, around, borderType=cv2.BORDER_CONSTANT, borderValue=(0, 0, 0))
        assert (apart >= eroded).all()
        assert (apart <= cv2.dilate(whole, around)).all()
        assert set(np.unique(apart)) <= {114, 255}


def test_image_out_of_view_is_not_drawn():
    image = np.full((10, 10, 3), 255, np.uint8)
    for x, y in ((200, 0), (-11, 0), (0, 130), (0, -10)):
        matrix = scale_shift_matrix(to=(x, y))
        left, top, right, bottom = bounding_pixels((0, 0, 10, 10), matrix, (120, 160))
        assert left >= right or top >= bottom
        drawn = np.zeros((120, 160, 3), np.uint8)
        paste(drawn, image, (0, 0, 10, 10), matrix)
        assert not drawn.any()
    assert bounding_pixels((0, 0, 10, 10), scale_shift_matrix(to=(-5, 115)), (120, 160)) == (
        0,
        115,
        5,
        120,
    )


@pytest.mark.parametrize("mirror", [1, -1])
def test_enlarged_small_image_matches_its_boxes(mirror):
    rng = keyed_generator(3, 1 + mirror)
    for zoom in (2.0, 2.1, 7.0, 15.0):
        image = np.full((12, 15, 3), 1, np.uint8)
        image[4:7, 5:9] = 255
        scale = np.array([mirror * zoom, zoom])
        matrix = scale_shift_matrix(
            scale=scale, to=[60, 55] - scale * [7, 5.5] + rng.uniform(-9, 9, 2)
        )
        drawn = np.zeros((110, 120, 3), np.uint8)
        drawn_as = paste(drawn, image, (0, 0, 15, 12), matrix)
        expected, _ = map_by_matrix(np.array([[5, 4, 9, 7]], np.float32), drawn_as, (110, 120))
        np.testing.assert_allclose(extent_of(drawn), expected[0], atol=1.6)
        left, top, right, bottom = bounding_pixels((0, 0, 15, 12), matrix, (110, 120))
        assert (drawn[top:bottom, left:right] > 0).all()
        drawn[top:bottom, left:right] = 0
        assert not drawn.any()


def test_a_zoom_looks_like_a_resize():
    smooth = cv2.GaussianBlur(
        np.random.RandomState(0).randint(0, 256, (60, 80, 3)).astype(np.uint8), (0, 0), 3
    )
    drawn = np.zeros((90, 120, 3), np.uint8)
    paste(drawn, smooth, (0, 0, 80, 60), box_matrix((0, 0, 80, 60), (0, 0, 120, 90)))
    resized = cv2.resize(smooth, (120, 90), interpolation=cv2.INTER_LINEAR)
    assert np.abs(drawn.astype(int) - resized).max() <= 3

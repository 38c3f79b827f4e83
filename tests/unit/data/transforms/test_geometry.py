"""Geometry and colours of augmentation, and what is accepted as an image."""

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import DataError
from ppdist.config.augment import AugmentConfig
from ppdist.data.image import read_image
from ppdist.data.transforms import geometry
from ppdist.data.transforms.color import random_colours
from ppdist.data.transforms.geometry import (
    FILL,
    ResizeParams,
    cropped,
    expanded,
    map_boxes,
    place,
    random_placement,
    render,
    resize_for_evaluation,
    whole,
)
from ppdist.data.types import keyed_generator
from tests.unit.data.pictures import exif, jpeg, picture

NOTHING = AugmentConfig(distort=0, expand=0, crop=0, flip=0, random_interpolation=False)


def white_boxes(boxes, height=120, width=160) -> np.ndarray:
    image = np.zeros((height, width, 3), np.uint8)
    for x1, y1, x2, y2 in boxes:
        image[y1:y2, x1:x2] = 255
    return image


def test_plain_image_of_input_size_is_unchanged():
    image, boxes = picture(), np.array([[3, 4, 30, 40]], np.float32)
    placement = random_placement(boxes, 64, 48, (48, 64), NOTHING, keyed_generator(0, 1))
    np.testing.assert_array_equal(render(image, placement, cv2.INTER_LINEAR), image)
    mapped, keep = map_boxes(boxes, placement)
    np.testing.assert_array_equal(mapped, boxes)
    assert keep.all()


def test_boxes_follow_pixels_in_expand_crop_and_flip():
    boxes = np.array([[20, 30, 60, 70], [90, 10, 150, 100]], np.float32)
    config = AugmentConfig(distort=0, expand=1, expand_most=2.5, crop=1, flip=0.5,
                           flip_vertical=0.5)  # fmt: skip
    checked = 0
    for sample in range(60):
        for number, box in enumerate(boxes):
            image = white_boxes([box.astype(int)])
            rng = keyed_generator(5, sample)
            placement = random_placement(boxes, 160, 120, (200, 240), config, rng)
            mapped, keep = map_boxes(boxes, placement)
            drawn = render(image, placement, cv2.INTER_NEAREST)
            ys, xs = np.nonzero((drawn == 255).all(2))
            if keep[number]:
                found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
                np.testing.assert_allclose(mapped[number], found, atol=2.6)  # a source pixel wide
                checked += 1
    assert checked > 40


def test_mirroring_twice_is_nothing():
    image, boxes = picture(), np.array([[3, 4, 30, 40]], np.float32)
    for axis in ("mirror_x", "mirror_y"):
        placement = whole(64, 48, (48, 64))._replace(**{axis: True})
        once = render(image, placement, cv2.INTER_LINEAR)
        np.testing.assert_array_equal(once, image[:, ::-1] if axis == "mirror_x" else image[::-1])
        twice, _ = map_boxes(map_boxes(boxes, placement)[0], placement)
        np.testing.assert_allclose(twice, boxes)
    both = whole(64, 48, (48, 64))._replace(mirror_x=True, mirror_y=True)
    np.testing.assert_array_equal(render(image, both, cv2.INTER_LINEAR), image[::-1, ::-1])


def test_what_an_expanded_image_does_not_cover_is_fill():
    image = np.zeros((48, 64, 3), np.uint8)
    placement = place(np.array([-64.0, -48.0, 128.0, 96.0]), 64, 48, (144, 192))
    assert placement == ResizeParams((0, 0, 64, 48), (64, 48, 128, 96), 144, 192)
    drawn = render(image, placement, cv2.INTER_LINEAR)
    assert (drawn[:48] == FILL).all() and (drawn[48:96, 64:128] == 0).all()
    assert (drawn == FILL).all(2).sum() == 144 * 192 - 48 * 64


def test_expanding_keeps_the_image_inside_and_the_aspect():
    for sample in range(50):
        window = expanded(np.array([0.0, 0, 64, 48]), 4.0, keyed_generator(0, sample))
        x1, y1, x2, y2 = window
        assert x1 <= 0 and y1 <= 0 and x2 >= 64 and y2 >= 48
        assert 1 <= (x2 - x1) / 64 <= 4
        assert np.isclose((x2 - x1) / (y2 - y1), 64 / 48)


def test_crop_holds_box_centre_and_stays_in_window():
    boxes = np.array([[10, 10, 40, 40], [100, 80, 140, 110]], np.float32)
    window, crops = np.array([0.0, 0, 160, 120]), 0
    for sample in range(100):
        part = cropped(window, boxes, 0.3, keyed_generator(1, sample))
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
    parts = [cropped(window, boxes, 0.3, keyed_generator(2, sample)) for sample in range(10)]
    assert not any(np.array_equal(part, window) for part in parts)
    for x1, y1, x2, y2 in parts:
        inter = (min(x2, 130) - max(x1, 10)) * (min(y2, 110) - max(y1, 10))
        assert inter / ((x2 - x1) * (y2 - y1) + 120 * 100 - inter) >= 0.5


def test_objects_off_centre_or_too_small_are_dropped():
    boxes = np.array([[0, 0, 10, 10], [50, 50, 50.4, 70], [90, 90, 130, 130]], np.float32)
    placement = ResizeParams((6, 0, 100, 100), (0, 0, 94, 100), 100, 94)
    mapped, keep = map_boxes(boxes, placement)
    assert keep.tolist() == [False, False, False]
    mapped, keep = map_boxes(boxes, whole(200, 200, (200, 200)))
    assert keep.tolist() == [True, False, True]
    mapped, keep = map_boxes(np.zeros((0, 4), np.float32), placement)
    assert mapped.shape == (0, 4) and keep.shape == (0,)


def test_neutral_colours_are_identity():
    grey = np.full((4, 4, 3), 100, np.uint8)
    changed = 0
    for sample in range(50):
        assert random_colours(0.0, keyed_generator(0, sample)) is None
        matrix = random_colours(1.0, keyed_generator(0, sample))
        after = cv2.transform(grey, matrix)
        assert np.ptp(after.astype(int), axis=2).max() <= 2, "hue and saturation leave grey alone"
        assert 100 * 0.5 - 33 <= after.mean() <= 100 * 1.5 + 33
        changed += abs(after.mean() - 100) > 5
    assert changed > 30


def test_evaluation_resizes_cubic_without_ratio():
    image = picture()
    expected = cv2.resize(image, (40, 96), interpolation=cv2.INTER_CUBIC)
    np.testing.assert_array_equal(resize_for_evaluation(image, (96, 40)), expected)


def test_rng_key_alone_determines_numbers():
    draws = {key: tuple(keyed_generator(*key).random(3)) for key in
             [(0, 1), (0, 1, 0), (0, 2), (1, 1), (0, 0, 1), (0, 1, 1)]}  # fmt: skip
    assert len(set(draws.values())) == len(draws)
    assert draws[(0, 1)] == tuple(keyed_generator(0, 1).random(3))


def test_pixels_are_rgb(tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGB", (5, 4), (255, 10, 0)).save(file)
    assert read_image(file).shape == (4, 5, 3)
    assert read_image(str(file))[0, 0].tolist() == [255, 10, 0]


def test_image_is_upright_unless_annotated_unturned(tmp_path):
    file = tmp_path / "turned.jpg"
    file.write_bytes(jpeg(picture(48, 64), exif=exif(6)))
    assert read_image(file).shape == (64, 48, 3)
    assert read_image(file, (64, 48)).shape == (64, 48, 3)
    assert read_image(file, (48, 64)).shape == (48, 64, 3)


@pytest.mark.parametrize("progressive", [False, True])
def test_truncated_jpeg_with_thumbnail_is_refused(tmp_path, progressive):
    file = tmp_path / "half.jpg"
    whole_file = jpeg(picture(300, 400), progressive=progressive, exif=exif(1, jpeg(picture())))
    file.write_bytes(whole_file + b"trailing bytes are fine")
    assert read_image(file).shape == (300, 400, 3)
    file.write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(DataError) as caught:
        read_image(file)
    assert str(caught.value) == f"{file}: the JPEG data end early (incomplete file)"


def test_what_is_no_image_is_named(tmp_path):
    absent, empty, text = (tmp_path / name for name in ("absent.jpg", "empty.jpg", "text.png"))
    empty.write_bytes(b"")
    text.write_text("no picture at all")
    small = tmp_path / "small.png"
    Image.new("RGB", (5, 4)).save(small)
    for file, size, code, message in (
        (absent, None, "image_missing", "No such file or directory"),
        (empty, None, "image_empty", "the file is empty"),
        (text, None, "image_unreadable", "not an image, or damaged"),
        (small, (40, 50), "size_mismatch", "the image is 5x4 but its annotation says 50x40"),
    ):
        with pytest.raises(DataError) as caught:
            read_image(file, size)
        assert (caught.value.code, str(caught.value)) == (code, f"{file}: {message}")

"""Images read at a fraction of their size."""

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.data.images import read_image, reduction
from ppdist.errors import DataError
from tests.data.test_transforms import exif, jpeg, picture


def smooth(height: int, width: int) -> np.ndarray:
    return cv2.GaussianBlur(picture(height, width), (0, 0), 12)


def test_an_image_is_reduced_no_further_than_it_is_shown():
    scales = (2.0, 1.0, 0.51, 0.5, 0.26, 0.25, 0.1, 0.01)
    assert [reduction(scale) for scale in scales] == [1, 1, 1, 2, 2, 4, 8, 8]


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("size", [(160, 240), (157, 243)])
def test_a_reduced_image_is_the_mean_of_what_was_left_out(tmp_path, suffix, factor, size):
    file = tmp_path / f"a.{suffix}"
    original = smooth(*size)
    if suffix == "jpg":
        file.write_bytes(jpeg(original))
    else:
        Image.fromarray(original).save(file)
    found = read_image(file, size, factor)
    expected_size = -(-size[0] // factor), -(-size[1] // factor)
    assert found.shape == (*expected_size, 3) and found.dtype == np.uint8
    rows, columns = size[0] // factor, size[1] // factor
    blocks = original[: rows * factor, : columns * factor].reshape(rows, factor, columns, factor, 3)
    difference = found[:rows, :columns].astype(float) - blocks.mean((1, 3))
    assert np.abs(difference).max() < 8 and abs(difference.mean()) < 1


def test_a_turned_image_is_turned_before_it_is_reduced(tmp_path):
    file = tmp_path / "turned.jpg"
    file.write_bytes(jpeg(smooth(48, 64), exif=exif(6)))
    assert read_image(file, (64, 48), 2).shape == (32, 24, 3)
    assert read_image(file, (48, 64), 2).shape == (24, 32, 3)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("size", [(1024, 1020), (1017, 1023), (1024, 1016)])
def test_an_almost_square_image_is_turned_as_its_annotation_says(tmp_path, size, factor):
    file = tmp_path / "turned.jpg"
    file.write_bytes(jpeg(smooth(*size[::-1]), exif=exif(6)))
    for asked in (size, size[::-1]):
        found, full = read_image(file, asked, factor), read_image(file, asked)
        assert full.shape[:2] == asked
        expected = cv2.resize(full, found.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(found.astype(int) - expected).max() < 8


def test_a_wrong_size_is_refused_reduced_also_where_it_is_the_size_on_its_side(tmp_path):
    file = tmp_path / "a.jpg"
    file.write_bytes(jpeg(smooth(1024, 1020)))
    assert read_image(file, (1024, 1020), 8).shape == (128, 128, 3)
    for wrong in ((1020, 1024), (1024, 1000), (1050, 1020)):
        with pytest.raises(DataError, match="the image is 1020x1024 but its annotation says"):
            read_image(file, wrong, 8)


def test_what_is_refused_in_full_is_refused_reduced(tmp_path):
    file = tmp_path / "a.jpg"
    file.write_bytes(jpeg(smooth(48, 64)))
    with pytest.raises(DataError) as caught:
        read_image(file, (50, 64), 2)
    assert str(caught.value) == f"{file}: the image is 64x48 but its annotation says 64x50"
    file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(DataError, match="end early"):
        read_image(file, (48, 64), 2)

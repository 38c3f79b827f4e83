"""What is accepted as an image, and images read at a fraction of their size."""

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import DataError
from ppdist.data.checks.images import check_image
from ppdist.data.image import (
    choose_reduction,
    convert_array,
    convert_pillow,
    image_size,
    is_image_name,
    read_image,
)
from ppdist.predict.detections import write_picture
from tests.errors import raises
from tests.unit.data.pictures import exif, jpeg, picture, tiff_of_channels


def smooth(height: int, width: int) -> np.ndarray:
    return cv2.GaussianBlur(picture(height, width), (0, 0), 12)


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
    with raises("image_truncated", str(file)):
        read_image(file)


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


def test_an_image_is_reduced_no_further_than_it_is_shown():
    scales = (2.0, 1.0, 0.51, 0.5, 0.26, 0.25, 0.1, 0.01)
    assert [choose_reduction(scale) for scale in scales] == [1, 1, 1, 2, 2, 4, 8, 8]


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("size", [(160, 240), (157, 243)])
def test_reduced_image_is_mean_of_skipped_pixels(tmp_path, suffix, factor, size):
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


@pytest.mark.parametrize("size", [(1024, 1020), (1017, 1023), (1024, 1016)])
def test_almost_square_image_rotates_as_annotated(tmp_path, size):
    file = tmp_path / "turned.jpg"
    file.write_bytes(jpeg(smooth(*size[::-1]), exif=exif(6)))
    for asked in (size, size[::-1]):
        full = read_image(file, asked)
        assert full.shape[:2] == asked
        for factor in (2, 4, 8):
            found = read_image(file, asked, factor)
            expected = cv2.resize(full, found.shape[1::-1], interpolation=cv2.INTER_AREA)
            assert np.abs(found.astype(int) - expected).max() < 8


def test_wrong_size_is_refused_reduced_or_rotated(tmp_path):
    file = tmp_path / "a.jpg"
    file.write_bytes(jpeg(smooth(1024, 1020)))
    assert read_image(file, (1024, 1020), 8).shape == (128, 128, 3)
    for wrong in ((1020, 1024), (1024, 1000), (1050, 1020)):
        with raises("size_mismatch"):
            read_image(file, wrong, 8)


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "webp", "tif"])
def test_truncated_file_yields_no_invented_pixels(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(smooth(48, 64)).save(file)
    content = file.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 40)):
        file.write_bytes(content[:length])
        with pytest.raises(DataError) as caught:
            read_image(file)
        expected = ("image_empty",) if length == 0 else ("image_truncated", "image_unreadable")
        assert caught.value.code in expected and caught.value.where == str(file)


def test_every_kind_of_image_becomes_8_bits_of_rgb(tmp_path):
    rgb = smooth(48, 64)
    grey = rgb[..., 1]
    alike = np.repeat(grey[..., None], 3, 2)
    clear = np.dstack([rgb, np.arange(48 * 64).reshape(48, 64) % 256]).astype(np.uint8)
    cases = {
        "grey.png": (Image.fromarray(grey), alike),
        "alpha.png": (Image.fromarray(clear), rgb),
        "grey_alpha.png": (Image.fromarray(grey).convert("LA"), alike),
        "deep_grey.png": (Image.fromarray(grey.astype(np.uint16) * 257), alike),
        "deep_grey.tif": (Image.fromarray(grey.astype(np.uint16) * 257), alike),
        "print.tif": (Image.fromarray(rgb).convert("CMYK"), rgb),
        "print.jpg": (Image.fromarray(rgb).convert("CMYK"), rgb),
    }
    for name, (image, expected) in cases.items():
        image.save(tmp_path / name, **({"quality": 100} if name.endswith("jpg") else {}))
        found = read_image(tmp_path / name)
        assert found.shape == (48, 64, 3) and found.dtype == np.uint8, name
        assert np.abs(found.astype(int) - expected).max() <= (4 if "print" in name else 0), name
    assert cv2.imwrite(str(tmp_path / "deep.png"), rgb[..., ::-1].astype(np.uint16) * 257)
    assert (read_image(tmp_path / "deep.png") == rgb).all()


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def test_a_file_pillow_and_numpy_give_the_same_pixels(tmp_path):
    rgb, alpha = smooth(48, 64), Image.fromarray(picture(48, 64)[..., 0])
    grey, colour = Image.fromarray(rgb[..., 0]), Image.fromarray(rgb)
    see_through = Image.merge("RGBA", (*colour.split(), alpha))
    deep = Image.fromarray(rgb[..., 0].astype(np.uint16) * 257 + 40)
    cases = [
        ("a.png", see_through, {}), ("a.tif", see_through, {}),
        ("lzw.tif", see_through, {"compression": "tiff_lzw"}),
        ("big.tif", see_through, {"big_tiff": True}),
        ("turned.tif", colour, {"exif": exif(6)}),
        ("a.webp", see_through, {"lossless": True}),
        ("la.png", Image.merge("LA", (grey, alpha)), {}),
        ("la.tif", Image.merge("LA", (grey, alpha)), {}),
        ("palette.png", colour.convert("P", palette=Image.Palette.ADAPTIVE), {"transparency": 3}),
        ("palette.tif", colour.convert("P", palette=Image.Palette.ADAPTIVE), {}),
        ("bits.png", grey.convert("1"), {}), ("bits.tif", grey.convert("1"), {}),
        ("deep.png", deep, {}), ("deep.tif", deep, {}),
        ("print.jpg", colour.convert("CMYK"), {}), ("print.tif", colour.convert("CMYK"), {}),
        *((f"{turn}.jpg", colour, {"exif": exif(turn), "quality": 95}) for turn in range(1, 9)),
        ("exif.png", colour, {"exif": exif(8)}), ("xmp.jpg", colour, {"xmp": XMP}),
    ]  # fmt: skip
    for name, image, options in cases:
        image.save(tmp_path / name, **options)
        expected = read_image(tmp_path / name)
        with Image.open(tmp_path / name) as opened:
            assert np.array_equal(convert_pillow(opened), expected), name
            assert (opened.width, opened.height) == image.size or ".tif" in name, "as it was"
    assert read_image(tmp_path / "a.tif").tolist() == rgb.tolist(), "not blended over black"
    for array in (rgb, np.dstack([rgb, rgb[..., :1]]), rgb.astype(np.uint16) * 256 + 7):
        assert np.array_equal(convert_array(array), rgb)
    for array in (rgb[..., 0], rgb[..., :1], rgb[..., 0].astype(np.uint16) << 8):
        assert np.array_equal(convert_array(array), rgb[..., :1].repeat(3, 2))


def test_pixels_that_no_rgb_is_made_of_are_named(tmp_path):
    grey = smooth(200, 300)[..., 0]  # larger than what a look at a header reads
    files = {
        "float.tif": grey.astype(np.float32) / 255,
        "double.tif": grey.astype(np.float64),
        "signed.tif": grey.astype(np.int16),
        "long.tif": grey.astype(np.int32),
    }
    for name, array in files.items():
        assert cv2.imwrite(str(tmp_path / name), array)
    for channels in (3, 4, 5):  # of grey: no colours
        file = tmp_path / f"{channels}.tif"
        file.write_bytes(tiff_of_channels(np.dstack([grey] * channels)))
    Image.fromarray(smooth(8, 8)).convert("LAB").save(tmp_path / "lab.tif")
    for file in tmp_path.iterdir():
        with raises("pixel_kind"):
            read_image(file)
        assert image_size(file) is None
        for decode in (False, True):
            problem = check_image(str(file), None, decode=decode).problem
            assert problem is not None and problem.code == "pixel_kind", file.name
    for name in ("float.tif", "lab.tif"):
        with Image.open(tmp_path / name) as opened, raises("pixel_kind"):
            convert_pillow(opened)
    (tmp_path / "two.tif").write_bytes(tiff_of_channels(np.dstack([grey, grey])))
    assert (read_image(tmp_path / "two.tif")[..., 1] == grey).all(), "grey and transparency"


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_few_of_16_bits_are_warned_of(tmp_path, suffix):
    grey = picture()[..., 0].astype(np.uint16)
    for name, array in (
        ("dark", grey * 16),
        ("whole", grey * 256),
        ("eight", picture()[..., 0] // 9),
    ):
        file = tmp_path / f"{name}.{suffix}"
        assert cv2.imwrite(str(file), array)
        notes = check_image(str(file), (64, 48), decode=True).notes
        assert ("dark_sixteen_bit" in notes) == (name == "dark")


@pytest.mark.parametrize("suffix", [".jfif", ".jpe", ".mpo", ".JFIF"])
def test_other_suffixes_of_jpeg_are_read(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    file.write_bytes(jpeg(picture()))
    assert is_image_name(file.name) and read_image(file).shape == (48, 64, 3)
    assert check_image(str(file), (64, 48), decode=False).notes == ()
    write_picture(file, picture(20, 30))
    assert image_size(file) == (30, 20)

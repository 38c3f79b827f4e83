"""The size of an image from its header, and annotations of the frame that EXIF turns away from."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import ExifTags, Image

from ppdist.config.data import DataConfig
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.convert import conversion_section, convert, turn_annotations
from ppdist.data.image import image_size, read_header, read_image
from ppdist.data.types import RawImage, RawObject, RawSet

RED, BOX = (255, 0, 0), (8, 4, 24, 12)


def write_turned(path: Path, orientation: int, size=(40, 24)) -> Path:
    """A red box on black, stored in `size`, with a note how to turn it."""
    pixels_HW3 = np.zeros((size[1], size[0], 3), np.uint8)
    x1, y1, x2, y2 = BOX
    pixels_HW3[y1:y2, x1:x2] = RED
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels_HW3).save(path, exif=exif)
    return path


def red_box(path: Path) -> tuple[float, float, float, float]:
    """Where the box is once the image is upright."""
    ys, xs = np.nonzero(read_image(path)[:, :, 0] > 128)
    return float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1)


def annotated_as_stored(path: Path) -> RawImage:
    box = tuple(map(float, BOX))
    outline_K2 = np.array([[8.0, 4.0], [24.0, 4.0], [24.0, 12.0]])
    objects = [RawObject(box, 0, "here", polygons=(outline_K2,)), RawObject(box, 0, "here")]
    return RawImage(path, 1, 40, 24, objects, "here")


def test_png_exif_with_a_wrong_sum_turns_nothing(tmp_path):
    path = write_turned(tmp_path / "a.png", 6)
    content = bytearray(path.read_bytes())
    content[content.index(b"eXIfMM") + 14] ^= 0x80
    path.write_bytes(content)
    assert image_size(path) == read_image(path).shape[1::-1] == (40, 24)


def test_late_png_exif_orientation_counts_not_xmp(tmp_path):
    png = write_turned(tmp_path / "a.png", 6)
    content = png.read_bytes()
    start = content.index(b"eXIf") - 4
    (length,) = struct.unpack_from(">I", content, start)
    chunk = content[start : start + length + 12]
    rest = content.replace(chunk, b"")
    png.write_bytes(rest[:-12] + chunk + rest[-12:])
    note = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    Image.new("RGB", (40, 24)).save(tmp_path / "b.jpg", xmp=note)
    for path, size in ((png, (24, 40)), (tmp_path / "b.jpg", (40, 24))):
        assert image_size(path) == size == read_image(path).shape[1::-1]


def test_size_of_pillow_bomb_image_is_read(tmp_path):
    header = struct.pack(">IIBBBBB", 40_000, 30_000, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    content = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(header)) + chunk
    (tmp_path / "a.png").write_bytes(content + struct.pack(">I", zlib.crc32(chunk)))
    assert image_size(tmp_path / "a.png") == (40_000, 30_000)
    # SOF0: one channel, 60,000 x 50,000
    jpeg = b"\xff\xd8\xff\xc0" + struct.pack(">HBHHBBBB", 11, 8, 50_000, 60_000, 1, 1, 0x11, 0)
    (tmp_path / "b.jpg").write_bytes(jpeg + b"\xff\xda\0\2")
    assert image_size(tmp_path / "b.jpg") == (60_000, 50_000)


@pytest.mark.parametrize("content", [b"", b"x", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"II*\0"])
def test_the_size_of_what_is_no_image_is_not_known(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    assert image_size(tmp_path / "a.png") is None
    assert image_size(tmp_path / "absent.png") is None


@pytest.mark.parametrize("orientation", range(5, 9))
def test_boxes_and_outlines_turn_with_the_pixels(tmp_path, orientation):
    path = write_turned(tmp_path / "a.png", orientation)
    frame = read_header(path)
    assert frame is not None
    turned = turn_annotations(annotated_as_stored(path), frame)
    assert (turned.width, turned.height) == (24, 40)
    for thing in turned.objects:
        assert thing.box == red_box(path)
    (part_K2,) = turned.objects[0].polygons
    assert (*part_K2.min(0), *part_K2.max(0)) == red_box(path)
    swapped = RawObject((24.0, 12.0, 8.0, 4.0), 0, "here")
    (found,) = turn_annotations(RawImage(path, 1, 40, 24, [swapped], "here"), frame).objects
    x1, y1, x2, y2 = red_box(path)
    assert found.box == (x2, y2, x1, y1)


@pytest.mark.parametrize("form", ["coco", "yolo"])
def test_stored_frame_boxes_survive_every_format(tmp_path, form):
    images = [
        annotated_as_stored(write_turned(tmp_path / f"{orientation}.png", orientation))
        for orientation in (1, 5, 6, 7, 8)
    ]
    raw = RawSet(images, ("cat",), (1,), "some set")
    lines = convert(raw, form, tmp_path / "out", images="copy", split="train")
    told = [line.partition(":")[0] for line in lines]
    assert told == (["4 images", "image ids"] if form == "yolo" else [])
    text = conversion_section({"train": raw, "val": raw}, form, tmp_path / "out", images="copy")
    found = read_raw(DataConfig(**yaml.safe_load(text)["data"]), "train", lambda finding: None)
    for image in found.images:
        upright = image_size(image.path) == (image.width, image.height)
        expected = red_box(image.path) if upright else tuple(map(float, BOX))
        for thing in image.objects:
            np.testing.assert_allclose(thing.box, expected, atol=1e-9)


def test_image_of_other_size_is_left_out_of_yolo(tmp_path):
    good, bad = (write_turned(tmp_path / name, 1) for name in ("a.png", "b.png"))
    images = [annotated_as_stored(good), annotated_as_stored(bad)]
    images[1].width, images[1].image_id = 80, 2
    raw = RawSet(images, ("cat",), (1,), "some set")
    lines = convert(raw, "yolo", tmp_path / "out", images="copy", split="train")
    assert [line.endswith(f", first {bad}") for line in lines] == [True]
    assert (tmp_path / "out" / "train.txt").read_text() == "./images/train/a.png\n"


def test_yolo_image_of_unknown_size_is_not_converted(tmp_path):
    write_turned(tmp_path / "images" / "a.png", 1)
    (tmp_path / "images" / "b.jpg").write_bytes(b"broken")
    (tmp_path / "labels").mkdir()
    for name in ("a", "b"):
        (tmp_path / "labels" / f"{name}.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    split = {"annotations": "labels"}
    config = DataConfig(
        format="yolo", root=str(tmp_path), train=split, val=split, class_names=("cat",)
    )
    raw = read_raw(config, "train", lambda finding: None)
    assert [image.size_known for image in raw.images] == [True, False]
    lines = convert(raw, "coco", tmp_path / "out", images="copy", split="train")
    assert [line.endswith(f"first {tmp_path}/images/b.jpg") for line in lines] == [True]
    text = conversion_section({"train": raw, "val": raw}, "coco", tmp_path / "out", images="copy")
    (image,) = read_raw(
        DataConfig(**yaml.safe_load(text)["data"]), "train", lambda finding: None
    ).images
    assert (image.path.name, image.width, image.objects[0].box) == ("a.png", 40, (15, 6, 25, 18))

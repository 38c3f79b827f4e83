"""Large images cut into tiles, with their labels."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.convert import Format, convert
from ppdist.data.datasets.tiles import slice_set
from ppdist.data.image import read_image
from ppdist.data.types import RawImage, RawObject, RawSet

BOXES = [(10.0, 20.0, 30.0, 50.0), (90.0, 10.0, 130.0, 30.0), (250.0, 150.0, 290.0, 190.0)]


def large(folder: Path) -> RawSet:
    """An image of 300x200 with three objects, the second across the cut at 100."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    cv2.imwrite(str(folder / "big.png"), pixels)
    objects = [RawObject(box, label % 2, "") for label, box in enumerate(BOXES)]
    image = RawImage(folder / "big.png", 7, 300, 200, objects, "")
    return RawSet([image], ("a", "b"), (1, 2), str(folder))


def cut(raw: RawSet, visible: float = 0.1, empty: float = 1.0) -> RawSet:
    return slice_set(raw, 100, 0.0, visible=visible, empty=empty, seed=0)[0]


@pytest.mark.parametrize("form", ["coco", "yolo"])
def test_tiles_read_back_with_their_objects(tmp_path: Path, form: Format) -> None:
    tiles = cut(large(tmp_path))
    convert(tiles, form, tmp_path / "out", images="copy", split="train")
    annotations = "annotations/instances_train.json" if form == "coco" else "train.txt"
    split = SplitConfig(images="images/train", annotations=annotations)
    data = DataConfig(format=form, root=str(tmp_path / "out"), train=split, val=split)
    whole_HW3 = read_image(tmp_path / "big.png")
    found = []
    images = read_raw(data, "train", ignore_issue).images
    assert len(images) == 6
    for image in images:
        left, top = map(int, image.path.stem.split("_")[1:])
        pixels_HW3 = read_image(image.path)
        np.testing.assert_array_equal(pixels_HW3, whole_HW3[top : top + 100, left : left + 100])
        for one in image.objects:
            x1, y1, x2, y2 = one.box
            found.append((round(x1 + left), round(y1 + top), round(x2 + left), round(y2 + top)))
    cut_boxes = [BOXES[0], (90, 10, 100, 30), (100, 10, 130, 30), BOXES[2]]
    assert sorted(found) == sorted(cut_boxes)


VOC_OBJECT = (
    "<object><name>{name}</name><difficult>0</difficult><bndbox><xmin>{0}</xmin><ymin>{1}</ymin>"
    "<xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"
)


@pytest.mark.parametrize("form", ["voc", "yolo"])
def test_sets_of_every_format_give_the_same_tiles(
    tmp_path: Path, form: Literal["voc", "yolo"]
) -> None:
    raw = large(tmp_path)
    if form == "voc":
        objects = "".join(
            VOC_OBJECT.format(*map(int, box), name="ab"[i % 2]) for i, box in enumerate(BOXES)
        )
        size = "<size><width>300</width><height>200</height></size>"
        (tmp_path / "big.xml").write_text(f"<annotation>{size}{objects}</annotation>")
        split = SplitConfig(images=".", annotations=".")
        data = DataConfig(format=form, root=str(tmp_path), train=split, val=split)
    else:
        convert(raw, form, tmp_path / "set", images="copy", split="train")
        split = SplitConfig(images="images/train", annotations="train.txt")
        data = DataConfig(format=form, root=str(tmp_path / "set"), train=split, val=split)
    tiles = cut(read_raw(data, "train", ignore_issue))
    assert tiles.class_names == raw.class_names
    for image, expected in zip(tiles.images, cut(raw).images, strict=True):
        assert image.path.name == expected.path.name
        assert [one.label for one in image.objects] == [one.label for one in expected.objects]
        for one, other in zip(image.objects, expected.objects):
            np.testing.assert_allclose(one.box, other.box, atol=1e-3)


def test_tiles_lie_beside_their_images_under_names_of_their_own(tmp_path: Path) -> None:
    raw = large(tmp_path)
    cv2.imwrite(str(tmp_path / "big.bmp"), read_image(tmp_path / "big.png"))
    raw.images.append(replace(raw.images[0], path=tmp_path / "big.bmp"))
    lines = convert(cut(raw), "yolo", tmp_path / "out", images="copy", split="train")
    assert lines == []
    folder = tmp_path / "out" / "images" / "train"
    names = {path.name for path in folder.iterdir() if path.is_file()}
    assert len(names) == 12 and {"big_200_100.png", "big.bmp_200_100.png"} <= names


def test_slivers_are_no_objects_and_no_background(tmp_path: Path) -> None:
    raw = large(tmp_path)
    assert [len(image.objects) for image in cut(raw, visible=0.3).images] == [1, 1, 0, 0, 0, 1]
    raw.images[0].objects[:] = raw.images[0].objects[1:2]
    # The tile with a quarter of the object is left out; it is not background.
    assert [len(image.objects) for image in cut(raw, visible=0.3).images] == [1, 0, 0, 0, 0]


def test_a_part_of_the_empty_tiles_stays(tmp_path: Path) -> None:
    raw = large(tmp_path)
    assert [len(image.objects) for image in cut(raw, empty=0.0).images] == [2, 1, 1]
    names = [[image.path for image in cut(raw, empty=0.5).images] for _ in range(2)]
    assert names[0] == names[1] and 3 <= len(names[0]) <= 6


def test_a_small_image_is_one_tile(tmp_path: Path) -> None:
    tiles, _ = slice_set(large(tmp_path), 640, 0.2, visible=0.1, empty=1.0, seed=0)
    (image,) = tiles.images
    assert (image.width, image.height) == (300, 200)
    assert [one.box for one in image.objects] == BOXES

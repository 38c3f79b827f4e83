"""Every format to every other and back: the same images and objects, and a word about the rest."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import yaml

from ppdist.common.retry import unavailable
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_raw, read_split
from ppdist.data.datasets.convert import conversion_section, convert
from ppdist.data.types import RawImage, RawObject, RawSet
from tests.errors import raises
from tests.unit.data.sets import NAMES, bccd, write_images

FORMATS = ("coco", "yolo")
SIZE = (64, 48)


def read_converted(
    raw: RawSet, form: str, out: Path, *, images: str = "copy", lost: tuple[str, ...] = ()
) -> RawSet:
    """What the set reads as once written, by the config that the snippet gives; no issue."""
    assert tuple(convert(raw, form, out, images=images, split="train")) == lost
    text = conversion_section({"train": raw, "val": raw}, form, out, images=images)
    data = yaml.safe_load(text)["data"]
    return read_raw(DataConfig(**data | {"val": data["train"]}), "train", complain)


def complain(issue):
    assert issue.code == "class_ids_gap", issue


def plain_set(root: Path, count: int = 6) -> RawSet:
    """Boxes as any annotator may have drawn them, in two folders; what all formats can hold."""
    rng = random.Random(1)
    images = []
    for number in range(count):
        folder = root / "some" / f"part {number % 2}"
        (name,) = write_images(folder, 1, SIZE)
        path = folder / f"bild{number // 2} ü.jpg"
        (folder / name).rename(path)
        objects = []
        for index in range(number):
            x1, y1 = rng.uniform(-3, 40), rng.uniform(0, 30)
            x2, y2 = x1 + rng.uniform(0, 20), y1 + rng.uniform(0, 20)
            digits = index % 7 * 3
            box = tuple(round(value, digits) for value in (x1, y1, x2, y2))
            objects.append(RawObject(box, rng.randrange(3), "here"))
        images.append(RawImage(path, number + 1, *SIZE, objects, "here"))
    return RawSet(images, ("red", "weiß", "3"), (1, 2, 3), "some set")


def assert_equal_sets(found: RawSet, expected: RawSet, exact: bool = True) -> None:
    assert (found.class_names, found.category_ids) == (expected.class_names, expected.category_ids)
    assert len(found.images) == len(expected.images)
    for ours, theirs in zip(found.images, expected.images):
        assert ours.path.name == theirs.path.name
        assert (ours.image_id, ours.width, ours.height) == (
            theirs.image_id, theirs.width, theirs.height,
        )  # fmt: skip
        assert [thing.label for thing in ours.objects] == [thing.label for thing in theirs.objects]
        assert [thing.crowd for thing in ours.objects] == [thing.crowd for thing in theirs.objects]
        boxes = [thing.box for thing in ours.objects], [thing.box for thing in theirs.objects]
        if exact:
            assert boxes[0] == boxes[1]
        elif theirs.objects:
            np.testing.assert_allclose(*boxes, atol=1e-9)


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_a_set_comes_back_from_any_two_formats_as_it_was(tmp_path, first, second):
    raw = plain_set(tmp_path)
    # YOLO's fractions cannot say every number of pixels; what it read once, it can.
    there = read_converted(raw, first, tmp_path / "one")
    assert_equal_sets(there, raw, exact=first != "yolo")
    again = read_converted(
        there, second, tmp_path / "two",
        lost=("15 objects: area", "15 images and objects: ids or other properties")
        if (first, second) == ("coco", "yolo") else (),
    )  # fmt: skip
    assert_equal_sets(again, there, exact=second != "yolo" or first == "yolo")
    back = read_converted(
        again, first, tmp_path / "three",
        lost=("15 objects: area", "15 images and objects: ids or other properties")
        if (second, first) == ("coco", "yolo") else (),
    )  # fmt: skip
    assert_equal_sets(back, raw, exact="yolo" not in (first, second))
    config = DataConfig(
        **yaml.safe_load(
            conversion_section(
                {"train": again, "val": again}, second, tmp_path / "two", images="copy"
            )
        )["data"]
        | {"val": {"images": "images", "annotations": "no.txt"}}
    )
    for record, image in zip(read_split(config, "train", 3).records, raw.images):
        assert Path(record.path).read_bytes() == image.path.read_bytes()


def rich_set(root: Path) -> RawSet:
    """All that COCO can say."""
    names = write_images(root / "images", 2, SIZE)
    outline = np.array([[1.5, 2], [11.25, 2], [11.25, 9.125]])
    rle = {"size": [48, 64], "counts": [3, 4, 5]}
    objects = [
        RawObject((1.5, 2.0, 11.25, 9.125), 1, "here", area=33.3, polygons=(outline,),
                  extra={"id": 17, "keypoints": [1, 2, 2], "attributes": {"seen by": "A & B"}}),
        RawObject((0.1, 0.2, 0.3, 0.7), 0, "here", crowd=True, area=0.1,
                  extra={"id": 3, "segmentation": rle, "pose": "Left", "note": " \x07\r\n<"}),
        RawObject((5.0, 6.0, 7.0, 8.0), 0, "here", area=4.0, polygons=(outline, outline + 0.1),
                  extra={"id": 4, "part": [{"name": "a"}, {"name": "b"}], "none": None}),
    ]  # fmt: skip
    extra = {"license": 2, "flickr_url": "http://a?b&c", "source": {"database": "x"}, "list": ["a"]}
    images = [
        RawImage(root / "images" / names[0], 40, *SIZE, objects, "here", extra),
        RawImage(root / "images" / names[1], 7, *SIZE, [], "here", {"license": 3}),
    ]
    return RawSet(images, ("cat", "dog"), (5, 90), "rich set")


def test_ids_areas_outlines_and_extras_survive(tmp_path):
    raw = rich_set(tmp_path)
    found = read_converted(raw, "coco", tmp_path / "out")
    assert_equal_sets(found, raw)
    for ours, theirs in zip(found.images, raw.images):
        assert ours.extra == theirs.extra
        for our, their in zip(ours.objects, theirs.objects):
            assert (our.area, our.extra) == (their.area, their.extra)
            assert [part.tolist() for part in our.polygons] == [
                part.tolist() for part in their.polygons
            ]


def test_what_yolo_cannot_hold_is_said(tmp_path):
    found = read_converted(
        rich_set(tmp_path), "yolo", tmp_path / "out",
        lost=(
            "category ids: become 1 to 2",
            "image ids: become 1 to 2",
            "1 crowds (difficult objects): left out",
            "1 objects: outlines of several parts, or that do not fill the box: box only",
            "2 objects: area",
            "4 images and objects: ids or other properties",
        ),
    )  # fmt: skip
    one, two = found.images[0].objects
    assert one.polygons[0].tolist() == [[1.5, 2], [11.25, 2], [11.25, 9.125]]
    assert one.box == (1.5, 2, 11.25, 9.125) and two.box == (5, 6, 7, 8)
    assert [one.label, two.label] == [1, 0] and not two.polygons


def test_yolo_numbers_survive_as_written(tmp_path):
    write_images(tmp_path / "images", 1, (637, 481))
    text = "1 0.586719 0.576042 0.360938 0.414583\n0 0.1 0.2 0.3 0.4 0.123457 0.6\n"
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "000.txt").write_text(text)
    split = SplitConfig(annotations="labels")
    config = DataConfig(
        format="yolo", root=str(tmp_path), train=split, val=split, class_names=("a", "b")
    )
    raw = read_raw(config, "train", complain)
    coco = read_converted(raw, "coco", tmp_path / "coco")
    convert(coco, "yolo", tmp_path / "yolo", images="link", split="train")
    assert (tmp_path / "yolo" / "labels" / "train" / "000.txt").read_text() == text


def test_coco_numbers_survive_as_written(tmp_path):
    raw = plain_set(tmp_path, 1)
    file = tmp_path / "coco" / "annotations" / "instances_train.json"
    bboxes = [[1, 2, 3, 4], [0.1, 0.7, 0.2, 10.3], [12.34, 1.1, 2.2, 33.33], [9.99, 3, 1e-3, 7]]
    for bbox in bboxes:
        x, y, w, h = map(float, bbox)
        raw.images[0].objects.append(RawObject((x, y, x + w, y + h), 0, "here"))
    convert(raw, "coco", tmp_path / "coco", images="none", split="train")
    assert [entry["bbox"] for entry in json.loads(file.read_text())["annotations"]] == bboxes


def test_images_are_copied_linked_or_left_where_they_are(tmp_path):
    raw = plain_set(tmp_path, 3)
    assert_equal_sets(read_converted(raw, "coco", tmp_path / "coco", images="none"), raw)
    assert not (tmp_path / "coco" / "images").exists()
    linked = read_converted(raw, "yolo", tmp_path / "yolo", images="link")
    assert [image.path.readlink() for image in linked.images] == [i.path for i in raw.images]
    with raises("images_needed"):
        convert(raw, "yolo", tmp_path / "other", images="none", split="train")


def test_same_names_are_separated_and_become_utf8(tmp_path):
    raw = plain_set(tmp_path, 5)
    names = (b"x.jpg", b"x.png", "图像".encode("gbk") + b".jpg", b"a\nb .jpg", b"c 1.jpg")
    for image, name in zip(raw.images, names):
        target = tmp_path / "flat" / os.fsdecode(name)
        target.parent.mkdir(exist_ok=True)
        image.path = image.path.rename(target)
    for form, count, second in (
        ("coco", 2, "x.png"),
        ("yolo", 3, "x_2.png"),
    ):
        lines = convert(raw, form, tmp_path / form, images="copy", split="train")
        assert len(lines) == 1 and lines[0].startswith(f"{count} images: renamed, first ")
        text = conversion_section({"train": raw, "val": raw}, form, tmp_path / form, images="copy")
        found = read_raw(DataConfig(**yaml.safe_load(text)["data"]), "train", complain)
        expected = ["x.jpg", second, "图像.jpg", "a_b.jpg", "c 1.jpg"]
        assert [image.path.name for image in found.images] == expected
        assert [len(image.objects) for image in found.images] == [0, 1, 2, 3, 4]


def test_nothing_that_is_there_is_overwritten(tmp_path):
    raw = plain_set(tmp_path, 2)
    for form in FORMATS:
        convert(raw, form, tmp_path / form, images="link", split="train")
        assert convert(raw, form, tmp_path / form, images="link", split="val") == []
        with raises("file_exists"):
            convert(raw, form, tmp_path / form, images="link", split="val")
    other = replace(raw, class_names=("x", "y", "z"))
    with raises("folder_of_other_classes"):
        convert(other, "yolo", tmp_path / "yolo", images="copy", split="test")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stopped_by", [unavailable("no answer"), KeyboardInterrupt()])
def test_a_conversion_that_ended_early_can_be_repeated(form, stopped_by, tmp_path, monkeypatch):
    raw = plain_set(tmp_path, 3)
    with monkeypatch.context() as patch:
        outcomes = iter([None, stopped_by])

        def copy(source: BinaryIO, target: BinaryIO) -> None:
            if (outcome := next(outcomes)) is not None:
                raise outcome

        patch.setattr("shutil.copyfileobj", copy)
        with pytest.raises(type(stopped_by)):
            convert(raw, form, tmp_path / "out", images="copy", split="train")
    assert not [*tmp_path.rglob(".*")]  # no draft is left
    assert convert(raw, form, tmp_path / "out", images="copy", split="train") == []


def test_what_cannot_be_written_is_refused_or_said(tmp_path):
    raw = plain_set(tmp_path, 3)
    twice = replace(raw, class_names=("a", "b", "a"))
    with raises("class_name_duplicate", "'a'"):
        convert(twice, "yolo", tmp_path / "out", images="copy", split="train")
    strange = replace(raw, class_names=("a", " b", "c"))
    with raises("class_name_unwritable", "b': yolo"):
        convert(strange, "yolo", tmp_path / "out", images="copy", split="train")
    raw.images[2].objects[0].box = (1.0, math.nan, 3.0, 4.0)
    raw.images[2].path.unlink()
    raw.images.append(replace(raw.images[1], image_id=9))
    lines = convert(raw, "yolo", tmp_path / "out", images="copy", split="train")
    facts = ("1 objects: box is not finite", "1 images: listed more", f"{raw.images[2].path}")
    assert [fact in line for fact, line in zip(facts, lines, strict=True)] == [True] * 3
    listed = ("part 0/bild0 ü.jpg", "part 1/bild0 ü.jpg", "part 0/bild1 ü.jpg")
    expected = "".join(f"./images/train/{name}\n" for name in listed)
    assert (tmp_path / "out" / "train.txt").read_text() == expected


def test_image_of_boxes_not_finite_becomes_no_background(tmp_path):
    raw = plain_set(tmp_path, 3)
    for thing in raw.images[1].objects:
        thing.box = (1.0, math.inf, 3.0, 4.0)
    lines = convert(raw, "coco", tmp_path / "out", images="link", split="train")
    assert [line[:9] for line in lines] == ["1 objects", "1 images:"]
    content = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
    assert [image["id"] for image in content["images"]] == [1, 3]  # 1 shows nothing, as it was


def described_set(root: Path) -> RawSet:
    """With what COCO says of the whole set and of its classes."""
    raw = plain_set(root, 3)
    raw.extra = {"info": {"year": 2020}, "licenses": [{"id": 3, "name": "CC"}]}
    raw.class_extras = ({"supercategory": "colour"}, {}, {"keypoints": ["nose"], "skeleton": []})
    return raw


def test_coco_info_and_class_fields_survive(tmp_path):
    raw = described_set(tmp_path)
    found = read_converted(raw, "coco", tmp_path / "out")
    assert (found.extra, found.class_extras) == (raw.extra, raw.class_extras)
    content = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
    assert content["info"] == {"year": 2020}
    assert content["categories"][0] == {"supercategory": "colour", "id": 1, "name": "red"}


def test_fields_lost_in_other_formats_are_reported(tmp_path):
    lines = convert(described_set(tmp_path), "yolo", tmp_path / "out", images="copy", split="a")
    keys = [line.partition(":")[0] for line in lines]
    assert keys == ["info, licenses", "supercategory, keypoints, skeleton"]


def test_numbers_that_json_has_not_are_not_written(tmp_path):
    raw = plain_set(tmp_path, 3)
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    raw.images[2].objects[0].extra = {"score": math.nan, "scores": [1.5, -math.inf], "deep": deep}
    lines = convert(raw, "coco", tmp_path / "out", images="none", split="train")
    assert [line.partition(":")[0] for line in lines] == [f"{n} further properties" for n in "21"]

    def refuse(constant):
        raise AssertionError(constant)

    file = tmp_path / "out" / "annotations" / "instances_train.json"
    content = json.loads(file.read_text(), parse_constant=refuse)
    entry = content["annotations"][1]
    assert entry["score"] is None and entry["scores"] == [1.5, None]


@pytest.fixture(scope="module")
def own(shared_dir) -> dict[str, RawSet]:
    """The validation split of the real set, from its own file of each format."""
    return {
        form: read_raw(bccd(shared_dir, form, class_names=NAMES), "val", complain)
        for form in ("coco", "voc", "yolo")
    }


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", ["coco", "voc", "yolo"])
def test_the_real_set_says_the_same_in_all_formats(tmp_path, own, first, second):
    """Its own file of a format is what converting another one to that format gives."""
    raw, expected = own[first], own[second]
    convert(raw, second, tmp_path, images="link", split="val")
    text = conversion_section({"train": raw, "val": raw}, second, tmp_path, images="link")
    found = read_raw(DataConfig(**yaml.safe_load(text)["data"]), "val", complain)
    assert found.class_names == expected.class_names and len(found.images) == 87
    boxes = []
    for each in (found, expected):
        boxes.append([thing.box for image in each.images for thing in image.objects])
    for ours, theirs in zip(found.images, expected.images):
        assert ours.path.resolve() == theirs.path.resolve()
        assert [t.label for t in ours.objects] == [t.label for t in theirs.objects]
    np.testing.assert_allclose(*boxes, atol=1e-3)


def test_data_yaml_names_the_splits_that_are_there(tmp_path):
    raw = plain_set(tmp_path / "here", 3)
    for expected in ({"train": "train.txt"}, {"train": "train.txt", "val": "val.txt"}):
        convert(raw, "yolo", tmp_path / "out", images="copy", split=[*expected][-1])
        found = yaml.safe_load((tmp_path / "out" / "data.yaml").read_text())
        assert {key: found.get(key) for key in ("train", "val") if key in found} == expected

"""labelme, CVAT, VisDrone, KITTI and BDD100K, read for conversion."""

import json
from pathlib import Path

import pytest

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import IssueLog
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.convert import convert
from ppdist.data.datasets.foreign import detect_tool, read_foreign
from ppdist.data.types import Issue
from tests.unit.data.corpus import config
from tests.unit.data.sets import write_images

CVAT = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version><meta><task><labels><label><name>red</name></label>
<label><name>green</name></label></labels></task></meta>
<image id="0" name="000.jpg" width="64" height="48">{}</image>
<image id="1" name="001.jpg" width="0" height="0"></image></annotations>"""
RED = 'label="red" occluded="0" z_order="0"'
KITTI = "{} 0.00 0 -1.57 10.00 20.00 30.50 40.00 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59\n"


def labelme(folder: Path, stem: str, *shapes: dict, **changes: object) -> None:
    content = {
        "version": "5.4.1", "flags": {}, "imagePath": f"{stem}.jpg", "imageData": None,
        "shapes": [{"group_id": None, "flags": {}, **shape} for shape in shapes],
        "imageHeight": 48, "imageWidth": 64,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("kind", "points", "box"),
    [
        ("rectangle", [[30, 40], [10, 20]], (10, 20, 30, 40)),
        ("rectangle", [[10, 20], [30, 20], [30, 40], [10, 40]], (10, 20, 30, 40)),
        ("polygon", [[10, 20], [30, 25], [20, 40]], (10, 20, 30, 40)),
        ("circle", [[20, 20], [23, 24]], (15, 15, 25, 25)),
        ("mask", [[10, 20], [30, 40]], (10, 20, 30, 40)),
        ("point", [[10, 20]], None),
        ("polygon", [[10, 20], [30, 25]], None),
    ],
)
def test_each_shape_of_labelme_becomes_a_box(tmp_path, kind, points, box):
    write_images(tmp_path / "set", 1)
    shape = {"label": "red", "points": points, "shape_type": kind}
    other = {"label": "a", "points": [[1, 2], [3, 4]], "shape_type": "rectangle"}
    labelme(tmp_path / "set", "000", shape, other, imagePath="..\\pictures\\000.jpg")
    issues: list[Issue] = []
    assert detect_tool(tmp_path / "set") == "labelme"
    raw = read_foreign(tmp_path / "set", issues.append)["train"]
    assert raw.class_names == ("a", "red")
    boxes = [thing.box for thing in raw.images[0].objects if thing.label == 1]
    assert boxes == ([] if box is None else [box])
    assert ("shape_unread" in {issue.code for issue in issues}) == (box is None)


def test_shapes_of_one_group_are_one_object(tmp_path):
    write_images(tmp_path / "set", 2)
    part = {"label": "red", "shape_type": "polygon", "group_id": 3}
    labelme(tmp_path / "set", "001")  # background
    labelme(
        tmp_path / "set", "000",
        {**part, "points": [[1, 2], [9, 2], [9, 9]]},
        {**part, "points": [[20, 20], [30, 20], [30, 31]]},
        {**part, "points": [[40, 40], [45, 40], [45, 45]], "group_id": None},
    )  # fmt: skip
    image, empty = read_foreign(tmp_path / "set", IssueLog())["train"].images
    assert (empty.path.name, empty.objects, empty.lost) == ("001.jpg", [], 0)
    first, second = image.objects
    assert (first.box, len(first.polygons)) == ((1, 2, 30, 31), 2)
    assert second.box == (40, 40, 45, 45)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        (f'<box {RED} xtl="10" ytl="20" xbr="30.5" ybr="40"/>', (10, 20, 30.5, 40)),
        (f'<box {RED} xtl="10" ytl="20" xbr="30" ybr="30" rotation="90"/>', (15, 15, 25, 35)),
        (f'<polygon {RED} points="10,20;30,25;20,40"/>', (10, 20, 30, 40)),
        (f'<ellipse {RED} cx="20" cy="20" rx="5" ry="2"/>', (15, 18, 25, 22)),
        (f'<ellipse {RED} cx="20" cy="20" rx="5" ry="2" rotation="90"/>', (18, 15, 22, 25)),
        (f'<mask {RED} rle="1" left="3" top="4" width="5" height="6"/>', (3, 4, 8, 10)),
        (f'<points {RED} points="10,20"/>', None),
        (f'<polyline {RED} points="10,20;3,4;5,6"/>', None),
    ],
)
def test_each_shape_of_cvat_becomes_a_box(tmp_path, shape, box):
    write_images(tmp_path / "images", 2)
    green = '<tag label="red"/><box label="green" xtl="1" ytl="2" xbr="3" ybr="4"/>'
    (tmp_path / "annotations.xml").write_text(CVAT.format(shape + green))
    issues: list[Issue] = []
    assert detect_tool(tmp_path) == "CVAT"
    raw = read_foreign(tmp_path, issues.append)["train"]
    assert raw.class_names == ("red", "green")  # in the order of the task
    first, second = raw.images
    found = [thing.box for thing in first.objects if thing.label == 0]
    assert [pytest.approx(each) for each in found] == ([] if box is None else [box])
    assert (second.width, second.height, second.objects) == (64, 48, [])
    assert ("shape_unread" in {issue.code for issue in issues}) == (box is None)


def test_what_is_converted_reads_back(tmp_path):
    """Splits are those of the folders."""
    for split, count in (("train", 2), ("valid", 1)):
        for name in write_images(tmp_path / "set" / split, count):
            points = [[5, 6], [20, 30]]
            shape = {"label": split, "points": points, "shape_type": "rectangle"}
            labelme(tmp_path / "set" / split, name[:-4], shape)
    raws = read_foreign(tmp_path / "set", IssueLog())
    assert [*raws] == ["train", "val"]
    for split, raw in raws.items():
        assert convert(raw, "coco", tmp_path / "out", images="copy", split=split) == []
    written = config(
        tmp_path / "out", "coco", "annotations/instances_train.json",
        "annotations/instances_val.json",
    )  # fmt: skip
    written = written.model_copy(
        update={"train": written.train.model_copy(update={"images": "images/train"})}
    )
    dataset = read_split(written, "train", 2)
    assert dataset.class_names == ("train", "valid") and len(dataset.records) == 2
    assert dataset.records[0].boxes_M4.tolist() == [[5, 6, 20, 30]]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.xml", CVAT.format("<box/>"), "annotation_unreadable"),
        ("a.xml", CVAT.format("")[:-9], "annotation_unreadable"),
        ("a.xml", CVAT.format(f'<polygon {RED} points="1,x"/>'), "annotation_unreadable"),
        ("a.xml", '<annotations><image id="1"/></annotations>', "annotation_unreadable"),
        ("a.xml", "<!DOCTYPE a [<!ENTITY b 'c'>]>" + CVAT.format(""), "annotation_unreadable"),
        ("a.json", '{"shapes": [{"label": 1}]}', "annotation_unreadable"),
        ("a.json", '{"shapes": 7, "label": 1}', "annotation_unreadable"),
        ("a.json", '{"shapes": "label"', "annotation_unreadable"),
        ("a.json", '{"shapes": []}', "objects_missing"),
        ("a.json", '{"a": "box2d"}', "annotation_unreadable"),
        ("a.json", '[{"name": "000.jpg", "labels": [{"box2d": {}}, 7]}]', "annotation_unreadable"),
        ("a.txt", "1,2,3,4,1,12,0,0\n", "annotation_unreadable"),
        ("a.txt", "1,2,3,4,1,1,0,0\n1,2\n", "annotation_unreadable"),
        ("a.txt", KITTI.format("Car") + "Car 1\n", "annotation_unreadable"),
    ],
)
def test_what_a_tool_cannot_have_written_is_named(tmp_path, name, text, code):
    write_images(tmp_path, 2)
    (tmp_path / name).write_text(text)
    issues: list[Issue] = []
    with pytest.raises(DataError) as caught:
        read_foreign(tmp_path, issues.append)
    assert code in (caught.value.code, *(issue.code for issue in issues))


BDD = [
    {"name": "000.jpg", "labels": [
        {"category": "car", "box2d": {"x1": 10, "y1": 20, "x2": 30.5, "y2": 40}},
        {"category": "lane", "poly2d": []}]},
    {"name": "001.jpg"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "images", "files", "right"),
    [
        (
            "VisDrone",
            "VisDrone2019-DET-{}/images",
            {"VisDrone2019-DET-{}/annotations/000.txt": "1,2,3,4,0,0,0,0\n10,20,20,20,1,4,0,0,\n",
             "VisDrone2019-DET-{}/annotations/001.txt": ""},
            ("car", (10, 20, 30, 40)),
        ),
        (
            "KITTI",
            "{}/image_2",
            {"{}/label_2/000.txt": KITTI.format("Car") + KITTI.format("DontCare"),
             "{}/label_2/001.txt": ""},
            ("Car", (10, 20, 30.5, 40)),
        ),
        (
            "BDD100K",
            "images/100k/{}",
            {"labels/det_20/det_{}.json": json.dumps(BDD)},
            ("car", (10, 20, 30.5, 40)),
        ),
    ],
)  # fmt: skip
def test_boxes_of_public_sets_are_read(tmp_path, tool, images, files, right):
    for split in ("train", "val"):
        write_images(tmp_path / images.format(split), 2)
        for name, text in files.items():
            file = tmp_path / name.format(split)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    assert detect_tool(tmp_path) == tool
    issues: list[Issue] = []
    raws = read_foreign(tmp_path, issues.append)
    assert [*raws] == ["train", "val"] and not issues
    for split, raw in raws.items():
        labelled, empty = raw.images
        assert labelled.path == tmp_path / images.format(split) / "000.jpg"
        assert (labelled.width, labelled.height) == (64, 48)
        found = [(raw.class_names[thing.label], thing.box) for thing in labelled.objects]
        assert found == [right]
        assert (empty.path.name, empty.objects, empty.lost) == ("001.jpg", [], 0)


def test_other_folders_are_of_no_tool(tmp_path):
    write_images(tmp_path, 1)
    (tmp_path / "a.json").write_text('{"images": []}')
    (tmp_path / "a.xml").write_text("<annotation></annotation>")
    assert detect_tool(tmp_path) == "" and detect_tool(tmp_path / "absent") == ""

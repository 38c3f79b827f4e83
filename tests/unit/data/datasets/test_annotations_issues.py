"""What readers find wrong, and how they go on: a check collects all, training stops or says so."""

import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.annotations import (
    KINDS,
    box_problem,
    find_image,
    forget_folder_listings,
)
from ppdist.data.datasets.build import (
    read_raw,
    read_split,
)
from ppdist.data.image import read_image
from ppdist.data.types import Issue, RawSet
from tests.unit.data.datasets.messages import refused
from tests.unit.data.datasets.small import voc_set, yolo_set
from tests.unit.data.sets import (
    coco_config,
    coco_content,
    write_images,
    write_json,
)


def found_in(config: DataConfig, split="train") -> tuple[RawSet, list[Issue]]:
    issues: list[Issue] = []
    raw = read_raw(config, split, issues.append)
    assert all(issue.code in KINDS for issue in issues)
    return raw, issues


def kinds_in(config: DataConfig) -> list[str]:
    return [issue.code for issue in found_in(config)[1]]


def test_check_continues_without_invalid_coco_parts(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 4))
    one, two, three = content["annotations"]
    content["images"] += [
        {"id": 1, "file_name": "000.jpg", "width": 64, "height": 48},
        {"id": 7, "file_name": "../007.jpg", "width": 64, "height": 48},
        {"id": 8, "file_name": "002.jpg", "width": 0, "height": "48"},
        {"id": "x", "file_name": "009.jpg", "width": 64, "height": 48},
        {"id": 10, "file_name": "001.jpg", "width": 64.0, "height": 48},
        7,
    ]
    content["annotations"] += [
        one | {"image_id": 99},
        one | {"id": 5, "image_id": 7},  # of an image left out: without a word
        two | {"id": 6, "category_id": [3]},
        three,
        one | {"id": 8, "area": "large"},
        one | {"id": 9, "segmentation": [[1, 2, 3]]},
        one | {"id": 10, "bbox": [1, 2, "a", 4]},
    ]
    content["categories"][2]["id"] = 90
    three["category_id"] = 90
    write_json(tmp_path, content)
    raw, issues = found_in(coco_config(tmp_path))
    assert [issue.code for issue in issues] == [
        "class_ids_gap", "image_id_duplicate", "path_outside", "size_missing", "image_listed_twice",
        "annotation_line", "image_listed_twice", "annotation_line", "image_unknown",
        "class_unknown", "area_invalid", "outline_malformed", "annotation_line",
        "annotation_id_duplicate",
    ]  # fmt: skip
    assert [image.image_id for image in raw.images] == [1, 2, 3, 4, 8, 10]
    assert sum(len(image.objects) for image in raw.images) == 6
    assert "90 Platelets -> 2" in issues[0].text and "images[8]: 001.jpg" in issues[6].text


def test_check_continues_without_invalid_voc_objects(tmp_path):
    config = voc_set(tmp_path, dict.fromkeys("abcd", "train"), {stem: ["cat"] for stem in "abcd"})
    (tmp_path / "label_list.txt").write_text("cat\n")
    (tmp_path / "train.txt").write_text("a\nb\nc\nd\ne\n../f\na\n")
    files = {stem: tmp_path / "Annotations" / f"{stem}.xml" for stem in "abcd"}
    files["a"].write_text(files["a"].read_text().replace("cat", "cow"))
    files["b"].write_text(files["b"].read_text()[:-5])
    files["c"].write_text(files["c"].read_text().replace("<width>64", "<width>nan"))
    (tmp_path / "images" / "c.jpg").write_bytes(b"no image, so that its size is unknown")
    files["d"].write_text(files["d"].read_text().replace("<name>cat</name>", ""))
    raw, issues = found_in(config)
    assert [issue.code for issue in issues] == [
        "annotation_unreadable", "annotation_line", "annotation_missing",
        "path_outside", "class_unknown", "class_unknown", "image_listed_twice",
    ]  # fmt: skip
    assert [image.path.name for image in raw.images] == ["a.jpg", "c.jpg", "d.jpg", "a.jpg"]
    assert [(len(each.objects), each.size_known) for each in raw.images] == [
        (0, True), (1, False), (0, True), (0, True),
    ]  # fmt: skip


def test_check_continues_without_invalid_yolo_lines(tmp_path):
    config = yolo_set(tmp_path, "7 0.5 0.5 0.1 0.1\n0 1 2\nnan nan 0 0 0\n0 nan 0.5 1 1")
    (tmp_path / "labels" / "001.txt").write_bytes(b"0 \xff\xff")
    raw, issues = found_in(config)
    assert [issue.code for issue in issues] == [
        "annotation_unreadable", "class_unknown", "annotation_line", "class_unknown",
    ]  # fmt: skip
    assert issues[1].image == str(tmp_path / "images" / "000.jpg")
    assert [len(image.objects) for image in raw.images] == [2, 0]


def test_warnings_take_one_line_and_keep_training(tmp_path, caplog):
    config = yolo_set(tmp_path, "", names=None)
    (tmp_path / "classes.txt").write_bytes("猫\r\n狗\r\n".encode("gbk"))
    raw, issues = found_in(config)
    assert [issue.code for issue in issues] == ["line_ends", "encoding"]
    with caplog.at_level(logging.WARNING, "ppdist"):
        dataset = read_split(config, "train", 2)
    assert dataset.class_names == raw.class_names == ("猫", "狗")
    line = f"{tmp_path / 'classes.txt'}: not UTF-8 text: read as GBK, a guess"
    assert dataset.notes == (line,)
    assert [record.getMessage() for record in caplog.records] == [line]


def test_western_class_names_stay_western(tmp_path):
    """ "L\u00f6we" in Windows-1252 is GBK text, too, and "Caf\u00e9" is not."""
    classes = {"a": "L\u00f6we", "b": "Caf\u00e9", "c": "L\u00f6we"}
    config = voc_set(
        tmp_path,
        {"a": "train", "b": "val", "c": "train"},
        {stem: [name] for stem, name in classes.items()},
    )
    for stem in classes:
        file = tmp_path / "Annotations" / f"{stem}.xml"
        file.write_bytes(file.read_text().encode("cp1252"))
    (tmp_path / "train.txt").write_text("a\nb\nc\n")
    raw, issues = found_in(config)
    assert raw.class_names == ("Caf\u00e9", "L\u00f6we")
    assert all("Windows-1252" in issue.text for issue in issues)


@pytest.mark.parametrize("name", ["血小板", "貓頭鷹", "臺灣", "鱿鱼"])
def test_chinese_class_names_stay_chinese(tmp_path, name):
    """Also those beyond GB2312, as of Taiwan."""
    config = yolo_set(tmp_path, "", names=None)
    (tmp_path / "classes.txt").write_bytes(f"{name}\ndog\n".encode("gbk"))
    assert found_in(config)[0].class_names == (name, "dog")


def test_alike_class_names_are_a_warning_with_both(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["Raccoon", "raccoon", "cat"]})
    (note,) = read_split(config, "train", 3).notes
    assert "'Raccoon' and 'raccoon'" in note
    folder = tmp_path / "of_classes"
    for name in ("Cat", "cat "):
        write_images(folder / name, 1)
    part = SplitConfig(images="of_classes")
    config = DataConfig(format="folder", root=str(tmp_path), train=part, val=part)
    (note,) = read_split(config, "train", 2).notes
    assert "'Cat' and 'cat '" in note


@pytest.mark.parametrize(
    ("policy", "box", "kept"),
    [
        ("drop", [50, 2, 40, 4], [0, 2]),
        ("clip", [50, 2, 40, 4], [0, 1, 2]),
        ("clip", [90, 2, 4, 4], [0, 2]),
    ],
)
def test_images_that_lose_all_boxes_are_left_out(tmp_path, policy, box, kept):
    content = coco_content(write_images(tmp_path / "images", 3))  # of 0, 1, 2 boxes
    content["annotations"][0]["bbox"] = box
    write_json(tmp_path, content)
    config = coco_config(tmp_path, bad_boxes=policy)
    dataset = read_split(config, "train", 3)
    assert [int(record.path[-5]) for record in dataset.records] == kept
    if 1 not in kept:
        assert "1 of 3 images" in dataset.notes[-1] and "(1 images" in dataset.notes[-1]
    assert len(read_split(config, "train", 3, all_images=True).records) == 3


def test_a_set_without_any_object_is_refused(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 2))
    write_json(tmp_path, content | {"annotations": []})
    for split in ("train", "val"):
        refused(coco_config(tmp_path), "objects_missing", split=split)
    for each in content["annotations"]:
        each["bbox"] = [200, 200, 5, 5]
    write_json(tmp_path, content)
    refused(coco_config(tmp_path), "objects_missing")


@pytest.mark.parametrize(
    ("bad", "good", "remedy"),
    [(1, 2, "DATA --fix DIR"), (3, 40, "DATA --fix DIR"), (4, 5, "4 of 9 objects"),
     (4, 0, "all 4 objects"), (1, 0, "")],
)  # fmt: skip
def test_clean_copy_is_the_remedy_of_few_bad_lines_alone(tmp_path, bad, good, remedy):
    config = yolo_set(tmp_path, "")
    lines = ["0 0.5 banana 0.1 0.1"] * bad + ["0 0.5 0.5 0.1 0.1"] * good
    (tmp_path / "labels" / "000.txt").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_split(config, "train", 2)
    assert remedy in (caught.value.fix or "") and bool(remedy) == bool(caught.value.fix)


@pytest.mark.parametrize(
    ("written", "found", "issue"),
    [
        ("a/b.jpg", "a/b.jpg", ""),
        ("a\\b.jpg", "a/b.jpg", ""),
        ("A/b.JPG", "a/b.jpg", ""),
        (".\\a\\b.jpg", "a/b.jpg", ""),
        ("data/a/b.jpg", "a/b.jpg", "image_elsewhere"),
        ("..\\..\\media\\upload\\4\\b.jpg", "a/b.jpg", "image_elsewhere"),
        ("../../upload/B.JPG", "a/b.jpg", "image_elsewhere"),
        ("C:\\set\\b.jpg", "a/b.jpg", "image_elsewhere"),
        ("/gone/a/b.jpg", "a/b.jpg", "image_elsewhere"),
        ("{root}/a/b.jpg", "a/b.jpg", ""),
        ("{root}/../out.jpg", "../out.jpg", ""),  # an absolute path says where it is
        ("../out.jpg", None, "path_outside"),
        ("{root}/../secret.txt", None, "path_outside"),
        ("twice.jpg", "twice.jpg", ""),  # in two folders, so that nobody knows
        ("x/twice.jpg", "x/twice.jpg", ""),
        ("x/c/twice.jpg", "c/twice.jpg", "image_elsewhere"),
        ("gone.jpg", "gone.jpg", ""),
        ("set/val/v.jpg", "val/v.jpg", "image_elsewhere"),
        ("images/train/v.jpg", "images/train/v.jpg", ""),  # missing: the other is not meant
        ("/home/train/set/val/v.jpg", "val/v.jpg", "image_elsewhere"),
    ],
)
def test_image_is_found_as_files_of_other_tools_call_it(tmp_path, written, found, issue):
    root = tmp_path / "set"
    names = ("a/b.jpg", "c/twice.jpg", "d/twice.jpg", "val/v.jpg", "../out.jpg", "../secret.txt")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    issues: list[Issue] = []
    forget_folder_listings()
    path = find_image(root, written.format(root=root), "list", issues.append)
    assert path == (None if found is None else Path(os.path.normpath(root / found)))
    assert [each.code for each in issues] == ([issue] if issue else [])


def test_xml_in_the_encoding_that_it_declares_is_read(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["Käfer"]})
    file = tmp_path / "Annotations" / "a.xml"
    text = "<?xml version='1.0' encoding='iso-8859-1'?>\n" + file.read_text()
    file.write_bytes(text.encode("iso-8859-1"))
    assert read_split(config, "train", 1).class_names == ("Käfer",)
    assert kinds_in(config) == ["encoding"]


@pytest.mark.parametrize(
    ("on_disk", "listed"),
    [
        ("图像.jpg".encode("gbk"), "图像.jpg"),
        (b"L\xf6we.jpg", "L\u00f6we.jpg"),  # Windows-1252
        ("e\u0301.jpg".encode(), "\u00e9.jpg"),
        (b"000.jpg", ".\\000.jpg"),
    ],
)
def test_images_are_found_despite_name_spelling(tmp_path, on_disk, listed):
    content = coco_content(write_images(tmp_path / "images", 2))
    (tmp_path / "images" / "000.jpg").rename(tmp_path / "images" / os.fsdecode(on_disk))
    content["images"][0]["file_name"] = listed
    write_json(tmp_path, content)
    record, _ = read_split(coco_config(tmp_path), "train", 3).records
    assert os.path.basename(os.fsencode(record.path)) == on_disk
    assert read_image(record.path, (48, 64)).shape == (48, 64, 3)


@pytest.mark.parametrize("policy", ["clip", "drop", "error"])
def test_swapped_corners_are_fixed_dropped_or_error(tmp_path, policy):
    content = coco_content(write_images(tmp_path / "images", 1))
    content["annotations"] = [
        {"image_id": 1, "category_id": 1, "bbox": [30, 5, -20, 10]},
        {"image_id": 1, "category_id": 1, "bbox": [70, 5, -20, 10]},
        {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]},
    ]
    file = write_json(tmp_path, content)
    config = coco_config(tmp_path, bad_boxes=policy)
    if policy == "error":
        refused(config, "box_swapped", str(file), "annotation number 0 of")
        return
    dataset = read_split(config, "train", 3)
    boxes = dataset.records[0].boxes_M4.tolist()
    if policy == "drop":
        done = "2 dropped (corners swapped)"
        assert boxes == [[1, 2, 4, 6]]
    else:
        done = "1 clipped (sticking out), 2 put in order (corners swapped)"
        assert boxes == [[10, 5, 30, 15], [50, 5, 64, 15], [1, 2, 4, 6]]
        assert dataset.records[0].area_M.tolist() == [200, 140, 12]
    assert dataset.notes == (f"{file}: {done} of 3 boxes (data.bad_boxes: {policy})",)


def test_coco_masks_are_kept_on_request(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 2))
    outline = [5.25, 5, 15, 5, 15, 15]
    rle = {"size": [48, 64], "counts": "abc"}
    content["annotations"] = [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 5, 10, 10],
         "segmentation": [outline, outline[:4]]},
        {"id": 2, "image_id": 1, "category_id": 2, "bbox": [5, 5, 10, 10], "iscrowd": 1,
         "segmentation": rle},
        {"id": 3, "image_id": 1, "category_id": 2, "bbox": [5, 5, 0, 10],
         "segmentation": [outline]},
    ]  # fmt: skip
    write_json(tmp_path, content)
    config = coco_config(tmp_path)
    one, none = read_split(config, "train", 3, masks=True).records[0].polygons_M
    assert [part.tolist() for part in one] == [[[5.25, 5], [15, 5], [15, 15]]]
    assert none == ()
    raw, _ = found_in(config)
    assert raw.images[0].objects[1].extra == {"id": 2, "segmentation": rle}
    assert raw.images[0].objects[0].polygons[0].dtype == np.float64


@pytest.mark.parametrize(
    "segmentation",
    [[[1, 2, 3, 4, 5]], [1, 2, 3, 4, 5, 6], "outline", 7, [[1, 2, None, 4]], [[1, 2, math.nan, 4]],
     [[1, 2, math.inf, 4]], [[1, 2, 3, 4], [{}]], [[[]]], [[1, 2]], [[1, 2, 3, 4]],
     [[1, 2, 3, 4, 5, 6, 7]]],
)  # fmt: skip
def test_object_with_malformed_outline_keeps_its_box(tmp_path, segmentation):
    content = coco_content(write_images(tmp_path / "images", 2))
    content["annotations"][0]["segmentation"] = segmentation
    write_json(tmp_path, content)
    raw, issues = found_in(coco_config(tmp_path))
    assert [issue.code for issue in issues] == ["outline_malformed"]
    assert issues[0].image == str(tmp_path / "images" / "001.jpg")
    (thing,) = raw.images[1].objects
    assert thing.polygons == () and "segmentation" not in thing.extra
    dataset = read_split(coco_config(tmp_path), "train", 3, masks=True)
    assert len(dataset.records[1].labels_M) == 1
    assert "x1, y1, x2, y2" in dataset.notes[0]


@pytest.mark.parametrize(
    ("value", "crowd"),
    [(0, False), (1, True), ("0", False), ("1", True), ("", False), (None, False), (True, True)],
)
def test_crowd_flag_is_read_from_text_numbers(tmp_path, value, crowd):
    content = coco_content(write_images(tmp_path / "images", 2))
    content["annotations"][0]["iscrowd"] = value
    write_json(tmp_path, content)
    raw, _ = found_in(coco_config(tmp_path))
    assert raw.images[1].objects[0].crowd is crowd


@pytest.mark.parametrize("area", [math.nan, math.inf, 10**400, "large", [1]])
def test_an_area_that_is_no_number_is_that_of_the_box(tmp_path, area):
    content = coco_content(write_images(tmp_path / "images", 2))
    content["annotations"][0] |= {"area": area, "bbox": [1, 2, 3, 4]}
    write_json(tmp_path, content)
    raw, issues = found_in(coco_config(tmp_path))
    assert [issue.code for issue in issues] == ["area_invalid"]
    assert raw.images[1].objects[0].area is None
    assert read_split(coco_config(tmp_path), "train", 3).records[1].area_M.tolist() == [12]


def test_box_with_zero_float32_area_is_issue(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 2))
    content["annotations"][0]["bbox"] = [40.0, 2, 1e-7, 4]
    write_json(tmp_path, content)
    dataset = read_split(coco_config(tmp_path), "train", all_images=True)
    assert len(dataset.records[1].labels_M) == 0
    assert "1 dropped (without area)" in dataset.notes[0]
    assert box_problem((40.0, 2.0, 40.0 + 1e-7, 6.0), 64, 48) == "box_no_area"
    assert box_problem((64 - 1e-7, 2.0, 70.0, 6.0), 64, 48) == "box_outside"
    assert box_problem((0.0, 2.0, 1e-7, 6.0), 64, 48) is None


def test_yolo_folder_images_are_found_behind_links(tmp_path):
    config = yolo_set(tmp_path, "")
    (name,) = write_images(tmp_path / "elsewhere", 1)
    (tmp_path / "images" / "sub").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "images" / "again").symlink_to(tmp_path / "images")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "images")
    (tmp_path / "labels" / "sub").mkdir()
    (tmp_path / "labels" / "sub" / "000.txt").write_text("0 .5 .5 .25 .5\n")
    raw, issues = found_in(config)
    found = [(os.path.relpath(image.path, tmp_path), len(image.objects)) for image in raw.images]
    assert found == [("images/000.jpg", 1), ("images/001.jpg", 0), (f"images/sub/{name}", 1)]
    assert issues == []


def test_label_files_of_no_image_or_of_two_are_found(tmp_path):
    config = yolo_set(tmp_path, "")
    (tmp_path / "labels" / "orphan.txt").write_text("0 .5 .5 .25 .5\n")
    (tmp_path / "labels" / "classes.txt").write_text("cat\ndog\n")
    image = tmp_path / "images" / "000.png"
    image.write_bytes((tmp_path / "images" / "000.jpg").read_bytes())
    raw, issues = found_in(config)
    assert [(issue.code, issue.image, issue.where) for issue in issues] == [
        ("label_without_image", "", f"{tmp_path}/labels/orphan.txt"),
        ("label_shared", str(image), f"{tmp_path}/labels/000.txt"),
    ]
    assert [len(image.objects) for image in raw.images] == [1, 1, 0]


def test_unresolved_outside_xml_file_name_is_issue(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat"]})
    (tmp_path / "images" / "a.jpg").unlink()
    file = tmp_path / "Annotations" / "a.xml"
    file.write_text(file.read_text().replace("stale.jpg", "/etc/passwd"))
    assert kinds_in(config) == ["path_outside"]

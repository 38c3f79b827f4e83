"""COCO, VOC and YOLO to one contract, and the exact words for what is wrong in COCO files."""

import json
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import has_objects, read_split
from ppdist.data.datasets.coco import map_categories, read_index
from ppdist.data.types import DetectionSet, Records
from tests.unit.data.datasets.messages import refused
from tests.unit.data.sets import (
    NAMES,
    bccd,
    coco_config,
    coco_content,
    write_coco,
    write_images,
    write_json,
)


@pytest.fixture(scope="module")
def blood(shared_dir) -> dict[tuple[str, str], DetectionSet]:
    return {
        (form, split): read_split(bccd(shared_dir, form, class_names=NAMES), split, 3)
        for form in ("coco", "voc", "yolo")
        for split in ("train", "val")
    }


@pytest.mark.parametrize(
    ("part", "key", "code", "problem"),
    [
        ("annotations", "category_id", "class_unknown", "category_id '1' is text: expected"),
        ("annotations", "image_id", "image_unknown", "image_id '2' is text: expected"),
        ("categories", "id", "bad_category_id", "id '1' is text: expected a whole number"),
        ("images", "id", "annotation_line", "id '1' is text: expected a whole number"),
    ],
)
def test_numbers_written_as_text_are_said_to_be_text(tmp_path, part, key, code, problem):
    content = coco_content(write_images(tmp_path / "images", 2))
    content[part][0][key] = str(content[part][0][key])
    write_json(tmp_path, content)
    refused(coco_config(tmp_path), code, problem)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("form", ["voc", "yolo"])
def test_the_three_formats_of_one_set_give_equal_records(blood, form, split):
    expected, found = blood["coco", split], blood[form, split]
    assert found.class_names == expected.class_names == NAMES
    assert found.category_ids == expected.category_ids == (1, 2, 3)
    ours, theirs = Records.of(found.records), Records.of(expected.records)
    paths = [ours.path(index) for index in range(len(ours))]
    assert paths == [theirs.path(index) for index in range(len(theirs))]
    assert all(map(os.path.isfile, paths))
    assert (ours.sizes_N2 == (480, 640)).all() and (theirs.sizes_N2 == (480, 640)).all()
    # VOC order is that of the file, the others' too; YOLO has six decimals of the image.
    np.testing.assert_array_equal(ours.counts_N, theirs.counts_N)
    np.testing.assert_allclose(ours.boxes_O4, theirs.boxes_O4, atol=1e-3)
    np.testing.assert_array_equal(ours.labels_O, theirs.labels_O)
    np.testing.assert_array_equal(ours.crowd_O, theirs.crowd_O)
    np.testing.assert_allclose(ours.area_O, theirs.area_O, rtol=1e-3)
    assert ours.boxes_O4.dtype == np.float32 and ours.labels_O.dtype == np.int64


def test_real_set_has_documented_counts(blood):
    for split, images, boxes in (("train", 205, 2805), ("val", 87, 1138)):
        found = blood["coco", split]
        assert len(found.records) == images
        assert sum(len(record.labels_M) for record in found.records) == boxes - 1
        (note,) = found.notes
        assert note.startswith(f"{found.source}: 1 dropped") and f"{boxes} boxes" in note


def test_real_set_names_its_empty_box_on_request(shared_dir):
    config = bccd(shared_dir, "coco", bad_boxes="error")
    file = Path(config.root) / config.train.annotations
    entries = json.loads(file.read_text())
    broken = next(entry for entry in entries["annotations"] if entry["bbox"][2] == 0)
    refused(config, "box_no_area", str(file), f"annotation {broken['id']} ")


def test_a_linked_image_folder_is_the_users_business(tmp_path):
    config = write_coco(tmp_path, 2)
    os.rename(tmp_path / "images", tmp_path / "elsewhere")
    (tmp_path / "images").symlink_to(tmp_path / "elsewhere")
    assert len(read_split(config, "train", 3).records) == 2


def bad_box_set(root: Path, policy: str) -> DataConfig:
    content = coco_content(write_images(root / "images", 1))
    boxes = [[5, 5, 10, 10], [60, 40, 20, 4], [70, 5, 9, 9], [5, 5, 0, 9], [54, 5, 10.6, 9]]
    content["annotations"] = [
        {"id": n, "image_id": 1, "category_id": 1, "bbox": box} for n, box in enumerate(boxes)
    ]
    write_json(root, content)
    return coco_config(root, bad_boxes=policy)


def test_bad_boxes_are_clipped_or_dropped_with_line(tmp_path, caplog):
    kept = {"clip": [[5, 5, 15, 15], [60, 40, 64, 44], [54, 5, 64, 14]],
            "drop": [[5, 5, 15, 15], [54, 5, 64, 14]]}  # fmt: skip
    done = {"clip": "1 clipped (sticking out), ", "drop": ""}
    more = {"clip": "", "drop": ", 1 dropped (sticking out)"}
    for policy, expected in kept.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ppdist"):
            dataset = read_split(bad_box_set(tmp_path, policy), "train", 3)
        np.testing.assert_allclose(dataset.records[0].boxes_M4, expected)
        line = (
            f"{tmp_path / 'set.json'}: {done[policy]}1 dropped (outside the image)"
            f"{more[policy]}, 1 dropped (without area) of 5 boxes (data.bad_boxes: {policy})"
        )
        assert dataset.notes == (line,)
        assert [record.getMessage() for record in caplog.records] == [line]


def test_crowds_areas_and_sparse_category_ids_are_kept(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 1))
    content["categories"] = [{"id": 90, "name": "z"}, {"id": 3, "name": "a"}]
    content["annotations"] = [
        {"image_id": 1, "category_id": 90, "bbox": [1, 2, 3, 4], "iscrowd": 1, "area": 7.5},
        {"image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4]},
    ]
    write_json(tmp_path, content)
    dataset = read_split(coco_config(tmp_path), "train", 2)
    (record,) = dataset.records
    assert (dataset.class_names, dataset.category_ids) == (("a", "z"), (3, 90))
    assert record.labels_M.tolist() == [1, 0]
    assert record.crowd_M.tolist() == [True, False]
    assert record.area_M.tolist() == [7.5, 12.0]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("sides", "known"),
    [({"width": -1, "height": -1}, True), ({"width": 0, "height": 0}, True), ({}, True),
     ({"width": 64}, True), ({"width": None, "height": "48"}, True), ({}, False)],
)  # fmt: skip
def test_a_missing_or_wrong_size_is_that_of_the_image(tmp_path, sides, known, fast):
    content = coco_content(write_images(tmp_path / "images", 3))
    if not known:
        (tmp_path / "images" / "001.jpg").write_bytes(b"no image")
    for entry in content["images"]:
        del entry["width"], entry["height"]
        entry |= sides
    write_json(tmp_path, content)
    dataset = read_split(coco_config(tmp_path), "train", 3, masks=not fast)
    sizes = [(record.width, record.height) for record in dataset.records]
    assert sizes == [(64, 48), (64, 48) if known else (1, 1), (64, 48)]
    assert [len(record.labels_M) for record in dataset.records] == [0, 1, 2]
    (note,) = dataset.notes  # one line, and how many
    assert f"(and {1 + known} more:" in note


def rle_of(mask_HW: np.ndarray, compressed: bool) -> dict:
    """COCO's run-length mask, by pycocotools."""
    from pycocotools import mask as masks

    encoded = masks.encode(np.asfortranarray(mask_HW.astype(np.uint8)))
    if compressed:
        return {"size": encoded["size"], "counts": encoded["counts"].decode()}
    flat = mask_HW.T.reshape(-1)
    edges = np.flatnonzero(np.diff(flat.astype(int))) + 1
    runs = np.diff([0, *edges, len(flat)]).tolist()
    return {"size": [*mask_HW.shape], "counts": [0, *runs] if flat[0] else runs}


@pytest.mark.parametrize("compressed", [True, False])
def test_a_box_that_is_not_given_is_that_of_the_mask(tmp_path, compressed):
    from pycocotools import mask as masks

    rng = np.random.RandomState(0)
    content = coco_content(write_images(tmp_path / "images", 1))
    found, expected = [], []
    for number in range(30):
        mask_HW = np.zeros((48, 64), bool)
        for _ in range(rng.randint(1, 4)):
            top, left = rng.randint(0, 47), rng.randint(0, 63)
            mask_HW[top : top + rng.randint(1, 48), left : left + rng.randint(1, 30)] = True
        outline = rle_of(mask_HW, compressed)
        found.append({"id": number, "image_id": 1, "category_id": 1, "segmentation": outline})
        box = masks.toBbox(masks.encode(np.asfortranarray(mask_HW.astype(np.uint8))))
        expected.append([box[0], box[1], box[0] + box[2], box[1] + box[3]])
    write_json(tmp_path, content | {"annotations": found})
    boxes_M4 = read_split(coco_config(tmp_path), "train", 3).records[0].boxes_M4
    assert boxes_M4.tolist() == expected


@pytest.mark.parametrize("bbox", [{}, {"bbox": None}, {"bbox": []}, {"bbox": [0, 0, 0, 0]}])
def test_a_box_that_is_not_given_is_that_of_the_outline(tmp_path, bbox):
    outline = [[5, 6, 15.5, 6, 15.5, 20], [3, 7, 4, 7, 4, 8], []]
    entry = {"id": 1, "image_id": 1, "category_id": 1, "segmentation": outline, **bbox}
    content = coco_content(write_images(tmp_path / "images", 1)) | {"annotations": [entry]}
    write_json(tmp_path, content)
    for masks in (False, True):
        (record,) = read_split(coco_config(tmp_path), "train", 3, masks=masks).records
        assert record.boxes_M4.tolist() == [[3, 6, 15.5, 20]]


@pytest.mark.parametrize(
    "outline",
    [None, [], [[]], [[1, 2]], [[1, 2, 3, 4]], [[[1, 2, 3, 4, 5, 6]]], [[1, 2, 3, 4, 5, 6, 7]], "x",
     {}, {"size": [48, 64], "counts": "~"}, {"size": [48, 64], "counts": [48 * 64]},
     {"size": [48, 64], "counts": [1, 2]}, {"size": [0, 64], "counts": [0]}, {"counts": [1, 2]},
     {"size": [48, 64], "counts": [-5, 48 * 64 + 5]}, {"size": [48, 64], "counts": []},
     {"size": [48, 64], "counts": "o" * 40}],
)  # fmt: skip
def test_an_object_with_neither_box_nor_outline_is_named(tmp_path, outline):
    content = coco_content(write_images(tmp_path / "images", 2))
    del content["annotations"][0]["bbox"]
    content["annotations"][0]["segmentation"] = outline
    write_json(tmp_path, content)
    refused(coco_config(tmp_path), "annotation_line", "bbox None, and no outline")


@pytest.mark.parametrize("given", [{}, {"annotations": []}])
def test_images_to_be_annotated_are_read_on_request(tmp_path, given):
    """COCO's image_info_test-dev."""
    content = coco_content(write_images(tmp_path / "images", 2))
    del content["annotations"]
    write_json(tmp_path, content | given)
    refused(coco_config(tmp_path), "objects_missing")
    dataset = read_split(coco_config(tmp_path), "val", 3, annotated=False)
    assert [record.image_id for record in dataset.records] == [1, 2]
    assert (dataset.category_ids, has_objects(dataset)) == ((1, 2, 3), False)


def categories(*pairs: tuple[int, str], above: str = "") -> list[dict]:
    return [{"id": number, "name": name, "supercategory": above} for number, name in pairs]


CLASSES = categories((1, "RBC"), (2, "WBC"), (3, "Platelets"))
ORDER = categories((2, "WBC"), (7, "RBC"), (9, "Platelets"))
FEWER = categories((5, "Platelets"), (1, "WBC"))
MORE = [*CLASSES, *categories((4, "other"))]
GROUPED = [*categories((0, "cells")), *categories((1, "RBC"), (2, "WBC"), above="cells")]
# Roboflow: the group is called as one of its classes.
NAMESAKE = [*categories((0, "RBC")), *categories((1, "RBC"), (2, "WBC"), above="RBC")]
TWICE = categories((1, "RBC"), (2, "WBC"), (3, "RBC"))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("train", "val", "used", "names", "labels", "ids"),
    [
        (CLASSES, ORDER, (2, 7, 9), NAMES, [1, 0, 2], (7, 2, 9)),
        (CLASSES, FEWER, (5, 1), NAMES, [2, 1], (6, 1, 5)),
        (CLASSES, MORE, (3,), NAMES, [2], (1, 2, 3)),
        (GROUPED, GROUPED, (1, 2), ("RBC", "WBC"), [0, 1], (1, 2)),
        (GROUPED, CLASSES, (2, 1), ("RBC", "WBC"), [1, 0], (1, 2)),
        (NAMESAKE, NAMESAKE, (2, 1), ("RBC", "WBC"), [1, 0], (1, 2)),
        (NAMESAKE, CLASSES, (2, 1), ("RBC", "WBC"), [1, 0], (1, 2)),
        (CLASSES, NAMESAKE, (1, 2), NAMES, [0, 1], (1, 2, 3)),
        (TWICE, TWICE, (1, 2, 3), ("RBC", "WBC"), [0, 1, 0], (1, 2)),
        (TWICE, CLASSES, (2, 1), ("RBC", "WBC"), [1, 0], (1, 2)),
    ],
)
def test_splits_agree_on_classes_by_name(tmp_path, train, val, used, names, labels, ids, masks):
    """Train has an object of each class; val of those in `used`."""
    write_images(tmp_path / "images", 1)
    image = {"id": 1, "file_name": "000.jpg", "width": 64, "height": 48}
    of_train = [each["id"] for each in train if each["id"]]  # 0 is a group
    for split, known, own in (("train", train, of_train), ("val", val, used)):
        things = [
            {"id": number, "image_id": 1, "category_id": category, "bbox": [number, 1, 5, 5]}
            for number, category in enumerate(own)
        ]
        content = {"images": [image], "annotations": things, "categories": known}
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    config = DataConfig(
        root=str(tmp_path),
        train=SplitConfig(annotations="train.json"),
        val=SplitConfig(annotations="val.json"),
    )
    assert read_index(tmp_path / "train.json") == (["000.jpg"], names)
    assert read_split(config, "train", len(names), masks=masks).class_names == names
    found = read_split(config, "val", len(names), masks=masks)
    assert (found.class_names, found.category_ids) == (names, ids)
    assert found.records[0].labels_M.tolist() == labels
    named = config.model_copy(update={"class_names": names[::-1]})
    last = len(names) - 1
    reversed_labels = read_split(named, "val", len(names), masks=masks).records[0].labels_M
    assert reversed_labels.tolist() == [last - label for label in labels]


def test_classes_take_time_in_proportion_to_their_number(tmp_path):
    entries = categories(*((n, f"class {n}") for n in range(20_000)), above="things")
    began = time.process_time()
    assert len(map_categories(entries, set, tmp_path / "set.json", ignore_issue).names) == 20_000
    assert time.process_time() - began < 5  # all of it against all: minutes


def test_an_object_of_a_class_that_training_has_not_names_both_files(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 4))
    (tmp_path / "train.json").write_text(json.dumps(content))
    content["categories"][0]["name"] = "red"
    file = write_json(tmp_path, content)
    config = coco_config(tmp_path)
    alone = config.model_copy(update={"train": SplitConfig(annotations="absent.json")})
    assert read_split(alone, "val", 3).class_names == ("red", "WBC", "Platelets")
    config = config.model_copy(update={"train": SplitConfig(annotations="train.json")})
    refused(config, "class_unknown", str(file), "annotation 1", "'red'", split="val")
    named = coco_config(tmp_path, class_names=NAMES)
    refused(named, "class_unknown", "of data.class_names")

"""COCO, VOC and YOLO to one contract, and the exact words for what is wrong in COCO files."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.data import DataConfig
from ppdist.data.datasets.build import (
    read_split,
)
from ppdist.data.types import DetectionSet, Records
from tests.unit.data.datasets.messages import message_of
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
    assert problem in message_of(coco_config(tmp_path), code)


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
        assert note == (
            f"{found.source}: 1 dropped (without area) of {boxes} boxes (data.bad_boxes: clip)"
        )


def test_real_set_names_its_empty_box_on_request(shared_dir):
    config = bccd(shared_dir, "coco", bad_boxes="error")
    file = Path(config.root) / config.train.annotations
    entries = json.loads(file.read_text())
    bad = next(entry for entry in entries["annotations"] if entry["bbox"][2] == 0)
    assert message_of(config, "box_no_area") == (
        f"{file}: annotation {bad['id']} of image 'BloodImage_00343.jpg': box (x=181, y=329, w=0, "
        f"h=0) has no area; fix the file, or set data.bad_boxes: clip"
    )


@pytest.mark.parametrize(
    ("content", "code", "problem"),
    [
        ("[1,", "not_json", "not JSON: Expecting value: line 1 column 4 (char 3)"),
        ("[]", "not_coco", "not COCO detection JSON: expected an object, found a list"),
        (
            '{"images": [], "shapes": []}',
            "not_coco",
            "not COCO detection JSON: it has no list 'annotations' (it has: images, shapes)",
        ),
        ("{}", "not_coco", "not COCO detection JSON: it has no list 'images' (it has: nothing)"),
        (
            '{"images": [{"id": 1, "width": 3, "height": 2}], "annotations": [], "categories": []}',
            "annotation_line",
            "not COCO detection JSON: images[0] has no 'file_name': "
            "{'id': 1, 'width': 3, 'height': 2}",
        ),
    ],
)  # fmt: skip
def test_json_that_is_not_coco_is_told_by_what_it_lacks(tmp_path, content, code, problem):
    (tmp_path / "images").mkdir()
    (tmp_path / "set.json").write_text(content)
    assert message_of(coco_config(tmp_path), code) == f"{tmp_path / 'set.json'}: {problem}"


def test_unknown_categories_and_images_are_named(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 4))
    file = write_json(tmp_path, content)
    content["annotations"][1]["category_id"] = 7
    write_json(tmp_path, content)
    assert message_of(coco_config(tmp_path), "class_unknown") == (
        f"{file}: annotation 2: category_id 7 is not among the file's categories "
        f"(1 RBC, 2 WBC, 3 Platelets)"
    )
    content["annotations"][1].update(category_id=1, image_id=99)
    write_json(tmp_path, content)
    assert message_of(coco_config(tmp_path), "image_unknown") == (
        f"{file}: annotation 2: image_id 99 is not among the file's images"
    )
    content["annotations"][1].update(image_id=2, bbox=[1, 2, 3])
    write_json(tmp_path, content)
    assert message_of(coco_config(tmp_path), "annotation_line") == (
        f"{file}: annotation 2 of image '001.jpg': bbox [1, 2, 3]: expected [x, y, width, height]"
    )


def test_two_images_of_one_id_are_refused(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 3))
    content["images"][2]["id"] = 1
    file = write_json(tmp_path, content)
    assert message_of(coco_config(tmp_path), "image_id_duplicate") == (
        f"{file}: images[2] has the same id as images[0]: 1"
    )


@pytest.mark.parametrize("name", ["../outside.jpg", "/etc/passwd", "a/../../outside.jpg", ".."])
def test_file_names_cannot_leave_the_folder(tmp_path, name):
    content = coco_content(write_images(tmp_path / "images", 2))
    content["images"][1]["file_name"] = name
    file = write_json(tmp_path, content)
    (tmp_path / "outside.jpg").write_bytes(b"")
    assert message_of(coco_config(tmp_path), "path_outside") == (
        f"{file}: file name {name!r} leads out of {tmp_path / 'images'}"
    )


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


def test_bad_boxes_can_stop_the_run(tmp_path):
    assert message_of(bad_box_set(tmp_path, "error"), "box_sticking_out") == (
        f"{tmp_path / 'set.json'}: annotation 1 of image '000.jpg': box (x=60, y=40, w=20, h=4) "
        f"sticks out of the 64x48 image; fix the file, or set data.bad_boxes: clip"
    )


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

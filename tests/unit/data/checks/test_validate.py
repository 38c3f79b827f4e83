"""Both splits validated."""

import json
import os

import pytest

from ppdist.config.data import SplitConfig
from ppdist.data.checks.clean_copy import clean_copy
from ppdist.data.checks.validate import validate
from ppdist.data.datasets import annotations
from ppdist.data.datasets.annotations import KINDS
from tests.errors import raises
from tests.unit.data.corpus import (
    config,
    write_clean_coco,
    write_dirty_coco,
    write_dirty_voc,
    write_dirty_yolo,
    write_picture,
)
from tests.unit.data.sets import bccd

_TWICE = {"image_truncated": 5, "box_duplicate": 2, "image_no_boxes": 2}
_OF_OTHER_FORMATS = {"annotation_missing", "annotation_unreadable", "encoding"}
# One a set; test_yolo.py and test_annotations_issues.py have them.
_OF_WHOLE_SETS = {"image_elsewhere", "label_columns", "label_encoded", "label_missing"}
_OF_YOLO = {"label_without_image", "label_shared", "image_kind_unread"}
_OF_CLASSES = {
    "shape_unread",  # of labelme and CVAT alone
    *("classes_differ", "class_names_alike", "class_names_same", "class_count_differs"),
    *("class_group", "class_list_differs"),
}
_OF_PIXELS = {"dark_sixteen_bit", "pixel_kind"}  # see test_image
_OF_SPLITS = {"objects_missing", "splits_same"}
_OF_NATIVE_CODE = {"image_crashes_decoder", "image_hangs_decoder"}  # see test_scan


@pytest.mark.parametrize("decode", [True, False])
def test_an_audit_finds_every_defect_once(tmp_path, decode, record_property):
    report = validate(write_dirty_coco(tmp_path), decode=decode, workers=2)
    counts = {row.name: row.counts.get("train", 0) for row in report.rows()}
    wanted = KINDS.keys() - _OF_OTHER_FORMATS - _OF_YOLO - _OF_NATIVE_CODE
    wanted -= _OF_CLASSES | _OF_SPLITS | _OF_WHOLE_SETS | _OF_PIXELS
    assert counts == {kind: _TWICE.get(kind, 1) for kind in wanted}
    assert not any(row.counts.get("val") for row in report.rows())
    severities = [row.kind.severity for row in report.rows()]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert report.errors == 15
    record_property("figure", f"{len(wanted)} of {len(wanted)} kinds of defects found")


def test_validate_finds_issues_of_per_image_files(tmp_path):
    config = write_dirty_voc(tmp_path)
    found = {row.name: row for row in validate(config, decode=False, workers=1).rows()}
    assert found.keys() >= _OF_OTHER_FORMATS
    assert str(tmp_path / "Annotations" / "1.xml") in found["annotation_unreadable"].examples[0]
    assert "2.xml: not UTF-8" in found["encoding"].examples[0]


def test_image_with_unknown_yolo_size_is_lost_issue(tmp_path, monkeypatch):
    settings = write_dirty_yolo(tmp_path)
    (tmp_path / "images" / "train" / "b.jpg").write_bytes(b"no image")
    monkeypatch.setattr(
        annotations, "image_size", lambda path, opener: None
    )  # as of a format Pillow has not
    found = {row.name: row.counts for row in validate(settings, decode=False, workers=1).rows()}
    assert found["image_unreadable"] == {"train": 1}
    assert found["size_mismatch"] == {"train": 2, "val": 1} and "box_outside" not in found


def test_two_splits_of_one_file_are_a_warning(tmp_path):
    settings = write_clean_coco(tmp_path)
    one = settings.model_copy(update={"val": settings.train})
    row, _ = validate(one, decode=False, workers=1).rows()  # and val's image is in no split
    assert (row.name, row.kind.severity, row.count) == ("splits_same", "warning", 1)
    assert row.examples[0].startswith(f"{tmp_path / 'train.json'}: ")


def test_split_without_any_object_is_an_error(tmp_path):
    settings = write_clean_coco(tmp_path)
    content = json.loads((tmp_path / "val.json").read_text())
    content["annotations"] = [content["annotations"][0] | {"iscrowd": 1}]  # one to ignore
    (tmp_path / "val.json").write_text(json.dumps(content))
    report = validate(settings, decode=False, workers=1)
    (row,) = [row for row in report.rows() if row.kind.severity == "error"]
    assert (row.name, row.counts) == ("objects_missing", {"val": 1})
    content["annotations"] = []
    (tmp_path / "val.json").write_text(json.dumps(content))
    with raises("objects_missing"):
        clean_copy(
            validate(settings, decode=False, workers=1), "coco", tmp_path / "out", images="link"
        )
    assert not (tmp_path / "out").exists()


def test_images_of_the_test_split_are_listed(tmp_path):
    settings = write_clean_coco(tmp_path)
    val = json.loads((tmp_path / "val.json").read_text())
    write_picture(tmp_path / "images" / "3.jpg", 3)
    val["images"][0]["file_name"] = "3.jpg"
    (tmp_path / "test.json").write_text(json.dumps(val), encoding="utf-8")
    assert [row.name for row in validate(settings, decode=False, workers=1).rows()] == [
        "image_unlisted"
    ]
    tested = settings.model_copy(update={"test": SplitConfig(annotations="test.json")})
    assert validate(tested, decode=False, workers=1).rows() == []


def test_a_report_survives_json_with_every_finding(tmp_path):
    report = validate(write_dirty_coco(tmp_path), decode=True, workers=1)
    content = json.loads(json.dumps(report.as_json()))
    assert content["splits"]["train"]["images"] == len(report.splits["train"].raw.images)
    assert content["splits"]["train"]["classes"] == ["cat", "dog", "bird"]
    of_kind = {entry["kind"]: entry for entry in content["kinds"]}
    assert len(content["findings"]) == sum(entry["count"] for entry in of_kind.values())
    assert of_kind["box_swapped"]["severity"] == "warning"
    assert of_kind["image_empty"]["examples"][0].startswith(f"{tmp_path}/images/empty.jpg: ")
    leak = next(entry for entry in content["findings"] if entry["kind"] == "leakage")
    assert leak["split"] == "train" and leak["image"] == f"{tmp_path}/images/leak.jpg"


def test_the_real_defects_of_bccd_are_found(shared_dir):
    if not (shared_dir / "data" / "bccd").is_dir():
        pytest.skip("the BCCD images are not here")
    report = validate(bccd(shared_dir), decode=True, workers=2)
    found = {row.name: row for row in report.rows()}
    assert found.keys() == {"box_no_area", "image_unlisted"} and report.errors == 0
    assert found["box_no_area"].counts == {"train": 1, "val": 1}
    train, val = found["box_no_area"].examples
    assert "BloodImage_00343" in train and "BloodImage_00338" in val


def test_other_validation_classes_are_report_error(tmp_path):
    settings = write_clean_coco(tmp_path)
    file = tmp_path / "val.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "dog"
    file.write_text(json.dumps(content))
    report = validate(settings, decode=False, workers=1)
    (finding,) = (f for f in report.as_json()["findings"] if f["kind"] == "class_unknown")
    assert (
        finding["split"] == "val" and report.errors == 3
    )  # and the image, and the split, have none


def test_one_list_for_both_splits_is_no_leakage(tmp_path):
    write_clean_coco(tmp_path)
    same = validate(config(tmp_path, "coco", "train.json", "train.json"), decode=False, workers=1)
    assert "leakage" not in {row.name for row in same.rows()}
    content = json.loads((tmp_path / "train.json").read_text())
    content["images"], content["annotations"] = content["images"][:1], content["annotations"][:1]
    (tmp_path / "half.json").write_text(json.dumps(content))
    half = validate(config(tmp_path, "coco", "train.json", "half.json"), decode=False, workers=1)
    (leak,) = (row for row in half.rows() if row.name == "leakage")
    assert leak.count == 1


def test_link_cycles_and_linked_folders_count_once(tmp_path):
    settings = write_clean_coco(tmp_path)
    images = tmp_path / "images"
    for number in range(3):  # each doubles what a walk without memory sees, at every depth
        os.symlink(images, images / f"loop{number}")
    write_picture(tmp_path / "elsewhere" / "new.jpg", 9)
    for name in ("a", "b"):
        os.symlink(tmp_path / "elsewhere", images / name)
    issues = validate(settings, decode=False, workers=1).splits["train"].issues
    assert [issue.image for issue in issues] == [str(images / "a" / "new.jpg")]
    content = json.loads((tmp_path / "train.json").read_text())
    content["images"][0]["file_name"] = "b/new.jpg"
    (tmp_path / "train.json").write_text(json.dumps(content))
    issues = validate(settings, decode=False, workers=1).splits["train"].issues
    assert [issue.image for issue in issues] == [str(images / "0.jpg")]


def test_box_of_two_classes_is_no_duplicate(tmp_path):
    settings = write_clean_coco(tmp_path)
    file = tmp_path / "train.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["categories"] += [{"id": 2, "name": "dog"}, {"id": 3, "name": "bird"}]
    content["annotations"] += [
        {"id": 2, "image_id": 0, "category_id": 2, "bbox": [1, 2, 20, 20]},  # a cat lies there
        {"id": 3, "image_id": 0, "category_id": 3, "bbox": [5, 6, 30, 30], "iscrowd": 1},
    ]
    file.write_text(json.dumps(content), encoding="utf-8")
    val = json.loads((tmp_path / "val.json").read_text(encoding="utf-8"))
    val["categories"] = content["categories"]
    (tmp_path / "val.json").write_text(json.dumps(val), encoding="utf-8")
    report = validate(settings, decode=False, workers=1)
    rows = {row.name: row for row in report.rows() if row.counts.get("train")}
    assert "box_duplicate" not in rows
    assert "'bird'" in rows["class_unused"].examples[0] and rows["class_unused"].count == 1
    out = tmp_path / "clean"
    cleaned = clean_copy(validate(settings, decode=True, workers=1), "coco", out, images="copy")
    kept = [len(image.objects) for image in cleaned.raws["train"].images]
    assert kept == [3, 1]

"""Clean copies of sets with defects."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppdist.common.errors import UserError
from ppdist.config.data import DataConfig
from ppdist.data.checks import clean_copy as module
from ppdist.data.checks.clean_copy import clean_copy
from ppdist.data.checks.validate import validate
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.convert import Format, Images, conversion_section
from tests.errors import raises
from tests.unit.data.corpus import (
    config,
    write_clean_coco,
    write_dirty_coco,
    write_dirty_voc,
    write_dirty_yolo,
    write_picture,
)
from tests.unit.data.datasets.small import yolo_set

pytestmark = pytest.mark.usefixtures("checked_here")


def _cleaned(settings: DataConfig, out: Path, form: Format = "coco", images: Images = "copy"):
    """What `clean_copy` gave, and the settings that read it."""
    cleaned = clean_copy(validate(settings, decode=True, workers=1), form, out, images=images)
    text = conversion_section(cleaned.raws, form, out, images=images)
    return cleaned, DataConfig(**yaml.safe_load(text)["data"])


def _names(settings: DataConfig, split: str) -> list[str]:
    return [os.path.basename(record.path) for record in read_split(settings, split).records]


@pytest.mark.parametrize(
    "write, form",
    [
        (write_dirty_coco, "coco"),
        (write_dirty_coco, "yolo"),
        (write_dirty_voc, "coco"),
        (write_dirty_yolo, "yolo"),
        (write_dirty_yolo, "coco"),
    ],
)
def test_a_clean_copy_has_nothing_but_notes(tmp_path, write, form):
    (tmp_path / "dirty").mkdir()
    config = write(tmp_path / "dirty")
    report = validate(config, decode=True, workers=2)
    lines, raws = clean_copy(report, form, tmp_path / "clean", images="copy")
    text = conversion_section(raws, form, tmp_path / "clean", images="copy")
    again = validate(DataConfig(**yaml.safe_load(text)["data"]), decode=True, workers=2)
    assert {row.kind.severity for row in again.rows()} <= {"note"}, again.rows()
    for row in report.rows():
        if row.kind.severity != "note":
            assert any(f" {row.name}: {row.kind.fix}" in line for line in lines), row.name


@pytest.mark.parametrize("line", ["0 0.5 banana 0.1 0.1", "7 0.5 0.5 0.1 0.1", "0 9 9 0.1 0.1"])
def test_image_of_bad_labels_alone_is_no_background(tmp_path, line):
    """Malformed, of an unknown class, outside: nobody said that the image shows nothing."""
    settings = yolo_set(tmp_path / "in", line)
    (tmp_path / "in" / "labels" / "001.txt").write_text(f"{line}\n")
    write_picture(tmp_path / "in" / "images" / "background.jpg", 9)
    found = {
        row.name: row.counts["train"] for row in validate(settings, decode=True, workers=1).rows()
    }
    assert (found["image_objects_lost"], found["image_no_boxes"]) == (1, 1)
    cleaned, copied = _cleaned(settings, tmp_path / "out", form="yolo")
    assert any("train: 1 image_objects_lost" in line for line in cleaned.lines)
    assert _names(copied, "train") == ["000.jpg", "background.jpg"]


def test_a_clean_copy_of_clean_data_changes_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    config = write_clean_coco(tmp_path / "a")
    report = validate(config, decode=True, workers=1)
    lines, raws = clean_copy(report, "coco", tmp_path / "b", images="link")
    assert lines == []
    text = conversion_section(raws, "coco", tmp_path / "b", images="link")
    copied = DataConfig(**yaml.safe_load(text)["data"])
    for split in ("train", "val"):
        for ours, theirs in zip(
            read_split(config, split).records, read_split(copied, split).records
        ):
            assert np.array_equal(ours.boxes_M4, theirs.boxes_M4)
            assert os.path.realpath(theirs.path) == os.path.realpath(ours.path)


def _write(root: Path, split: str, sizes: dict[str, tuple[int, int]]) -> None:
    """A COCO file of these images, annotated to be so large, with a box each."""
    entries = list(enumerate(sizes.items(), 1))
    content = {
        "images": [
            {"id": n, "file_name": name, "width": width, "height": height}
            for n, (name, (width, height)) in entries
        ],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 20, 20]} for n, _ in entries
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (root / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")


def test_of_equal_images_one_good_one_always_stays(tmp_path):
    root, good, bad = tmp_path / "set", (64, 48), (50, 50)
    for number, name in enumerate(("a", "b", "v", "w", "x")):
        write_picture(root / "images" / f"{name}.png", number)
    for original, copy in (("a", "a2"), ("v", "v_in_train"), ("w", "w_in_train"), ("b", "b2")):
        shutil.copy(root / "images" / f"{original}.png", root / "images" / f"{copy}.png")
    train = {"a": bad, "a2": good, "b": good, "b2": good, "v_in_train": good, "w_in_train": good}
    _write(root, "train", {f"{name}.png": size for name, size in train.items()})
    _write(root, "val", {"v.png": bad, "w.png": good, "x.png": good})
    cleaned, again = _cleaned(config(root, "coco", "train.json", "val.json"), tmp_path / "out")
    assert _names(again, "train") == ["a2.png", "b.png", "v_in_train.png"]
    assert _names(again, "val") == ["w.png", "x.png"]
    kinds = ["train: 1 size_mismatch", "train: 1 image_duplicate", "train: 1 leakage"]
    assert [line.rpartition(": ")[0] for line in cleaned.lines] == [*kinds, "val: 1 size_mismatch"]
    assert validate(again, decode=True, workers=1).errors == 0


def test_list_of_both_splits_stays_so_when_recleaned(tmp_path):
    write_clean_coco(tmp_path / "set")
    settings = config(tmp_path / "set", "coco", "train.json", "train.json")
    for number in range(2):
        cleaned, settings = _cleaned(settings, tmp_path / f"out{number}")
        assert _names(settings, "train") == _names(settings, "val") == ["0.jpg", "1.jpg"]
        assert not any("leakage" in line for line in cleaned.lines)


@pytest.mark.parametrize("form, images", [("coco", "none"), ("yolo", "link")])
def test_what_was_written_is_what_the_settings_read(tmp_path, form, images):
    """Without the images that were left out, the folder that all of them share is another one."""
    root = tmp_path / "set"
    _write(_made(root), "train", {"sub/0.jpg": (64, 48), "bad.jpg": (64, 48)})
    _write(root, "val", {"sub/1.jpg": (64, 48)})
    for number in range(2):
        write_picture(root / "images" / "sub" / f"{number}.jpg", number)
    (root / "images" / "bad.jpg").write_bytes(b"no image")
    cleaned, again = _cleaned(
        config(root, "coco", "train.json", "val.json"), tmp_path / "out", form, images
    )
    assert [image.path.name for image in cleaned.raws["train"].images] == ["0.jpg"]
    assert _names(again, "train") == ["0.jpg"] and _names(again, "val") == ["1.jpg"]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_other_validation_classes_write_nothing(tmp_path):
    settings = write_clean_coco(tmp_path)
    file = tmp_path / "val.json"
    file.write_text(file.read_text().replace('"cat"', '"dog"'))
    report = validate(settings, decode=False, workers=1)
    with raises("no_good_image"):
        clean_copy(report, "yolo", tmp_path / "out", images="copy")
    assert not (tmp_path / "out").exists()


def test_classes_that_count_from_one_write_nothing(tmp_path):
    report = validate(yolo_set(tmp_path, "2 0.5 0.5 0.1 0.1"), decode=False, workers=1)
    with raises("class_unknown"):
        clean_copy(report, "yolo", tmp_path / "out", images="copy")
    assert not (tmp_path / "out").exists()


def test_a_copy_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    settings = write_clean_coco(tmp_path)
    report, out = validate(settings, decode=False, workers=1), tmp_path / "out"
    original = module.convert

    def full(raw, form, folder, *, images, split):
        lines = original(raw, form, folder, images=images, split=split)
        if split == "val":
            raise UserError(
                "cannot be written: No space left on device", code="disk_full", where=str(folder)
            )
        return lines

    monkeypatch.setattr(module, "convert", full)
    with raises("disk_full", "No space left"):
        clean_copy(report, "coco", out, images="copy")
    assert [*out.iterdir()] == []
    monkeypatch.undo()
    assert clean_copy(report, "coco", out, images="copy").raws.keys() == {"train", "val"}
    with raises("folder_not_empty"):
        clean_copy(report, "coco", out, images="copy")

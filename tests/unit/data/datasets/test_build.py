"""What must hold before training: folders, files and classes; the exact words where it does not."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import (
    check_classes,
    check_same_classes,
    describe_same_sets,
    read_annotations,
    read_raw,
    read_split,
)
from tests.errors import raises
from tests.unit.data.corpus import write_clean_coco
from tests.unit.data.datasets.messages import refused
from tests.unit.data.sets import (
    NAMES,
    coco_config,
    write_coco,
)


def test_dangling_link_is_missing_image(tmp_path):
    settings, file = write_clean_coco(tmp_path), tmp_path / "images" / "1.jpg"
    file.rename(tmp_path / "images" / "real.jpg")
    os.symlink("real.jpg", file)
    assert len(read_split(settings, "train").records) == 2
    file.unlink()
    os.symlink("nowhere.jpg", file)
    with raises("image_missing"):
        read_split(settings, "train")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    settings = write_clean_coco(tmp_path)
    original, images = os.scandir, Path(settings.root) / "images"

    def scandir(folder):
        if os.fspath(folder) == str(images):
            raise PermissionError(13, "Permission denied", folder)
        return original(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with raises("folder_unreadable", str(images), "/train.json", "Permission denied"):
        read_split(settings, "train")


def test_missing_folders_and_files_are_named(tmp_path):
    config = coco_config(tmp_path / "nowhere")
    refused(config, "data_root_missing", str(tmp_path / "nowhere"))
    config = coco_config(tmp_path)
    refused(config, "image_folder_missing", str(tmp_path / "images"), "data.train.images")
    (tmp_path / "images").mkdir()
    refused(
        config,
        "annotation_file_missing",
        str(tmp_path / "set.json"),
        "data.val.annotations",
        split="val",
    )


def test_a_set_without_images_is_refused(tmp_path):
    config = write_coco(tmp_path, images=[], annotations=[])
    refused(config, "no_images", str(tmp_path / "set.json"))


def test_missing_images_are_counted_three_are_named(tmp_path):
    config = write_coco(tmp_path, 6)
    images = tmp_path / "images"
    for name in ("001", "002", "004", "005"):
        (images / f"{name}.jpg").unlink()
    refused(config, "image_missing", str(tmp_path / "set.json"))


def test_class_count_unlike_model_says_remedy(tmp_path):
    config = write_coco(tmp_path)
    refused(
        config,
        "num_classes_differ",
        str(tmp_path / "set.json"),
        "80",
        "(RBC, WBC, Platelets)",
        num_classes=80,
    )
    check_classes(read_split(config, "train", 3), 3)


def test_sets_of_other_classes_are_told_apart(tmp_path):
    train = read_split(write_coco(tmp_path), "train", 3)
    check_same_classes(train, replace(train, category_ids=(4, 5, 6)))
    with raises("classes_differ"):
        check_same_classes(train, replace(train, class_names=NAMES[::-1]))


def test_classes_are_read_without_images(tmp_path):
    config = write_coco(tmp_path)
    shutil.rmtree(tmp_path / "images")
    found = read_annotations(config, "val", 3)
    assert (found.class_names, found.category_ids) == (NAMES, (1, 2, 3))
    with raises("num_classes_differ"):
        read_annotations(config, "val", 4)


def test_val_fraction_divides_by_file_name_alone(tmp_path):
    settings = write_coco(tmp_path, 20).model_copy(update={"val_fraction": 0.25})

    def names(split, config=settings) -> set[str]:
        return {Path(record.path).name for record in read_split(config, split).records}

    train, val = names("train"), names("val")
    assert len(val) == 5 and len(train) == 15 and not train & val
    raws = [read_raw(settings, split, ignore_issue) for split in ("train", "val")]
    assert [len(raw.images) for raw in raws] == [15, 5]
    moved = shutil.copytree(tmp_path, tmp_path.with_name("moved"))
    elsewhere = settings.model_copy(update={"root": str(moved)})
    assert names("val", elsewhere) == val  # and so on every host
    write_coco(moved, 21)
    assert len(names("val", elsewhere) ^ val) <= 2
    assert describe_same_sets(settings) == "" and describe_same_sets(write_coco(tmp_path, 20))

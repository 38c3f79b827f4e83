"""YOLO: what only this format has, and the exact words for what is wrong there."""

import numpy as np
import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_split
from tests.unit.data.datasets.messages import message_of
from tests.unit.data.datasets.small import yolo_set
from tests.unit.data.sets import (
    NAMES,
    bccd,
    write_images,
)


def test_yolo_boxes_become_pixels_no_labels_no_boxes(tmp_path):
    first, second = read_split(yolo_set(tmp_path, ""), "train", 2).records
    assert first.boxes_M4.tolist() == [[24, 12, 40, 36]] and first.labels_M.tolist() == [1]
    assert second.boxes_M4.shape == (0, 4)


def test_yolo_polygon_line_gives_box_and_outline(tmp_path):
    config = yolo_set(tmp_path, "0 0.25 0.5 0.5 0.5 0.375 0.75 0.25 0.625")
    record = read_split(config, "train", 2, masks=True).records[0]
    assert record.boxes_M4.tolist() == [[24, 12, 40, 36], [16, 24, 32, 36]]
    box_only, (outline,) = record.polygons_M
    assert box_only == () and outline.dtype == np.float32
    assert outline.tolist() == [[16, 24], [32, 24], [24, 36], [16, 30]]
    assert not any(read_split(config, "train", 2).records[0].polygons_M)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2 0.5 0.5 0.1 0.1", "class 2: expected 0 to 1 (cat, dog)"),
        ("-1 0.5 0.5 0.1 0.1", "class -1: expected 0 to 1 (cat, dog)"),
        ("0.5 0.5 0.5 0.1 0.1", "class 0.5: expected 0 to 1 (cat, dog)"),
        (
            "0 0.5 0.5",
            "'0 0.5 0.5' has 3 numbers; expected five: class cx cy w h, or an outline: "
            "class x1 y1 x2 y2 x3 y3 ...",
        ),
        ("cat 0 0 1 1", "'cat 0 0 1 1': expected five numbers: class cx cy w h"),
    ],
)
def test_a_wrong_yolo_line_is_named_with_its_number(tmp_path, line, problem):
    config = yolo_set(tmp_path, line)
    code = "class_unknown" if problem.startswith("class") else "annotation_line"
    assert (
        message_of(config, code, num_classes=2) == f"{tmp_path / 'labels' / '000.txt'}:2: {problem}"
    )


def test_yolo_without_names_or_labels_says_remedy(tmp_path):
    config = yolo_set(tmp_path, "", names=None)
    assert message_of(config, "class_names_missing") == (
        f"{tmp_path}: YOLO labels do not name their classes; set data.class_names: [...] or write "
        f"them, one a line, to {tmp_path / 'classes.txt'}"
    )
    (tmp_path / "labels" / "000.txt").unlink()
    (tmp_path / "classes.txt").write_text("cat\n")
    assert message_of(config, "label_files_missing") == (
        f"{tmp_path / 'labels'}: none of 2 images has a label file; expected the first at "
        f"{tmp_path / 'labels' / '000.txt'}"
    )


def test_list_of_absent_images_says_so_and_not_labels(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "list.txt").write_text("images/a.jpg\nimages/b.jpg\n")
    part = SplitConfig(annotations="list.txt")
    config = DataConfig(format="yolo", root=str(tmp_path), train=part, val=part)
    assert "2 of its 2 images do not exist" in message_of(config, "image_missing", num_classes=1)


@pytest.mark.parametrize("suffix", ["avif", "gif", "jp2", "heic", "ppm", "GIF"])
def test_images_of_kinds_that_are_not_read_are_named(tmp_path, suffix):
    config = yolo_set(tmp_path, "")
    (tmp_path / "images" / f"new.{suffix}").write_bytes(b"an image")
    (tmp_path / "labels" / "new.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    dataset = read_split(config, "train", 2)
    assert len(dataset.records) == 2
    (note,) = dataset.notes
    assert note.startswith(f"{tmp_path}/images/new.{suffix}: {suffix.upper()}: this kind is not")


def test_number_of_classes_unlike_names_is_a_warning(tmp_path):
    config = yolo_set(tmp_path, "", names=None)
    file = tmp_path / "data.yaml"
    file.write_text("nc: 3\nnames: [cat, dog]\n")
    dataset = read_split(config, "train", 2)
    assert dataset.notes == (f"{file}: nc is 3, but names has 2: the names count",)
    file.write_text("nc: 2\nnames: [cat, dog]\n")
    assert read_split(config, "train", 2).notes == ()


def test_hidden_files_of_a_yolo_folder_are_no_images(tmp_path):
    config = yolo_set(tmp_path, "")
    (tmp_path / "images" / "._000.jpg").write_bytes(b"resource fork")
    assert len(read_split(config, "train", 2).records) == 2


def test_yolo_class_names_come_from_yaml_file(shared_dir):
    assert read_split(bccd(shared_dir, "yolo"), "val", 3).class_names == NAMES


def test_yolo_takes_several_folders_or_lists(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    places = {"a/images": "a/labels", "images/b": "labels/b", "beside": "beside"}
    for number, (folder, labels) in enumerate(places.items()):
        (name,) = write_images(tmp_path / folder, 1)
        (tmp_path / labels).mkdir(parents=True, exist_ok=True)
        (tmp_path / labels / f"{name[:-4]}.txt").write_text(f"1 0.5 0.5 0.25 {(number + 1) / 4}\n")
        (tmp_path / f"{number}.txt").write_text(f"{folder}/{name}\n")
    (tmp_path / "a" / "1.txt").write_text("./images/000.jpg\n")  # from where the list is

    def heights(**places) -> list[float]:
        part = SplitConfig(**places)
        config = DataConfig(format="yolo", root=str(tmp_path), train=part, val=part)
        records = read_split(config, "train", 2).records
        return [record.boxes_M4[0, 3] - record.boxes_M4[0, 1] for record in records]

    assert heights(images=tuple(places)) == [12, 24, 36]
    assert heights(images=("a", "beside")) == [12, 36]  # folders that hold images/ and labels/
    assert heights(images=".", annotations=("2.txt", "a/1.txt")) == [36, 12]


def test_several_folders_are_yolos_alone(tmp_path):
    part = SplitConfig(images=("a", "b"), annotations="labels")
    with pytest.raises(ValueError, match="train: a list of folders or files is for format: yolo"):
        DataConfig(format="coco", root=str(tmp_path), train=part, val=part)

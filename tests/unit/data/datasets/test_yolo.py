"""YOLO: what only this format has, and the exact words for what is wrong there."""

import os
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_split
from tests.unit.data.datasets.messages import refused
from tests.unit.data.datasets.small import yolo_set
from tests.unit.data.sets import (
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


BOX = [24, 12, 40, 36]  # of 0.5 0.5 0.25 0.5 in 64 x 48 pixels
CROSSED = "0.5 0.5 0.25 0.5 0.45 0.4 0.55 0.6 0.55 0.4"


@pytest.mark.parametrize(
    ("lines", "boxes", "said"),
    [
        (["0.5 0.5 0.25 0.5"], [BOX], ""),
        (["0.5 0.5 0.25 0.5 0.31", "0.5 0.5 0.25 0.5 1"], [BOX] * 2, "a score (0.31 to 1)"),
        (["0.5 0.5 0.25 0.5 4", "0.5 0.5 0.25 0.5 1"], [BOX] * 2, "a track number"),
        (["0.5 0.5 0.25 0.5", "0.5 0.5 0.25 0.5 0.31"], [BOX] * 2, "1 lines of 6 numbers"),
        (["0.5 0.5 0.25 0.5 0.87 1", "0.5 0.5 0.25 0.5 0.31 12"], [BOX] * 2, "a score and a track"),
        (["0.5 0.5 0.25 0.5 0.87 1"], [BOX], "a score and a track number"),
        # An outline that ends at the border, and as a box would leave the image.
        (["0.9 0.5 0.8 0.75 0.875 1"], [[51.2, 24, 57.6, 48]], ""),
        (["0.25 0.5 0.5 0.5 0.5 0.75", "0.5 0.5 0.75 1 0.5 0.75"],
         [[16, 24, 32, 36], [32, 24, 48, 48]], ""),
        # One outline that runs far out of its image is cut, and the others stay outlines.
        (["0.25 0.5 0.5 0.5 0.5 0.75"] * 2 + ["0.25 0.5 9 0.5 0.5 0.75"],
         [[16, 24, 32, 36]] * 2 + [[16, 24, 64, 36]], ""),
        # Lines of several lengths are outlines, also one at the border and one that crosses itself.
        (["0.5 0.5 0.3 0.4 0.6 1", CROSSED], [[19.2, 19.2, 38.4, 48], [16, 19.2, 35.2, 28.8]], ""),
        # Points with what can be seen of them: 4 + 3 x 2 numbers, odd and even.
        (["0.5 0.5 0.25 0.5 0.45 0.4 2", "0.5 0.5 0.25 0.5 0 0 0"], [BOX] * 2, "points with"),
        (["0.5 0.5 0.25 0.5 0.45 0.4 2 0.55 0.6 1"], [BOX], "key points with visibility"),
    ],
)  # fmt: skip
def test_columns_are_read_as_all_lines_have_them(tmp_path, lines, boxes, said):
    config = yolo_set(tmp_path, "")
    text = "".join(f"1 {line}\n" for line in lines)
    (tmp_path / "labels" / "000.txt").write_text(text)
    dataset = read_split(config.model_copy(update={"duplicate_boxes": "all"}), "train", 2)
    np.testing.assert_allclose(dataset.records[0].boxes_M4, boxes, rtol=1e-6)
    notes = [note for note in dataset.notes if "data.bad_boxes" not in note]
    assert said in "".join(notes) and bool(said) == bool(notes)


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (["100 100 50 20"] * 3, "boxes_far_outside", "up to 125 times"),
        (["100 100 50 20 120 90"] * 3, "boxes_far_outside", "up to 120 times"),
        (["0.5 0.5 0.25 0.5"] + ["51 50 24 634"] * 3, "boxes_far_outside", "3 of 4 boxes"),
        (["0.7 0.7 0.9 0.9"] * 3, "boxes_misread", "3 of 3 boxes leave"),
        (["0.9 0.7 0.6 0.5 0.4", "0.8 0.3 0.5 0.4 0.5", "0.7 0.8 0.2 0.3 0.3"],
         "labels_ambiguous", "a score in front of a box"),
        ([CROSSED] * 2, "labels_ambiguous", "outlines or boxes with key points"),
        (["0.5 0.5 0.25 0.5 -30"] * 3, "annotation_line", "has 6 numbers"),
    ],
)  # fmt: skip
def test_columns_that_could_be_two_things_are_refused(tmp_path, lines, code, said):
    config = yolo_set(tmp_path, "")
    text = "".join(f"1 {line}\n" for line in lines)
    (tmp_path / "labels" / "000.txt").write_text(text)
    refused(config, code, said, num_classes=2)


def test_images_in_the_working_folder_are_found(tmp_path, monkeypatch):
    config = yolo_set(tmp_path, "")
    for file in [*tmp_path.glob("images/*"), *tmp_path.glob("labels/*")]:
        file.rename(tmp_path / file.name)
    monkeypatch.chdir(tmp_path)
    here = {"root": ".", "train": SplitConfig(images="."), "val": SplitConfig(images=".")}
    dataset = read_split(config.model_copy(update=here), "train", 2)
    assert dataset.records[0].boxes_M4.tolist() == [BOX]


def test_points_that_a_data_file_tells_of_are_no_outlines(tmp_path):
    config = yolo_set(tmp_path, "")
    (tmp_path / "labels" / "000.txt").write_text(f"1 {CROSSED}\n")
    (tmp_path / "data.yaml").write_text("names: [cat, dog]\nkpt_shape: [3, 2]\n")
    dataset = read_split(config, "train", 2)
    assert dataset.records[0].boxes_M4.tolist() == [BOX] and "points" in dataset.notes[0]


def test_classes_that_seem_to_count_from_one_are_a_hint(tmp_path):
    config = yolo_set(tmp_path, "2 0.5 0.5 0.1 0.1")
    remedy = "2; YOLO counts from 0; subtract 1"  # a copy without class 2 would still be wrong
    assert "--fix" not in refused(config, "class_unknown", "numbered 1", remedy)


@pytest.mark.parametrize("where", ["labels/val", "images/val"])
def test_lists_of_classes_beside_labels_are_matched_by_name(tmp_path, where):
    for split, names, lines in (
        ("train", "cat\ndog\n", "0 0.5 0.5 0.25 0.5"),
        ("val", "dog\nbird\ncat\n", "2 0.5 0.5 0.25 0.5\n0 0.5 0.5 0.25 0.5"),
    ):
        write_images(tmp_path / "images" / split, 1)
        (tmp_path / "labels" / split).mkdir(parents=True)
        (tmp_path / "labels" / split / "000.txt").write_text(lines)
        (tmp_path / where.replace("val", split) / "classes.txt").write_text(names)
    parts = {split: SplitConfig(images=f"images/{split}") for split in ("train", "val")}
    config = DataConfig(format="yolo", root=str(tmp_path), class_names=("cat", "dog"), **parts)
    assert read_split(config, "train", 2).records[0].labels_M.tolist() == [0]
    assert read_split(config, "val", 2).records[0].labels_M.tolist() == [0, 1]
    (tmp_path / "labels" / "val" / "000.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    said = refused(config, "class_unknown", split="val")
    assert "'bird'" in said and f"{tmp_path / where}/classes.txt" in said


def test_label_files_may_have_capitals_and_readmes_are_none(tmp_path):
    config = yolo_set(tmp_path, "")
    labels = tmp_path / "labels"
    (labels / "000.txt").rename(labels / "000.TXT")
    (labels / "README.txt").write_text("Exported by a tool.\n")
    (tmp_path / "images" / "001.jpg").rename(tmp_path / "images" / "001.JPG")
    dataset = read_split(config, "train", 2)
    assert [len(record.labels_M) for record in dataset.records] == [1, 0] and not dataset.notes
    (labels / "001.txt").unlink()
    (note,) = read_split(config, "train", 2).notes
    assert "1 of 2 images" in note


@pytest.mark.parametrize(
    ("line", "image"),
    [
        ("data/images/train/000.jpg", "images/train/000.jpg"),
        ("images\\train\\000.jpg", "images/train/000.jpg"),
        ("{root}/images/train/000.jpg", "images/train/000.jpg"),
        ("{root}/../elsewhere/images/000.jpg", "../elsewhere/images/000.jpg"),
    ],
)
def test_labels_are_found_from_lists_of_other_tools(tmp_path, line, image):
    root = tmp_path / "set"
    for folder in (root / "images/train", root / "images/val", root / "../elsewhere/images"):
        write_images(folder, 1)
        labels = Path(str(folder).replace("images", "labels"))
        labels.mkdir(parents=True)
        (labels / "000.txt").write_text("0 0.5 0.5 0.25 0.5")
    (root / "classes.txt").write_text("cat\n")
    (root / "train.txt").write_text(line.format(root=root))
    part = SplitConfig(annotations="train.txt")
    config = DataConfig(format="yolo", root=str(root), train=part, val=part)
    (record,) = read_split(config, "train", 1).records
    assert record.path == os.path.normpath(root / image) and len(record.labels_M) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("7 0.5 0.5 0.1 0.1", "class 7: expected 0 to 1 (cat, dog)"),
        ("-1 0.5 0.5 0.1 0.1", "class -1: expected 0 to 1 (cat, dog)"),
        ("0.5 0.5 0.5 0.1 0.1", "class 0.5: expected 0 to 1 (cat, dog)"),
        (
            "0 0.5 0.5",
            "'0 0.5 0.5' has 3 numbers; expected five: class cx cy w h, or an outline: "
            "class x1 y1 x2 y2 x3 y3 ...",
        ),
        (
            "cat 0 0 1 1",
            "'cat 0 0 1 1': expected five numbers separated by spaces: class cx cy w h",
        ),
    ],
)
def test_a_wrong_yolo_line_is_named_with_its_number(tmp_path, line, problem):
    config = yolo_set(tmp_path, line)
    code = "class_unknown" if problem.startswith("class") else "annotation_line"
    refused(config, code, f"{tmp_path / 'labels' / '000.txt'}:2: {problem}", num_classes=2)


def test_yolo_without_names_or_labels_says_remedy(tmp_path):
    config = yolo_set(tmp_path, "", names=None)
    refused(config, "class_names_missing", str(tmp_path))
    for name in ("000.txt", "001.txt"):
        (tmp_path / "labels" / name).unlink()
    (tmp_path / "classes.txt").write_text("cat\n")
    refused(config, "label_files_missing", str(tmp_path / "labels"))


def test_list_of_absent_images_says_so_and_not_labels(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "list.txt").write_text("images/a.jpg\nimages/b.jpg\n")
    part = SplitConfig(annotations="list.txt")
    config = DataConfig(format="yolo", root=str(tmp_path), train=part, val=part)
    refused(config, "image_missing", num_classes=1)


@pytest.mark.parametrize("suffix", ["avif", "gif", "jp2", "heic", "ppm", "GIF"])
def test_images_of_kinds_that_are_not_read_are_named(tmp_path, suffix):
    config = yolo_set(tmp_path, "")
    (tmp_path / "images" / f"new.{suffix}").write_bytes(b"an image")
    (tmp_path / "labels" / "new.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    dataset = read_split(config, "train", 2)
    assert len(dataset.records) == 2
    (note,) = dataset.notes
    assert note.startswith(f"{tmp_path}/images/new.{suffix}: {suffix.upper()}: ")


def test_number_of_classes_unlike_names_is_a_warning(tmp_path):
    config = yolo_set(tmp_path, "", names=None)
    file = tmp_path / "data.yaml"
    file.write_text("nc: 3\nnames: [cat, dog]\n")
    dataset = read_split(config, "train", 2)
    assert [note.startswith(f"{file}: nc is 3") for note in dataset.notes] == [True]
    file.write_text("nc: 2\nnames: [cat, dog]\n")
    assert read_split(config, "train", 2).notes == ()


def test_hidden_files_of_a_yolo_folder_are_no_images(tmp_path):
    config = yolo_set(tmp_path, "")
    (tmp_path / "images" / "._000.jpg").write_bytes(b"resource fork")
    assert len(read_split(config, "train", 2).records) == 2


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
    with pytest.raises(
        ValueError, match="train: only format: yolo takes a list of folders or files"
    ):
        DataConfig(format="coco", root=str(tmp_path), train=part, val=part)

"""VOC and YOLO: what only these formats have, and the exact words for what is wrong there."""

import numpy as np
import pytest

from ppdist.data.datasets.build import check_same_classes, read_split
from tests.unit.data.datasets.messages import message_of
from tests.unit.data.datasets.small import voc_set, yolo_set


def test_voc_names_are_sorted_from_training_split(tmp_path):
    config = voc_set(tmp_path, {"a": "train", "b": "val"}, {"a": ["dog", "cat"], "b": ["dog"]})
    train, val = read_split(config, "train", 2), read_split(config, "val", 2)
    assert train.class_names == val.class_names == ("cat", "dog")
    assert val.records[0].labels_M.tolist() == [1]
    check_same_classes(train, val)


# --- what is wrong with a COCO set ---------------------------------------------------------------


def test_a_voc_list_may_pair_images_with_their_files(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat"]})
    (tmp_path / "train.txt").write_text("images/a.jpg Annotations/a.xml\n")
    (record,) = read_split(config, "train", 1).records
    assert record.path == str(tmp_path / "images" / "a.jpg")
    assert record.boxes_M4.tolist() == [[1, 2, 30, 40]]


def test_voc_file_missing_or_without_size_is_named(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat"]})
    file = tmp_path / "Annotations" / "a.xml"
    content = file.read_text()
    file.write_text(content.replace("size>", "sizes>"))
    assert message_of(config, "size_invalid") == (
        f"{file}: has no <size>; expected the image's width and height"
    )
    file.write_text(content.replace("<width>64", "<width>0"))
    assert (
        message_of(config, "size_invalid")
        == f"{file}: <size> is 0x48; expected the image's size in pixels"
    )
    file.write_text(content.replace("<xmin>1</xmin>", ""))
    assert message_of(config, "annotation_line") == (
        f"{file}: object 1: <bndbox> has xmin None, ymin '2', xmax '30', ymax '40': expected "
        f"four numbers"
    )
    file.write_text("<annotation>")
    assert message_of(config, "annotation_unreadable").startswith(
        f"{file}: not a Pascal VOC annotation: no element found"
    )
    file.unlink()
    assert (
        message_of(config, "annotation_missing")
        == f"{file}: does not exist, but its image is listed"
    )


def test_unknown_voc_class_is_named_with_its_object(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat", "cow"]})
    (tmp_path / "label_list.txt").write_text("cat\ndog\n")
    assert message_of(config, "class_unknown", num_classes=2) == (
        f"{tmp_path / 'Annotations' / 'a.xml'}: object 2: class 'cow' is not among cat, dog"
    )


def test_yolo_boxes_become_pixels_no_labels_no_boxes(tmp_path):
    first, second = read_split(yolo_set(tmp_path, ""), "train", 2).records
    assert first.boxes_M4.tolist() == [[24, 12, 40, 36]] and first.labels_M.tolist() == [1]
    assert second.boxes_M4.shape == (0, 4)


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


def test_hidden_files_of_a_yolo_folder_are_no_images(tmp_path):
    config = yolo_set(tmp_path, "")
    (tmp_path / "images" / "._000.jpg").write_bytes(b"resource fork")
    assert len(read_split(config, "train", 2).records) == 2


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


def test_a_class_named_twice_is_refused(tmp_path):
    config = yolo_set(tmp_path, "", names="cat\ndog\ncat\n")
    assert (
        message_of(config, "class_name_duplicate")
        == f"{tmp_path / 'classes.txt'}: class 'cat' is listed twice"
    )


def test_yolo_polygon_line_gives_box_and_outline(tmp_path):
    config = yolo_set(tmp_path, "0 0.25 0.5 0.5 0.5 0.375 0.75 0.25 0.625")
    record = read_split(config, "train", 2, masks=True).records[0]
    assert record.boxes_M4.tolist() == [[24, 12, 40, 36], [16, 24, 32, 36]]
    box_only, (outline,) = record.polygons_M
    assert box_only == () and outline.dtype == np.float32
    assert outline.tolist() == [[16, 24], [32, 24], [24, 36], [16, 30]]
    assert not any(read_split(config, "train", 2).records[0].polygons_M)

"""VOC: what only this format has, and the exact words for what is wrong there."""

import pytest

from ppdist.data.datasets.build import (
    check_same_classes,
    read_split,
)
from tests.unit.data.datasets.messages import message_of
from tests.unit.data.datasets.small import voc_set


def test_voc_names_are_sorted_from_training_split(tmp_path):
    config = voc_set(tmp_path, {"a": "train", "b": "val"}, {"a": ["dog", "cat"], "b": ["dog"]})
    train, val = read_split(config, "train", 2), read_split(config, "val", 2)
    assert train.class_names == val.class_names == ("cat", "dog")
    assert val.records[0].labels_M.tolist() == [1]
    check_same_classes(train, val)


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
    image = tmp_path / "images" / "a.jpg"
    picture = image.read_bytes()
    for old, new, what in (
        ("size>", "sizes>", "has no <size>"),
        ("<width>64", "<width>0", "<size> is 0x48"),
    ):
        file.write_text(content.replace(old, new))
        image.write_bytes(b"no image")
        assert message_of(config, "size_invalid") == (
            f"{file}: {what}; expected the image's width and height in pixels"
        )
        image.write_bytes(picture)
        dataset = read_split(config, "train", 1)
        assert (dataset.records[0].width, dataset.records[0].height) == (64, 48)
        assert dataset.notes == (f"{file}: {what}: the size of the image is taken, 64x48",)
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


@pytest.mark.parametrize(
    "filename",
    ["a", "/home/bob/a.jpg", "/home/bob/a", "C:\\bob\\a.jpg", "a.jpg", "a.png", "../b.gif", ""],
)
def test_stale_xml_file_name_keeps_listed_image(tmp_path, filename):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat"]})
    (tmp_path / "images" / "a.jpg").rename(tmp_path / "images" / "a.JPG")
    file = tmp_path / "Annotations" / "a.xml"
    file.write_text(file.read_text().replace("stale.jpg", filename))
    (record,) = read_split(config, "train", 1).records
    assert record.path == str(tmp_path / "images" / "a.JPG")

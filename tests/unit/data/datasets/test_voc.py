"""VOC: what only this format has, and the exact words for what is wrong there."""

from pathlib import Path

import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import (
    check_same_classes,
    read_split,
)
from tests.unit.data.datasets.messages import refused
from tests.unit.data.datasets.small import voc_set
from tests.unit.data.sets import write_images


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
        (record,) = read_split(config, "train", 1).records  # `data.bad_images` decides about it
        assert (record.width, record.height, len(record.labels_M)) == (1, 1, 1)
        image.write_bytes(picture)
        dataset = read_split(config, "train", 1)
        assert (dataset.records[0].width, dataset.records[0].height) == (64, 48)
        assert [note.startswith(f"{file}: {what}") for note in dataset.notes] == [True]
    file.write_text(content.replace("<xmin>1</xmin>", ""))
    refused(config, "annotation_line", str(file), "object 1: <bndbox> has")
    file.write_text("<annotation>")
    refused(config, "annotation_unreadable", str(file), "not a Pascal VOC")
    file.unlink()
    refused(config, "annotation_missing", str(file))


def test_unknown_voc_class_is_named_with_its_object(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat", "cow"]})
    (tmp_path / "label_list.txt").write_text("cat\ndog\n")
    refused(
        config,
        "class_unknown",
        str(tmp_path / "Annotations" / "a.xml"),
        "object 2",
        "'cow'",
        num_classes=2,
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


def xml_of(stem: str, name: str = "cat") -> str:
    return (
        f"<annotation><filename>{stem}.jpg</filename><size><width>64</width><height>48</height>"
        f"</size><object><name>{name}</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax>"
        f"<ymax>40</ymax></bndbox></object></annotation>"
    )


def voc_folder(root: Path, images: str, annotations: str) -> DataConfig:
    """Two images of a cat and a dog whose XML files are in a folder, without any list."""
    part = SplitConfig(images=images, annotations=annotations)
    return DataConfig(format="voc", root=str(root), train=part, val=part)


@pytest.mark.parametrize(
    ("image", "xml", "images", "annotations"),
    [
        ("a/000.jpg", "a/000.xml", "a", ""),  # side by side
        ("pictures/x/000.jpg", "labels/x/000.xml", "pictures", "labels"),  # two trees alike
        ("pictures/y/000.jpg", "labels/x/000.xml", "pictures", "labels"),  # one is called so
        ("pictures/000.jpg", "labels/other.XML", "pictures", "labels"),  # <filename> says
    ],
)
def test_folder_of_xml_needs_no_list(tmp_path, image, xml, images, annotations):
    write_images((tmp_path / image).parent, 1)
    (tmp_path / xml).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / xml).write_text(xml_of("000"))
    (record,) = read_split(voc_folder(tmp_path, images, annotations), "train", 1).records
    assert record.path == str(tmp_path / image)
    assert record.boxes_M4.tolist() == [[1, 2, 30, 40]]


def test_xml_without_one_image_of_its_name_is_named(tmp_path):
    config = voc_folder(tmp_path, "images", "labels")
    for folder in ("images/a", "images/b"):
        write_images(tmp_path / folder, 1)
    (tmp_path / "labels").mkdir()
    refused(config, "annotation_file_missing", str(tmp_path / "labels"))
    file = tmp_path / "labels" / "000.xml"
    file.write_text(xml_of("000"))
    refused(config, "image_missing", str(file))
    (tmp_path / "images" / "a" / "000.jpg").unlink()
    assert len(read_split(config, "train", 1).records) == 1
    file.rename(file.with_name("c.xml")).write_text(xml_of("d"))
    refused(config, "image_missing", str(tmp_path / "labels" / "c.xml"), "d.jpg")


def test_a_listed_xml_file_may_end_in_capitals(tmp_path):
    config = voc_set(tmp_path, {"a": "train"}, {"a": ["cat"]})
    (tmp_path / "Annotations" / "a.xml").rename(tmp_path / "Annotations" / "a.XML")
    dataset = read_split(config, "train", 1)
    assert len(dataset.records) == 1 and dataset.notes == ()

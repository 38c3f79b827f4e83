"""data.classes, single_class and fraction leave what a set cut by hand has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import dataset_from_raw, limit_notes, read_raw, read_split
from ppdist.data.datasets.convert import conversion_section, convert
from ppdist.data.datasets.selection import selected_names
from ppdist.data.types import DetectionSet, RawSet, Records
from ppdist.engine.data import fingerprint
from tests.errors import raises
from tests.unit.data.sets import NAMES, coco_config, write_coco, write_images, write_voc

CLASSES = {"classes": ("Platelets", 0)}  # in the order of their numbers
SINGLE = {"single_class": True}


def raw_set(root: Path) -> RawSet:
    """Nine images with up to two objects of three classes; two objects differ in class alone."""
    raw = read_raw(write_coco(root, 9), "train", ignore_issue)
    first = raw.images[1].objects[0]
    raw.images[1].objects.append(replace(first, label=1))
    return raw


def cut(raw: RawSet, numbers: tuple[int, ...], names: tuple[str, ...]) -> RawSet:
    """The set as somebody cuts it who keeps the objects of some classes and renames them."""
    new = {number: min(at, len(names) - 1) for at, number in enumerate(numbers)}
    images = [
        replace(
            image,
            objects=[
                replace(thing, label=new[thing.label])
                for thing in image.objects
                if thing.label in numbers
            ],
        )
        for image in raw.images
    ]
    return replace(
        raw, images=images, class_names=names, category_ids=raw.category_ids[: len(names)]
    )


def write(raw: RawSet, kind: str, out: Path) -> DataConfig:
    if kind == "voc":
        write_voc(raw, out, "train")
        split = {"annotations": "ImageSets/Main/train.txt"}
        return DataConfig(format="voc", root=str(out), train=split, val=split)
    convert(raw, kind, out, images="copy", split="train")
    text = conversion_section({"train": raw, "val": raw}, kind, out, images="copy")
    data = yaml.safe_load(text)["data"]
    return DataConfig(**data | {"val": data["train"], "class_names": list(raw.class_names)})


def content(dataset: DetectionSet) -> tuple[object, ...]:
    names = [Path(record.path).name for record in dataset.records]
    records = Records.of(dataset.records)
    columns = (records.boxes_O4, records.labels_O, records.counts_N, records.crowd_O)
    return dataset.class_names, names, [column.tolist() for column in columns]


@pytest.mark.parametrize("kind", ["coco", "voc", "yolo"])
@pytest.mark.parametrize(
    ("keys", "numbers", "names"),
    [
        (CLASSES, (0, 2), ("RBC", "Platelets")),
        (SINGLE, (0, 1, 2), ("object",)),
        ({"classes": ("WBC",)} | SINGLE, (1,), ("WBC",)),
    ],
)
def test_classes_are_those_of_a_set_cut_by_hand(tmp_path, kind, keys, numbers, names):
    raw = raw_set(tmp_path / "raw")
    whole = write(raw, kind, tmp_path / "whole").model_copy(update=keys)
    by_hand = write(cut(raw, numbers, names), kind, tmp_path / "cut")
    for split in ("train", "val"):
        found = read_split(whole, split, len(names))
        assert content(found) == content(read_split(by_hand, split, len(names)))
        assert content(found) == content(read_split(whole, split, len(names)))  # as it was kept
        checked = dataset_from_raw(whole, split, read_raw(whole, split, ignore_issue), len(names))
        assert content(checked) == content(found)
    assert selected_names(whole) == (names if whole.class_names else ())


@pytest.mark.parametrize("kind", ["coco", "voc", "yolo"])
def test_a_fraction_is_of_the_training_images_and_in_a_larger_one(tmp_path, kind):
    config = write(raw_set(tmp_path / "raw"), kind, tmp_path / "set")
    few, more, all_of_them = (
        [record.path for record in read_split(part, "train").records]
        for part in (config.model_copy(update={"fraction": share}) for share in (0.3, 0.7, 1.0))
    )
    assert [len(few), len(more), len(all_of_them)] == [3, 6, 9] and {*few} < {*more}
    part = config.model_copy(update={"fraction": 0.3})
    limited = config.model_copy(update={"train": config.train.model_copy(update={"limit": 3})})
    assert fingerprint(read_split(part, "train"), "") == fingerprint(
        read_split(limited, "train"), ""
    )
    assert limit_notes(read_split(part, "train")) and len(read_split(part, "val").records) == 9


@pytest.mark.parametrize("strange", ["rbc", 3, -1])
def test_a_class_that_is_not_there_is_named_with_its_neighbours(tmp_path, strange):
    write_coco(tmp_path)
    with raises("class_unknown"):
        read_split(coco_config(tmp_path, classes=(strange,)), "train")


def test_classified_images_of_other_classes_are_left_out(tmp_path):
    for split in ("train", "val"):
        for name in NAMES:
            write_images(tmp_path / split / name, 2)
    sections = {split: {"images": split} for split in ("train", "val")}
    config = DataConfig(format="folder", root=str(tmp_path), **sections, classes=("WBC", "RBC"))
    dataset = read_split(config, "train", 2)
    assert dataset.class_names == ("RBC", "WBC")
    labels = [
        (Path(record.path).parent.name, int(record.labels_M[0])) for record in dataset.records
    ]
    assert labels == [("RBC", 0)] * 2 + [("WBC", 1)] * 2
    raw = read_raw(config, "val", ignore_issue)
    assert len(raw.images) == 6 and len(dataset_from_raw(config, "val", raw, 2).records) == 4


def test_keys_that_contradict_each_other_are_refused(tmp_path):
    split = {"images": "a", "limit": 3}
    for keys in ({"fraction": 0.5}, {"format": "folder", "single_class": True}, {"fraction": 0.0}):
        with pytest.raises(ValidationError):
            DataConfig(root=str(tmp_path), train=split, val={"images": "b"}, **keys)


def test_outlines_go_with_their_objects(tmp_path):
    raw = raw_set(tmp_path)
    triangle = (np.float64([[1, 1], [9, 1], [9, 9]]),)
    for image in raw.images:
        image.objects[:] = [replace(thing, polygons=triangle) for thing in image.objects]
    config = write(raw, "coco", tmp_path / "set").model_copy(update=CLASSES)
    dataset = read_split(config, "train", 2, masks=True)
    assert all(len(record.polygons_M) == len(record.labels_M) for record in dataset.records)

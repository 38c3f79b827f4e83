"""Dividing a split: every class in every part, copies together, the file's own entries kept."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.convert import (
    data_section,
    divide,
    group_by_content,
    make_folds,
    write_parts,
)
from tests.errors import raises
from tests.unit.data.sets import NAMES, voc_xml, write_coco, write_images

SHARES = (0.7, 0.2, 0.1)


def alone(count: int) -> np.ndarray:
    return np.arange(count)


def random_classes(count: int, seed: int) -> list[np.ndarray]:
    """Of 12 classes, of which the first is common and each next one rarer."""
    rng = np.random.RandomState(seed)
    chances = 0.8 * 0.6 ** np.arange(12)
    return [np.flatnonzero(rng.rand(12) < chances) for _ in range(count)]


def worst_deviation(classes: list[np.ndarray], part_N: np.ndarray) -> float:
    """Of any class in any part, or of a part as a whole: images too many or too few."""
    shown = [np.bincount(labels, minlength=12) > 0 for labels in classes]
    counted = np.array([[*of_image, True] for of_image in shown])
    found = [
        abs(counted[part_N == part].sum(0) - share * counted.sum(0)).max()
        for part, share in enumerate(SHARES)
    ]
    return max(found)


@pytest.mark.parametrize("seed", range(5))
def test_parts_have_shares_of_images_and_each_class(seed):
    classes = random_classes(1000, seed)
    assert worst_deviation(classes, divide(classes, alone(1000), SHARES, seed)) <= 2
    by_chance = np.random.RandomState(seed).choice(3, 1000, p=SHARES)
    assert worst_deviation(classes, by_chance) > 8


@pytest.mark.parametrize("seed", range(10))
def test_class_with_image_per_part_is_in_each_part(seed):
    classes = [np.array([0])] * 97 + [np.array([0, 1])] * 3
    part_N = divide(classes, alone(100), SHARES, seed)
    assert sorted(part_N[97:]) == [0, 1, 2]


def test_only_image_of_class_is_in_largest_part():
    classes = [np.array([0])] * 9 + [np.array([0, 1])]
    assert divide(classes, alone(10), (0.8, 0.2), 3)[9] == 0


def test_the_seed_alone_decides():
    classes = random_classes(200, 1)
    first = divide(classes, alone(200), SHARES, 5)
    assert (first == divide(classes, alone(200), SHARES, 5)).all()
    assert (first != divide(classes, alone(200), SHARES, 6)).any()


def test_copies_of_an_image_stay_together(tmp_path):
    names = write_images(tmp_path, 12)
    for copy, name in zip(("a.jpg", "b.jpg", "c.jpg"), names):
        (tmp_path / copy).write_bytes((tmp_path / name).read_bytes())
    paths = [str(tmp_path / name) for name in [*names, "a.jpg", "b.jpg", "c.jpg", "absent.jpg"]]
    group_N = group_by_content(paths)
    assert group_N.tolist() == [*range(12), 0, 1, 2, 15]
    classes = random_classes(16, 2)
    for seed in range(10):
        part_N = divide(classes, group_N, (0.5, 0.5), seed)
        assert (part_N[12:15] == part_N[:3]).all()


def test_equal_length_other_content_is_no_duplicate(tmp_path):
    for name, content in (("a", b"123"), ("b", b"124"), ("c", b"123")):
        (tmp_path / name).write_bytes(content)
    paths = [str(tmp_path / name) for name in "abc"]
    assert group_by_content(paths).tolist() == [0, 1, 0]


def halves(config: DataConfig, out: Path | None = None) -> tuple[list[Path], DataConfig]:
    """Divides the training split in two; returns the files, and the settings that use them."""
    dataset = read_split(config, "train")
    part_N = np.arange(len(dataset.records)) % 2
    files = write_parts(config, dataset, part_N, {"a": {0}, "b": {1}}, out)
    text = data_section(config, dataset, files, ("a", "b"))
    return files, DataConfig.model_validate(yaml.safe_load(text)["data"])


def assert_is_every_second(config: DataConfig, divided: DataConfig) -> None:
    """Both parts, read again, hold the images and boxes of the whole in their order."""
    whole = read_split(config, "train")
    for first, split in enumerate(("train", "val")):
        part = read_split(divided, split)
        assert part.class_names == whole.class_names
        records = list(whole.records)[first::2]
        assert [r.path for r in part.records] == [r.path for r in records]
        for found, expected in zip(part.records, records):
            assert found.labels_M.tolist() == expected.labels_M.tolist()
            assert found.boxes_M4.tolist() == expected.boxes_M4.tolist()


def test_coco_file_is_split_with_every_field(tmp_path):
    config = write_coco(tmp_path, 9, info={"year": 2024}, licenses=[{"id": 4, "name": "红"}])
    files, divided = halves(config)
    assert [file.name for file in files] == ["set_a.json", "set_b.json"]
    assert_is_every_second(config, divided)
    whole = json.loads((tmp_path / "set.json").read_text(encoding="utf-8"))
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for part in parts:
        for key in ("info", "licenses", "categories"):
            assert part[key] == whole[key]
    for key in ("images", "annotations"):
        entries = [entry for part in parts for entry in part[key]]
        assert sorted(entries, key=lambda entry: entry["id"]) == whole[key]


def test_each_image_is_validated_in_exactly_one_fold(tmp_path):
    config = write_coco(tmp_path, 7)
    dataset = read_split(config, "train")
    files = write_parts(config, dataset, np.arange(7) % 3, make_folds(3), tmp_path)
    names = [file.name for file in files]
    assert names[:2] == ["set_fold1_train.json", "set_fold1_val.json"] and len(names) == 6
    shown = [json.loads(file.read_text(encoding="utf-8"))["images"] for file in files]
    ids = [{image["id"] for image in images} for images in shown]
    every = {record.image_id for record in dataset.records}
    assert all(ids[at] | ids[at + 1] == every and not ids[at] & ids[at + 1] for at in (0, 2, 4))
    assert sorted(image for at in (1, 3, 5) for image in ids[at]) == sorted(every)


def test_a_voc_list_is_divided_by_its_lines(tmp_path):
    names = write_images(tmp_path / "JPEGImages", 5)
    (tmp_path / "Annotations").mkdir()
    for position, name in enumerate(names):
        text = voc_xml(name, [(NAMES[position % 3], (2, 3, 20 + position, 30))])
        (tmp_path / "Annotations" / name.replace("jpg", "xml")).write_text(text)
    (tmp_path / "all.txt").write_text("".join(f"{name[:-4]}\n" for name in names))
    part = SplitConfig(images="JPEGImages", annotations="all.txt")
    config = DataConfig(format="voc", root=str(tmp_path), train=part, val=part)
    _, divided = halves(config)
    assert (tmp_path / "all_a.txt").read_text() == "000\n002\n004\n"
    assert_is_every_second(config, divided)


def test_a_folder_of_xml_becomes_lists_of_pairs(tmp_path):
    for position, name in enumerate(write_images(tmp_path / "all", 5)):
        text = voc_xml(name, [(NAMES[position % 3], (2, 3, 20, 30))])
        (tmp_path / "all" / name.replace("jpg", "xml")).write_text(text)
    part = SplitConfig(images="all")
    config = DataConfig(format="voc", root=str(tmp_path), train=part, val=part)
    files, divided = halves(config)
    assert files[1].read_text() == "all/001.jpg all/001.xml\nall/003.jpg all/003.xml\n"
    assert_is_every_second(config, divided)


def write_yolo(root: Path, images: str, labels: str) -> DataConfig:
    names = write_images(root / images, 5)
    (root / labels).mkdir(parents=True)
    for position, name in enumerate(names):
        text = "".join(f"{label} 0.5 0.5 0.25 0.5\n" for label in range(position % 3))
        (root / labels / name.replace("jpg", "txt")).write_text(text)
    (root / "classes.txt").write_text("\n".join(NAMES))
    part = SplitConfig(images=images, annotations=labels)
    return DataConfig(format="yolo", root=str(root), train=part, val=part)


def test_a_folder_of_yolo_labels_becomes_lists_of_images(tmp_path):
    config = write_yolo(tmp_path, "all/images", "all/labels")
    files, divided = halves(config)
    assert files == [tmp_path / "labels_a.txt", tmp_path / "labels_b.txt"]
    assert files[1].read_text() == "all/images/001.jpg\nall/images/003.jpg\n"
    assert_is_every_second(config, divided)


def test_a_yolo_list_is_divided_into_another_folder(tmp_path):
    write_yolo(tmp_path / "data", "images", "labels")
    lines = [f"images/00{number}.jpg\n" for number in range(5)]
    (tmp_path / "data" / "all.txt").write_text("".join(lines))
    part = SplitConfig(annotations="all.txt")
    config = DataConfig(format="yolo", root=str(tmp_path / "data"), train=part, val=part)
    files, divided = halves(config, tmp_path / "elsewhere" / "lists")
    assert files[0] == tmp_path / "elsewhere" / "lists" / "all_a.txt"
    assert divided.train.annotations == str(files[0])
    assert_is_every_second(config, divided)


def test_yolo_labels_unreachable_by_list_are_refused(tmp_path):
    config = write_yolo(tmp_path, "pictures", "texts")
    with raises("labels_not_beside_images"):
        halves(config)


@pytest.mark.parametrize("header", ["path,label\n", ""])
def test_a_csv_file_is_divided_with_its_header(tmp_path, header):
    names = write_images(tmp_path / "images", 4)
    names[1] = 'a, "b".jpg'
    (tmp_path / "images" / "001.jpg").rename(tmp_path / "images" / names[1])
    with (tmp_path / "all.csv").open("w", newline="") as file:
        file.write(header)
        csv.writer(file).writerows([name, NAMES[n % 2]] for n, name in enumerate(names))
    part = SplitConfig(annotations="all.csv")
    config = DataConfig(format="csv", root=str(tmp_path), train=part, val=part)
    files, divided = halves(config)
    assert files[0].read_text().startswith(header or "000.jpg")
    assert_is_every_second(config, divided)


def test_a_folder_of_classes_becomes_csv_files(tmp_path):
    for name in NAMES:
        write_images(tmp_path / "all" / name, 3)
    part = SplitConfig(images="all")
    config = DataConfig(format="folder", root=str(tmp_path), train=part, val=part)
    files, divided = halves(config)
    assert divided.format == "csv" and files[0] == tmp_path / "all_a.csv"
    lines = files[0].read_text(encoding="utf-8").split("\n")
    assert lines[0] == "path,label" and lines[-1] == "" and all(lines[:-1])
    assert_is_every_second(config, divided)


@pytest.mark.parametrize("parts", [("a", "b"), ("b", "a")])
def test_empty_part_is_refused_before_writing(tmp_path, parts):
    config = write_coco(tmp_path, 3)
    dataset = read_split(config, "train")
    part_N = np.full(3, parts.index("b"))
    with raises("empty_part", "set.json: 3"):
        wanted = {name: {part} for part, name in enumerate(parts)}
        write_parts(config, dataset, part_N, wanted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    config = write_coco(tmp_path)
    (tmp_path / "set_b.json").write_text("mine")
    with raises("file_exists", "set_b.json"):
        halves(config)
    assert (tmp_path / "set_b.json").read_text() == "mine"
    assert not (tmp_path / "set_a.json").exists()

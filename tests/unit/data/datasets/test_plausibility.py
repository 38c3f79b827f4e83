"""What no reader notices of its own format: wrong units, a wrong order, boxes given twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import ignore_issue, to_detection_set
from ppdist.data.datasets.build import limit_images, read_raw, read_split
from ppdist.data.datasets.convert import convert
from ppdist.data.datasets.plausibility import check_boxes
from ppdist.data.types import RawColumns, RawImage, RawObject, RawSet
from ppdist.metrics.coco import evaluate_boxes
from ppdist.metrics.scored import count_duplicates
from tests.errors import raises
from tests.unit.data.sets import (
    NAMES,
    coco_content,
    write_coco,
    write_images,
    write_voc,
)

FRAME = (64, 48, 64, 48)
BOXES = [[2, 30, 9, 10], [40, 20, 8, 9], [33, 3, 9, 7], [30, 30, 20, 15]]  # x, y, w, h of 64 x 48


def raw_set(boxes: list[list[float]], size: tuple[int, int] = (64, 48)) -> RawSet:
    """An image with a box of class 0 each, read as x1, y1, x2, y2."""
    images = [
        RawImage(
            Path(f"{n}.jpg"), n, *size, [RawObject(tuple(map(float, box)), 0, f"box {n}")], f"{n}"
        )
        for n, box in enumerate(boxes)
    ]
    return RawSet(images, NAMES, (1, 2, 3), "set.json")


def checked(raw: RawSet, form: str = "coco") -> RawSet:
    check_boxes(RawColumns.of(raw, masks=False), form)
    return raw


def write_set(root: Path, form: str, raw: RawSet) -> DataConfig:
    """Both splits in a format."""
    names = write_images(root / "images", len(raw.images))
    for image, name in zip(raw.images, names):
        image.path = root / "images" / name
    out = root / form
    for split in ("train", "val"):
        if form == "voc":
            write_voc(raw, out, split)
        else:
            convert(raw, form, out, images="copy", split=split)
    annotations = {
        "coco": "annotations/instances_{}.json",
        "voc": "ImageSets/Main/{}.txt",
        "yolo": "{}.txt",
    }[form]
    parts = {
        split: {
            "images": "images" if form == "voc" else f"images/{split}",
            "annotations": annotations.format(split),
        }
        for split in ("train", "val")
    }
    return DataConfig(format=form, root=str(out), **parts)


def corners(box: list[float]) -> list[float]:
    x, y, w, h = box
    return [x, y, x + w, y + h]


def misread(form: str, box: list[float]) -> list[float]:
    """Box x1 y1 x2 y2 that a format makes of numbers that are those of another."""
    x, y, w, h = box
    return {
        "coco": [x, y, x + x + w, y + y + h],  # corners where sides belong
        "yolo": [x - (x + w) / 2, y - (y + h) / 2, x + (x + w) / 2, y + (y + h) / 2],
        "voc": [x, y, w, h],  # sides where corners belong
    }[form]


@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda form, box: misread(form, box), "boxes_misread"),
        (lambda form, box: [v / side for v, side in zip(corners(box), FRAME)],
         "boxes_are_fractions"),
        (lambda form, box: [v * side for v, side in zip(box, FRAME)],
         "boxes_far_outside"),
    ],
)  # fmt: skip
def test_wrong_units_and_orders_are_refused_in_every_format(tmp_path, form, change, code):
    config = write_set(tmp_path, form, raw_set([change(form, box) for box in BOXES]))
    with raises(code, config.root):
        read_split(config, "train", 3)
    with raises(code, config.root):  # `data check` and `data convert`, too
        read_raw(config, "train", ignore_issue)


@pytest.mark.parametrize(
    "boxes",
    [
        [[0, 0, 1, 1]] * 4,  # whole numbers are pixels
        [[0, 0, 0.5, 0.5]] * 2,  # too few to show a rule
        [[0, 0, 0.5, 0.5]] * 2 + [[3, 3, 20, 20]] * 2,
        [[0, 0, 0.5, 0.5]] * 8 + [[3, 3, 20, 20]] * 2,  # not nearly all
        [[20, 20, 20, 20]] * 4 + [[3, 3, 20, 20]],  # points: without area, not sides
        [[-4, -4, 68, 52]] * 4,  # objects that fill the image, drawn past its border
        [[10, 10, 70, 40], [5, 5, 66, 50], [30, 2, 69, 20], [50, 4, 70, 40]],
        [[0, 0, 2000, 2000]] * 2 + [[3, 3, 20, 20]] * 2,
    ],
)
@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
def test_what_is_only_untidy_is_read(form, boxes, tmp_path):
    config = write_set(tmp_path, form, raw_set(boxes))
    assert len(read_split(config, "train", 3).records)


def drawn(count: int, part: float) -> np.ndarray:
    """Boxes of up to this part of an image of 640 x 480, xyxy: [P, 4]."""
    rng = np.random.default_rng(0)
    sides_P2 = rng.uniform(0.02, part, (count, 2)) * (640, 480)
    first_P2 = rng.uniform(0, 1, (count, 2)) * ((640, 480) - sides_P2)
    return np.concatenate([first_P2, first_P2 + sides_P2], axis=1)


def as_centres(boxes_P4: np.ndarray) -> np.ndarray:
    """What a reader of centres makes of first corners."""
    half_P2 = (boxes_P4[:, 2:] - boxes_P4[:, :2]) / 2
    return boxes_P4 - np.concatenate([half_P2, half_P2], axis=1)


@pytest.mark.parametrize("part", [0.06, 0.3, 0.9])
def test_first_corners_where_yolo_has_centres_are_refused(part, tmp_path):
    boxes_P4 = drawn(400, part)
    checked(raw_set(boxes_P4.tolist(), (640, 480)), "yolo")
    with raises("boxes_misread", "x1 y1 w h"):
        checked(raw_set(as_centres(boxes_P4).tolist(), (640, 480)), "yolo")
    config = write_set(tmp_path, "yolo", raw_set((as_centres(drawn(40, 0.9)) / 10).tolist()))
    with raises("boxes_misread", config.root):
        read_split(config, "train", 3)


@pytest.mark.parametrize("part", [0.06, 0.3, 0.9])
def test_objects_that_stick_out_are_no_first_corners(part):
    boxes_P4 = drawn(400, part)
    sides_P2 = boxes_P4[:, 2:] - boxes_P4[:, :2]
    apart_P4 = (
        np.random.default_rng(1).uniform(-0.3, 0.3, boxes_P4.shape) * np.c_[sides_P2, sides_P2]
    )
    checked(raw_set((boxes_P4 + apart_P4).tolist(), (640, 480)), "yolo")  # on all sides
    few_P4 = np.concatenate([as_centres(drawn(9, 0.9)), boxes_P4])  # too few to show a rule
    checked(raw_set(few_P4.tolist(), (640, 480)), "yolo")


def test_true_boxes_of_tiny_images_are_no_fractions(tmp_path):
    for size in (5, 16):
        dataset = to_detection_set(checked(raw_set([[0.5, 0.5, 1, 1]] * 4, (size, size))), "clip")
        assert [record.boxes_M4.tolist() for record in dataset.records] == [[[0.5, 0.5, 1, 1]]] * 4


def test_fractions_of_corners_in_coco_are_fractions():
    boxes = [[v / side for v, side in zip(corners(box), FRAME)] for box in BOXES]
    as_sides = [[x1, y1, x1 + x2, y1 + y2] for x1, y1, x2, y2 in boxes]
    with raises("boxes_are_fractions", "set.json"):
        checked(raw_set(as_sides), "coco")


def test_swapped_corners_are_put_in_order(tmp_path):
    boxes = [[30, 20, 20, 10], [28, 22, 3, 9], [30, 23, 8, 20]]  # all in the first half
    boxes += [[x2, y2, x1, y1] for x1, y1, x2, y2 in map(corners, BOXES)]
    for given in (boxes, boxes[:3]):
        dataset = read_split(
            write_set(tmp_path / str(len(given)), "voc", raw_set(given)), "train", 3
        )
        boxes_M4 = np.concatenate([record.boxes_M4 for record in dataset.records])
        ordered = [[min(a, c), min(b, d), max(a, c), max(b, d)] for a, b, c, d in given]
        assert boxes_M4.tolist() == ordered


def test_unread_sizes_show_no_unit(tmp_path):
    config = write_set(tmp_path, "yolo", raw_set([[2, 30, 9, 40]] * 4))
    for image in Path(config.root).rglob("*.jpg"):
        image.write_bytes(b"no image")
    assert len(read_split(config, "train", 3).records) == 4


@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
def test_boxes_given_twice_count_once_in_every_format(tmp_path, form):
    raw = raw_set([[x, y, x + w, y + h] for x, y, w, h in BOXES])
    for image in raw.images[1:]:
        image.objects *= 2
    raw.images[0].objects.append(RawObject(raw.images[0].objects[0].box, 1, "of another class"))
    config = write_set(tmp_path, form, raw)
    dataset = read_split(config, "val", 3)
    assert [len(record.labels_M) for record in dataset.records] == [2, 1, 1, 1]
    assert dataset.duplicates == {1: 1, 2: 1, 3: 1}
    assert "3 duplicates" in "".join(dataset.notes)
    assert count_duplicates(dataset) == 3
    both = [  # a perfect detector
        [index, label, 0.9, *box]
        for index, record in enumerate(dataset.records)
        for label, box in zip(record.labels_M, record.boxes_M4)
    ]
    assert evaluate_boxes(dataset, np.array(both, np.float32))["mAP"] == 1
    everything = read_split(config.model_copy(update={"duplicate_boxes": "all"}), "val", 3)
    assert [len(record.labels_M) for record in everything.records] == [2, 2, 2, 2]
    assert not everything.duplicates and not everything.notes


def test_crowds_and_the_like_stay_beside_objects(tmp_path):
    config = write_coco(tmp_path)
    content = coco_content(["000.jpg", "001.jpg", "002.jpg", "003.jpg"])
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 10, 10]}
    content["annotations"] = [
        {**box, "id": n, **change}
        for n, change in enumerate(
            [{}, {"iscrowd": 1}, {"category_id": 2}, {"image_id": 2}, {"bbox": [1, 2, 10, 10.5]}],
            1,
        )
    ]
    (tmp_path / "set.json").write_text(json.dumps(content))
    assert not read_split(config, "train", 3).duplicates
    content["annotations"] += [
        {**each, "id": n + 10} for n, each in enumerate(content["annotations"])
    ]
    (tmp_path / "set.json").write_text(json.dumps(content))
    dataset = read_split(config, "train", 3)
    assert dataset.duplicates == {0: 4, 1: 1}
    assert dataset.records[0].crowd_M.tolist() == [False, True, False, False]


def test_an_image_counts_its_own_duplicates(tmp_path):
    """Also among the first of a limit, and where an image is left out for its boxes."""
    raw = raw_set([[70, 70, 80, 80], *([x, y, x + w, y + h] for x, y, w, h in BOXES)])
    raw.images[0].objects *= 3
    raw.images[3].objects *= 2
    dataset = to_detection_set(raw, "clip")
    assert len(dataset.records) == 4 and dataset.duplicates == {2: 1}
    for count in range(1, 5):
        few = limit_images(dataset, count, "data.val.limit")
        at = [Path(record.path).name for record in few.records]
        assert few.duplicates == ({at.index("3.jpg"): 1} if "3.jpg" in at else {})
    unread = {2: "not an image"}
    lost = type(dataset)(**{**{f: getattr(dataset, f) for f in dataset.__dataclass_fields__},
                            "unreadable": unread})  # fmt: skip
    assert count_duplicates(lost) == 0


def test_many_boxes_are_compared_exactly():
    rng = np.random.default_rng(0)
    count = 20_000
    boxes = np.round(rng.uniform(0, 3, (count, 4)) * 2) / 2 + [0, 0, 4, 4]
    labels, image = rng.integers(0, 3, count), rng.integers(0, 5, count)
    columns = RawColumns.of(raw_set([[0, 0, 1, 1]] * 5), masks=False)
    for name, value in {
        "image_O": image, "boxes_O4": boxes, "labels_O": labels,
        "crowd_O": np.zeros(count, bool), "area_O": np.full(count, np.nan),
    }.items():  # fmt: skip
        setattr(columns, name, value)
    wanted = {(i, c, *box) for i, c, box in zip(image, labels, map(tuple, boxes.tolist()))}
    dataset = to_detection_set(columns, "clip")
    assert sum(len(record.labels_M) for record in dataset.records) == len(wanted)
    assert sum(dataset.duplicates.values()) == count - len(wanted)

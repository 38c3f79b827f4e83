"""The generated set: reproducible, consistent with its boxes, readable like any other."""

import json

import cv2
import numpy as np
import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.synthetic import CLASS_NAMES, make_shapes, scene
from tests.errors import raises


def test_same_seed_gives_same_set_other_seed_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_shapes(tmp_path / name, train=3, val=2, size=96, seed=seed)
    files = [
        *(f"annotations/instances_{split}.json" for split in ("train", "val")),
        *(f"images/train/{n:05d}.jpg" for n in range(3)),
        *(f"images/val/{n:05d}.jpg" for n in range(2)),
    ]
    a, b, c = ([(tmp_path / name / file).read_bytes() for file in files] for name in "abc")
    assert a == b
    assert all(ours != theirs for ours, theirs in zip(a, c))
    assert a[2] != a[5], "training and validation are different images"


def contents(root) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*") if path.is_file()}  # fmt: skip


def test_repeated_or_interrupted_call_is_idempotent(tmp_path):
    make_shapes(tmp_path, train=3, val=2, size=96)
    before = contents(tmp_path)
    (tmp_path / "images" / "val" / "00001.jpg").unlink()
    (tmp_path / "annotations" / "instances_val.json").unlink()
    (tmp_path / "cfg.yml").write_text("mine")
    for _ in range(2):
        make_shapes(tmp_path, train=3, val=2, size=96)
        assert contents(tmp_path) == {**before, "cfg.yml": b"mine"}


@pytest.mark.parametrize(
    "file",
    [
        "annotations/instances_train.json",
        "annotations/mine.json",
        "images/train/00002.jpg",
        "images/train/00004.jpg",
    ],
)
def test_folder_with_foreign_files_is_left_unchanged(tmp_path, file):
    make_shapes(tmp_path, train=3, val=2, size=96)
    (tmp_path / file).write_text("mine")
    (tmp_path / "images" / "val" / "00001.jpg").unlink()
    before = contents(tmp_path)
    with raises("folder_not_empty", str(file)):
        make_shapes(tmp_path, train=3, val=2, size=96)
    assert contents(tmp_path) == before


def test_another_set_is_not_written_over_the_first(tmp_path):
    make_shapes(tmp_path, train=3, val=2, size=96)
    before = contents(tmp_path)
    for other in ({"train": 2}, {"val": 3}, {"seed": 1}, {"size": 64}):
        with raises("folder_not_empty"):
            make_shapes(tmp_path, **{"train": 3, "val": 2, "size": 96, **other})
    assert contents(tmp_path) == before


def test_it_reads_as_a_clean_coco_set(tmp_path):
    make_shapes(tmp_path, train=12, val=4, size=128, seed=0)
    train, val = (
        SplitConfig(annotations=f"annotations/instances_{split}.json") for split in ("train", "val")
    )
    config = DataConfig(root=str(tmp_path), train=train, val=val, bad_boxes="error")
    dataset = read_split(config, "train", 3)
    assert dataset.class_names == CLASS_NAMES and dataset.notes == ()
    assert len(dataset.records) == 12 and len(read_split(config, "val", 3).records) == 4
    assert all(1 <= len(record.labels_M) <= 6 for record in dataset.records)
    json.loads((tmp_path / "annotations" / "instances_val.json").read_text())


def test_classes_and_sizes_occur_with_little_overlap():
    scenes = [scene(128, 0, 0, index) for index in range(25)]
    labels = np.concatenate([labels_M for _, _, labels_M in scenes])
    assert np.bincount(labels, minlength=3).min() > 12
    boxes = np.concatenate([boxes_M4 for _, boxes_M4, _ in scenes])
    sides = boxes[:, 2:] - boxes[:, :2]
    assert sides.min() > 6 and sides.max() < 0.45 * 128 and sides.max() / sides.min() > 2.5
    assert (boxes >= 0).all() and (boxes <= 128).all()


def test_a_box_encloses_what_differs_from_the_background():
    image, boxes_M4, _ = scene(256, 0, 0, 2)
    assert len(boxes_M4) == 1
    x1, y1, x2, y2 = boxes_M4[0].astype(int)
    inside = cv2.blur(image, (5, 5))[y1:y2, x1:x2].reshape(-1, 3).astype(float)
    outside = cv2.blur(image, (5, 5))[: y1 - 4].reshape(-1, 3).astype(float)
    assert np.linalg.norm(np.median(inside, 0) - outside.mean(0)) > 40

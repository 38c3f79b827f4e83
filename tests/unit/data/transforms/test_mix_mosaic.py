"""Mosaic, mixup, affine and letterbox as the training loader makes them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.train import MicroBatches
from ppdist.data.datasets.build import read_split
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.transforms.geometry import GREY
from ppdist.data.transforms.mix import Slot, mixup, point_layout
from ppdist.data.types import Sample, SampleKey, keyed_generator
from tests.unit.data.loaders import arrays, assert_equal
from tests.unit.data.sets import coco_config, write_coco
from tests.unit.data.transforms.blocks import STILL, samples

YOLOV5 = {
    **STILL,
    "flip": 0.5,
    "mosaic": 1.0,
    "affine": {"scale": 0.5, "translate": 0.1},
    "hsv": (0.015, 0.7, 0.4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("set")
    write_coco(root, 11)
    return root


def loader(root: Path, workers=0) -> TrainLoader:
    config = coco_config(root, workers=workers, augment=YOLOV5, resize="letterbox")
    sampler = TrainSampler(
        dataset_size=11,
        batches=MicroBatches(4, 2, spread=False),
        rank=0,
        world=1,
        seed=3,
        start_step=0,
        end_step=6,
        sizes=[(64, 96), (96, 64)],
    )
    return TrainLoader(read_split(config, "train", 3), config, sampler, seed=3)


def test_tiles_touch_the_point_and_each_other_only():
    for corner, expected in enumerate(
        [(70, 50, 100, 90), (100, 50, 130, 90), (70, 90, 100, 130), (100, 90, 130, 130)]
    ):
        before = 1 - corner % 2, 1 - corner // 2
        assert Slot(100, 90, *before).tile(40, 30) == expected
    layouts = [point_layout((60, 80), keyed_generator(0, key)) for key in range(300)]
    assert {(one.canvas, one.cell) for one in layouts} == {((120, 160), (60, 80))}
    slots_K4 = [one.slots for one in layouts]
    for slots in slots_K4:
        assert len({slot[:2] for slot in slots}) == 1
        assert [slot[2:] for slot in slots] == [(1, 1), (0, 1), (1, 0), (0, 0)]
    points = np.array([slots[0][:2] for slots in slots_K4])
    assert (points >= [40, 30]).all() and (points <= [120, 90]).all()
    assert np.ptp(points[:, 0]) > 75 and np.ptp(points[:, 1]) > 55


def test_beside_the_images_there_is_grey(folder):
    wide = samples(folder, STILL).make(SampleKey(0, 0, 128, 96))  # 64 x 48 becomes 96 x 72
    assert (wide.image_HW3[:28] == GREY).all() and (wide.image_HW3[100:] == GREY).all()
    assert not (wide.image_HW3[28:100] == GREY).all(2).all(1).any()
    away = samples(folder, {**STILL, "affine": {"translate": 1.0}})
    assert any(
        (away.make(SampleKey(0, index, 96, 96)).image_HW3[:10] == GREY).all() for index in range(11)
    )


def test_mixup_blends_two_inputs_and_keeps_all_objects(folder):
    alone = samples(folder, STILL)
    mixed = samples(folder, {**STILL, "mixup": 1.0})
    several = 0
    for index in range(11):
        key = SampleKey(0, index, 48, 64)
        one, both = alone.make(key), mixed.make(key)
        np.testing.assert_array_equal(both.boxes_M4[: len(one.boxes_M4)], one.boxes_M4)
        several += len(both.labels_M) > len(one.labels_M)
        others = [
            other
            for other in range(11)
            if _is_blend(both.image_HW3, one.image_HW3, alone.make(SampleKey(0, other, 48, 64)))
        ]
        assert others
    assert several > 3
    bright = Sample(np.full((4, 4, 3), 200, np.uint8), np.zeros((0, 4)), np.zeros(0, int), 0)
    dark = replace(bright, image_HW3=np.zeros((4, 4, 3), np.uint8))
    mixes = [mixup(bright, dark, keyed_generator(0, key)) for key in range(300)]
    shares = [mix.image_HW3.mean() / 200 for mix in mixes]
    assert abs(np.mean(shares) - 0.5) < 0.02 and 0.04 < np.std(shares) < 0.08  # Beta(32, 32): 0.062


def _is_blend(mixed, one, other: Sample) -> bool:
    a, b, c = (array.astype(float).ravel() for array in (one, other.image_HW3, mixed))
    if np.array_equal(a, b):
        return bool(np.abs(c - a).max() <= 1)
    share = ((c - b) @ (a - b)) / ((a - b) @ (a - b))
    return bool(0.2 < share < 0.8 and np.abs(share * a + (1 - share) * b - c).max() <= 1)


def test_the_last_epochs_go_without_mosaic_and_mixup(folder):
    augment = {**YOLOV5, "mixup": 0.5, "close_mosaic_epochs": 2}
    closing = samples(folder, augment, epochs=5)
    open_all_along = samples(folder, {**augment, "close_mosaic_epochs": 0})
    single = samples(folder, {**augment, "close_mosaic_epochs": 0, "mosaic": 0, "mixup": 0})
    for epoch in range(5):
        key = SampleKey(epoch, 5, 64, 64)
        expected = (open_all_along if epoch < 3 else single).make(key)
        np.testing.assert_array_equal(closing.make(key).image_HW3, expected.image_HW3)
    with pytest.raises(ValueError, match="the length of the run is needed"):
        samples(folder, augment)


def test_a_damaged_partner_is_replaced_as_always(tmp_path, caplog):
    write_coco(tmp_path, 11)
    (tmp_path / "images" / "003.jpg").write_bytes(b"\xff\xd8 no jpeg")
    found = list(loader(tmp_path, workers=2))
    assert_equal(loader(tmp_path), found)
    (line,) = {record.getMessage() for record in caplog.records}
    assert line.startswith(f"{tmp_path / 'images' / '003.jpg'}: ")
    (tmp_path / "images" / "003.jpg").write_bytes((tmp_path / "images" / "004.jpg").read_bytes())
    content = json.loads((tmp_path / "set.json").read_text(encoding="utf-8"))
    for annotation in [a for a in content["annotations"] if a["image_id"] == 4]:
        content["annotations"].remove(annotation)
    copies = [a for a in content["annotations"] if a["image_id"] == 5]
    content["annotations"] += [{**annotation, "image_id": 4} for annotation in copies]
    (tmp_path / "set.json").write_text(json.dumps(content), encoding="utf-8")
    for one, other in zip(found, loader(tmp_path)):
        for a, b in zip(arrays(one)[:4], arrays(other)[:4]):  # all but the position
            np.testing.assert_array_equal(a, b)


def test_crowds_are_not_learned_in_a_mosaic_either(tmp_path):
    write_coco(tmp_path, 4)
    content = json.loads((tmp_path / "set.json").read_text(encoding="utf-8"))
    content["annotations"] = [{**a, "iscrowd": 1} for a in content["annotations"]]
    (tmp_path / "set.json").write_text(json.dumps(content), encoding="utf-8")
    under_test = samples(tmp_path, {**YOLOV5, "mixup": 1.0})
    assert all(len(under_test.make(SampleKey(0, n, 64, 64)).labels_M) == 0 for n in range(4))

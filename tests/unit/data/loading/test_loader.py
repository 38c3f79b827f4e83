"""Batches: what they hold, that nothing but the seed decides about it, and how failures arrive."""

import contextlib
import logging
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.config.augment import AugmentConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.image import DARK, read_image
from ppdist.data.transforms.pipeline import TrainSamples
from tests.errors import raises
from tests.unit.data.loaders import arrays, assert_equal, eval_loader, loader, warnings_in
from tests.unit.data.sets import coco_config, coco_content, write_coco, write_images, write_json

COUNT = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("set")
    write_coco(root, COUNT)
    return root


def test_a_batch_is_what_the_contract_says(folder):
    for batch in loader(folder):
        images, boxes, labels, mask, index, scale, offset, seeds = arrays(batch)
        count, _, height, width = images.shape
        assert images.dtype == np.uint8 and (height, width) in [(64, 96), (96, 64)]
        assert boxes.shape == (count, 8, 4) and boxes.dtype == np.float32
        assert labels.shape == mask.shape == (count, 8)
        assert labels.dtype == index.dtype == seeds.dtype == np.int64
        assert isinstance(batch.seeds_B, np.ndarray) and len({*seeds.tolist()}) == count
        assert mask.dtype == scale.dtype == offset.dtype == np.float32
        assert (scale == 1).all() and (offset == 0).all() and scale.shape == (count, 2)
        assert set(np.unique(mask)) <= {0.0, 1.0}
        assert not boxes[mask == 0].any() and not labels[mask == 0].any()
        real = boxes[mask == 1]
        assert (real[:, 2:] - real[:, :2] >= 1).all()
        assert (real >= 0).all() and (real[:, [0, 2]] <= width).all()
        assert (real[:, [1, 3]] <= height).all()


def test_without_augmentation_training_sees_the_file(folder):
    still = AugmentConfig(distort=0, expand=0, crop=0, flip=0, random_interpolation=False)
    one = loader(folder, sizes=[(48, 64)], augment=still, end=3)
    records = read_split(coco_config(folder), "train").records
    for batch in one:
        for position, index in enumerate(batch.image_index_B.numpy()):
            expected = read_image(records[index].path)
            found = batch.images_B3HW[position].numpy().transpose(1, 2, 0)
            np.testing.assert_array_equal(found, expected)
            mask = batch.mask_BM[position].numpy() > 0
            boxes = batch.boxes_BM4[position].numpy()[mask]
            np.testing.assert_array_equal(boxes, records[index].boxes_M4)


def test_a_rank_that_gets_nothing_still_makes_a_batch(folder):
    batches = list(loader(folder, rank=15, world=16, end=1, workers=1))
    assert [batch.real for batch in batches] == [False]
    for batch in batches:
        assert batch.image_index_B.numpy().tolist() == [-1]
        assert batch.images_B3HW.shape[0] == 1 and batch.boxes_BM4.shape[1] >= 1
        assert not batch.mask_BM.numpy().any() and not batch.images_B3HW.numpy().any()


def test_crowds_are_not_learned_but_evaluated(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 1))
    content["annotations"] = [
        {"image_id": 1, "category_id": 2, "bbox": [5, 5, 20, 20], "iscrowd": crowd}
        for crowd in (1, 0)
    ]
    write_json(tmp_path, content)
    still = AugmentConfig(expand=0, crop=0)
    (batch, *_) = loader(tmp_path, augment=still)
    assert batch.mask_BM.numpy().sum(1)[0] == 1
    (batch,) = eval_loader(tmp_path)
    assert batch.mask_BM.numpy().sum() == 2


def test_boxes_are_padded_to_a_multiple_of_eight(tmp_path):
    content = coco_content(write_images(tmp_path / "images", 2))
    content["annotations"] = [
        {"image_id": 1, "category_id": 1, "bbox": [n, n, 20, 20]} for n in range(9)
    ]
    write_json(tmp_path, content)
    (batch,) = eval_loader(tmp_path)
    assert batch.boxes_BM4.shape == [2, 16, 4]
    assert batch.mask_BM.numpy().sum(1).tolist() == [9, 0]


@pytest.mark.parametrize(("workers", "world"), [(0, 1), (2, 1), (1, 3)])
def test_evaluation_loads_each_image_once_stretched(folder, workers, world):
    seen = []
    for rank in range(world):
        one = eval_loader(folder, workers, rank, world)
        for batch in one:
            assert batch.real and batch.images_B3HW.shape[1:] == [3, 32, 80]
            np.testing.assert_allclose(batch.scale_B2.numpy()[0], [32 / 48, 80 / 64])
            records = read_split(coco_config(folder), "val").records
            for position, index in enumerate(batch.image_index_B.numpy()):
                mask = batch.mask_BM[position].numpy() > 0
                boxes = batch.boxes_BM4[position].numpy()[mask] / [1.25, 2 / 3, 1.25, 2 / 3]
                np.testing.assert_allclose(boxes, records[index].boxes_M4, rtol=1e-5)
                seen.append(index)
    assert sorted(seen) == list(range(COUNT))


def test_an_eval_loader_can_be_iterated_again(folder):
    one = eval_loader(folder, workers=1)
    assert_equal(one, list(one))


# --- damaged images ------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path) -> Path:
    write_coco(tmp_path, COUNT)
    (tmp_path / "images" / "003.jpg").write_bytes(b"\xff\xd8 no jpeg")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_image_is_replaced_and_named_once(damaged, workers, caplog):
    with caplog.at_level(logging.WARNING, "ppdist"):
        found = [
            index
            for batch in loader(damaged, workers, end=6)  # two epochs
            for index in batch.image_index_B.numpy().tolist()
        ]
    once = [index if index != 3 else 4 for index in range(COUNT)]
    assert sorted(found) == sorted(2 * once)
    (line,) = warnings_in(caplog)
    assert line.startswith(f"{damaged / 'images' / '003.jpg'}: ") and "next good image" in line


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_leaves_a_damaged_image_out(damaged, workers):
    (batch,) = eval_loader(damaged, workers, batch_size=20)
    assert batch.image_index_B.numpy().tolist() == [at for at in range(COUNT) if at != 3]
    assert batch.images_B3HW.shape[0] == COUNT - 1
    assert set(batch.bad_images) == {3}
    alone = [*eval_loader(damaged, workers, batch_size=1)][3]
    assert alone.image_index_B.numpy().tolist() == [-1] and set(alone.bad_images) == {3}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [loader, eval_loader])
def test_a_damaged_image_stops_the_run_when_asked_to(damaged, workers, make):
    with raises("image_truncated", str(damaged / "images" / "003.jpg")):
        list(make(damaged, workers, bad_images="error"))
    assert_no_workers_left()


def test_nothing_but_damaged_images_stops_the_run(damaged):
    for file in (damaged / "images").iterdir():
        file.write_bytes(b"")
    with raises("no_good_image") as caught:
        list(loader(damaged))
    assert caught.value.where == str(damaged / "set.json") and "11 images" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_worker_bug_arrives_with_traceback_and_file(folder, workers, monkeypatch):
    def broken(self, key):
        raise KeyError("a bug")

    monkeypatch.setattr(TrainSamples, "make", broken)
    with pytest.raises(RuntimeError) as caught:
        list(loader(folder, workers))
    assert not isinstance(caught.value, DataError)
    assert str(folder / "images") in str(caught.value) and "KeyError: 'a bug'" in str(caught.value)


# --- processes -----------------------------------------------------------------------------------


def children() -> list[int]:
    """Processes this one has started; not those that Python keeps (see tests/distributed.py)."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return [each for each in found if not kept_by_python(each)]


def kept_by_python(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except FileNotFoundError:  # it has just ended
        return False
    return b"from multiprocessing." in command


def assert_no_workers_left() -> None:
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children()


def test_no_worker_outlives_its_loader(folder):
    one = loader(folder, workers=2, end=10**6)
    with contextlib.closing(iter(one)) as batches:
        next(batches)
        assert sorted(children()) == sorted(one.worker_ids) and len(one.worker_ids) == 2
    del batches
    assert len(one.worker_ids) == 2  # for the next iteration
    del one
    assert_no_workers_left()
    batches = iter(loader(folder, workers=1, end=10**6))
    next(batches)
    del batches
    assert_no_workers_left()


@pytest.mark.parametrize("workers", [0, 2])
def test_few_of_16_bits_are_named_once_a_set(tmp_path, workers, caplog):
    write_coco(tmp_path, 4)
    for file in sorted((tmp_path / "images").iterdir())[:2]:
        content = cv2.imencode(".png", np.full((48, 64), 900, np.uint16))[1]
        file.write_bytes(content.tobytes())
    with caplog.at_level(logging.WARNING, "ppdist"):
        assert len(list(loader(tmp_path, workers=workers))) == len(loader(tmp_path))
    assert [DARK in line for line in warnings_in(caplog)] == [True]

"""Which part of an image a classifier sees, and that its batches are those of detection."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from ppdist.config.augment import AugmentConfig
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.config.train import MicroBatches
from ppdist.data.datasets.build import read_split
from ppdist.data.loading.loader import EvalLoader, TrainLoader
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.transforms.classification import (
    ClassifyEvalSamples,
    ClassifyTrainSamples,
    centred_part,
    random_part,
    resize_centre,
)
from ppdist.data.types import SampleKey
from tests.errors import raises
from tests.unit.data.classified import PATTERNS, write_patterns

PLAIN = AugmentConfig(distort=0, crop=0, flip=0, random_interpolation=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patterns")
    write_patterns(folder / "train", 3, seed=0)
    return read_split(config_of(folder), "train", 3)


def config_of(root: Path, **changes) -> DataConfig:
    split = SplitConfig(images="train")
    changes = {"workers": 0, **changes}
    return DataConfig(format="folder", root=str(root), train=split, val=split, **changes)


@pytest.mark.parametrize(
    ("width", "height", "size", "expected"),
    [
        (100, 60, (224, 224), (20, 0, 80, 60)),
        (60, 101, (224, 224), (0, 20, 60, 80)),
        (100, 100, (64, 128), (0, 25, 100, 75)),
        (100, 100, (128, 64), (25, 0, 75, 100)),
        (1, 1, (224, 224), (0, 0, 1, 1)),
        (2, 300, (32, 512), (0, 149, 2, 150)),
    ],
)
def test_centre_crop_is_largest_of_input_shape(width, height, size, expected):
    assert centred_part(width, height, size).tolist() == list(expected)


def test_evaluation_sees_the_centre_resized_linearly():
    image_HW3 = np.random.default_rng(0).integers(0, 256, (50, 81, 3)).astype(np.uint8)
    expected = cv2.resize(image_HW3[:, 15:65], (32, 32), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(resize_centre(image_HW3, (32, 32)), expected)


def test_random_crops_have_documented_area_aspect():
    rng = np.random.default_rng(0)
    parts_N4 = np.array([random_part(500, 375, 0.283, rng) for _ in range(4000)])
    assert (parts_N4 == parts_N4.astype(int)).all()
    assert parts_N4.min() >= 0 and (parts_N4[:, 2:] <= [500, 375]).all()
    wide_N, tall_N = (parts_N4[:, 2:] - parts_N4[:, :2]).T
    area_N, aspect_N = wide_N * tall_N / (500 * 375), wide_N / tall_N
    assert 0.079 < area_N.min() < 0.09 and area_N.max() > 0.95
    small_N = area_N < 0.56  # of an image of 4:3 these fit whatever their aspect: none is redrawn
    assert abs(area_N[small_N].mean() - (0.08 + 0.56) / 2) < 0.01
    assert 0.74 < aspect_N.min() < 0.78 and 1.30 < aspect_N.max() < 1.35
    assert abs(np.log(aspect_N)[small_N].mean()) < 0.02
    assert parts_N4[:, 0].max() > 250 and parts_N4[:, 1].max() > 180


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000), (1, 1)])
def test_strip_falls_back_to_centre_crop(width, height):
    x1, y1, x2, y2 = random_part(width, height, 1.0, np.random.default_rng(0))
    assert 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height
    assert 3 / 4 - 0.1 <= (x2 - x1) / (y2 - y1) <= 4 / 3 + 0.1


def test_training_sample_depends_on_seed_epoch_index(dataset):
    def sample(seed: int, *key: int) -> np.ndarray:
        augment = AugmentConfig(hsv=(0.1, 0.5, 0.5))
        samples = ClassifyTrainSamples(dataset, "skip", augment, seed)
        return samples.make(SampleKey(*key, 48, 64)).image_HW3

    first = sample(7, 0, 2)
    assert first.shape == (48, 64, 3)
    np.testing.assert_array_equal(first, sample(7, 0, 2))
    for other in (sample(8, 0, 2), sample(7, 1, 2), sample(7, 0, 3)):
        assert (first != other).any()


def test_plain_training_sees_evaluation_input(dataset):
    key = SampleKey(0, 5, 64, 64)
    training = ClassifyTrainSamples(dataset, "skip", PLAIN, 0).make(key).image_HW3
    evaluation = ClassifyEvalSamples(dataset, "skip").make(key).image_HW3
    np.testing.assert_array_equal(training, evaluation)
    mirror = PLAIN.model_copy(update={"flip": 1.0})
    mirrored = ClassifyTrainSamples(dataset, "skip", mirror, 0).make(key).image_HW3
    np.testing.assert_array_equal(mirrored, evaluation[:, ::-1])


def test_batches_carry_the_class_in_the_first_column(dataset):
    root = Path(dataset.source).parent
    config = config_of(root)
    loader = EvalLoader(dataset, config, image_size=(64, 64), batch_size=4, rank=0, world=1)
    batches = list(loader)
    assert [batch.images_B3HW.shape for batch in batches] == [[4, 3, 64, 64]] * 2 + [[1, 3, 64, 64]]
    labels = np.concatenate([batch.labels_BM[:, 0].numpy() for batch in batches])
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all((batch.mask_BM[:, 0] == 1).all() for batch in batches)

    sampler = TrainSampler(dataset_size=9, batches=MicroBatches(4, 4, False), rank=0, world=1,
                           seed=0, start_step=0, end_step=3, sizes=[(64, 64)])  # fmt: skip
    epoch = list(TrainLoader(dataset, config, sampler, seed=0))
    seen = {
        (int(index), int(label))
        for batch in epoch
        for index, label in zip(batch.image_index_B, batch.labels_BM[:, 0])
    }
    assert seen == {(index, index // 3) for index in range(9)}


def test_damaged_image_is_replaced_left_out_or_error(tmp_path):
    write_patterns(tmp_path / "train", 2, seed=0)
    (tmp_path / "train" / PATTERNS[1] / "000.png").write_bytes(b"no image")
    dataset = read_split(config_of(tmp_path), "train", 3)
    samples = ClassifyTrainSamples(dataset, "skip", PLAIN, 0)
    sample = samples.make(SampleKey(0, 2, 64, 64))
    assert (sample.index, sample.labels_M.tolist()) == (3, [1])
    assert ClassifyEvalSamples(dataset, "skip").make(SampleKey(0, 2, 64, 64)).index == -1
    with raises("image_unreadable"):
        ClassifyEvalSamples(dataset, "error").make(SampleKey(0, 2, 64, 64))
    config = config_of(tmp_path)
    loader = EvalLoader(dataset, config, image_size=(64, 64), batch_size=6, rank=0, world=1)
    (batch,) = loader
    assert batch.image_index_B.numpy().tolist() == [0, 1, 3, 4, 5]
    assert set(batch.bad_images) == {2}

"""How often images come: the published formulas, and whole numbers that keep their promise."""

import numpy as np
import pytest

from ppdist.config.data import SamplingConfig
from ppdist.data.loading.sampler import difficulty, draw_copies, epoch_size, expected_copies
from ppdist.data.types import DetectionSet, ImageRecord

BALANCED = SamplingConfig(name="balanced", balance_threshold=0.5)
DIFFICULTY = SamplingConfig(name="difficulty")


def dataset(*labels: list[int], classes: int = 3, crowds: tuple[int, ...] = ()) -> DetectionSet:
    """An image for each list of labels; all objects of the images `crowds` are crowds."""
    records = []
    for index, of_image in enumerate(labels):
        count = len(of_image)
        boxes_M4 = np.tile(np.array([[1, 1, 5, 5]], np.float32), (count, 1))
        records.append(
            ImageRecord(
                path=f"/images/{index}.jpg",
                image_id=index + 1,
                width=10,
                height=10,
                boxes_M4=boxes_M4,
                labels_M=np.array(of_image, np.int64),
                crowd_M=np.full(count, index in crowds),
                area_M=np.full(count, 16, np.float32),
            )
        )
    names = tuple(f"class {number}" for number in range(classes))
    return DetectionSet(tuple(records), names, tuple(range(1, classes + 1)), "set.json")


def test_balanced_equals_the_formula_of_lvis_written_out():
    rng = np.random.default_rng(4)
    lists = [rng.integers(0, 3, rng.integers(0, 4)).tolist() for _ in range(60)]
    lists += [[3]] + [[]] * 3
    expected = []
    for of_image in lists:
        factors = [1.0]
        for label in of_image:
            share = sum(label in other for other in lists) / len(lists)
            factors.append(max(1.0, (0.3 / share) ** 0.5))
        expected.append(max(factors))
    config = SamplingConfig(name="balanced", balance_threshold=0.3)
    np.testing.assert_allclose(expected_copies(dataset(*lists, classes=5), config, None), expected)


def test_difficulty_weighs_images_and_keeps_length():
    # Class 0: 4 objects, class 1: 1 object; d = (0.25, 1): weights 2/16 and 1, and their mean.
    some = dataset([0, 0], [0, 0], [1], [], classes=2)
    weight_N = np.array([1 / 8, 1 / 8, 1, 10 / 24])
    copies_N = expected_copies(some, DIFFICULTY, difficulty([0.5, 0.0]))
    np.testing.assert_allclose(copies_N, 4 * weight_N / weight_N.sum())
    assert epoch_size(copies_N) == 4


def test_before_the_first_evaluation_only_rarity_counts():
    some = dataset([0], [0], [0], [1], classes=2)
    np.testing.assert_allclose(expected_copies(some, DIFFICULTY, None), [2 / 3, 2 / 3, 2 / 3, 2])


def test_unevaluated_class_has_average_difficulty():
    np.testing.assert_allclose(difficulty([0.2, 0.6, -1, None]), [0.64, 0.16, 0.36, 0.36])
    np.testing.assert_allclose(difficulty([np.nan, -1]), [1, 1])


def test_when_nothing_is_difficult_all_images_come_once():
    some = dataset([0], [1, 1], [], classes=2)
    np.testing.assert_array_equal(expected_copies(some, DIFFICULTY, difficulty([1, 1])), [1, 1, 1])
    np.testing.assert_array_equal(expected_copies(dataset([], []), DIFFICULTY, None), [1, 1])


def test_crowds_count_for_nothing():
    with_crowd = dataset([0], [0], [2, 2], [0], crowds=(2,))
    without = dataset([0], [0], [], [0])
    for config in (BALANCED, DIFFICULTY):
        np.testing.assert_array_equal(
            expected_copies(with_crowd, config, None), expected_copies(without, config, None)
        )


def test_difficulties_of_wrong_length_are_refused():
    with pytest.raises(ValueError, match="2 difficulties for 3 classes"):
        expected_copies(dataset([0]), DIFFICULTY, [1.0, 1.0])


@pytest.mark.parametrize("seed", range(8))
def test_integer_repeats_are_floor_or_ceil_fixed_sum(seed):
    rng = np.random.default_rng(seed)
    copies_N = rng.gamma(0.7, 1.5, rng.integers(1, 300)).round(rng.integers(1, 12))
    copies_N[rng.random(len(copies_N)) < 0.3] = 1.0
    copies_N[-1] += 1.0
    for offset in [0.0, 1e-17, 1 - 2**-53, *rng.random(20)]:
        times_N = draw_copies(copies_N, offset)
        assert times_N.sum() == epoch_size(copies_N)
        assert ((times_N == np.floor(copies_N)) | (times_N == np.ceil(copies_N))).all()


def test_whole_copies_are_right_on_average():
    copies_N = np.array([0.3, 1.0, 1.9, 2.25, 0.05, 0.5])
    offsets = (np.arange(1000) + 0.5) / 1000
    mean_N = np.mean([draw_copies(copies_N, offset) for offset in offsets], axis=0)
    np.testing.assert_allclose(mean_N, copies_N, atol=0.002)


def test_fractional_sum_is_rounded_in_fractions_only():
    for copies_N in ([1.0, 1.3, 1.4], [1.0, 1.3, 1.1], [2.0, 0.1, 3.0], [1.0, 0.9, 0.9]):
        copies_N = np.array(copies_N)
        exact_N = copies_N == np.floor(copies_N)
        for offset in np.linspace(0, 0.999, 50):
            times_N = draw_copies(copies_N, offset)
            assert times_N.sum() == round(copies_N.sum())
            np.testing.assert_array_equal(times_N[exact_N], copies_N[exact_N])

"""Curves, the best confidence, VOC's average precision, against plain loops."""

import numpy as np
import pytest

from ppdist.metrics.coco import coco_arrays
from ppdist.metrics.matching import (
    CONFIDENCE_T,
    NOBODY,
    coco_average_precision,
    collect_objects,
    compute_operating_points,
    count_by_confidence,
    count_objects,
    find_best_step,
    find_overlaps,
    match_as_coco,
    right_by_class,
    select_detections,
    voc_average_precision,
)
from tests.unit.metrics.cases import detection_set, odd_case, random_case, record


def matched(dataset, rows_R7):
    truth = collect_objects(dataset)
    found = select_detections(truth, rows_R7)
    return truth, found, match_as_coco(truth, found, find_overlaps(truth, found), 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_precision_recall_f1_equal_direct_counts(seed):
    dataset, rows_R7, classes = odd_case(seed)
    truth, found, match_F = matched(dataset, rows_R7)
    counts = count_by_confidence(truth, found, match_F, classes)
    for label in range(classes):
        objects = int(((truth.label_G == label) & ~truth.crowd_G).sum())
        for step in range(0, 1001, 50):
            sure = (found.label_F == label) & (found.score_F >= step / 1000)
            right, wrong = (match_F[sure] >= 0).sum(), (match_F[sure] == NOBODY).sum()
            precision = right / (right + wrong) if right + wrong else np.nan
            recall = right / objects if objects else np.nan
            f1 = 2 * right / (right + wrong + objects) if objects else np.nan
            ours = (counts.precision_CT, counts.recall_CT, counts.f1_CT)
            want = [precision, recall, f1]
            np.testing.assert_allclose([values[label, step] for values in ours], want, rtol=1e-12)


def test_the_best_confidence_makes_the_mean_f1_largest():
    dataset, rows_R7 = random_case(1)
    counts = count_by_confidence(*matched(dataset, rows_R7), 3)
    best = compute_operating_points(counts)
    f1_T = counts.f1_CT[:2].mean(axis=0)  # class 2 has no object
    assert best["f1"] == f1_T.max() == f1_T[round(best["best_f1_threshold"] * 1000)]
    step = find_best_step(counts)
    assert best["precision"] == pytest.approx(counts.precision_CT[:2, step].mean())
    assert best["recall"] == pytest.approx(counts.recall_CT[:2, step].mean())


def test_class_not_found_counts_for_recall_only():
    box = [10, 10, 60, 60]
    dataset = detection_set(record(1, [box], [0]), record(2, [box], [1]))
    best = compute_operating_points(
        count_by_confidence(*matched(dataset, np.array([[0, 0, 0.7, *box]])), 3)
    )
    assert best == {
        "precision": 1.0,
        "recall": 0.5,
        "f1": 0.5,
        "best_f1_threshold": 0.35,
        "precision_at_25": 1.0,
        "recall_at_25": 0.5,
    }


@pytest.mark.parametrize("seed", range(6))
def test_ap_from_matches_equals_coco_ap50(seed):
    dataset, rows_R7 = random_case(seed, tied_scores=seed % 2 == 1)
    truth, found, match_F = matched(dataset, rows_R7)
    rights = right_by_class(found.label_F, match_F, 3)
    arrays = coco_arrays(truth, found, 3)
    for label, objects in enumerate(count_objects(truth, 3)[:2]):
        ours = coco_average_precision(rights[label], int(objects))
        assert ours == pytest.approx(arrays.of_class(label)["AP50"], abs=1e-9)


def by_voc_devkit(right_F, objects) -> tuple[float, float]:
    """VOCevaldet.m of 2007 and VOCap.m of 2010, by loops."""
    recall, precision, hits = [], [], 0
    for number, right in enumerate(right_F, start=1):
        hits += right
        recall.append(hits / objects)
        precision.append(hits / number)
    eleven = 0.0
    for tenth in range(11):
        reached = [p for r, p in zip(recall, precision) if r >= tenth / 10]
        eleven += max(reached, default=0.0) / 11
    recall, precision = [0.0, *recall, 1.0], [0.0, *precision, 0.0]
    for place in range(len(precision) - 2, -1, -1):
        precision[place] = max(precision[place], precision[place + 1])
    area = sum(
        (recall[i] - recall[i - 1]) * precision[i]
        for i in range(1, len(recall))
        if recall[i] != recall[i - 1]
    )
    return eleven, area


@pytest.mark.parametrize("seed", range(20))
def test_vocs_average_precision_is_that_of_its_devkit(seed):
    rng = np.random.default_rng(seed)
    right_F = rng.random(int(rng.integers(0, 60))) < rng.random()
    objects = int(right_F.sum()) + int(rng.integers(1, 20))
    ours, want = voc_average_precision(right_F, objects), by_voc_devkit(right_F, objects)
    assert ours == pytest.approx(want, abs=1e-12)
    assert np.isnan(voc_average_precision(right_F, 0)).all()


def test_voc_ap_11_point_and_area_worked_example():
    # Of 4 objects the 1st and the 3rd detection find one: precision 1, 1/2, 2/3 at recall
    # 1/4, 1/4, 1/2; best precision 1 up to recall 1/4, 2/3 up to 1/2, then 0.
    eleven, area = voc_average_precision(np.array([True, False, True]), 4)
    assert eleven == pytest.approx((3 * 1 + 3 * 2 / 3) / 11)
    assert area == pytest.approx(0.25 * 1 + 0.25 * 2 / 3)


def test_confidences_are_thousandths():
    assert CONFIDENCE_T[[0, 216, 1000]].tolist() == [0.0, 0.216, 1.0]

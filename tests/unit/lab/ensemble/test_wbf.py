"""Fusion of boxes: against slow code written from the paper, and what must hold of any input."""

import numpy as np
import pytest

from ppdist.lab.ensemble.wbf import view_iou, weighted_fusion


def some_boxes(seed: int, objects: int = 4, members: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Boxes of three members around a few objects, some missed, some double, and stray ones."""
    rng = np.random.default_rng(seed)
    boxes, scores = [], []
    for _ in range(objects):
        corner = rng.uniform(0, 80, 2)
        true = np.concatenate([corner, corner + rng.uniform(15, 40, 2)])
        for _ in range(members):
            for _ in range(rng.integers(0, 3)):
                boxes.append(true + rng.normal(0, 2, 4))
                scores.append(rng.uniform(0.05, 1))
    return np.array(boxes).reshape(-1, 4), np.array(scores)


def slow_iou(a, b) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, wide) * max(0.0, high)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def slow_wbf(boxes, scores, members, threshold):
    """arXiv:1910.13302, section 3, steps 1 to 7, in lists; each mean is made from all its boxes."""
    entries = sorted(zip(boxes.tolist(), scores.tolist()), key=lambda e: -e[1])
    lists, fused = [], []
    for entry in entries:
        overlaps = [slow_iou(entry[0], mean) for mean in fused]
        if overlaps and max(overlaps) > threshold:
            place = overlaps.index(max(overlaps))
            lists[place].append(entry)
        else:
            place = len(lists)
            lists.append([entry])
            fused.append(None)
        mass = sum(s for _, s in lists[place])
        fused[place] = [sum(s * box[side] for box, s in lists[place]) / mass for side in range(4)]
    result = []
    for box, cluster in zip(fused, lists):
        mean = sum(s for _, s in cluster) / len(cluster)
        result.append((box, mean * min(len(cluster), members) / members))
    return sorted(result, key=lambda pair: -pair[1])


@pytest.mark.parametrize("seed", range(12))
def test_fused_boxes_are_what_the_paper_says(seed) -> None:
    boxes_R4, scores_R = some_boxes(seed)
    found_K4, found_K = weighted_fusion(boxes_R4, scores_R, 3, 0.55)
    expected = slow_wbf(boxes_R4, scores_R, 3, 0.55)
    np.testing.assert_allclose(found_K, [score for _, score in expected], rtol=1e-12)
    np.testing.assert_allclose(found_K4, [box for box, _ in expected], rtol=1e-12)


def test_what_one_member_found_is_half_as_sure() -> None:
    boxes_R4, scores_R = np.array([[0.0, 0, 5, 5]]), np.array([0.8])
    assert weighted_fusion(boxes_R4, scores_R, 2, 0.55)[1].tolist() == [0.4]


def test_scores_and_boxes_stay_within_bounds() -> None:
    for seed in range(5):
        boxes_R4, scores_R = some_boxes(seed)
        boxes_K4, scores_K = weighted_fusion(boxes_R4, scores_R, 3, 0.55)
        assert ((scores_K >= 0) & (scores_K <= 1)).all() and (np.diff(scores_K) <= 0).all()
        assert (boxes_K4 >= boxes_R4.min(0) - 1e-9).all()
        assert (boxes_K4 <= boxes_R4.max(0) + 1e-9).all()


def test_the_order_of_boxes_does_not_matter() -> None:
    boxes_R4, scores_R = some_boxes(3)
    turned = np.random.default_rng(0).permutation(len(scores_R))
    first = weighted_fusion(boxes_R4, scores_R, 3, 0.55)
    second = weighted_fusion(boxes_R4[turned], scores_R[turned], 3, 0.55)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_boxes_without_area_or_score_are_no_trouble() -> None:
    boxes_R4 = np.array([[5.0, 5, 5, 9], [5.0, 5, 5, 9], [0, 0, 4, 4]])
    scores_R = np.array([0.5, 0.0, 0.0])
    with np.errstate(all="raise"):
        boxes_K4, scores_K = weighted_fusion(boxes_R4, scores_R, 2, 0.55)
    assert np.isfinite(boxes_K4).all() and np.isfinite(scores_K).all()


@pytest.mark.parametrize(("iou", "scores"), [(0.55, [0.7]), (0.65, [0.45, 0.25])])
def test_boxes_join_above_the_threshold(iou, scores) -> None:
    boxes_R4 = np.array([[0.0, 0, 100, 100], [0, 0, 100, 60]])  # that overlap by 0.6
    found_K = weighted_fusion(boxes_R4, np.array([0.9, 0.5]), 2, iou)[1]
    np.testing.assert_allclose(found_K, scores)


@pytest.mark.parametrize(
    ("iou", "written", "expected"),
    [
        (0.55, 0.7, 0.45),  # a cluster of 0.55, less the margin
        (0.7, 0.7, 0.6),
        (0.9, 0.7, 0.7),  # never less strict than the configuration
        (0.05, 0.7, 0.0),
        (0.55, None, 0.45),  # a model without suppression has low boxes, too
    ],
)
def test_views_are_suppressed_more_strictly(iou, written, expected) -> None:
    assert view_iou(iou, written) == expected

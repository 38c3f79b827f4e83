"""Fusion of boxes: against slow code written from the papers, and what must hold of any input."""

from functools import partial

import numpy as np
import pytest

from ppdist.common.errors import ConfigError
from ppdist.ensemble.wbf import (
    LEAST_SCORE,
    fuse_class,
    gaussian,
    hard_suppression,
    linear,
    soft_suppression,
    view_iou,
    weighted_fusion,
)

METHODS = {
    "wbf": partial(weighted_fusion, iou=0.55),
    "nms": partial(hard_suppression, iou=0.5),
    "linear": partial(soft_suppression, keeps=partial(linear, iou=0.3)),
    "gaussian": partial(soft_suppression, keeps=partial(gaussian, sigma=0.5)),
}


def some_boxes(seed: int, objects: int = 4, members: int = 3) -> tuple[np.ndarray, ...]:
    """Boxes of three members around a few objects, some missed, some double, and stray ones."""
    rng = np.random.default_rng(seed)
    weights_M = np.array([1.0, 0.5, 0.25])[:members]
    boxes, scores, weight = [], [], []
    for _ in range(objects):
        corner = rng.uniform(0, 80, 2)
        true = np.concatenate([corner, corner + rng.uniform(15, 40, 2)])
        for member in range(members):
            for _ in range(rng.integers(0, 3)):
                boxes.append(true + rng.normal(0, 2, 4))
                scores.append(rng.uniform(0.05, 1))
                weight.append(weights_M[member])
    return np.array(boxes).reshape(-1, 4), np.array(scores), np.array(weight)


def slow_iou(a, b) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, wide) * max(0.0, high)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def slow_wbf(boxes, scores, weights, total, threshold):
    """arXiv:1910.13302, section 3, steps 1 to 7, in lists; each mean is made from all its boxes."""
    entries = sorted(
        zip(boxes.tolist(), scores.tolist(), weights.tolist()), key=lambda e: -e[1] * e[2]
    )
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
        mass = sum(w * s for _, s, w in lists[place])
        fused[place] = [
            sum(w * s * box[side] for box, s, w in lists[place]) / mass for side in range(4)
        ]
    result = []
    for box, cluster in zip(fused, lists):
        found = sum(w for _, _, w in cluster)
        mean = sum(w * s for _, s, w in cluster) / found
        result.append((box, mean * min(found, total) / total))
    return sorted(result, key=lambda pair: -pair[1])


def slow_suppression(boxes, scores, weights, factor):
    """arXiv:1704.04503, figure 2: factor(IoU) of each box left."""
    left = [[box, s * w] for box, s, w in zip(boxes.tolist(), scores.tolist(), weights.tolist())]
    result = []
    while left := [entry for entry in left if entry[1] >= LEAST_SCORE]:
        best = max(left, key=lambda entry: entry[1])
        left.remove(best)
        result.append((best[0], best[1]))
        for entry in left:
            entry[1] *= factor(slow_iou(best[0], entry[0]))
    return result


SLOW = {
    "wbf": lambda b, s, w, total: slow_wbf(b, s, w, total, 0.55),
    "nms": lambda b, s, w, total: slow_suppression(b, s, w, lambda o: 0.0 if o > 0.5 else 1.0),
    "linear": lambda b, s, w, total: slow_suppression(
        b, s, w, lambda o: 1 - o if o >= 0.3 else 1.0
    ),
    "gaussian": lambda b, s, w, total: slow_suppression(
        b, s, w, lambda o: float(np.exp(-o * o / 0.5))
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(12))
def test_each_method_is_what_its_paper_says(method, seed) -> None:
    boxes_R4, scores_R, weight_R = some_boxes(seed)
    found_K4, found_K = METHODS[method](boxes_R4, scores_R, weight_R, 1.75)
    expected = SLOW[method](boxes_R4, scores_R, weight_R, 1.75)
    np.testing.assert_allclose(found_K, [score for _, score in expected], rtol=1e-12)
    np.testing.assert_allclose(found_K4, [box for box, _ in expected], rtol=1e-12)


def test_with_equal_weights_wbf_is_the_papers() -> None:
    box = np.array([[0.0, 0, 10, 10]])
    for count in (1, 2, 3, 5):
        scores_R = np.linspace(0.3, 0.9, count)
        boxes_R4 = np.repeat(box, count, axis=0)
        found_K4, found_K = weighted_fusion(boxes_R4, scores_R, np.ones(count), 3.0, 0.55)
        np.testing.assert_allclose(found_K4, box)
        np.testing.assert_allclose(found_K, [scores_R.mean() * min(count, 3) / 3])


def test_a_fused_box_lies_where_the_surer_boxes_are() -> None:
    boxes_R4 = np.array([[0.0, 0, 10, 10], [2.0, 0, 12, 10]])
    found_K4, found_K = weighted_fusion(boxes_R4, np.array([0.9, 0.3]), np.ones(2), 2.0, 0.5)
    np.testing.assert_allclose(found_K4, [[0.5, 0, 10.5, 10]])
    np.testing.assert_allclose(found_K, [0.6])


def test_what_one_member_found_is_half_as_sure() -> None:
    boxes_R4, scores_R, weight_R = np.array([[0.0, 0, 5, 5]]), np.array([0.8]), np.ones(1)
    assert METHODS["wbf"](boxes_R4, scores_R, weight_R, 2.0)[1].tolist() == [0.4]
    assert METHODS["nms"](boxes_R4, scores_R, weight_R, 2.0)[1].tolist() == [0.8]


@pytest.mark.parametrize("method", METHODS)
def test_no_boxes_give_no_boxes(method) -> None:
    boxes_K4, scores_K = METHODS[method](np.zeros((0, 4)), np.zeros(0), np.zeros(0), 1.0)
    assert boxes_K4.shape == (0, 4) and scores_K.shape == (0,)


@pytest.mark.parametrize("method", METHODS)
def test_scores_and_boxes_stay_within_bounds(method) -> None:
    for seed in range(5):
        boxes_R4, scores_R, weight_R = some_boxes(seed)
        boxes_K4, scores_K = METHODS[method](boxes_R4, scores_R, weight_R, 1.75)
        assert ((scores_K >= 0) & (scores_K <= 1)).all() and (np.diff(scores_K) <= 0).all()
        assert (boxes_K4 >= boxes_R4.min(0) - 1e-9).all()
        assert (boxes_K4 <= boxes_R4.max(0) + 1e-9).all()


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_boxes_does_not_matter(method) -> None:
    boxes_R4, scores_R, weight_R = some_boxes(3)
    turned = np.random.default_rng(0).permutation(len(scores_R))
    first = METHODS[method](boxes_R4, scores_R, weight_R, 1.75)
    second = METHODS[method](boxes_R4[turned], scores_R[turned], weight_R[turned], 1.75)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize("method", METHODS)
def test_boxes_without_area_or_score_are_no_trouble(method) -> None:
    boxes_R4 = np.array([[5.0, 5, 5, 9], [5.0, 5, 5, 9], [0, 0, 4, 4]])
    with np.errstate(all="raise"):
        boxes_K4, scores_K = METHODS[method](boxes_R4, np.array([0.5, 0.0, 0.0]), np.ones(3), 2.0)
    assert np.isfinite(boxes_K4).all() and np.isfinite(scores_K).all()


# Two boxes of the same class that overlap by 0.6.
BOXES_R4 = np.array([[0.0, 0, 100, 100], [0, 0, 100, 60]])
SCORES_R, WEIGHT_R = np.array([0.9, 0.5]), np.ones(2)


@pytest.mark.parametrize(
    ("method", "iou", "sigma", "scores"),
    [
        ("wbf", None, None, [0.7]),
        ("wbf", 0.65, None, [0.45, 0.25]),
        ("nms", None, None, [0.9, 0.5]),
        ("nms", 0.55, None, [0.9]),
        ("soft-nms-linear", None, None, [0.9, 0.5 * 0.4]),
        ("soft-nms-linear", 0.65, None, [0.9, 0.5]),
        ("soft-nms-gaussian", None, None, [0.9, 0.5 * np.exp(-0.36 / 0.5)]),
        ("soft-nms-gaussian", None, 2.0, [0.9, 0.5 * np.exp(-0.36 / 2)]),
    ],
)
def test_each_method_has_its_papers_setting(method, iou, sigma, scores) -> None:
    found_K = fuse_class(method, iou, sigma)(BOXES_R4, SCORES_R, WEIGHT_R, 2.0)[1]
    np.testing.assert_allclose(found_K, scores)


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (
            ("wbf", None, 1.0),
            "options_conflict",
            "--sigma is for soft-nms-gaussian; wbf takes --iou",
        ),
        (
            ("soft-nms-gaussian", 0.5, None),
            "options_conflict",
            "--iou: has no effect with soft-nms-gaussian; give --sigma",
        ),
        (
            ("soft-nms-gaussian", None, 0.0),
            "option_invalid",
            "--sigma 0: expected a number above 0",
        ),
    ],
)
def test_a_setting_of_another_method_is_refused(settings, code, message) -> None:
    with pytest.raises(ConfigError) as error:
        fuse_class(*settings)
    assert (error.value.code, str(error.value)) == (code, message)


@pytest.mark.parametrize(
    ("method", "iou", "asked", "written", "expected"),
    [
        ("wbf", None, None, 0.7, 0.45),  # a cluster of 0.55, less the margin
        ("wbf", 0.7, None, 0.7, 0.6),
        ("wbf", 0.9, None, 0.7, 0.7),  # never less strict than the configuration
        ("wbf", 0.05, None, 0.7, 0.0),
        ("wbf", None, 0.7, 0.7, 0.7),  # the user is obeyed
        ("wbf", None, None, None, 0.45),  # a model without suppression has low boxes, too
        ("nms", None, None, None, None),
        ("nms", None, None, 0.7, None),
        ("soft-nms-linear", None, 0.9, 0.7, 0.9),
    ],
)
def test_views_are_suppressed_more_strictly(method, iou, asked, written, expected) -> None:
    assert view_iou(method, iou, asked, written) == expected

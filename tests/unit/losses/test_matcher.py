"""Hungarian matching against brute force, and the union of several matchings."""

from itertools import permutations

import numpy as np
import paddle
import pytest

from ppdist.losses.boxes import aligned_giou, cxcywh_to_xyxy
from ppdist.losses.matcher import Costs, Truth, hungarian_matcher, matching_cost

MASK = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]], "float32")  # boxes of three images


def matched(cost: np.ndarray, mask: np.ndarray = MASK) -> list[np.ndarray]:
    """box and is_positive of each layer [L, B, Q], and of the union [B, Q]."""
    own, union = hungarian_matcher(paddle.to_tensor(cost), paddle.to_tensor(mask))
    return [*(x.numpy() for x in own), *(x.numpy()[0] for x in union)]


def test_cost_is_that_of_the_papers() -> None:
    rng = np.random.default_rng(0)
    logits, boxes = rng.normal(size=(2, 1, 4, 3)), rng.uniform(0.2, 0.6, (2, 1, 4, 4))
    target, labels = rng.uniform(0.2, 0.6, (1, 2, 4)), np.array([[2, 0]])
    size = np.array([128, 96, 128, 96.0])
    truth = Truth(*map(paddle.to_tensor, (target, labels, np.ones([1, 2]))))
    found = matching_cost(*map(paddle.to_tensor, (logits, boxes, size)), truth, Costs(2, 5, 3))
    for layer, query, box in np.ndindex(2, 4, 2):
        p = 1 / (1 + np.exp(-logits[layer, 0, query, labels[0, box]]))
        of_class = -0.25 * (1 - p) ** 2 * np.log(p) + 0.75 * p**2 * np.log(1 - p)
        pair = boxes[layer, 0, query], target[0, box]
        giou = float(aligned_giou(*(cxcywh_to_xyxy(paddle.to_tensor(x)) for x in pair)))
        expected = 2 * of_class + 5 * np.abs(pair[0] - pair[1]).sum() - 3 * giou
        assert float(found[layer, 0, query, box]) == pytest.approx(expected, rel=1e-5)


def test_matching_is_the_cheapest_of_all() -> None:
    cost = np.random.default_rng(1).normal(size=(2, 3, 5, 3)).astype("float32")
    box_LBQ, is_positive_LBQ, *_ = matched(cost)
    for layer, image in np.ndindex(2, 3):
        (real,) = MASK[image].nonzero()
        chosen = permutations(range(5), len(real))
        best = min(chosen, key=lambda queries: cost[layer, image, queries, real].sum())
        pairs = dict(zip(best, real))
        assert is_positive_LBQ[layer, image].nonzero()[0].tolist() == sorted(pairs)
        assert box_LBQ[layer, image].tolist() == [pairs.get(query, 0) for query in range(5)]


def test_more_boxes_than_queries_leave_boxes_out() -> None:
    cost = np.arange(6, dtype="float32").reshape(1, 1, 2, 3) % 3
    box, is_positive, *_ = matched(cost, np.ones([1, 3], "float32"))
    assert sorted(box.ravel().tolist()) == [0, 1] and is_positive.all()


def test_union_gives_a_query_what_most_layers_give_it() -> None:
    cheap = [[(0, 0), (1, 1)], [(0, 1), (1, 0)], [(0, 1), (2, 0)]]  # (query, box) of each layer
    cost = np.ones([3, 1, 4, 2], "float32")
    for layer, pairs in enumerate(cheap):
        for query, box in pairs:
            cost[layer, 0, query, box] = 0
    *_, box_BQ, is_positive_BQ = matched(cost, np.ones([1, 2], "float32"))
    assert is_positive_BQ.tolist() == [[1, 1, 1, 0]]
    assert box_BQ.tolist() == [[1, 0, 0, 0]]  # query 1 has two boxes once: the first


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_costs_that_are_not_finite_do_not_raise(value: float) -> None:
    cost = np.zeros([1, 1, 3, 2], "float32")
    cost[0, 0, 1:, 1] = value
    box, is_positive, *_ = matched(cost, np.ones([1, 2], "float32"))
    assert is_positive.sum() == 2 and box[0, 0, 0] == 1
    cost[:] = value
    assert matched(cost, np.ones([1, 2], "float32"))[1].sum() == 2

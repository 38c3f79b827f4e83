"""Boxes against plain loops and against their own laws."""

import math

import numpy as np
import paddle
import pytest

from ppdist.losses import boxes


def random_boxes(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 100, (*shape, 2))
    return np.concatenate([low, low + rng.uniform(1, 60, (*shape, 2))], -1).astype("float32")


def iou_of(a: np.ndarray, b: np.ndarray) -> float:
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(w, 0.0) * max(h, 0.0)
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return overlap / (area - overlap)


def giou_of(a: np.ndarray, b: np.ndarray) -> float:
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    iou = iou_of(a, b)
    union = area / (1 + iou)
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return iou - (hull - union) / hull


def ciou_of(a: np.ndarray, b: np.ndarray, share: float | None = None) -> float:
    """As arXiv:1911.08287 writes it; `share`: alpha, where it is held constant."""
    iou = iou_of(a, b)
    hull = [max(a[i + 2], b[i + 2]) - min(a[i], b[i]) for i in (0, 1)]
    apart = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    angles = [math.atan((x[2] - x[0]) / (x[3] - x[1])) for x in (a, b)]
    v = 4 / math.pi**2 * (angles[0] - angles[1]) ** 2
    share = v / (1 - iou + v) if share is None else share
    return iou - (apart[0] ** 2 + apart[1] ** 2) / (hull[0] ** 2 + hull[1] ** 2) - share * v


def test_pairwise_iou_equals_a_loop_over_all_pairs() -> None:
    a, b = random_boxes(2, 5, seed=1), random_boxes(2, 7, seed=2)
    got = boxes.pairwise_iou(paddle.to_tensor(a), paddle.to_tensor(b)).numpy()
    want = [[[iou_of(x, y) for y in b[i]] for x in a[i]] for i in range(2)]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_box_with_two_negative_sides_has_no_area() -> None:
    turned = paddle.to_tensor([[30.0, 30.0, 10.0, 10.0]])
    assert boxes.area(turned).item() == 0.0
    other = paddle.to_tensor([[0.0, 0.0, 40.0, 40.0]])
    assert boxes.pairwise_iou(turned.unsqueeze(0), other.unsqueeze(0)).item() == 0.0


def test_aligned_iou_and_giou_equal_their_definitions() -> None:
    a, b = random_boxes(40, seed=3), random_boxes(40, seed=4)
    pair = paddle.to_tensor(a), paddle.to_tensor(b)
    want_iou, want_giou = ([f(x, y) for x, y in zip(a, b)] for f in (iou_of, giou_of))
    np.testing.assert_allclose(boxes.aligned_iou(*pair).numpy(), want_iou, atol=1e-6)
    np.testing.assert_allclose(boxes.aligned_giou(*pair).numpy(), want_giou, atol=1e-5)
    assert min(want_giou) < 0 < max(want_iou)


def test_ciou_equals_definition_with_constant_alpha() -> None:
    a, b = random_boxes(40, seed=3), random_boxes(40, seed=4)
    x = paddle.to_tensor(a)
    x.stop_gradient = False
    got = boxes.aligned_ciou(x, paddle.to_tensor(b))
    want = [ciou_of(*pair) for pair in zip(a, b)]
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)
    assert min(want) < 0 < max(want)
    got.sum().backward()
    for row in range(8):
        start, other = a[row].astype("float64"), b[row].astype("float64")
        iou, angles = iou_of(start, other), []
        for y in (start, other):
            angles.append(math.atan((y[2] - y[0]) / (y[3] - y[1])))
        v = 4 / math.pi**2 * (angles[0] - angles[1]) ** 2
        for side in range(4):
            move = np.eye(4)[side] * 1e-5
            ahead, behind = (
                ciou_of(start + sign * move, other, v / (1 - iou + v)) for sign in (1, -1)
            )
            slope = (ahead - behind) / 2e-5
            np.testing.assert_allclose(x.grad.numpy()[row, side], slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("degenerate", [[5, 5, 5, 5], [9, 9, 3, 3], [0, 0, 0, 0]])
def test_boxes_without_area_have_finite_gradients(degenerate: list[float]) -> None:
    a = paddle.to_tensor([degenerate, degenerate], dtype="float32")
    a.stop_gradient = False
    b = paddle.to_tensor([[1.0, 1.0, 8.0, 8.0], degenerate])
    total = boxes.aligned_giou(a, b).sum() + boxes.aligned_iou(a, b).sum()
    total += boxes.aligned_ciou(a, b).sum()
    total.backward()
    assert np.isfinite(float(total)) and np.isfinite(a.grad.numpy()).all()


def test_centres_and_sizes_become_corners_and_areas() -> None:
    corners = boxes.cxcywh_to_xyxy(paddle.to_tensor([[4.0, 7.0, 4.0, 6.0], [1.0, 1.0, 0.0, 2.0]]))
    assert corners.tolist() == [[2, 4, 6, 10], [1, 0, 1, 2]]
    assert boxes.area(corners).tolist() == [24, 0]

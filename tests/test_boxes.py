"""Boxes against plain loops and against their own laws."""

import numpy as np
import paddle
import pytest

from ppdist import boxes


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


def test_pairwise_iou_equals_a_loop_over_all_pairs() -> None:
    a, b = random_boxes(2, 5, seed=1), random_boxes(2, 7, seed=2)
    got = boxes.pairwise_iou(paddle.to_tensor(a), paddle.to_tensor(b)).numpy()
    want = [[[iou_of(x, y) for y in b[i]] for x in a[i]] for i in range(2)]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_aligned_iou_and_giou_equal_their_definitions() -> None:
    a, b = random_boxes(40, seed=3), random_boxes(40, seed=4)
    pair = paddle.to_tensor(a), paddle.to_tensor(b)
    want_iou, want_giou = ([f(x, y) for x, y in zip(a, b)] for f in (iou_of, giou_of))
    np.testing.assert_allclose(boxes.aligned_iou(*pair).numpy(), want_iou, atol=1e-6)
    np.testing.assert_allclose(boxes.aligned_giou(*pair).numpy(), want_giou, atol=1e-5)
    assert min(want_giou) < 0 < max(want_iou)


def test_iou_is_symmetric_and_one_with_itself_and_giou_never_above_it() -> None:
    a, b = paddle.to_tensor(random_boxes(30, seed=5)), paddle.to_tensor(random_boxes(30, seed=6))
    assert np.array_equal(boxes.aligned_iou(a, b).numpy(), boxes.aligned_iou(b, a).numpy())
    np.testing.assert_allclose(boxes.aligned_iou(a, a).numpy(), 1, atol=1e-6)
    np.testing.assert_allclose(boxes.aligned_giou(a, a).numpy(), 1, atol=1e-6)
    assert bool((boxes.aligned_giou(a, b) <= boxes.aligned_iou(a, b) + 1e-6).all())


@pytest.mark.parametrize("degenerate", [[5, 5, 5, 5], [9, 9, 3, 3], [0, 0, 0, 0]])
def test_boxes_without_area_give_finite_values_and_gradients(degenerate: list[float]) -> None:
    a = paddle.to_tensor([degenerate, degenerate], dtype="float32")
    a.stop_gradient = False
    b = paddle.to_tensor([[1.0, 1.0, 8.0, 8.0], degenerate])
    total = boxes.aligned_giou(a, b).sum() + boxes.aligned_iou(a, b).sum()
    total.backward()
    assert np.isfinite(float(total)) and np.isfinite(a.grad.numpy()).all()


def test_conversions_are_inverse_to_one_another() -> None:
    a = paddle.to_tensor(random_boxes(3, 4))
    there = boxes.xyxy_to_cxcywh(a)
    np.testing.assert_allclose(boxes.cxcywh_to_xyxy(there).numpy(), a.numpy(), atol=1e-4)
    np.testing.assert_allclose(
        boxes.xywh_to_xyxy(boxes.xyxy_to_xywh(a)).numpy(), a.numpy(), atol=1e-4
    )
    one = paddle.to_tensor([[2.0, 4.0, 6.0, 10.0]])
    assert boxes.xyxy_to_cxcywh(one).tolist() == [[4, 7, 4, 6]]
    assert boxes.xyxy_to_xywh(one).tolist() == [[2, 4, 4, 6]]


def test_clipping_leaves_nothing_outside_the_image_and_areas_follow() -> None:
    some = paddle.to_tensor([[-5.0, -5.0, 5.0, 8.0], [90.0, 20.0, 200.0, 30.0], [300, 0, 310, 5]])
    cut = boxes.clip(some, height=50, width=100)
    assert cut.tolist() == [[0, 0, 5, 8], [90, 20, 100, 30], [100, 0, 100, 5]]
    assert boxes.area(cut).tolist() == [40, 100, 0]

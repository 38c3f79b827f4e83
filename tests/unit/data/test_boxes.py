"""Boxes in numpy against plain arithmetic."""

import numpy as np

from ppdist.data.boxes import box_area, box_iou


def test_iou_equals_pixels_counted() -> None:
    rng = np.random.default_rng(0)
    low = rng.integers(0, 20, (12, 2))
    boxes = np.concatenate([low, low + rng.integers(1, 12, (12, 2))], 1)
    masks = np.zeros((12, 32, 32), bool)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes):
        mask[y1:y2, x1:x2] = True
    a, b = slice(0, 7), slice(7, 12)
    shared = (masks[a, None] & masks[None, b]).sum((2, 3))
    union = (masks[a, None] | masks[None, b]).sum((2, 3))
    np.testing.assert_allclose(
        box_iou(boxes[a].astype(float), boxes[b].astype(float)), shared / union
    )
    assert box_area(boxes).tolist() == masks.sum((1, 2)).tolist()


def test_boxes_without_area_overlap_nothing() -> None:
    point, box = np.array([[3.0, 3.0, 3.0, 3.0]]), np.array([[0.0, 0.0, 9.0, 9.0]])
    turned = np.array([[8.0, 8.0, 2.0, 2.0]])
    assert box_iou(point, point) == 0 and box_iou(point, box) == 0 and box_iou(turned, box) == 0
    assert box_area(turned) == 0
    assert box_iou(np.zeros((0, 4)), box).shape == (0, 1)

"""Boxes in numpy: area and IoU."""

import numpy as np


def box_area(boxes: np.ndarray) -> np.ndarray:
    """Computes the area [...] of boxes [..., 4]; 0 if a side is negative.

    Args: boxes: xyxy in any one unit.
    """
    sides = np.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return sides[..., 0] * sides[..., 1]


def box_iou(a_N4: np.ndarray, b_M4: np.ndarray) -> np.ndarray:
    """Computes the IoU [N, M] of all pairs of boxes; 0 if neither has an area.

    Args: a_N4, b_M4: xyxy, in the same unit.
    """
    low_NM2 = np.maximum(a_N4[:, None, :2], b_M4[None, :, :2])
    high_NM2 = np.minimum(a_N4[:, None, 2:], b_M4[None, :, 2:])
    sides_NM2 = np.maximum(high_NM2 - low_NM2, 0)
    shared_NM = sides_NM2[..., 0] * sides_NM2[..., 1]
    union_NM = box_area(a_N4)[:, None] + box_area(b_M4)[None] - shared_NM
    return np.divide(shared_NM, union_NM, out=np.zeros_like(shared_NM), where=union_NM > 0)

"""Several images in one input: four around a point (mosaic), two blended (mixup).

Sources: mosaic of YOLOv4 (Bochkovskiy et al. 2020, arXiv:2004.10934, section 3.3) as YOLOv5 lays
it out; mixup (Zhang et al. 2017, arXiv:1710.09412) of detections (Zhang et al. 2019,
arXiv:1902.04103), whose objects all count in full.
"""

import cv2
import numpy as np

TILES = 4
_MIXUP_BETA = 32.0  # both parameters of the Beta distribution: nearly half and half


def canvas_of(size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the canvas of a mosaic for the input `size`."""
    return 2 * size[0], 2 * size[1]


def meeting_point(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float]:
    """Where the four images meet, (x, y) in canvas pixels: within the canvas' inner half."""
    y, x = rng.uniform(0.5, 1.5, 2) * size
    return x, y


def tile(
    corner: int, point: tuple[float, float], height: int, width: int
) -> tuple[float, float, float, float]:
    """Where an image of the given sides lies (x1, y1, x2, y2) so as to touch the meeting point.

    Args:
        corner: 0 above left of the point, 1 above right, 2 below left, 3 below right.
    """
    x, y = point
    left = x - width if corner % 2 == 0 else x
    top = y - height if corner < 2 else y
    return left, top, left + width, top + height


def blend(one_HW3: np.ndarray, other_HW3: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A weighted mean of two inputs; the first has a Beta(32, 32) share."""
    share = rng.beta(_MIXUP_BETA, _MIXUP_BETA)
    return cv2.addWeighted(one_HW3, share, other_HW3, 1 - share, 0)

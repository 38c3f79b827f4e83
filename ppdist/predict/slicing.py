"""Sliced prediction: small objects in large images.

The image is looked at as a whole and in overlapping square slices.  A box that ends at the cut of a
slice is likely a part of an object, so it counts only where nothing whole covers it.  What is left
goes through non-maximum suppression.

Source of the idea: Akyon, Altinuc, Temizel 2022, "Slicing Aided Hyper Inference", arXiv:2202.06934.
"""

from collections.abc import Sequence

import numpy as np

from ppdist.predict.model import Predict, suppressed

_CUT = 2.0  # pixels: a box that ends so close to a cut was cut
_COVERED = 0.5  # of a part's area: so much of it in a whole object of its class, and it goes
_IOU = 0.5  # of two views of one object


def sliced(predict: Predict, size: int, overlap: float, batch: int) -> Predict:
    """A detector that also looks at square slices of each image.

    Args:
        predict: of whole images.
        size: side of a slice, pixels; an image no larger is looked at as it is.
        overlap: of neighbours, part of their side, 0 to below 1.
        batch: slices at once.
    """

    def see(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [_of_image(predict, image, size, overlap, batch) for image in images]

    return see


def corners(height: int, width: int, size: int, overlap: float) -> list[tuple[int, int]]:
    """Left and top of the slices; the last ones are moved inside."""
    step = max(1, round(size * (1 - overlap)))

    def starts(side: int) -> list[int]:
        last = max(0, side - size)
        return [*range(0, last, step), last]

    return [(left, top) for top in starts(height) for left in starts(width)]


def _of_image(
    predict: Predict, image_HW3: np.ndarray, size: int, overlap: float, batch: int
) -> np.ndarray:
    height, width = image_HW3.shape[:2]
    (whole_R6,) = predict([image_HW3])
    if max(height, width) <= size:
        return whole_R6
    places = corners(height, width, size, overlap)
    found, cut = [whole_R6], [np.zeros(len(whole_R6), bool)]
    for start in range(0, len(places), batch):
        some = places[start : start + batch]
        views = [image_HW3[top : top + size, left : left + size] for left, top in some]
        for (left, top), view, rows_R6 in zip(some, views, predict(views)):
            moved_R6 = rows_R6.copy()
            moved_R6[:, 2:] += np.array([left, top, left, top], np.float32)
            right, bottom = left + view.shape[1], top + view.shape[0]
            x1, y1, x2, y2 = moved_R6[:, 2:].T
            cut_R = ((left > 0) & (x1 < left + _CUT)) | ((top > 0) & (y1 < top + _CUT))
            cut_R |= ((right < width) & (x2 > right - _CUT)) | (
                (bottom < height) & (y2 > bottom - _CUT)
            )
            found.append(moved_R6)
            cut.append(cut_R)
    return _merged(np.concatenate(found), np.concatenate(cut))


def _merged(rows_R6: np.ndarray, cut_R: np.ndarray) -> np.ndarray:
    """Whole objects, and parts that no whole object of their class covers."""
    whole_R6 = suppressed(rows_R6[~cut_R], _IOU)
    parts_R6 = suppressed(rows_R6[cut_R], _IOU)
    kept = [part for part in parts_R6 if not _is_covered(part, whole_R6)]
    everything_R6 = np.concatenate([whole_R6, *(part[None] for part in kept)])
    return everything_R6[np.argsort(-everything_R6[:, 1], kind="stable")]


def _is_covered(part_6: np.ndarray, whole_R6: np.ndarray) -> bool:
    same_R6 = whole_R6[whole_R6[:, 0] == part_6[0]]
    x1, y1, x2, y2 = part_6[2:]
    wide = np.minimum(same_R6[:, 4], x2) - np.maximum(same_R6[:, 2], x1)
    tall = np.minimum(same_R6[:, 5], y2) - np.maximum(same_R6[:, 3], y1)
    area = max((x2 - x1) * (y2 - y1), 1e-9)
    return bool((wide.clip(0) * tall.clip(0) > _COVERED * area).any())

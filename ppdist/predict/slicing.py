"""Predicts large images in slices, to find small objects.

The image is predicted as a whole and in overlapping square slices.  A box that ends at the cut of a
slice is likely a part of an object, so it counts only where no whole object covers it.  The
remaining boxes go through non-maximum suppression.

Source of the idea: Akyon, Altinuc, Temizel 2022, "Slicing Aided Hyper Inference", arXiv:2202.06934.
"""

from collections.abc import Sequence

import numpy as np

from ppdist.data.datasets.tiles import slice_corners
from ppdist.predict.model import Predict, suppress_rows

_CUT = 2.0  # pixels: a box that ends this close to a cut was cut
_COVERED = 0.5  # a part goes if this share of its area lies in a whole object of its class
_IOU = 0.5  # of two boxes of one object in different slices


def with_slices(
    predict: Predict, size: int, overlap: float, batch: int, agnostic: bool = False
) -> Predict:
    """Returns a detector that also predicts square slices of each image.

    Args:
        predict: predicts whole images.
        size: side of a slice in pixels; an image no larger than a slice is not sliced.
        overlap: overlap of neighbouring slices as a fraction of their side, in [0, 1).
        batch: number of slices per batch.
        agnostic: boxes of different classes may belong to the same object.
    """

    def see(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [_predict_slices(predict, image, size, overlap, batch, agnostic) for image in images]

    return see


def _predict_slices(
    predict: Predict, image_HW3: np.ndarray, size: int, overlap: float, batch: int, agnostic: bool
) -> np.ndarray:
    height, width = image_HW3.shape[:2]
    # The whole image finds objects that are larger than a slice.
    (whole_R6,) = predict([image_HW3])
    if max(height, width) <= size:
        return whole_R6
    corners_S = slice_corners(height, width, size, overlap)
    rows, cut = [whole_R6], [np.zeros(len(whole_R6), bool)]
    for start in range(0, len(corners_S), batch):
        batch_corners = corners_S[start : start + batch]
        views = [image_HW3[top : top + size, left : left + size] for left, top in batch_corners]
        for (left, top), view, rows_R6 in zip(batch_corners, views, predict(views)):
            moved_R6 = rows_R6.copy()
            moved_R6[:, 2:] += np.array([left, top, left, top], np.float32)
            right, bottom = left + view.shape[1], top + view.shape[0]
            x1, y1, x2, y2 = moved_R6[:, 2:].T
            # Where a slice ends at the edge of the image, it cuts no object.
            cut_R = ((left > 0) & (x1 < left + _CUT)) | ((top > 0) & (y1 < top + _CUT))
            cut_R |= ((right < width) & (x2 > right - _CUT)) | (
                (bottom < height) & (y2 > bottom - _CUT)
            )
            rows.append(moved_R6)
            cut.append(cut_R)
    return _merge(np.concatenate(rows), np.concatenate(cut), agnostic)


def _merge(rows_R6: np.ndarray, cut_R: np.ndarray, agnostic: bool) -> np.ndarray:
    """Keeps whole objects, and parts that no whole object of their class covers.

    Args: agnostic: whole objects of any class cover parts.
    """
    whole_R6 = suppress_rows(rows_R6[~cut_R], _IOU, agnostic)
    parts_R6 = suppress_rows(rows_R6[cut_R], _IOU, agnostic)
    uncovered = [part for part in parts_R6 if not _is_covered(part, whole_R6, agnostic)]
    all_R6 = np.concatenate([whole_R6, *(part[None] for part in uncovered)])
    return all_R6[np.argsort(-all_R6[:, 1], kind="stable")]


def _is_covered(part_6: np.ndarray, whole_R6: np.ndarray, agnostic: bool) -> bool:
    same_R6 = whole_R6 if agnostic else whole_R6[whole_R6[:, 0] == part_6[0]]
    x1, y1, x2, y2 = part_6[2:]
    wide = np.minimum(same_R6[:, 4], x2) - np.maximum(same_R6[:, 2], x1)
    tall = np.minimum(same_R6[:, 5], y2) - np.maximum(same_R6[:, 3], y1)
    area = max((x2 - x1) * (y2 - y1), 1e-9)
    return bool((wide.clip(0) * tall.clip(0) > _COVERED * area).any())

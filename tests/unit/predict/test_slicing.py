"""Sliced prediction: places of slices, objects at their cuts."""

import numpy as np

from ppdist.data.datasets.tiles import slice_corners
from ppdist.predict.slicing import with_slices

BOXES = np.array([[10, 10, 30, 30], [90, 10, 112, 30], [60, 60, 190, 190]], np.float32)


def seen(image_HW3: np.ndarray) -> np.ndarray:
    """Rows of the objects of BOXES that this view shows at least half of, cut to it.

    The view says in its first pixel where it lies: left, top, and 1 where it is a slice.
    """
    left, top, is_slice = image_HW3[0, 0].tolist()
    height, width = image_HW3.shape[:2]
    rows = []
    for box in BOXES:
        moved = box - [left, top, left, top]
        cut = moved.clip(0, [width, height, width, height])
        area = (cut[2] - cut[0]) * (cut[3] - cut[1])
        small = (box[2] - box[0]) < 40
        if area > 0 and (is_slice or not small):  # the whole image shows the large one alone
            rows.append([1, 0.9 if area > 400 else 0.6, *cut])
    return np.array(rows, np.float32).reshape(-1, 6)


def test_slices_cover_the_image_and_overlap() -> None:
    places = slice_corners(150, 250, 100, 0.2)
    assert places == [(0, 0), (80, 0), (150, 0), (0, 50), (80, 50), (150, 50)]
    assert slice_corners(90, 100, 100, 0.2) == [(0, 0)]


def test_each_object_is_found_once_and_whole() -> None:
    image_HW3 = np.zeros((200, 200, 3), np.uint8)
    size, overlap = 100, 0.3
    for left, top in slice_corners(200, 200, size, overlap):
        image_HW3[top, left] = (left, top, 1)
    image_HW3[0, 0, 2] = 0  # the whole image, and the first slice: it is told apart by its size
    batches = []

    def predict(images):
        batches.append(len(images))
        views = []
        for image in images:
            view = image.copy()
            view[0, 0, 2] = len(image) == size
            views.append(view)
        return [seen(view) for view in views]

    (rows_R6,) = with_slices(predict, size, overlap, 4)([image_HW3])
    found = sorted(rows_R6[:, 2:].tolist())
    assert found == sorted(BOXES.tolist())
    assert batches == [1, 4, 4, 1] and (np.diff(rows_R6[:, 1]) <= 0).all()
    (small_R6,) = with_slices(predict, 400, overlap, 4)([image_HW3])  # no larger than a slice
    assert len(small_R6) == 1

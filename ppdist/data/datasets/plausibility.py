"""Checks whether the boxes of a split are plausible: their unit, their order, repeats.

It checks what the readers of all formats return, so every format refuses the same mistakes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.types import RawColumns

_MIN_EXAMPLES = 3  # boxes that make a rule credible
_MAX_SAMPLED = 1 << 18  # boxes, evenly spread over the set: enough to see a rule
_FAR = 2.0  # image sizes: an object that sticks out ends before that
_FRACTION_SIDE = 32  # pixels: in smaller images a true box may lie in the first pixel
_BORDER = 0.02  # of an image, and one pixel: tolerance for rounding tools
_NEARLY_ALL = 0.98  # of the boxes


class _Misreading(NamedTuple):
    """A mistake in the order of the four numbers of a box.

    reread: boxes [P, 4], xyxy, as read -> as they were intended.
    shows: boxes and sides of their images [P, 4] -> which boxes are invalid as read, most likely
        because of this mistake; None: boxes that do not fit their images.
    names: names of the four numbers, in the format and as they were intended.
    fix: how to write the numbers.
    fewest, share: a set has the mistake if more than `fewest` boxes, and a larger share of them
        than `share`, show it.
    """

    reread: Callable[[np.ndarray], np.ndarray]
    shows: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    names: tuple[str, str]
    fix: str
    fewest: int = _MIN_EXAMPLES - 1
    share: float = 0.5


def _corners_as_coco(boxes_P4: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes_P4[:, :2], boxes_P4[:, 2:] - boxes_P4[:, :2]], axis=1)


def _corners_as_yolo(boxes_P4: np.ndarray) -> np.ndarray:
    low_P2, high_P2 = boxes_P4[:, :2], boxes_P4[:, 2:]
    return np.concatenate([(low_P2 + high_P2) / 2, high_P2 - low_P2], axis=1)


def _first_corner_as_yolo(boxes_P4: np.ndarray) -> np.ndarray:
    half_P2 = (boxes_P4[:, 2:] - boxes_P4[:, :2]) / 2
    return boxes_P4 + np.concatenate([half_P2, half_P2], axis=1)


def _sides_as_voc(boxes_P4: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes_P4[:, :2], boxes_P4[:, 2:] + boxes_P4[:, :2]], axis=1)


def _leave_at_top_left(boxes_P4: np.ndarray, sides_P4: np.ndarray) -> np.ndarray:
    """Finds boxes beyond the left or the top of their image, if none is beyond another side: [P]
    bool.

    This happens if first corners were read as centres: each box is shifted by half its size, up and
    left.  Objects that really stick out do so on all sides.
    """
    first_P = (boxes_P4[:, :2] < -1).any(axis=1)
    last_P = (boxes_P4[:, 2:] > sides_P4[:, 2:] + 1).any(axis=1)
    return np.asarray(first_P & ~last_P.any())


def _end_before_begin(boxes_P4: np.ndarray, sides_P4: np.ndarray) -> np.ndarray:
    """Finds boxes that end before they begin, and begin in the second half of their image: [P]
    bool.

    This happens if sides were read as second corners.  It also happens if corners are in another
    order, but their sums rarely lie in the image.  In the first half the sums of both would, and
    equal corners mean a box without area.
    """
    first_P2 = boxes_P4[:, :2]
    past_P2 = (boxes_P4[:, 2:] < first_P2) & (2 * first_P2 > sides_P4[:, :2])
    return np.asarray(past_P2.any(axis=1))


_MISREADINGS = {
    "coco": (
        _Misreading(
            _corners_as_coco,
            None,
            ("[x, y, width, height]", "[x1, y1, x2, y2]"),
            "write width = x2 - x1 and height = y2 - y1",
        ),
    ),
    "yolo": (
        _Misreading(
            _corners_as_yolo,
            None,
            ("class cx cy w h", "class x1 y1 x2 y2"),
            "write the centre, width and height of each box as fractions of the image",
        ),
        _Misreading(
            _first_corner_as_yolo,
            _leave_at_top_left,
            ("class cx cy w h", "class x1 y1 w h"),
            "write cx = x1 + w / 2 and cy = y1 + h / 2; or, where objects do stick out of the "
            "left and the top of their images alone, cut their boxes there",
            fewest=9,
            share=0.02,
        ),
    ),
    "voc": (
        _Misreading(
            _sides_as_voc,
            _end_before_begin,
            ("xmin, ymin, xmax, ymax", "x, y, width, height"),
            "write xmax = x + width and ymax = y + height",
        ),
    ),
}


def check_boxes(columns: RawColumns, data_format: str) -> None:
    """Checks that boxes are in the unit and order of their format.

    A single box may be anywhere.  But it is a mistake if most boxes of a split are within the first
    pixels, far outside their images, or inside only if their numbers are read in another order.

    Args: data_format: `data.format`; for any other text the order is not checked.
    Raises: DataError `boxes_far_outside`, `boxes_are_fractions` or `boxes_misread`.
    """
    # The sample is spread over the set, as its beginning may be the work of one tool or person.
    step = -(-len(columns.image_O) // _MAX_SAMPLED) or 1
    image_P, boxes_P4 = columns.image_O[::step], columns.boxes_O4[::step]
    used_P = columns.size_known_N[image_P] & np.isfinite(boxes_P4).all(axis=1)
    boxes_P4, image_P = boxes_P4[used_P], image_P[used_P]
    sides_P4 = columns.sizes_N2[image_P][:, [1, 0, 1, 0]]
    count = len(boxes_P4)
    if count < _MIN_EXAMPLES:
        return
    far_P = (np.abs(boxes_P4) > _FAR * sides_P4).any(axis=1)
    if _is_majority(far_P):
        times = float((np.abs(boxes_P4) / sides_P4)[far_P].max())
        numbers = "pixels where fractions of the image are expected"
        fix = "divide cx and w by the width of the image, cy and h by its height"
        if data_format != "yolo":
            numbers = "of images of another size, or in another unit than pixels"
            fix = "write the boxes in pixels of these images"
        raise DataError(
            f"{far_P.sum()} of {count} boxes end outside their images by up to {times:.3g} times "
            f"the size: their numbers are {numbers}",
            code="boxes_far_outside",
            where=columns.source,
            fix=fix,
        )
    # Integers may be pixels, however small, or boxes that cover a whole image.
    numbers_P4 = _corners_as_coco(boxes_P4) if data_format == "coco" else boxes_P4
    unit_P = ((numbers_P4 >= -_BORDER) & (numbers_P4 <= 1 + _BORDER)).all(axis=1)
    unit_P &= (sides_P4 >= _FRACTION_SIDE).all(axis=1)
    if unit_P.mean() >= _NEARLY_ALL and _is_majority((boxes_P4 != boxes_P4.round()).any(axis=1)):
        raise DataError(
            f"the numbers of {unit_P.sum()} of {count} boxes are 0 to 1: fractions of their images "
            f"where pixels are expected",
            code="boxes_are_fractions",
            where=columns.source,
            fix="multiply x and width by the width of the image, y and height by its height",
        )
    for misreading in _MISREADINGS.get(data_format, ()):
        if misreading.shows is None:
            wrong_P = ~_fit_images(boxes_P4, sides_P4)
        else:
            wrong_P = misreading.shows(boxes_P4, sides_P4)
        if wrong_P.sum() <= misreading.fewest or wrong_P.mean() <= misreading.share:
            continue
        fit_P = _fit_images(misreading.reread(boxes_P4), sides_P4)
        if fit_P.mean() >= _NEARLY_ALL:
            expected, actual = misreading.names
            raise DataError(
                f"read as {expected}, {wrong_P.sum()} of {count} boxes leave their images or end "
                f"before they begin; read as {actual}, {fit_P.sum()} fit",
                code="boxes_misread",
                where=columns.source,
                fix=misreading.fix,
            )


def _is_majority(wrong_P: np.ndarray) -> bool:
    return bool(wrong_P.sum() >= _MIN_EXAMPLES and 2 * wrong_P.sum() > len(wrong_P))


def _fit_images(boxes_P4: np.ndarray, sides_P4: np.ndarray) -> np.ndarray:
    """Finds boxes that have an area and lie in their images: [P] bool."""
    slack_P4 = 1 + _BORDER * sides_P4
    inside_P4 = (boxes_P4 >= -slack_P4) & (boxes_P4 <= sides_P4 + slack_P4)
    return np.asarray(inside_P4.all(axis=1) & (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(axis=1))


_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, bits spread evenly: Fibonacci hashing (Knuth, 6.4)


def find_first_equal(columns: RawColumns) -> np.ndarray:
    """Finds for each object the first one that equals it: int64 [O].

    Objects are equal if their image, class, box and crowd flag are equal.  An object with no equal
    object before it gets its own number.
    """
    fields = [columns.image_O, columns.labels_O, columns.crowd_O.astype(np.int64)]
    fields += [(side_O + 0.0).view(np.int64) for side_O in columns.boxes_O4.T]  # -0 is 0
    # One key of 64 bits is sorted faster than seven columns.
    key_O = np.zeros(len(columns.image_O), np.uint64)
    for field_O in fields:
        key_O = (key_O ^ field_O.astype(np.uint64)) * _MIX
        key_O ^= key_O >> np.uint64(29)
    order = key_O.argsort(kind="stable")
    same = key_O[order[1:]] == key_O[order[:-1]]
    first_O = np.arange(len(order))
    if same.any():
        for field_O in fields:  # equal keys are nearly always of equal objects
            same &= field_O[order[1:]] == field_O[order[:-1]]
        begin = np.flatnonzero(np.r_[True, ~same])
        first_O[order] = np.repeat(order[begin], np.diff(np.r_[begin, len(order)]))
    return first_O
